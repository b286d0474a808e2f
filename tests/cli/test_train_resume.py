"""A run that a signal stops, a crash ends or a kill interrupts resumes, and then equals an uninterrupted run."""

import json
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import yaml

from tests.cli.eval_command import Done, bandpo, succeed, usage_error
from tests.cli.processes import count_lines, end_of, wait_until
from tests.cli.train_runs import (
    SMALL,
    check_equal,
    drop_checkpoints,
    file_contents,
    record,
    summary,
    truncate_metrics,
)
from tests.commands import Forked

pytestmark = pytest.mark.slow


@pytest.fixture
def crashed(six_steps: Path, tmp_path: Path) -> Path:
    """Return a copy of the uninterrupted run, which a test changes to the state after a crash."""
    return Path(shutil.copytree(six_steps, tmp_path / "runs" / "a"))


def _no_samples(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()
    shutil.rmtree(folder / "samples")


def _half_a_step(folder: Path) -> None:
    """The completions of the step are being written, and another file; its metrics are not written yet."""
    (folder / "samples" / "step-000006.parquet").rename(folder / "samples" / ".step-000006.parquet.7.tmp")
    (folder / ".summary.json.12.tmp").write_text("{")


def _half_a_checkpoint(folder: Path) -> None:
    """The temporary folder contains half of the files."""
    checkpoints = folder / "checkpoints"
    (checkpoints / "step-000006").rename(checkpoints / ".step-000006.writing")
    shutil.rmtree(checkpoints / ".step-000006.writing" / "trainer")
    (checkpoints / ".step-000006.writing" / "model.safetensors").write_bytes(b"half")


def _half_a_line(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "train/reward": 0.')


def _half_a_removal(folder: Path) -> None:
    shutil.copytree(folder / "checkpoints" / "step-000002", folder / "checkpoints" / ".step-000001.removing")
    (folder / "checkpoints" / ".step-000001.removing" / "model.safetensors").unlink()


def _half_the_plots(folder: Path) -> None:
    (folder / "plots").mkdir()
    (folder / "plots" / ".accuracy.png.3.tmp").write_bytes(b"half")


STATES: dict[str, tuple[int, tuple[int, ...], Callable[[Path], None]]] = {
    "before the first line": (-1, (2, 4, 6), _no_samples),
    "before the first checkpoint": (1, (2, 4, 6), lambda folder: None),
    "during a step": (4, (6,), _half_a_step),
    "between a checkpoint and its line": (5, (), lambda folder: None),
    "during a line": (5, (), _half_a_line),
    "during the removal of a checkpoint": (5, (6,), _half_a_removal),
    "during a resume, after the removal of later steps": (2, (4, 6), lambda folder: None),
    "after the last step": (6, (), lambda folder: None),
    "during the plots": (6, (), _half_the_plots),
}
"""The last step with a line, the checkpoints that do not exist, and a further change of the complete run."""


def crash(folder: Path, state: str) -> None:
    """Change a complete run to the state after a crash."""
    last, missing, change = STATES[state]
    truncate_metrics(folder, last)
    drop_checkpoints(folder, *missing)
    change(folder)


@pytest.mark.parametrize("state", STATES)
def test_resume_after_a_crash(crashed, six_steps, tmp_path, state):
    crash(crashed, state)
    succeed("train", "--resume", "a", cwd=tmp_path)
    check_equal(crashed, six_steps)


def test_resume_prints_its_starting_point(crashed, six_steps, tmp_path):
    """The run has two kinds of leftovers and is given by path; `--dry-run` prints the same and changes nothing."""
    truncate_metrics(crashed, 5)
    _half_a_checkpoint(crashed)
    (crashed / "checkpoints" / ".step-000001.removing").mkdir()
    before = {path: path.stat().st_mtime_ns for path in crashed.rglob("*")}
    shown = succeed("train", "--resume", str(crashed), "--dry-run", cwd=tmp_path)
    assert "after step 4" in shown.out
    assert "2 steps to go, 1 of them done again" in " ".join(shown.out.split())
    assert {path: path.stat().st_mtime_ns for path in crashed.rglob("*")} == before
    done = succeed("train", "--resume", str(crashed), cwd=tmp_path)
    assert "step 6/6" in done.out
    assert "step 4/6" not in done.out
    check_equal(crashed, six_steps)
    (resume,) = json.loads((crashed / "env.json").read_text())["resumes"]
    assert resume["after_step"] == 4
    assert "--resume" in resume["command"]
    assert "versions" not in resume, "nothing has changed"


def test_a_complete_run_can_be_extended(six_steps, tmp_path):
    succeed("train", "--steps", "4", *SMALL, "--name", "b", cwd=tmp_path)
    done = succeed("train", "--resume", "b", "--steps", "6", "--set", "checkpoint.keep_last=1", cwd=tmp_path)
    assert "step 6/6" in done.out
    folder = tmp_path / "runs" / "b"
    assert record(folder) == record(six_steps)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["steps"], config["checkpoint"]["keep_last"]) == (6, 1)
    assert summary(folder)["of_steps"] == 6
    there = {path.name for path in (folder / "checkpoints").iterdir()}
    assert "step-000006" in there
    assert len(there) <= 2, "the last and the best"


def test_a_killed_fork_resumes_and_equals_the_uninterrupted_run(six_steps, tmp_path):
    """The fork of a fork, which takes back the changes; the settings of the evaluation were not always the same."""
    shutil.copytree(six_steps, tmp_path / "runs" / "a")
    changed = ["--method", "clip", "--set", "evaluation.every=0", "--steps", "5", "--no-mlflow"]
    shown = succeed("train", "--fork", "a@4", *changed, "--dry-run", cwd=tmp_path).out
    for part in ("a/checkpoints/step-000004: 1 step to go", "bounds.method = clip (the run has band)"):
        assert part in shown
    succeed("train", "--fork", "a@4", *changed, "--name", "clip", cwd=tmp_path)
    back = ["--method", "band", "--set", "evaluation.every=2", "--steps", "6", "--no-mlflow"]
    succeed("train", "--fork", "clip@4", *back, "--name", "b", cwd=tmp_path)
    folder = tmp_path / "runs" / "b"
    assert record(folder) == record(six_steps)
    truncate_metrics(folder, 5)
    drop_checkpoints(folder, 6)
    succeed("train", "--resume", "b", cwd=tmp_path)
    assert record(folder) == record(six_steps)
    ours, theirs = file_contents(folder), file_contents(six_steps)
    differing = [name for name in ours if ours[name] != theirs[name]]
    assert differing == ["checkpoints/step-000004/trainer/state.json"]
    assert "checkpoints/step-000006/trainer/optimizer.safetensors" in ours
    (run,) = json.loads(succeed("runs", "b", "--format", "json", cwd=tmp_path).out)
    assert run["parent"] == "runs/clip@4"
    assert "runs/a@4" in succeed("show", "clip", cwd=tmp_path).out


@pytest.mark.parametrize("name", ["model.safetensors", "trainer/optimizer.safetensors"])
def test_a_flipped_bit_is_noticed(crashed, six_steps, tmp_path, name):
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
    check_equal(crashed, six_steps)


def test_resume_sends_the_steps_that_mlflow_lacks(crashed, tmp_path, empty_database):
    from mlflow import MlflowClient

    shutil.copy(empty_database, tmp_path / "runs")
    crash(crashed, "during a step")
    succeed("train", "--resume", "a", "--mlflow", cwd=tmp_path)
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("bandpo").experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "train/entropy")
    assert sorted(point.step for point in history) == [1, 2, 3, 4, 5, 6]


