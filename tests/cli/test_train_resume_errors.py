"""`bandpo train --resume`: refused settings and damaged runs give one line, and the run folder is not changed."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bandpo_cli.config.layers import read_assignments, resolve, to_yaml
from bandpo_cli.storage.checkpoints import Progress, write_trainer_state
from bandpo_cli.storage.run_folder import RunFolder
from tests.cli.eval_command import succeed, usage_error
from tests.cli.train_runs import SMALL_SETTINGS, file_contents, metrics_lines, truncate_metrics


@pytest.fixture
def placeholder_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a finished run of 6 steps with placeholder tensors, which a dry run does not load."""
    monkeypatch.setattr("bandpo_cli.cli.preview.print_dry_run", lambda *_: None)
    run = RunFolder.create(tmp_path / "runs", "a")
    run.write_config(to_yaml(resolve([read_assignments(["steps=6", "seed=3", *SMALL_SETTINGS.split()])])))
    for step in range(7):
        run.append_metrics({"step": step, "time/step": 1.0})
    for step in (2, 4, 6):
        folder = run.checkpoint_dir(step)
        (folder / "trainer").mkdir(parents=True)
        for name in ("config.json", "model.safetensors", "trainer/optimizer.safetensors"):
            (folder / name).write_bytes(b"none")
        write_trainer_state(folder, Progress(step, 2 * step, 0, 4 * step, "abc"))
    run.write_summary({"status": "FINISHED", "steps": 6})
    (run.path / "plots").mkdir()
    return run.path


def test_a_complete_run_is_refused_and_not_changed(placeholder_run, tmp_path):
    before = file_contents(placeholder_run)
    line = usage_error("train", "--resume", "a", cwd=tmp_path)
    assert "run a is complete: 6 of 6 steps; to train further: bandpo train --resume a --steps 12" in line
    assert file_contents(placeholder_run) == before


def test_the_hint_for_a_run_of_a_sweep_names_its_folder(placeholder_run, tmp_path):
    (tmp_path / "runs" / "first").mkdir()
    shutil.move(placeholder_run, tmp_path / "runs" / "first" / "band-s0")
    line = usage_error("train", "--resume", "first/band-s0", cwd=tmp_path)
    assert "to train further: bandpo train --resume runs/first/band-s0 --steps 12" in line
    flags = ["--steps", "12", "--dry-run"]
    planned = succeed("train", "--resume", "runs/first/band-s0", *flags, cwd=tmp_path).out.split()
    assert "after step 6 (runs/first/band-s0/checkpoints/step-000006): 6 steps to go" in " ".join(planned)


FORK = "with the other values: bandpo train --fork a --set bounds.method=clip --set optim.lr=0.001"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("--set optim.lr=1e-3", ["optim.lr = 0.001 (the run has 5e-05)", "a resume can change", "tracking"]),
        ("--lr 1e-3 --method clip", ["bounds.method = clip (the run has band), optim.lr = 0.001", FORK]),
        ("--model some/model", ["model.path = some/model (the run has embedded)", "starts a new run"]),
        ("--fork a", ["--fork a: it starts a new run from a checkpoint; leave out --resume and --probe"]),
        ("--seed 4 --delta 0.1", ["seed = 4 (the run has 3), bounds.delta = 0.1 (the run has 0.05)"]),
        ("--steps 5", ["steps = 5: 5 are done"]),
        ("--set checkpoint.best_metric=time/step", ["best_metric", "metrics.jsonl"]),
    ],
)
def test_changed_settings_are_refused(placeholder_run, tmp_path, arguments, parts):
    truncate_metrics(placeholder_run, 5)
    before = file_contents(placeholder_run)
    usage_error("train", "--resume", "a", *arguments.split(), cwd=tmp_path, parts=parts)
    assert file_contents(placeholder_run) == before


def test_equal_and_harmless_settings_are_accepted(placeholder_run, tmp_path):
    truncate_metrics(placeholder_run, 5)
    flags = ["--seed", "3", "--set", "grading.workers=1", "--set", "checkpoint.keep_best=0", "--no-mlflow"]
    succeed("train", "--resume", "a", "--config", "runs/a/config.yaml", *flags, "--dry-run", cwd=tmp_path)


