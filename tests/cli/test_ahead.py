"""`bandpo train` with `sampling.max_lag: 1`: its processes are killed or stopped, and the run is resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import RunError
from bandpo_cli.experiments.memory import out_of_memory_errors
from bandpo_cli.sampling.engine_server import portable_error
from tests.cli.eval_command import Done, bandpo, start, succeed, usage_error
from tests.cli.test_nproc import children as ranks_of
from tests.cli.test_train_stopped import count_lines, wait_until
from tests.cli.train_runs import SMALL, check_equal, drop_checkpoints, record, summary

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 20
EVERY = 4
SETTINGS = [
    "--steps", str(STEPS), *SMALL, "--set", f"evaluation.every={EVERY}", "--set", f"checkpoint.every={EVERY}",
    "--set", "sampling.max_lag=1",
]  # fmt: skip
AHEAD = "trainer/ahead/rollouts.safetensors"


def children(parent: int) -> dict[int, bytes]:
    """Return the command line of each child process of `parent`, by process id."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found[int(folder.name)] = (folder / "cmdline").read_bytes()
        except (OSError, ValueError, IndexError):
            continue
    return found


def descendants(parent: int) -> list[int]:
    """Return the process ids of all processes that `parent` has started, and of those that they have."""
    own = [*children(parent)]
    return own + [descendant for child in own for descendant in descendants(child)]


def engine_of(trainer: int) -> int:
    """Return the process id of the engine process of a trainer."""
    (engine,) = [value for value, command in children(trainer).items() if b"engine_child" in command]
    return engine


def is_running(process: int) -> bool:
    """Return whether a process exists and is no zombie, which waits for its parent to take notice of its end."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def check_ended(processes: list[int], seconds: float = 0.0) -> None:
    """Require that the processes end within a time."""
    deadline = time.monotonic() + seconds
    while any(map(is_running, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [process for process in processes if is_running(process)]


def end_of(process: subprocess.Popen[str]) -> Done:
    """Wait for the end of a command and return its exit code and output."""
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in out + err
    return Done(process.returncode, out, err)


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted run."""
    place = tmp_path_factory.mktemp("uninterrupted")
    succeed("train", *SETTINGS, "--name", "a", cwd=place)
    folder = place / "runs" / "a"
    kept = [
        step for step in checkpoints(folder) if (folder / f"checkpoints/step-{step:06d}" / AHEAD).exists()
    ]
    assert kept == [*range(EVERY, STEPS, EVERY)], "every checkpoint but the last has the next batch"
    return folder


class Interruption(threading.Thread):
    """Sends a signal to the engine process of this process once metrics.jsonl has more than `lines` lines."""

    def __init__(self, folder: Path, lines: int, number: int) -> None:
        super().__init__(daemon=True)
        self.engine = 0
        self._folder, self._lines, self._number = folder, lines, number
        self.start()

    def run(self) -> None:
        while count_lines(self._folder) <= self._lines:
            time.sleep(0.02)
        self.engine = engine_of(os.getpid())
        os.kill(self.engine, self._number)