def test_a_failed_run_prints_the_resume_command(tmp_path, monkeypatch):
    import bandpo_cli.training.checkpoint_writer as checkpoint

    usage = shutil.disk_usage(tmp_path)
    free = iter([usage.free, 3 * 2**20])
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage._replace(free=next(free)))
        done: Done = bandpo("train", "--steps", "6", *SMALL, "--name", "a", cwd=tmp_path)
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "error: not enough disk space for the checkpoint step-000004" in done.err
    assert "has 3 MiB;" in done.err
    assert "resume with: bandpo train --resume a" in done.out
    folder = tmp_path / "runs" / "a"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000002"]
    assert summary(folder)["status"] == "FAILED"
    succeed("train", "--resume", "a", cwd=tmp_path)
    assert [line["step"] for line in record(folder)] == [0, 1, 2, 3, 4, 5, 6]


def start_held(place: Path, kind: str, *arguments: str) -> Forked:
    """Start the run `a`, which is held at one place; see held_command.py."""
    words = [kind, "train", *arguments, "--name", "a"]
    return Forked(*words, cwd=place, module="tests.cli.held_command", OMP_NUM_THREADS="1")


def wait_for_line(process: Forked, words: str) -> None:
    """Wait until the process has written a line with these words to standard error."""
    while words not in (line := process.stderr.readline()):
        assert line, "the process has ended"


def test_sigterm_finishes_the_step_and_a_second_process_is_refused(six_steps, tmp_path):
    process = start_held(tmp_path, "step", "--steps", "6", *SMALL, "--runs-dir", "there")
    wait_until(process, (tmp_path / "reached").exists)
    part = f"is being written by process {process.pid} on "
    usage_error("train", "--resume", "a", "--runs-dir", "there", cwd=tmp_path, parts=[part])
    process.send_signal(signal.SIGTERM)
    wait_for_line(process, "send SIGTERM again")
    (tmp_path / "release").touch()
    out, _ = end_of(process, 143)
    assert "stopped by SIGTERM after step 3; its files are in there/a" in out
    assert "resume with: bandpo train --resume a --runs-dir there" in out
    folder = tmp_path / "there" / "a"
    done = summary(folder)
    assert (done["status"], done["steps"], done["of_steps"]) == ("KILLED", 3, 6)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    resumed = succeed("train", "--resume", "a", "--runs-dir", "there", cwd=tmp_path)
    assert "after step 3" in " ".join(resumed.out.split())
    drop_checkpoints(folder, 3)  # the only difference allowed
    check_equal(folder, six_steps)


