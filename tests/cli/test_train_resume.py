"""`bandpo train --resume`: a run resumed after a crash equals an uninterrupted run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.cli.eval_command import Done, bandpo, succeed, usage_error
from tests.cli.train_runs import (
    SMALL,
    check_equal,
    drop_checkpoints,
    metrics_lines,
    record,
    summary,
    truncate_metrics,
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted run: 6 steps, with all checkpoints."""
    place = tmp_path_factory.mktemp("uninterrupted")
    succeed("train", "--steps", "6", *SMALL, "--name", "a", cwd=place)
    return place / "runs" / "a"


@pytest.fixture
def crashed(uninterrupted: Path, tmp_path: Path) -> Path:
    """Return a copy of the uninterrupted run, which a test changes to the state after a crash."""
    return Path(shutil.copytree(uninterrupted, tmp_path / "runs" / "a"))


def _before_the_first_line(folder: Path) -> None:
    truncate_metrics(folder, -1)
    (folder / "metrics.jsonl").unlink()
    drop_checkpoints(folder, 2, 4, 6)
    shutil.rmtree(folder / "samples")


def _before_the_first_checkpoint(folder: Path) -> None:
    truncate_metrics(folder, 1)
    drop_checkpoints(folder, 2, 4, 6)


def _during_a_step(folder: Path) -> None:
    """The completions of the step are written, its metrics are not; another file was being written."""
    truncate_metrics(folder, 4)
    drop_checkpoints(folder, 6)
    (folder / "samples" / "step-000006.parquet").rename(folder / "samples" / ".step-000006.parquet.7.tmp")
    (folder / ".summary.json.12.tmp").write_text("{")


def _during_a_checkpoint(folder: Path) -> None:
    """The temporary folder contains half of the files."""
    truncate_metrics(folder, 5)
    checkpoints = folder / "checkpoints"
    (checkpoints / "step-000006").rename(checkpoints / ".step-000006.writing")
    shutil.rmtree(checkpoints / ".step-000006.writing" / "trainer")
    (checkpoints / ".step-000006.writing" / "model.safetensors").write_bytes(b"half")


def _between_a_checkpoint_and_its_line(folder: Path) -> None:
    truncate_metrics(folder, 5)


