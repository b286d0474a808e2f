"""Training runs with vLLM: log-prob gaps, a resume, and two ranks with an engine each, which train as one process does.

The processes are forks of the test's process: importing vLLM takes longer than the runs.
"""

from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("vllm")

from vllm.distributed import cleanup_dist_env_and_memory

from bandpo_cli.config.layers import resolve
from bandpo_cli.experiments import resume, train
from bandpo_cli.metric_names import without_clock
from bandpo_cli.models.weights import checkpoint_weights
from bandpo_cli.ranks import Ranks
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tasks.task import build_task
from bandpo_cli.training import loop
from bandpo_cli.training.components import build_components
from tests.training.several_ranks import run_ranks

pytestmark = pytest.mark.vllm

SETTINGS: dict[str, Any] = {
    # Nine prompts: two ranks have four and five.
    "sampling": {"engine": "vllm", "prompts": 9, "vllm": {"kv_cache_gb": 0.5, "eager": True}},
    # A large eps: AdamW divides the gradient by its own size, and so a rounding error of a gradient near 0, too.
    "optim": {"warmup_steps": 0, "updates": 3, "lr": 1e-4, "eps": 1e-4},
    "evaluation": {"every": 0},
    "tracking": {"mlflow": False},
}
STEPS = 2


def test_a_resumed_run_continues_its_metrics(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(resolve([SETTINGS, {"steps": 1}]), tmp_path, name="run")
    first = RunFolder(tmp_path / "run").read_metrics()
    resume("run", tmp_path, settings=[{"steps": 2}])
    longer = RunFolder(tmp_path / "run").read_metrics()
    assert longer[:1] == first
    assert [line["step"] for line in longer] == [1, 2]
    assert all(0 < line["sampler/logprob_gap_max"] <= 1e-4 for line in longer)
    assert all(line["time/sync"] > 0 for line in longer)
    assert capfd.readouterr().err == "", "messages of the engine would disturb the run's live view"


def trained(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Return the metrics and completions of the steps of a run, and its weights and the gap of its last sync."""
    config = resolve([SETTINGS, {"steps": STEPS + 1, "checkpoint": {"every": 0}}])
    run = RunFolder.create(folder, "run") if ranks.is_main else RunFolder(folder / "run")
    components = build_components(config, build_task(config.task), ranks)
    try:
        reports = loop.train(config, components, run)
        lines = [without_clock(report.record) for report in islice(reports, STEPS)]
        reports.close()
        weights = {name: weight.clone() for name, weight in checkpoint_weights(components.policy.model)}
        gap = components.sampler.probe_gap  # type: ignore[attr-defined]
    finally:
        components.close()
    ranks.wait()  # after the engines have ended, the ranks are still connected
    columns = ["problem_id", "text", "reward", "length"]
    files = [run.path / f"samples/step-{line['step']:06d}.parquet" for line in lines]
    completions = [pq.read_table(file, columns=columns).to_pylist() for file in files]
    return {"lines": lines, "weights": weights, "gap": gap, "completions": completions}


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    """The policy of two ranks is sharded, and each engine gets its weights one tensor at a time."""
    cleanup_dist_env_and_memory()  # an engine of a test before has left its process group, which forks inherit
    (one,) = run_ranks(1, tmp_path / "one", trained, tmp_path / "one")
    two, other = run_ranks(2, tmp_path / "two", trained, tmp_path / "two")
    assert two["lines"] == other["lines"], "all ranks report the same metrics"
    assert two["completions"] == one["completions"]
    assert 0 < two["gap"] < 1e-4
    for line, expected in zip(two["lines"], one["lines"], strict=True):
        assert expected["optim/grad_norm"] > 0.1
        assert 0 < line["sampler/logprob_gap_max"] < 1e-4
        for name in ("optim/loss", "optim/grad_norm", "kl/old_new", "train/entropy"):
            assert line[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-5)
        assert line["train/reward"] == expected["train/reward"]
    assert one["weights"].keys() == two["weights"].keys()
    for name, weight in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], weight, atol=1e-5, rtol=0)
