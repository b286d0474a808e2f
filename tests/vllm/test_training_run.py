"""Training runs with vLLM: log-prob gaps, a resume, and two ranks with an engine each, which train as one does."""

from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("vllm")

from bandpo_cli.config.layers import resolve
from bandpo_cli.experiments import evaluate, resume, train
from bandpo_cli.experiments.plan import prepare_task
from bandpo_cli.metric_names import without_clock
from bandpo_cli.models.load import load_policy
from bandpo_cli.models.weights import checkpoint_weights
from bandpo_cli.processes.ranks import SINGLE, Ranks
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.training import loop
from bandpo_cli.training.build import build_components
from tests.training.several_ranks import run_ranks
from tests.vllm.engines import silent

pytestmark = pytest.mark.vllm

SETTINGS: dict[str, Any] = {
    # Nine prompts: two ranks have four and five.
    "sampling": {
        "engine": "vllm", "prompts": 9, "max_sequences": 256, "vllm": {"kv_cache_gb": 0.1, "eager": True},
    },
    # A large eps: AdamW divides the gradient by its own size, and so a rounding error of a gradient near 0, too.
    "optim": {"warmup_steps": 0, "updates": 3, "lr": 1e-4, "eps": 1e-4},
    "evaluation": {"every": 0},
    "tracking": {"mlflow": False},
}  # fmt: skip
STEPS = 2


def completions_of(run: RunFolder) -> list[list[dict[str, Any]]]:
    """Return the sampled completions of the steps of a run."""
    files = [run.path / f"samples/step-{step:06d}.parquet" for step in range(1, STEPS + 1)]
    columns = ["problem_id", "text", "reward", "length"]
    return [pq.read_table(file, columns=columns).to_pylist() for file in files]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Return a run of one step that was resumed for a second one; it grades while it samples, and evaluates."""
    folder = tmp_path_factory.mktemp("runs")
    more = {
        "grading": {"while_sampling": True, "batch": 32},
        "evaluation": {"every": STEPS, "problems": 24, "samples": 8, "k": [1]},
    }
    run = RunFolder(folder / "run")
    with silent():  # messages of the engine would disturb the run's live view
        train(resolve([SETTINGS, more, {"steps": 1}]), folder, name="run")
        first = run.read_metrics()
        resume("run", folder, settings=[{"steps": STEPS}])
    assert run.read_metrics()[: len(first)] == first
    return run


def test_a_resumed_run_continues_its_metrics(resumed):
    lines = resumed.read_metrics()
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(0 < line["sampler/logprob_gap_max"] <= 1e-4 for line in lines[1:])
    assert all(line["time/sync"] > 0 for line in lines[1:])


def test_an_evaluation_agrees_with_one_of_the_transformers_engine(resumed, tmp_path):
    """Within the confidence interval: the engines sample other completions."""
    options = {"n": 8, "limit": 24, "sampler": "transformers", "settings": [{"tracking": {"mlflow": False}}]}
    result = evaluate("embedded", runs_dir=tmp_path, **options)
    expected = result.scores["countdown"].metrics["mean_at_8"]
    assert expected.low < resumed.read_metrics()[0]["eval/countdown/mean_at_8"] < expected.high


def trained(ranks: Ranks, folder: Path, layer: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of the steps of a run, and its weights and the gap of its last sync."""
    config = resolve([SETTINGS, {"steps": STEPS + 1, "checkpoint": {"every": 0}}, layer])
    run = RunFolder.create(folder, "run") if ranks.is_main else RunFolder(folder / "run")
    components = build_components(config, prepare_task(config), ranks)
    try:
        reports = loop.train(config, components, run)
        lines = [without_clock(report.record) for report in islice(reports, STEPS)]
        reports.close()
        weights = {name: weight.clone() for name, weight in checkpoint_weights(components.policy.model)}
        gap = components.sampler.check.gap
    finally:
        components.close()
    ranks.wait()  # after the engines have ended, the ranks are still connected
    return {"lines": lines, "weights": weights, "gap": gap}


def check_equal(two: dict[str, Any], lines: list[dict[str, Any]], weights: dict[str, torch.Tensor]) -> None:
    """Require what two ranks have trained to be what one rank has, up to rounding."""
    assert 0 < two["gap"] < 1e-4
    for line, expected in zip(two["lines"], lines, strict=True):
        assert expected["optim/grad_norm"] > 0.1
        assert 0 < line["sampler/logprob_gap_max"] < 1e-4
        for name in ("optim/loss", "optim/grad_norm", "kl/old_new", "train/entropy"):
            assert line[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-5)
        assert line["train/reward"] == expected["train/reward"]
    assert weights.keys() == two["weights"].keys()
    for name, weight in weights.items():
        torch.testing.assert_close(two["weights"][name], weight, atol=1e-5, rtol=0)


def test_two_ranks_train_as_one(resumed, tmp_path):
    """The policy of two ranks is sharded, and each engine gets its weights one tensor at a time.

    The ranks are forks of this process, which has imported vLLM. They grade after sampling.
    """
    context = get_context("fork")
    two, other = run_ranks(2, tmp_path / "two", trained, tmp_path / "two", {}, context=context)
    assert two["lines"] == other["lines"], "all ranks report the same metrics"
    assert completions_of(RunFolder(tmp_path / "two" / "run")) == completions_of(resumed)
    model = resolve([{"model": {"path": str(resumed.checkpoint_dir(STEPS))}}]).model
    check_equal(two, resumed.read_metrics()[1:], dict(checkpoint_weights(load_policy(model).model)))


def test_conversations_on_two_ranks_train_as_one(tmp_path):
    """With the tool of the calculator task. The two ranks are new processes."""
    layer = {"task": {"name": "calculator"}}
    with silent():
        one = trained(SINGLE, tmp_path / "one", layer)
    two, _ = run_ranks(2, tmp_path / "ranks", trained, tmp_path / "two", layer)
    assert all(line["conversation/inserted_tokens"] > 0 for line in one["lines"])
    runs = [RunFolder(tmp_path / name / "run") for name in ("one", "two")]
    assert completions_of(runs[0]) == completions_of(runs[1])
    check_equal(two, one["lines"], one["weights"])
