"""A run that was stopped and goes on is the run that was never stopped, bit for bit, whatever its settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import UserError
from bandpo_cli.storage.checkpoints import complete_checkpoints, remove_checkpoints_after
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tasks.registry import build_task
from bandpo_cli.training.components import Components, build_components
from bandpo_cli.training.loop import train

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL: dict[str, Any] = {
    "steps": 5,
    "sampling": {"prompts": 4, "samples": 4},
    "optim": {"updates": 2, "lr": 1e-3},
    "evaluation": {"every": 2, "problems": 4, "samples": 4, "k": [1, 4]},
    "checkpoint": {"every": 2},
}


def run_until(config: RunConfig, folder: RunFolder, parts: Components, first: int, last: int) -> Components:
    """Run the steps from `first` on and leave off after `last`, as a kill there would."""
    for report in train(config, parts, folder, first=first):
        if report.step == last:
            break
    parts.close()
    return parts


def go_on(config: RunConfig, folder: RunFolder, last: int) -> Components:
    """Resume from the latest checkpoint."""
    done = folder.read_metrics()[-1]["step"]
    step = max(step for step in complete_checkpoints(folder)[0] if step <= done)
    assert step < last
    parts = build_components(config, build_task(config.task))
    assert parts.resume_from(folder.checkpoint_dir(step)).step == step
    folder.roll_back(step)
    remove_checkpoints_after(folder, step)
    return run_until(config, folder, parts, step + 1, last)


def record(folder: RunFolder) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in folder.read_metrics()]


def files(folder: RunFolder) -> dict[str, bytes]:
    """Return what a run leaves but for its clocks: completions, tokens, evaluations and checkpoints."""
    parts = ("samples", "tokens", "evals", "checkpoints")
    paths = [path for part in parts for path in (folder.path / part).rglob("*") if path.is_file()]
    return {path.relative_to(folder.path).as_posix(): path.read_bytes() for path in paths}


def check_same(one: RunFolder, other: RunFolder) -> None:
    """Require two runs to be equal, in which something was learnt before and after the middle."""
    learnt = [line["step"] for line in record(one) if line.get("optim/grad_norm", 0) > 0]
    assert min(learnt) < 3 < max(learnt)
    assert record(one) == record(other)
    ours, theirs = files(one), files(other)
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if ours[name] != theirs[name]]


def both(tmp_path: Path, *layers: dict[str, Any], stop: int = 3) -> tuple[RunFolder, RunFolder]:
    """Run it once through, and once stopped after `stop` and resumed; return both folders."""
    config = resolve([SMALL, *layers])
    whole, resumed = (RunFolder.create(tmp_path, name) for name in ("whole", "resumed"))
    run_until(config, whole, build_components(config, build_task(config.task)), 0, config.steps)
    run_until(config, resumed, build_components(config, build_task(config.task)), 0, stop)
    go_on(config, resumed, config.steps)
    return whole, resumed


def test_a_resumed_run_is_the_run(tmp_path: Path) -> None:
    whole, resumed = both(tmp_path)
    check_same(whole, resumed)
    assert len(record(whole)) == 6


SETTINGS: dict[str, dict[str, Any]] = {
    "schedule": {"optim": {"schedule": "cosine", "warmup_steps": 3}},
    "dynamic": {"sampling": {"dynamic": True, "dynamic_batches": 3}},
    "micro-batches": {"optim": {"micro_batch_tokens": 128, "weight_decay": 0.1}},
    "checkpointing": {"model": {"gradient_checkpointing": True}},
    "no-evaluation": {"evaluation": {"every": 0}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_whatever_the_settings(tmp_path: Path, name: str) -> None:
    check_same(*both(tmp_path, SETTINGS[name]))


@pytest.mark.slow
def test_at_the_edge_of_an_epoch(tmp_path: Path) -> None:
    """21 problems, 14 a step: the resume, at position 28, goes on within the second epoch and into the third."""
    few = {"task": {"name": "countdown", "max_number": 4, "min_target": 8, "max_target": 8}}
    config = resolve([SMALL, few, {"evaluation": {"problems": 2}}])
    assert len(build_task(config.task).train_problems()) == 21
    for prompts in (14, 42):  # with 42 each step is two epochs, and the checkpoint lies right at an edge
        place = tmp_path / str(prompts)
        check_same(*both(place, few, {"sampling": {"prompts": prompts}, "evaluation": {"problems": 2}}))


@pytest.mark.slow
@pytest.mark.parametrize("kl", [0.0, 1e-2])
def test_narrow_weights_with_wide_masters(tmp_path: Path, kl: float) -> None:
    """Steps too small to show in bfloat16 one by one: it is the masters that have to come back."""
    layer = {"model": {"dtype": "bfloat16"}, "optim": {"lr": 1e-5}, "objective": {"reference_kl": kl}}
    check_same(*both(tmp_path, layer))


@pytest.mark.slow
def test_the_reference_is_the_start_and_not_where_the_run_goes_on(tmp_path: Path) -> None:
    whole, resumed = both(tmp_path, {"objective": {"reference_kl": 1e-3}})
    check_same(whole, resumed)
    figures = [line["kl/ref"] for line in record(resumed)[1:]]
    assert figures[-1] > figures[0] > 0
    assert figures[2] > 0.1 * figures[-1], "the third step is the first after the resume"


@pytest.mark.slow
def test_gradient_checkpointing_may_change_at_a_resume(tmp_path: Path) -> None:
    """What --resume lets through as harmless: no number of the record moves."""
    config = resolve([SMALL])
    whole, resumed = (RunFolder.create(tmp_path, name) for name in ("whole", "resumed"))
    run_until(config, whole, build_components(config, build_task(config.task)), 0, 5)
    run_until(config, resumed, build_components(config, build_task(config.task)), 0, 3)
    go_on(resolve([SMALL, {"model": {"gradient_checkpointing": True}}]), resumed, 5)
    check_same(whole, resumed)


@pytest.mark.slow
def test_what_is_kept_holds_across_a_resume(tmp_path: Path) -> None:
    """The best is decided from the record and the disk, so a run that forgot everything keeps the same."""
    keep = {
        "steps": 6,
        "checkpoint": {"every": 1, "keep_last": 1, "keep_best": 2, "best_metric": "train/accuracy"},
    }
    whole, resumed = both(tmp_path, keep, stop=4)
    check_same(whole, resumed)
    lines = [line for line in record(whole) if line["step"]]
    best = sorted(lines, key=lambda line: (-line["train/accuracy"], line["step"]))[:2]
    assert sorted(complete_checkpoints(resumed)[0]) == sorted({6, *(line["step"] for line in best)})


def test_other_problems_are_refused(tmp_path: Path) -> None:
    config = resolve([SMALL, {"steps": 1, "evaluation": {"every": 0}}])
    folder = RunFolder.create(tmp_path, "a")
    run_until(config, folder, build_components(config, build_task(config.task)), 0, 1)
    parts = build_components(config, build_task(resolve([SMALL, {"task": {"max_target": 50}}]).task))
    with pytest.raises(UserError, match="trained on other problems"):
        parts.resume_from(folder.checkpoint_dir(1))
    parts.close()


def test_asked_to_stop_it_keeps_the_step_it_has_done(tmp_path: Path) -> None:
    config = resolve([SMALL, {"checkpoint": {"every": 0}}])
    folder = RunFolder.create(tmp_path, "a")
    parts = build_components(config, build_task(config.task))
    steps = [report.step for report in train(config, parts, folder, stop=lambda: len(record(folder)) == 4)]
    parts.close()
    assert steps == [0, 1, 2, 3]
    state = json.loads((folder.checkpoint_dir(3) / "trainer" / "state.json").read_text())
    assert (state["step"], state["updates"], state["position"]) == (3, 6, 12)
    assert list(complete_checkpoints(folder)[0]) == [3]