def test_a_damaged_env_file_is_reported(placeholder_run, tmp_path):
    truncate_metrics(placeholder_run, 5)
    flags = ["--set", "tracking.mlflow=false", "--dry-run"]
    missing = succeed("train", "--resume", "a", *flags, cwd=tmp_path).out
    assert "env.json" not in missing, "a run that ended early has none"
    (placeholder_run / "env.json").write_text('{"resolved": {"engine": "tr')
    printed = " ".join(succeed("train", "--resume", "a", *flags, cwd=tmp_path).out.split())
    assert "env.json: not readable as JSON" in printed
    assert "engine and commits of the run are not known and are chosen anew" in printed


def test_a_radius_scheduled_over_the_run_cannot_be_extended(placeholder_run, tmp_path):
    """With `delta_steps` the schedule does not depend on the length of the run, which may then grow."""
    scheduled = "  delta: 0.05\n  delta_schedule: linear\n  delta_end: 0.01\n"
    config = (placeholder_run / "config.yaml").read_text().replace("  delta: 0.05\n", scheduled)
    (placeholder_run / "config.yaml").write_text(config)
    refused = usage_error("train", "--resume", "a", "--steps", "12", cwd=tmp_path)
    assert "bounds.delta_schedule = 'linear' ends with step 6" in refused
    assert "(its linear schedule has ended)" in usage_error("train", "--resume", "a", cwd=tmp_path)
    (placeholder_run / "config.yaml").write_text(config.replace(scheduled, f"{scheduled}  delta_steps: 6\n"))
    succeed("train", "--resume", "a", "--steps", "12", "--dry-run", cwd=tmp_path)


def _replace(name: str, text: str | None) -> Callable[[Path], object]:
    """Return a function that writes a file of a run, or removes it."""
    return lambda folder: (folder / name).unlink() if text is None else (folder / name).write_text(text)


def _change_metrics(change: Callable[[list[str]], list[str]]) -> Callable[[Path], object]:
    """Return a function that changes the lines of metrics.jsonl."""
    return lambda folder: (folder / "metrics.jsonl").write_text("".join(change(metrics_lines(folder))))


def _no_checkpoints(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")


def _evaluation(folder: Path) -> None:
    (folder / "config.yaml").unlink()
    (folder / "eval.json").write_text("{}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "arguments", "words"),
    [
        (_replace("config.yaml", None), "", ["it has no config.yaml", "start a new run"]),
        (_replace("config.yaml", "seed: ["), "", ["config.yaml", "not readable as YAML"]),
        (_replace("metrics.jsonl", None), "", ["metrics.jsonl: ends before the checkpoint of step 2"]),
        (_change_metrics(lambda lines: lines[:3]), "", ["ends before the checkpoint of step 4"]),
        (_change_metrics(lambda lines: [*lines[:3], lines[2]]), "", ["line 4: step 2 where step 3 belongs"]),
        (_change_metrics(lambda lines: [*lines[:3], "rubbish\n"]), "", ["line 4", "is not a JSON object"]),
        (_no_checkpoints, "--steps 8", ["no complete checkpoint", "start a new run", "--steps 8"]),
        (_evaluation, "", ["bandpo eval --resume a"]),
    ],
)
def test_a_damaged_run_is_one_line(placeholder_run, tmp_path, damage, arguments, words):
    damage(placeholder_run)
    before = file_contents(placeholder_run)
    usage_error("train", "--resume", "a", *arguments.split(), cwd=tmp_path, parts=words)
    assert file_contents(placeholder_run) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (["--set", "checkpoint.every=7", "--steps", "100"], "use --set checkpoint.every=5"),
        (["--steps", "12"], None),  # evaluations before and after the run only: nothing to choose from
    ],
)
def test_checkpoints_that_fall_on_no_evaluation(tmp_path, settings, advice):
    flags = ["--set", "evaluation.every=20", *settings, "--dry-run"]
    printed = " ".join(succeed("train", *flags, cwd=tmp_path).out.split())
    assert ("never coincide" in printed) == (advice is not None)
    assert advice is None or advice in printed
