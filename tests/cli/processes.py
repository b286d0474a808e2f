"""Helpers for tests that start commands, watch their processes and end them."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.cli.train_runs import metrics_lines
from tests.commands import Forked
from tests.processes.checks import check_ended, process_status


def wait_until(process: Forked | subprocess.Popen[str], holds: Callable[[], bool]) -> None:
    """Wait for a condition while the process runs."""
    deadline = time.monotonic() + 180
    while not holds():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def end_of(process: Forked | subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    """Wait for the end of a command, require its exit code, and return its output and its errors."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, out + err
    assert "Traceback" not in out + err
    return out, err


def count_lines(folder: Path) -> int:
    """Return the number of lines of metrics.jsonl."""
    return len(metrics_lines(folder)) if (folder / "metrics.jsonl").exists() else 0


def children(parent: int) -> list[int]:
    """Return the process ids of the child processes of `parent`."""
    numbers = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [number for number in numbers if process_status(number)[1:2] == [str(parent)]]


def descendants(parent: int) -> list[int]:
    """Return the process ids of all processes that `parent` has started, and of those that they have."""
    own = children(parent)
    return own + [descendant for child in own for descendant in descendants(child)]


def ranks_of(launcher: int, folder: Path) -> list[int]:
    """Return the process ids of two ranks, in their order, that a process has started; rank 0 writes the run."""
    main = int(json.loads((folder / ".lock").read_text())["pid"])
    (other,) = set(children(launcher)) - {main}
    return [main, other]


def kill_parent(process: Forked, left: Sequence[int], notice_s: float) -> None:
    """Kill a process and require that the processes `left` behind end, before they do any other work.

    They are stopped until their next look at their parent, `notice_s` seconds later at most, is due.
    """
    for descendant in left:
        os.kill(descendant, signal.SIGSTOP)
    process.kill()
    process.wait()
    time.sleep(notice_s)
    for descendant in left:
        os.kill(descendant, signal.SIGCONT)
    check_ended(left)
