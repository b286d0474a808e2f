"""Forks: the checkpoint, what can change, and what the new run takes over; equality is in tests/training."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from bandpo_cli.callbacks import RunResult
from bandpo_cli.cli.train_view import print_summary
from bandpo_cli.config.batch_and_sampling import CheckpointConfig
from bandpo_cli.config.layers import resolve, to_yaml
from bandpo_cli.errors import ConfigError, RunError, UserError
from bandpo_cli.experiments import resume
from bandpo_cli.experiments.eval_comparison import compare
from bandpo_cli.experiments.record import copy_parent
from bandpo_cli.experiments.resume_and_fork import plan_fork
from bandpo_cli.results import describe_run, read_metrics_table
from bandpo_cli.storage.checkpoints import (
    ANY_PROBLEMS,
    ROLLOUTS,
    STATE,
    Progress,
    complete_checkpoints,
    delete_checkpoint,
    prune_checkpoints,
    write_trainer_state,
)
from bandpo_cli.storage.run_folder import VERL_FILE, RunFolder
from bandpo_cli.storage.run_record import PARENT
from bandpo_cli.storage.sweep_folder import SweepFolder
from bandpo_cli.sweeps.scheduler import train_command
from bandpo_cli.sweeps.sweep_plan import SweepConfig, plan_from_config, plan_sweep
from bandpo_cli.sweeps.sweep_run import Executor, dry_run_info
from bandpo_cli.tracking.trackers import Place, write_place
from tests.conftest import output_of

SETTINGS: dict[str, Any] = {
    "seed": 3,
    "steps": 6,
    "model": {"dtype": "float32"},
    "task": {"max_number": 4},
    "sampling": {"prompts": 4, "samples": 4},
    "optim": {"updates": 2},
    "tracking": {"mlflow": False, "parent": "sweep"},
}
SCORE = "eval/countdown/mean_at_16"
METRICS = {"time/step": 1.0, "train/accuracy": 0.25, "train/entropy": 1.0}
NO_MLFLOW = {"tracking": {"mlflow": False}}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a folder with the run `a` of 6 steps; its checkpoints 2 and 4 have placeholders and a batch of step 5."""
    run = RunFolder.create(tmp_path / "runs", "a")
    run.write_config(to_yaml(resolve([SETTINGS])))
    for step in range(7):
        metrics = METRICS if step else {"time/step": 1.0}
        run.append_metrics({"step": step, **metrics, **({} if step % 2 else {SCORE: step / 8})})
        (run.path / "samples").mkdir(exist_ok=True)
        (run.path / "samples" / f"step-{step:06d}.parquet").write_text(f"completions {step}")
    for step in (2, 4):
        folder = run.checkpoint_dir(step)
        (folder / ROLLOUTS).parent.mkdir(parents=True)
        for name in ("config.json", "model.safetensors", "trainer/optimizer.safetensors"):
            (folder / name).write_bytes(b"none")
        batch = {"rollouts": json.dumps({"batches": [{"position": 4 * step}, {"position": 4 * step + 2}]})}
        save_file({}, folder / ROLLOUTS, batch)
        write_trainer_state(folder, Progress(step, 2 * step, 1, 4 * step + 4, "abc"))
    return run.path.parent


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (8, True, True)),
        ({"bounds": {"method": "clip"}, "optim": {"lr": 1e-3, "betas": [0.9, 0.95]}}, (8, True, True)),
        ({"grading": {"workers": 1}, "checkpoint": {"every": 3}}, (8, True, True)),
        ({"optim": {"updates": 4}}, (16, False, True)),
        ({"seed": 4}, (8, False, True)),
        ({"sampling": {"prompts": 8}}, (8, False, False)),
        ({"evaluation": {"problems": 9}}, (8, True, False)),
        ({"task": {"max_number": 5}}, (8, False, False)),
    ],
)
def test_progress_of_a_fork(runs, settings, expected):
    """The updates, whether the batch of the parent is trained on, and whether the problems must be the same.

    The problems of a batch that is dropped come again.
    """
    plan = plan_fork("a@4", [NO_MLFLOW, settings], runs)
    updates, keeps_batch, same_problems = expected
    fork, position = plan.fork, 20 if keeps_batch else 16
    assert fork.progress == Progress(4, updates, 1, position, "abc" if same_problems else ANY_PROBLEMS)
    assert (plan.first_step, fork.keeps_batch) == (5, keeps_batch)