def _during_a_metrics_line(folder: Path) -> None:
    last = metrics_lines(folder)[6]
    truncate_metrics(folder, 5)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(last[: len(last) // 2])


def _during_the_removal_of_an_older_checkpoint(folder: Path) -> None:
    truncate_metrics(folder, 5)
    drop_checkpoints(folder, 6)
    shutil.copytree(folder / "checkpoints" / "step-000002", folder / "checkpoints" / ".step-000001.removing")
    (folder / "checkpoints" / ".step-000001.removing" / "model.safetensors").unlink()


def _during_a_resume(folder: Path) -> None:
    """Later checkpoints are removed and the metrics are truncated; later files still exist."""
    truncate_metrics(folder, 2)
    drop_checkpoints(folder, 4, 6)


def _after_the_last_step(folder: Path) -> None:
    truncate_metrics(folder, 6)


def _during_the_final_plots(folder: Path) -> None:
    """Some plots exist, one of them truncated."""
    (folder / "summary.json").unlink()
    (folder / "plots" / "accuracy.png").unlink()
    (folder / "plots" / ".accuracy.png.3.tmp").write_bytes(b"half")


STATES = [
    _before_the_first_line, _before_the_first_checkpoint, _during_a_step, _between_a_checkpoint_and_its_line,
    _during_a_metrics_line, _during_the_removal_of_an_older_checkpoint, _during_a_resume, _after_the_last_step,
    _during_the_final_plots,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("change", STATES)
def test_resume_after_a_crash(
    crashed: Path, uninterrupted: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    change(crashed)
    succeed("train", "--resume", "a", cwd=tmp_path)
    check_equal(crashed, uninterrupted)


@pytest.mark.slow
def test_resume_prints_its_starting_point_and_continues(
    crashed: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    """The run has two kinds of leftovers and is given by path; `--dry-run` prints the same and changes nothing."""
    _during_a_checkpoint(crashed)
    (crashed / "checkpoints" / ".step-000001.removing").mkdir()
    before = {path: path.stat().st_mtime_ns for path in crashed.rglob("*")}
    shown = succeed("train", "--resume", str(crashed), "--dry-run", cwd=tmp_path)
    assert "after step 4" in shown.out
    assert "2 steps to go, 1 of them done again" in " ".join(shown.out.split())
    assert {path: path.stat().st_mtime_ns for path in crashed.rglob("*")} == before
    done = succeed("train", "--resume", str(crashed), cwd=tmp_path)
    assert "step 6/6" in done.out
    assert "step 4/6" not in done.out
    check_equal(crashed, uninterrupted)
    (resume,) = json.loads((crashed / "env.json").read_text())["resumes"]
    assert resume["after_step"] == 4
    assert "--resume" in resume["command"]
    assert "versions" not in resume, "nothing has changed"


@pytest.mark.slow
def test_a_complete_run_can_be_extended(crashed: Path, tmp_path: Path) -> None:
    """8 steps in two commands equal 8 steps in one."""
    succeed("train", "--steps", "8", *SMALL, "--name", "long", cwd=tmp_path)
    done = succeed("train", "--resume", "a", "--steps", "8", "--set", "checkpoint.keep_last=1", cwd=tmp_path)
    assert "step 8/8" in done.out
    assert record(crashed) == record(tmp_path / "runs" / "long")
    config = yaml.safe_load((crashed / "config.yaml").read_text())
    assert (config["steps"], config["checkpoint"]["keep_last"]) == (8, 1)
    assert summary(crashed)["of_steps"] == 8
    there = {path.name for path in (crashed / "checkpoints").iterdir()}
    assert "step-000008" in there
    assert len(there) <= 2, "the last and the best"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.safetensors", "trainer/optimizer.safetensors"])
def test_a_checkpoint_with_a_flipped_bit_is_skipped(
    crashed: Path, uninterrupted: Path, tmp_path: Path, name: str
) -> None:
    truncate_metrics(crashed, 5)
    drop_checkpoints(crashed, 6)
    path = crashed / "checkpoints" / "step-000004" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    message = f"step-000004: {name} is damaged: its content has changed since it was written"
    if name == "model.safetensors":
        usage_error("eval", "--model", "a@4", "--n", "1", cwd=tmp_path, parts=[message])
    printed = " ".join(succeed("train", "--resume", "a", cwd=tmp_path).out.split())
    for part in ("warning: skipped: ", message, "after step 2"):
        assert part in printed
    check_equal(crashed, uninterrupted)


@pytest.mark.slow
def test_resume_sends_the_steps_that_mlflow_lacks(crashed: Path, tmp_path: Path) -> None:
    """The run had no MLflow before; afterwards MLflow has each step once."""
    from mlflow import MlflowClient

    _during_a_step(crashed)
    succeed("train", "--resume", "a", "--mlflow", cwd=tmp_path)
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("bandpo").experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "train/entropy")
    assert sorted(point.step for point in history) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_failed_run_prints_the_resume_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full at the second checkpoint: the first one stays, and the run resumes from it."""
    import bandpo_cli.training.checkpoint_files as checkpoint

    usage = shutil.disk_usage(tmp_path)
    free = iter([usage.free, 0])
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage._replace(free=next(free)))
        done: Done = bandpo("train", "--steps", "6", *SMALL, "--name", "a", cwd=tmp_path)
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "error: not enough disk space for the checkpoint step-000004" in done.err
    assert "resume with: bandpo train --resume a" in done.out
    folder = tmp_path / "runs" / "a"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000002"]
    assert summary(folder)["status"] == "FAILED"
    succeed("train", "--resume", "a", cwd=tmp_path)
    assert [line["step"] for line in record(folder)] == [0, 1, 2, 3, 4, 5, 6]
