"""Resume: a stopped and resumed run equals an uninterrupted run bit for bit, with various settings."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from bandpo_cli import experiments
from bandpo_cli.config.layers import flatten, resolve, to_yaml
from bandpo_cli.config.run import WITHOUT_EFFECT, RunConfig
from bandpo_cli.errors import UserError
from bandpo_cli.storage.checkpoints import (
    STATE,
    complete_checkpoints,
    read_trainer_state,
    remove_checkpoints_after,
    write_trainer_state,
)
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tasks.task import build_task
from bandpo_cli.training import optimizer
from bandpo_cli.training.build import build_components
from bandpo_cli.training.loop import train
from tests.sampling.stub_engine import forked_engines
from tests.training import trained
from tests.training.trained import check_equal, contents, record

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL: dict[str, Any] = {
    **trained.SMALL,
    "steps": 4,
    "task": {"max_number": 5, "rewards": [{"weight": 1}, "parity:even"]},
    "sampling": {"prompts": 4, "samples": 4, "max_tokens": 6},
    "checkpoint": {"every": 2, "background": False},
}


@pytest.fixture(autouse=True)
def model(tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a small random model, and a grader that tells its answers apart; worker processes import the grader."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SMALL, "model", {"path": str(small_model)})
    code = "def even(text, answer, extra):\n    return sum(map(ord, text)) % 2 == 0\n"
    (tmp_path / "parity.py").write_text(code)


def run(config: RunConfig, folder: RunFolder, resume: bool = False, copy_after: int = 0) -> RunFolder:
    """Train to the last step, from the latest checkpoint with `resume`; copy the folder to `killed` after a step."""
    components = build_components(config, build_task(config.task))
    first = 0
    if resume:
        step = max(complete_checkpoints(folder).complete)
        assert components.resume_from(folder.checkpoint_dir(step)).step == step < config.steps
        folder.roll_back(step)
        remove_checkpoints_after(folder, step)
        first = step + 1
    for report in train(config, components, folder, first=first):
        if report.step == copy_after > 0:
            shutil.copytree(folder.path, folder.path.with_name("killed"))
    components.close()
    return folder


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # 21 problems, 42 per step: each step is two epochs, and the checkpoint is exactly at a boundary.
    "schedule, radius, reference, entropy target, gdpo, boundary of an epoch; then gradient checkpointing": (
        {
            "seed": 3,
            "optim": {"schedule": "cosine", "warmup_steps": 3, "weight_decay": 0.1},
            "objective": {
                "reference_kl": 1e-3,
                "advantages": "gdpo",
                "entropy_target": 9.0,
                "entropy_bonus_step": 0.01,
                "entropy_bonus_max": 0.025,
            },
            "bounds": {"delta": 0.05, "delta_end": 0.01, "delta_schedule": "linear"},
            "task": {"max_number": 4, "min_target": 8, "max_target": 8},
            "sampling": {"prompts": 42, "samples": 2},
            "evaluation": {"problems": 2, "samples": 4},
        },
        {"model": {"gradient_checkpointing": True}},
    ),
    "dynamic sampling with a reference and masters, no evaluation": (  # steps below the spacing of bfloat16
        {
            "sampling": {"dynamic": True, "dynamic_batches": 3},
            "model": {"dtype": "bfloat16"},
            "objective": {"reference_kl": 1e-2},
            "optim": {"lr": 1e-5, "micro_batch_tokens": 128},
            "evaluation": {"every": 0},
        },
        {},
    ),
    "four steps old, in the trainer's process, with ratios relative to the older weights": (
        {
            "steps": 8,
            "sampling": {"max_lag": 4, "engine_process": False},
            "objective": {"old_logprobs": "sampler"},
        },
        {},
    ),
    "dynamic sampling two steps ahead in an engine process, adapters in float16": (
        {  # the loss scale changes before and after the kill
            "sampling": {"max_lag": 2, "dynamic": True, "dynamic_batches": 2},
            "model": {"dtype": "float16", "lora": {"rank": 4}},
            "optim": {"lr": 1e-3},
        },
        {},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_a_resumed_run_equals_an_uninterrupted_run(tmp_path, name, monkeypatch):
    """After a kill at step 3; the gradients before and after it are not zero."""
    monkeypatch.setattr(optimizer, "GROWTH_UPDATES", 3)
    layer, after = VARIANTS[name]
    keep = {"every": 2, "keep_last": 1, "keep_best": 1, "best_metric": "train/accuracy"}
    layers = [SMALL, layer, {"checkpoint": keep}]
    if "epoch" in name:
        assert len(build_task(resolve(layers).task).train_problems()) == 21
    with forked_engines():
        whole = run(resolve(layers), RunFolder.create(tmp_path, "whole"), copy_after=3)
        resumed = run(resolve([*layers, after]), RunFolder(tmp_path / "killed"), resume=True)
    learned = [line["step"] for line in record(whole) if line.get("optim/grad_norm", 0) > 0]
    assert min(learned) < 3 < max(learned)
    check_equal(whole, resumed)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*VARIANTS][::3])
def test_a_fork_without_changes_equals_an_uninterrupted_run(tmp_path, name):
    """Bit for bit; with another method it is equal up to the step, and then not."""
    layers = [SMALL, VARIANTS[name][0], {"checkpoint": {"keep_last": None}}]
    same: dict[str, Any] = {"tracking": {"mlflow": False}}
    other: dict[str, Any] = {**same, "bounds": {"method": "none"}, "optim": {"lr": 1e-2}}
    with forked_engines():
        whole = experiments.train(resolve([*layers, same]), tmp_path, "whole").folder
        forks = [experiments.fork("whole@2", tmp_path, [layer]).folder for layer in (same, other)]
    equal, changed = map(RunFolder, forks)
    check_equal(RunFolder(whole), equal)
    lines, expected = record(changed), record(equal)
    assert expected[-1]["optim/grad_norm"] > 0
    for line, uninterrupted in zip(lines, expected, strict=True):
        assert (line == uninterrupted) == (line["step"] < 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer", [{"optim": {"updates": 1}}, {"sampling": {"temperature": 0.5, "max_lag": 0}}]
)
def test_a_fork_that_drops_the_batch_sampled_ahead_has_the_same_problems(tmp_path, layer):
    """Those of each step of the uninterrupted run."""
    settings = [SMALL, {"sampling": {"max_lag": 2}}, {"checkpoint": {"keep_last": None}}]
    without = {"tracking": {"mlflow": False}}
    with forked_engines():
        whole = experiments.train(resolve([*settings, without]), tmp_path, "whole").folder
        forked = experiments.fork("whole@2", tmp_path, [without, layer]).folder
    for step in (3, 4):
        name = f"samples/step-{step:06d}.parquet"
        uninterrupted, problems = (
            pq.read_table(path / name).column("problem_id").to_pylist() for path in (whole, forked)
        )
        assert problems == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("lag", [1, 2])
def test_an_engine_process_changes_no_number(tmp_path, lag):
    """A resume may therefore end the process."""
    process, none = ({"sampling": {"max_lag": lag, "engine_process": value}} for value in (True, False))
    whole, other = (RunFolder.create(tmp_path, name) for name in ("whole", "other"))
    with forked_engines():
        run(resolve([SMALL, process]), whole, copy_after=3)
    run(resolve([SMALL, none]), other)
    resumed = run(resolve([SMALL, none]), RunFolder(tmp_path / "killed"), resume=True)
    check_equal(whole, other)
    check_equal(whole, resumed)
    assert [line["sampler/lag_steps"] for line in record(whole)[1:]] == [min(n, lag) for n in range(4)]


@pytest.mark.slow
def test_settings_without_effect_change_no_number(tmp_path):
    """Each of `WITHOUT_EFFECT` has another value; reports treat such runs as one variant."""
    rows = [json.dumps({"question": f"1 1 {n} {n}={2 * n}:", "answer": "0"}) for n in range(1, 10)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    data = {"name": "data", "train": ["sums.jsonl"], "heldout_fraction": 0.4, "grader": "parity:even"}
    layers: list[dict[str, Any]] = [
        SMALL,
        {"steps": 3, "task": {**data, "template": "{question}"}, "grading": {"deadline": 60}},
        {"sampling": {"max_tokens": 8, "max_prompt_tokens": 64}},
    ]
    other: dict[str, Any] = {
        "tracking": {"mlflow": False, "tokens_every": 0},
        "checkpoint": {"every": 1, "keep_last": 1, "keep_best": 0, "background": False},
        "stop": {"entropy_below": 1e-9},
        "grading": {"workers": 1, "concurrency": 2},
        "model": {"gradient_checkpointing": True},
        "sampling": {"vllm": {"memory_fraction": 0.3}},
    }
    assert {name if name in WITHOUT_EFFECT else name.split(".")[0] for name in flatten(other)} == {
        *WITHOUT_EFFECT
    }
    one, two = (RunFolder.create(tmp_path, name) for name in ("one", "two"))
    for folder, config in ((one, resolve(layers)), (two, resolve([*layers, other]))):
        run(config, folder)
    assert record(one) == record(two)
    assert any(line["optim/grad_norm"] > 0 for line in record(one)[1:])
    for name in ("samples", "tokens", "evals"):
        assert contents(one.path / name) == contents(two.path / name)
    assert len([*(one.path / "token_values").iterdir()]) == 2
    assert not (two.path / "token_values").exists()


@pytest.mark.slow
def test_a_fork_whose_data_have_changed_is_refused_and_leaves_no_folder(tmp_path):
    same: dict[str, Any] = {"tracking": {"mlflow": False}, "evaluation": {"every": 0}}
    config = resolve([SMALL, same, {"steps": 1}])
    folder = run(config, RunFolder.create(tmp_path, "a"))
    folder.write_config(to_yaml(config))
    checkpoint = folder.checkpoint_dir(1)
    progress = read_trainer_state(checkpoint)
    (checkpoint / STATE).unlink()
    write_trainer_state(checkpoint, replace(progress, problems="of the file before it was edited"))
    with pytest.raises(UserError, match="a/checkpoints/step-000001: the run trained on other problems"):
        experiments.fork("a", tmp_path, [same, {"steps": 2}], "b")
    assert not (tmp_path / "b").exists()
