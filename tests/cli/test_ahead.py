"""`bandpo train` with `sampling.max_lag: 1`: its processes are killed or stopped, and the run is resumed."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.eval_command import usage_error
from tests.cli.processes import children, count_lines, descendants, end_of, wait_until
from tests.cli.train_runs import SMALL, check_equal, drop_checkpoints, sets, summary
from tests.commands import Forked
from tests.processes.checks import check_ended

pytestmark = pytest.mark.slow

STEPS = 12
EVERY = 3
CHANGES = sets(f"evaluation.every={EVERY} checkpoint.every={EVERY} sampling.max_lag=1")
SETTINGS = ["--steps", str(STEPS), *SMALL, *CHANGES, "--name", "a"]
AHEAD = "trainer/ahead/rollouts.safetensors"


def engine_of(trainer: int) -> int:
    """Return the process id of the engine process of a trainer."""
    commands = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in children(trainer)}
    (engine,) = [child for child, command in commands.items() if b"bandpo_cli.grading" not in command]
    return engine


def begin(place: Path, *arguments: str, fork_children: bool = True) -> Forked:
    """Start a run whose ranks and engine processes are forked from its process, or new ones."""
    return Forked("train", *arguments, cwd=place, fork_children=fork_children, OMP_NUM_THREADS="1")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted run."""
    place = tmp_path_factory.mktemp("uninterrupted")
    end_of(begin(place, *SETTINGS))
    folder = place / "runs" / "a"
    ahead = sorted(path.parents[2].name for path in folder.glob(f"checkpoints/step-*/{AHEAD}"))
    expected = [f"step-{step:06d}" for step in range(EVERY, STEPS, EVERY)]
    assert ahead == expected, "every checkpoint but the last has the next batch"
    return folder


def test_engine_and_trainer_are_killed_and_stopped(uninterrupted, tmp_path):
    """One run: SIGKILL to the engine, SIGKILL, one SIGINT, then two SIGTERM while the engine does not answer."""
    folder = tmp_path / "runs" / "a"
    process = begin(tmp_path, *SETTINGS)
    wait_until(process, lambda: count_lines(folder) > EVERY + 1)
    engine = engine_of(process.pid)
    os.kill(engine, signal.SIGKILL)
    out, err = end_of(process, 1)
    assert err == (
        "error: the engine process was killed by SIGKILL (as the system does when memory runs out); "
        "sampling.engine_process=false samples in the trainer's process, which needs less memory\n"
    )
    assert "resume with: bandpo train --resume a" in out
    assert summary(folder)["status"] == "FAILED"
    check_ended([engine], 0.0)
    refused = ["train", "--resume", "a", "--set", "sampling.max_lag=0"]
    usage_error(*refused, cwd=tmp_path, parts=["leave out sampling.max_lag"])

    before = count_lines(folder)
    process = begin(tmp_path, "--resume", "a")
    wait_until(process, lambda: count_lines(folder) > before)
    left = descendants(process.pid)
    assert engine_of(process.pid) in left
    process.kill()
    process.communicate(timeout=10)
    check_ended(left)

    before = count_lines(folder)
    process = begin(tmp_path, "--resume", "a")
    wait_until(process, lambda: count_lines(folder) > before)
    left = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    out, err = end_of(process, 130)
    assert err.count("\n") == 1
    assert "press Ctrl-C again" in err
    check_ended(left, 0.0)
    stopped = summary(folder)["steps"]
    assert f"stopped by Ctrl-C after step {stopped}" in out
    assert (folder / f"checkpoints/step-{stopped:06d}" / AHEAD).is_file()

    process = begin(tmp_path, "--resume", "a")
    wait_until(process, lambda: count_lines(folder) > stopped + 1)
    left = descendants(process.pid)
    os.kill(engine_of(process.pid), signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    assert "send SIGTERM again" in process.stderr.readline()
    with pytest.raises(subprocess.TimeoutExpired):  # the step waits for the batch that is sampled ahead
        process.wait(1.0)
    process.send_signal(signal.SIGTERM)
    out, err = end_of(process, 143)
    assert err == "stopped\n"
    assert "resume with: bandpo train --resume a" in out
    check_ended(left, 0.0)

    end_of(begin(tmp_path, "--resume", "a"))
    if stopped % EVERY:
        drop_checkpoints(folder, stopped)
    check_equal(folder, uninterrupted)
