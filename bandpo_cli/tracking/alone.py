"""One process at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Hold `lock` against other processes; the system lets go of it when this one dies. Does nothing on Windows."""
    if os.name != "posix":
        yield
        return
    import fcntl

    with lock.open("w") as file:
        # The file stays: removing it would let a waiter and a newcomer in at once.
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(
                file, fcntl.LOCK_UN
            )  # said, since a process that was forked meanwhile has the file open too