@pytest.mark.slow
def test_the_engine_process_is_killed(uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    killer = Interruption(folder, EVERY + 1, signal.SIGKILL)
    done = bandpo("train", *SETTINGS, "--name", "a", cwd=tmp_path)
    assert done.code == 1, done
    assert done.err == (
        "error: the engine process was killed by SIGKILL (as the system does when memory runs out); a new run with "
        "sampling.max_lag=0 samples in the trainer's process, which needs less memory\n"
    )
    assert "resume with: bandpo train --resume a" in done.out
    assert summary(folder)["status"] == "FAILED"
    check_ended([killer.engine])
    refused = usage_error("train", "--resume", "a", "--set", "sampling.max_lag=0", cwd=tmp_path)
    assert "leave out sampling.max_lag" in refused  # which the line above therefore does not advise
    succeed("train", "--resume", "a", cwd=tmp_path)
    check_equal(folder, uninterrupted)


@pytest.mark.slow
def test_the_trainer_is_killed_and_stopped(uninterrupted: Path, tmp_path: Path) -> None:
    """One run: SIGKILL, one SIGINT, then two SIGTERM while the engine does not answer."""
    folder = tmp_path / "runs" / "a"
    process = start(tmp_path, "train", *SETTINGS, "--name", "a")
    wait_until(process, lambda: count_lines(folder) > EVERY + 1)
    left = descendants(process.pid)
    assert engine_of(process.pid) in left
    process.kill()
    process.communicate(timeout=10)
    check_ended(left, 10.0)

    before = count_lines(folder)
    process = start(tmp_path, "train", "--resume", "a")
    wait_until(process, lambda: count_lines(folder) > before + 1)
    left = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    done = end_of(process)
    assert done.code == 130, done
    assert done.err.count("\n") == 1
    assert "press Ctrl-C again" in done.err
    check_ended(left)
    stopped = summary(folder)["steps"]
    assert f"stopped by Ctrl-C after step {stopped}" in done.out
    assert (folder / f"checkpoints/step-{stopped:06d}" / AHEAD).is_file()

    process = start(tmp_path, "train", "--resume", "a")
    wait_until(process, lambda: count_lines(folder) > stopped + 2)
    left = descendants(process.pid)
    os.kill(engine_of(process.pid), signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert "press Ctrl-C again" in process.stderr.readline()
    with pytest.raises(subprocess.TimeoutExpired):  # the step waits for the batch that is sampled ahead
        process.wait(1.0)
    process.send_signal(signal.SIGTERM)
    done = end_of(process)
    assert done.code == 143, done
    assert done.err == "stopped\n"
    assert "resume with: bandpo train --resume a" in done.out
    check_ended(left)

    succeed("train", "--resume", "a", cwd=tmp_path)
    if stopped % EVERY:
        drop_checkpoints(folder, stopped)
    check_equal(folder, uninterrupted)


@pytest.mark.slow
def test_the_engine_process_of_a_rank_is_killed(uninterrupted: Path, tmp_path: Path) -> None:
    """Two ranks, continued by one: the steps up to that of the stored batch are those of one rank."""
    folder = tmp_path / "runs" / "a"
    process = start(tmp_path, "train", *SETTINGS, "--name", "a", "--nproc", "2")
    wait_until(process, lambda: count_lines(folder) > EVERY + 1)
    left = descendants(process.pid)
    os.kill(engine_of(ranks_of(process)[1]), signal.SIGKILL)
    done = end_of(process)
    assert done.code == 1, done
    assert done.err.startswith("error: rank 1: the engine process was killed by SIGKILL")
    assert done.err.count("\n") == 1
    assert "resume with: bandpo train --resume a --nproc 2" in done.out
    check_ended(left)
    succeed("train", "--resume", "a", cwd=tmp_path)
    lines, others = record(folder), record(uninterrupted)
    assert [line["step"] for line in lines] == [*range(STEPS + 1)]
    assert [line.get("sampler/lag") for line in lines] == [line.get("sampler/lag") for line in others]
    for line, other in zip(lines[1 : EVERY + 2], others[1:], strict=False):  # the last is of the stored batch
        assert line["train/reward"] == other["train/reward"]
        assert line["train/entropy"] == pytest.approx(other["train/entropy"], abs=1e-4)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: 8 bytes",
            "8 bytes",
        ),
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1 GiB", "2.00 GiB"),
    ],
)
def test_an_allocation_that_fails_in_the_engine_process_names_it(text: str, kept: str) -> None:
    with pytest.raises(RunError) as raised, out_of_memory_errors(RunConfig()):
        raise portable_error(RuntimeError(text))
    requested = str(raised.value).partition(";")[0]
    assert requested.startswith("out of memory (engine process: ")
    assert requested.endswith(f"{kept})")
    assert "[enforce" not in requested
