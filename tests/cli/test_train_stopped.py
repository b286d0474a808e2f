"""`bandpo train` as a process that receives signals or is killed, and its resume."""

import json
import signal
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.cli.eval_command import bandpo, succeed, usage_error
from tests.cli.processes import count_lines, wait_until
from tests.cli.train_runs import SMALL, check_equal, drop_checkpoints, record, summary
from tests.commands import Forked

pytestmark = pytest.mark.slow


def start_held(place: Path, kind: str, *arguments: str) -> Forked:
    """Start the run `a`, which is held at one place; see held_command.py."""
    words = [kind, "train", *arguments, "--name", "a"]
    return Forked(*words, cwd=place, module="tests.cli.held_command", OMP_NUM_THREADS="1")


def wait_for_line(process: Forked, words: str) -> None:
    """Wait until the process has written a line with these words to standard error."""
    assert process.stderr is not None
    while words not in (line := process.stderr.readline()):
        assert line, "the process has ended"


def test_sigterm_finishes_the_step_and_a_second_process_is_refused(six_steps, tmp_path):
    process = start_held(tmp_path, "step", "--steps", "6", *SMALL, "--runs-dir", "there")
    wait_until(process, (tmp_path / "reached").exists)
    second = usage_error("train", "--resume", "a", "--runs-dir", "there", cwd=tmp_path)
    assert f"is being written by process {process.pid} on " in second
    process.send_signal(signal.SIGTERM)
    wait_for_line(process, "send SIGTERM again")
    (tmp_path / "release").touch()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143, out + err
    assert "Traceback" not in err
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
    """The first Ctrl-C waits for the end of the step, the second does not."""
    process = start_held(tmp_path, "step", *SMALL)
    folder = tmp_path / "runs" / "a"
    wait_until(process, (tmp_path / "reached").exists)
    wait_until(process, (folder / "checkpoints" / "step-000002").exists)  # which a thread writes
    process.send_signal(signal.SIGINT)
    wait_for_line(process, "press Ctrl-C again")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, "Traceback" in err) == (130, False), out + err
    assert (summary(folder)["status"], summary(folder)["error"]) == ("KILLED", "stopped by Ctrl-C")
    assert "stopped by Ctrl-C after step 2" in out
    assert count_lines(folder) == 3
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000002"]
    assert "resume with: bandpo train --resume a" in out


def import_benchmarks() -> None:
    """Let the process import the scripts in benchmarks/."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


def test_random_kills(tmp_path):
    """One kill; the default of the script is fifty."""
    words = ["--kills", "1", "--steps", "4", "--folder", str(tmp_path / "kills")]
    script = Forked(
        *words, cwd=tmp_path, module="random_kills", before=import_benchmarks, OMP_NUM_THREADS="1"
    )
    out, err = script.communicate(timeout=240)
    assert script.returncode == 0, out + err
    assert "1 kills of" in out
    assert "equal: metrics" in out


def test_a_signal_during_loading_exits_and_writes_nothing(tmp_path):
    process = start_held(tmp_path, "load", *SMALL)
    wait_until(process, (tmp_path / "loading").exists)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143, out + err
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_sigkill_while_a_thread_writes_a_checkpoint(six_steps, tmp_path):
    """The checkpoint before is complete, the record is two steps ahead of it, and the resumed run is the same."""
    process = start_held(tmp_path, "kill", "--steps", "6", *SMALL)
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
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, out + err
    assert "Traceback" not in err
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
