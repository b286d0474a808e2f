"""`bandpo train` as a process that receives signals or is killed, and its resume."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from tests.cli.eval_command import bandpo, start, succeed, usage_error
from tests.cli.processes import count_lines, wait_until
from tests.cli.train_runs import SMALL, check_equal, record, summary
from tests.commands import Forked


@pytest.mark.slow
def test_sigterm_finishes_the_step_and_a_second_process_is_refused(tmp_path: Path) -> None:
    settings = ["--steps", "24", *SMALL, "--set", "checkpoint.every=50", "--set", "evaluation.every=12"]
    succeed("train", *settings, "--name", "complete", "--runs-dir", "there", cwd=tmp_path)
    process = start(tmp_path, "train", *settings, "--name", "a", "--runs-dir", "there")
    folder = tmp_path / "there" / "a"
    wait_until(process, lambda: count_lines(folder) > 3)
    second = usage_error("train", "--resume", "a", "--runs-dir", "there", cwd=tmp_path)
    assert f"is being written by process {process.pid} on " in second
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143, out + err
    assert "Traceback" not in err
    assert "press Ctrl-C again" in err
    done = summary(folder)
    last = done["steps"]
    assert f"stopped by SIGTERM after step {last}; its files are in there/a" in out
    assert "resume with: bandpo train --resume a --runs-dir there" in out
    assert (done["status"], done["of_steps"]) == ("KILLED", 24)
    assert record(folder)[-1]["step"] == last < 24
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{last:06d}"]
    resumed = succeed("train", "--resume", "a", "--runs-dir", "there", cwd=tmp_path)
    assert f"after step {last}" in " ".join(resumed.out.split())
    shutil.rmtree(folder / "checkpoints" / f"step-{last:06d}")  # the only difference allowed
    check_equal(folder, tmp_path / "there" / "complete")


@pytest.mark.slow
def test_random_kills(tmp_path: Path) -> None:
    """One kill; the default of the script is fifty."""
    script = Path(__file__).parents[2] / "benchmarks" / "random_kills.py"
    done = subprocess.run(
        [sys.executable, script, "--kills", "1", "--steps", "4", "--folder", tmp_path / "kills"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 kills of" in done.stdout
    assert "equal: metrics" in done.stdout


@pytest.mark.slow
def test_a_second_ctrl_c_discards_the_step(tmp_path: Path) -> None:
    """A step takes many seconds; the first Ctrl-C waits for its end, the second does not."""
    settings = [*SMALL, "--set", "sampling.prompts=256", "--set", "sampling.samples=64"]
    process = start(tmp_path, "train", *settings, "--set", "evaluation.every=0", "--name", "a")
    folder = tmp_path / "runs" / "a"
    wait_until(process, (folder / "env.json").exists)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "press Ctrl-C again" not in (line := process.stderr.readline()):
        assert line, "the step ended too early, or the signal came too early"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, "Traceback" in err) == (130, False), out + err
    assert (summary(folder)["status"], summary(folder)["error"]) == ("KILLED", "stopped by Ctrl-C")
    assert "stopped by Ctrl-C before the first step" in out
    assert count_lines(folder) == 0
    assert not (folder / "checkpoints").exists()
    assert "resume with: bandpo train --resume a" in out


def start_held(place: Path, kind: str, *arguments: str) -> Forked:
    """Start a run that is held at one place; see held_command.py."""
    words = [kind, "train", *arguments, "--name", "a"]
    return Forked(*words, cwd=place, module="tests.cli.held_command", OMP_NUM_THREADS="1")


@pytest.mark.slow
def test_a_signal_during_loading_exits_and_writes_nothing(tmp_path: Path) -> None:
    process = start_held(tmp_path, "load", *SMALL)
    wait_until(process, (tmp_path / "loading").exists)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143, out + err
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_sigkill_while_a_thread_writes_a_checkpoint(tmp_path: Path) -> None:
    """The checkpoint before is complete, the record is two steps ahead of it, and the resumed run is the same."""
    settings = ["--steps", "8", *SMALL]
    succeed("train", *settings, "--name", "complete", cwd=tmp_path)
    process = start_held(tmp_path, "kill", *settings)
    out, err = process.communicate(timeout=240)
    assert process.returncode == -signal.SIGKILL, out + err
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
    assert "6 steps to go, 3 of them done again" in resumed
    check_equal(folder, tmp_path / "runs" / "complete")


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_while_a_thread_writes_a_checkpoint(tmp_path: Path, signals: int) -> None:
    """The first waits for the checkpoint, and the step that was done meanwhile gets its own; the second does not."""
    process = start_held(tmp_path, "hold", "--steps", "100", *SMALL, "--set", "checkpoint.every=4")
    folder = tmp_path / "runs" / "a"
    wait_until(process, lambda: count_lines(folder) > 6)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "press Ctrl-C again" not in (line := process.stderr.readline()):
        assert line
    if signals == 1:
        time.sleep(0.3)
        assert process.poll() is None
        (tmp_path / "release").touch()
    else:
        wait_until(process, lambda: "checkpoints" in {path.name for path in folder.iterdir()})
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, out + err
    assert "Traceback" not in err
    last = record(folder)[-1]["step"]
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == (["step-000004", f"step-{last:06d}"] if signals == 1 else [])
    assert (summary(folder)["status"], summary(folder)["steps"]) == ("KILLED", last)
    assert "resume with: bandpo train --resume a" in out


@pytest.mark.slow
def test_an_interrupt_during_the_plots_leaves_a_finished_run_without_an_empty_folder(tmp_path: Path) -> None:
    with mock.patch("bandpo_cli.reports.run_plots.plot_accuracy", side_effect=KeyboardInterrupt):
        done = bandpo("train", "--steps", "1", *SMALL, "--name", "a", cwd=tmp_path)
    folder = tmp_path / "runs" / "a"
    assert done.code == 130
    assert "warning: the plots are incomplete; type bandpo plot runs/a" in done.out
    assert summary(folder)["status"] == "FINISHED"
    assert not (folder / "plots").exists()
    succeed("plot", "runs/a", cwd=tmp_path)
    assert len([*(folder / "plots").iterdir()]) == 4
