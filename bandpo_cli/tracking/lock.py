"""One writer a run: a lock that the system holds for a process and lets go when the process ends, however it ends."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bandpo_cli.errors import UserError

LOCK = ".lock"
"""The file in the run folder. It stays when the run ends: only the system's lock on it counts, not its being there."""


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Hold the lock of the run in `folder` within the body.

    It is a POSIX record lock: a child process does not inherit it (so no orphan can keep it), and it reaches across
    the machines of a network file system that supports locks. Systems without such locks (Windows) have none here.

    Raises:
        UserError: another process holds it, named with its host; or nothing can be written to `folder`.
    """
    if os.name != "posix":
        yield
        return
    import fcntl

    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written to: {error.strerror}") from None
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX allows either error for a lock that another has
            raise UserError(
                f"run {folder.name} is being written by {_holder(descriptor)}; wait for it, or stop it first"
            ) from None
        except OSError as error:
            raise UserError(f"{folder / LOCK}: cannot be locked here: {error.strerror}") from None
        about = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, about.encode(), 0)
        yield
    finally:
        os.close(descriptor)  # which lets go of the lock


def _holder(descriptor: int) -> str:
    """Name the process that wrote itself into the file; it may have the lock and not have come to that yet."""
    try:
        about = json.loads(os.pread(descriptor, 1000, 0))
        return f"process {about['pid']} on {about['host']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "another process"