def test_a_fork_begins_as_the_record_of_its_parent(runs):
    plan = plan_fork("a", [NO_MLFLOW, {"optim": {"updates": 4}, "bounds": {"method": "clip"}}], runs, "b")
    folder, parent = RunFolder.create(runs, "b"), RunFolder(runs / "a")
    about = copy_parent(plan.fork, folder)[PARENT]
    changed = {"bounds.method": ("band", "clip"), "optim.updates": (2, 4)}
    assert about == {"run": str(parent.path), "path": str(parent.path), "step": 4, "changed": changed}
    assert [line["step"] for line in folder.read_metrics()] == [0, 1, 2, 3, 4]
    samples = [path.name for path in sorted((folder.path / "samples").iterdir())]
    assert samples == [f"step-{step:06d}.parquet" for step in range(5)]
    assert len([*(parent.path / "samples").iterdir()]) == len(parent.read_metrics()) == 7
    for step in (2, 4):
        delete_checkpoint(parent.checkpoint_dir(step))
    complete, damaged = complete_checkpoints(folder)
    assert (complete, damaged) == ({4: Progress(4, 16, 1, 16, "abc")}, {})
    assert not (folder.checkpoint_dir(4) / ROLLOUTS).exists()
    with pytest.raises(RunError, match=r"step-000004: the run has removed it; fork its last checkpoint"):
        copy_parent(plan.fork, RunFolder.create(runs, "c"))
    assert not (runs / "c").exists()
    folder.write_config(to_yaml(plan.config))
    folder.write_env({PARENT: about})
    shown = describe_run("b", runs)
    assert shown["parent"] == f"{parent.path}@4"

    assert abs(shown["started_ms"] / 1000 - (folder.path / "config.yaml").stat().st_mtime) < 1e-2
    delete_checkpoint(folder.checkpoint_dir(4))
    with pytest.raises(UserError, match="no complete checkpoint; fork the other run again: bandpo train --f"):
        resume("b", runs)


def test_evaluations_of_other_problems_are_not_compared_with_those_of_the_parent(runs):
    """Nor those of the parent's parent, whose settings the fork does not change itself."""
    changes = {"evaluation": {"problems": 9}}, {"optim": {"lr": 1e-3}}
    for parent, name, change in zip(("a@2", "b@2"), "bc", changes, strict=True):
        plan, folder = plan_fork(parent, [NO_MLFLOW, change], runs, name), RunFolder.create(runs, name)
        folder.write_env(copy_parent(plan.fork, folder))
        folder.write_config(to_yaml(plan.config))
    folder.append_metrics({"step": 3, **METRICS, SCORE: 0.125})
    assert describe_run("c", runs)["metrics"][SCORE] == {"first": (3, 0.125), "last": (3, 0.125)}
    assert describe_run("a", runs)["metrics"][SCORE]["first"] == (0, 0)
    tables = [read_metrics_table(folder.metrics_path, comparable)[SCORE] for comparable in (False, True)]
    assert [table.dropna().index.tolist() for table in tables] == [[0, 2, 3], [3]], "in reports"
    result = RunResult(folder.path, "FINISHED", folder.read_metrics())
    text = output_of(print_summary, plan.config, result, 3)
    expected = (
        "done        1 step in 1 s, after 2 earlier steps\nheld-out    step    3  mean@16 0.125\n"
        "            not comparable with step 0, since the fork changed evaluation.problems\n"
    )
    assert text.startswith(expected)
    scores = {"countdown": {"by_problem": {"1": {"mean_at_16": 0.5}, "2": {"mean_at_16": 1.0}}}}
    for step in (0, 3):
        folder.write_eval(step, {"sets": scores})
    other = {"evaluation.problems": (128, 9)}
    assert compare("c@0", "c@3", runs).differences == other
    write_trainer_state(folder.checkpoint_dir(3), Progress(3, 6, 0, 16, "abc"))
    prune_checkpoints(folder, CheckpointConfig(keep_last=1, keep_best=1))
    assert [*complete_checkpoints(folder).complete] == [3], "step 2 had 0.25 of other problems"


