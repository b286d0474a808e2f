"""Helpers for tests that wait for processes and their ends."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path


def wait_for(holds: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait for a condition, and fail if it does not hold in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"the condition did not hold within {seconds:g} s"
        time.sleep(0.02)


def process_status(pid: int) -> list[str]:
    """Return the fields of a process after its name: its state, its parent and others; none if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def has_ended(pid: int) -> bool:
    """Return whether a process has ended; a zombie waits for its parent to take notice of its end.

    While another of its threads is ending, a zombie still holds its files: pipes to it are not at their end.
    """
    status = process_status(pid)
    return not status or (status[0] in "ZX" and int(status[17]) <= 1)


def check_ended(pids: Iterable[int], seconds: float = 60.0) -> None:
    """Require that the processes end within a time."""
    pids = [*pids]
    wait_for(lambda: all(map(has_ended, pids)), seconds)