def test_a_second_ctrl_c_discards_the_step(tmp_path):
    process = start_held(tmp_path, "step", *SMALL)
    folder = tmp_path / "runs" / "a"
    wait_until(process, (tmp_path / "reached").exists)
    wait_until(process, (folder / "checkpoints" / "step-000002").exists)  # which a thread writes
    process.send_signal(signal.SIGINT)
    wait_for_line(process, "press Ctrl-C again")
    process.send_signal(signal.SIGINT)
    out, _ = end_of(process, 130)
    assert (summary(folder)["status"], summary(folder)["error"]) == ("KILLED", "stopped by Ctrl-C")
    assert "stopped by Ctrl-C after step 2" in out
    assert count_lines(folder) == 3
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000002"]
    assert "resume with: bandpo train --resume a" in out


def import_benchmarks() -> None:
    """Let the process import the scripts in benchmarks/."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


def test_random_kills(tmp_path):
    words = ["--kills", "1", "--steps", "4", "--folder", str(tmp_path / "kills")]
    options = {"module": "random_kills", "before": import_benchmarks, "OMP_NUM_THREADS": "1"}
    script = Forked(*words, cwd=tmp_path, **options)
    out, _ = end_of(script)
    assert "1 kills of" in out
    assert "equal: metrics" in out


def test_a_signal_during_loading_exits_and_writes_nothing(tmp_path):
    process = start_held(tmp_path, "load", *SMALL, "--set=deterministic=true")
    wait_until(process, (tmp_path / "loading").exists)
    process.send_signal(signal.SIGTERM)
    end_of(process, 143)
    assert not (tmp_path / "runs").exists()


def test_sigkill_while_a_thread_writes_a_checkpoint(six_steps, tmp_path):
    process = start_held(tmp_path, "kill", "--steps", "6", *SMALL)
    end_of(process, -signal.SIGKILL)
    folder = tmp_path / "runs" / "a"
    left = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert left == [".step-000004.writing", "step-000002"]
    assert count_lines(folder) == 6
    listed = json.loads(succeed("show", "a", "--format", "json", cwd=tmp_path).out)
    assert (listed["status"], listed["checkpoints"]) == ("KILLED", [2])
    evaluated = succeed("eval", "--model", "a", "--n", "1", "--k", "1", "--limit", "2", cwd=tmp_path).out
    assert "step-000002" in evaluated
    resumed = " ".join(succeed("train", "--resume", "a", cwd=tmp_path).out.split())
    assert "after step 2" in resumed
    assert "4 steps to go, 3 of them done again" in resumed
    check_equal(folder, six_steps)


@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_while_a_thread_writes_a_checkpoint(tmp_path, signals):
    """The first waits for the checkpoint, and the step that was done meanwhile gets its own; the second does not."""
    process = start_held(tmp_path, "hold", "--steps", "100", *SMALL, "--set", "checkpoint.every=4")
    folder = tmp_path / "runs" / "a"
    wait_until(process, lambda: count_lines(folder) > 6)
    process.send_signal(signal.SIGINT)
    wait_for_line(process, "press Ctrl-C again")
    if signals == 1:
        (tmp_path / "release").touch()
    else:
        wait_until(process, lambda: "checkpoints" in {path.name for path in folder.iterdir()})
        process.send_signal(signal.SIGINT)
    out, _ = end_of(process, 130)
    last = record(folder)[-1]["step"]
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == (["step-000004", f"step-{last:06d}"] if signals == 1 else [])
    assert (summary(folder)["status"], summary(folder)["steps"]) == ("KILLED", last)
    assert "resume with: bandpo train --resume a" in out


def test_an_interrupt_during_the_plots_leaves_a_finished_run_without_an_empty_folder(tmp_path):
    with mock.patch("bandpo_cli.reports.run_plots.plot_accuracy", side_effect=KeyboardInterrupt):
        done = bandpo("train", "--steps", "1", *SMALL, "--name", "a", cwd=tmp_path)
    folder = tmp_path / "runs" / "a"
    assert done.code == 130
    assert "warning: the plots are incomplete; type bandpo plot runs/a" in done.out
    assert summary(folder)["status"] == "FINISHED"
    assert not (folder / "plots").exists()
    succeed("plot", "runs/a", cwd=tmp_path)
    assert len([*(folder / "plots").iterdir()]) == 4