def test_the_files_of_a_fork_are_flushed_before_it_is_a_run(runs, monkeypatch):
    synced: set[Path] = set()
    rename = os.rename

    def check(old: Path, new: Path) -> None:
        there = {path.relative_to(old) for path in Path(old).rglob("*")}
        assert there - {Path(STATE)} <= {path.relative_to(old) for path in synced if path.is_relative_to(old)}
        assert Path(old) in synced
        rename(old, new)

    def note(descriptor: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", check)
    plan = plan_fork("a", [NO_MLFLOW], runs, "b")
    folder = RunFolder.create(runs, "b")
    copy_parent(plan.fork, folder)
    record = {path for path in folder.path.rglob("*") if "checkpoints" not in path.parts}
    assert len(record) == 7  # the metrics, the completions of the steps 0 to 4, and their folder
    assert record <= synced


def test_a_fork_is_a_child_of_the_mlflow_run_of_its_parent(runs):
    """Unless it has another parent, such as its sweep; the settings `tracking` of the parent are not its own."""
    uri = f"sqlite:///{runs.absolute()}/mlflow.db"
    assert plan_fork("a", [], runs).config.tracking.parent is None
    write_place(runs / "a", "mlflow", Place(uri, "bandpo", "key", "experiments/1/runs/the-run"))
    assert plan_fork("a", [], runs).config.tracking.parent == "the-run"
    assert plan_fork("a", [{"tracking": {"parent": "other"}}], runs).config.tracking.parent == "other"
    assert plan_fork("a", [NO_MLFLOW], runs).config.tracking.parent is None
    assert plan_fork("a", [{"tracking": {"experiment": "x"}}], runs).config.tracking.parent is None


def _cut(folder: Path) -> None:
    RunFolder(folder).roll_back(1)


def _damaged(folder: Path) -> None:
    (folder / "checkpoints" / "step-000004" / "model.safetensors").write_bytes(b"nine")


@pytest.mark.parametrize(
    ("run", "settings", "change", "message"),
    [
        ("b@4", {}, None, r"no run 'b' in .*; it has a"),
        ("a@3", {}, None, "--fork a@3: there is no checkpoint of step 3; steps with a checkpoint: 2, 4"),
        ("a", {}, lambda run: (run / VERL_FILE).write_text("{}"), "--fork a: the run was imported from verl"),
        ("a", {}, _cut, r"no complete checkpoint \(checkpoint.every = 10\); train it .*: bandpo train --res"),
        ("a", {}, _damaged, "step-000004: model.safetensors is damaged: its content has changed"),
        ("a", {"steps": 4}, None, "steps = 4: all are done at this checkpoint; give more, such as --steps"),
        (
            "a",
            {"model": {"path": "x/y", "dtype": "bfloat16", "lora": {"rank": 4}}},
            None,
            r"leave out model.path = x/y \(the run has embedded\), model.dtype = bfloat16 .*model.lora.rank = 4",
        ),
    ],
)
def test_what_cannot_be_forked(runs, run, settings, change, message):
    if change is not None:
        change(runs / "a")
    with pytest.raises(UserError, match=message):
        plan_fork(run, [NO_MLFLOW, settings], runs)


def test_a_sweep_of_forks(runs):
    options = {"fork": "a@2", "seeds": None}
    request = plan_sweep(None, {"bounds.method": "band,clip"}, [], options, [NO_MLFLOW], runs)
    runs_of = [(run.name, config.seed, config.steps) for run, config in request.runs.items()]
    assert runs_of == [("band-s3", 3, 6), ("clip-s3", 3, 6)]
    assert dry_run_info(request, Executor()).forked_at == 2
    folder = SweepFolder.create(runs, "s", request.runs, None, request.about)
    command = train_command(SweepFolder.open(runs, "s"), "clip-s3")
    assert command[command.index("--fork") + 1] == folder.fork == f"{(runs / 'a').absolute()}@2"
    for changes, message in (
        ({"axes": {"model.path": ["x/y"]}}, "leave out model.path"),
        ({"axes": {"steps": [2, 8]}}, "steps = 2: all are done"),
        ({"axes": {}, "tuned_on": "s"}, "fork: the variants are those of tuned_on"),
    ):
        with pytest.raises((ConfigError, ValueError), match=message):
            plan_from_config(SweepConfig.model_validate({"fork": "a@2", **changes}), [], runs)


def test_a_fork_warns_of_custom_code_that_has_changed(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "from bandpo_cli.callbacks import CallbackBase\n\nclass Watch(CallbackBase):\n    pass\n"
    Path("changed_watch.py").write_text(code)
    (runs / "a" / "changed_watch.py").write_text(code + "# as the parent was trained\n")
    layers = [NO_MLFLOW, {"tracking": {"callbacks": ["changed_watch:Watch"]}}]
    assert [text for text in plan_fork("a@4", layers, runs).warnings if "changed_watch.py" in text] == [
        f"{tmp_path / 'changed_watch.py'} differs from the copy in the run folder, which the parent was trained with; "
        "the fork uses the other file"
    ]
