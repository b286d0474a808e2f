"""Resume: a stopped and resumed run equals an uninterrupted run bit for bit, with various settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bandpo_cli.config.layers import flatten, resolve
from bandpo_cli.config.run import WITHOUT_EFFECT, RunConfig
from bandpo_cli.errors import UserError
from bandpo_cli.storage.checkpoints import complete_checkpoints, remove_checkpoints_after
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tasks.task import build_task
from bandpo_cli.training.components import Components, build_components
from bandpo_cli.training.loop import train
from tests.training import trained
from tests.training.trained import check_equal, contents, record

pytestmark = pytest.mark.usefixtures("one_thread")


SMALL = {**trained.SMALL, "steps": 4}


def run_until(
    config: RunConfig, folder: RunFolder, components: Components, first: int, last: int
) -> Components:
    """Run the steps from `first` to `last` and abandon the loop there, as a kill would."""
    for report in train(config, components, folder, first=first):
        if report.step == last:
            break
    components.close()
    return components


def resume(config: RunConfig, folder: RunFolder, last: int) -> Components:
    """Resume from the latest checkpoint."""
    done = folder.read_metrics()[-1]["step"]
    step = max(step for step in complete_checkpoints(folder).complete if step <= done)
    assert step < last
    components = build_components(config, build_task(config.task))
    assert components.resume_from(folder.checkpoint_dir(step)).step == step
    folder.roll_back(step)
    remove_checkpoints_after(folder, step)
    return run_until(config, folder, components, step + 1, last)


def check_same(one: RunFolder, other: RunFolder) -> None:
    """Require two runs to be equal, with non-zero gradients before and after step 3."""
    learned = [line["step"] for line in record(one) if line.get("optim/grad_norm", 0) > 0]
    assert min(learned) < 3 < max(learned)
    check_equal(one, other)


def both(
    tmp_path: Path, layer: dict[str, Any], after: dict[str, Any] | None = None
) -> tuple[RunFolder, RunFolder]:
    """Run without interruption, and stopped after step 3 and resumed with other settings; return both folders."""
    config = resolve([SMALL, layer])
    uninterrupted, resumed = (RunFolder.create(tmp_path, name) for name in ("uninterrupted", "resumed"))
    run_until(config, uninterrupted, build_components(config, build_task(config.task)), 0, config.steps)
    run_until(config, resumed, build_components(config, build_task(config.task)), 0, 3)
    resume(resolve([SMALL, layer, after or {}]), resumed, config.steps)
    return uninterrupted, resumed


VARIANTS: dict[str, dict[str, Any]] = {
    "schedule, radius, reference, micro-batches": {
        "seed": 3,
        "optim": {"schedule": "cosine", "warmup_steps": 3, "micro_batch_tokens": 128, "weight_decay": 0.1},
        "objective": {"reference_kl": 1e-3},
        "bounds": {"delta": 0.05, "delta_end": 0.01, "delta_schedule": "linear"},
    },
    "dynamic sampling, adapters in bfloat16": {
        "sampling": {"dynamic": True, "dynamic_batches": 3},
        "model": {"dtype": "bfloat16", "lora": {"rank": 4}, "gradient_checkpointing": True},
        "objective": {"reference_kl": 1e-2},
        "optim": {"lr": 1e-4},
    },
    "dynamic sampling one step ahead": {
        "sampling": {"max_lag": 1, "dynamic": True, "dynamic_batches": 3},
        "model": {"lora": {"rank": 4}},
    },
    "masters, no evaluation": {  # steps below the spacing of bfloat16
        "model": {"dtype": "bfloat16"},
        "optim": {"lr": 1e-5},
        "evaluation": {"every": 0},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_a_resumed_run_equals_an_uninterrupted_run(tmp_path: Path, name: str) -> None:
    check_same(*both(tmp_path, VARIANTS[name]))


@pytest.mark.slow
def test_resume_at_the_boundary_of_an_epoch(tmp_path: Path) -> None:
    """21 problems, 42 per step: each step is two epochs, and the checkpoint is exactly at a boundary."""
    few = {"task": {"name": "countdown", "max_number": 4, "min_target": 8, "max_target": 8}}
    layer = {**few, "sampling": {"prompts": 42}, "evaluation": {"problems": 2}}
    assert len(build_task(resolve([SMALL, layer]).task).train_problems()) == 21
    check_same(*both(tmp_path, layer))


@pytest.mark.slow
def test_settings_without_effect_change_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of `WITHOUT_EFFECT` has another value; reports treat such runs as one variant."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parity.py").write_text(  # a custom grader runs in the worker processes
        "def even(text, answer, extra):\n    return sum(map(ord, text)) % 2 == 0\n"
    )
    rows = [json.dumps({"question": f"1 1 {n} {n}={2 * n}:", "answer": "0"}) for n in range(1, 10)]
    (tmp_path / "sums.jsonl").write_text("\n".join(rows))
    data = {"name": "data", "train": ["sums.jsonl"], "heldout_fraction": 0.4, "grader": "parity:even"}
    layers: list[dict[str, Any]] = [
        SMALL,
        {"steps": 3, "task": {**data, "template": "{question}"}, "grading": {"deadline": 60}},
        {"sampling": {"max_tokens": 8, "max_prompt_tokens": 64}},
    ]
    other: dict[str, Any] = {
        "tracking": {"mlflow": False},
        "checkpoint": {"every": 1, "keep_last": 1, "keep_best": 0, "background": False},
        "grading": {"workers": 1},
        "model": {"gradient_checkpointing": True},
        "sampling": {"vllm": {"memory_fraction": 0.3}},
    }
    assert {name if name in WITHOUT_EFFECT else name.split(".")[0] for name in flatten(other)} == {
        *WITHOUT_EFFECT
    }
    one, two = (RunFolder.create(tmp_path, name) for name in ("one", "two"))
    for folder, config in ((one, resolve(layers)), (two, resolve([*layers, other]))):
        run_until(config, folder, build_components(config, build_task(config.task)), 0, config.steps)
    assert record(one) == record(two)
    assert any(line["optim/grad_norm"] > 0 for line in record(one)[1:])
    for name in ("samples", "tokens", "evals"):
        assert contents(one.path / name) == contents(two.path / name)


@pytest.mark.slow
def test_pruning_and_numbers_are_the_same_across_a_resume_with_gradient_checkpointing(tmp_path: Path) -> None:
    """The best checkpoints follow from metrics.jsonl and the disk alone; --resume accepts the changed setting."""
    keep = {"every": 1, "keep_last": 1, "keep_best": 1, "best_metric": "train/accuracy"}
    uninterrupted, resumed = both(tmp_path, {"checkpoint": keep}, {"model": {"gradient_checkpointing": True}})
    check_same(uninterrupted, resumed)
    lines = [line for line in record(uninterrupted) if line["step"]]
    best = min(lines, key=lambda line: (-line["train/accuracy"], line["step"]))
    assert sorted(complete_checkpoints(resumed).complete) == sorted({4, best["step"]})


def test_resume_with_other_problems_is_refused(tmp_path: Path) -> None:
    config = resolve([SMALL, {"steps": 1, "evaluation": {"every": 0}}])
    folder = RunFolder.create(tmp_path, "a")
    run_until(config, folder, build_components(config, build_task(config.task)), 0, 1)
    components = build_components(config, build_task(resolve([SMALL, {"task": {"max_target": 50}}]).task))
    with pytest.raises(UserError, match="trained on other problems"):
        components.resume_from(folder.checkpoint_dir(1))
    components.close()
