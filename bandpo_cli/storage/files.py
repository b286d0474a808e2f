"""One process at a time."""

# MERGED: Files that are either whole or not there: what a crash or a full disk leaves is never half a file.
# MERGED: One writer a run: a lock that the system holds for a process and lets go when the process ends, however it ends.
from __future__ import annotations

import json
import math
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from bandpo_cli.errors import UserError


@contextmanager
def file_lock(lock: Path) -> Iterator[None]:
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


_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")


def write_atomically(path: Path, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a temporary file beside `path`, make it durable, then put it in `path`'s place.

    That order (write, fsync, rename, fsync the folder) keeps the old file until the new one is on the disk.
    Raises what `write` or the file system raises; `path` is then as it was and the temporary file is gone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        sync_file(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return path


def write_text(path: Path, text: str) -> Path:
    """Write `text` as UTF-8, whole or not at all."""
    return write_atomically(path, lambda temporary: _write_utf8(temporary, text))


def write_json(path: Path, value: object) -> Path:
    """Write `value` as indented JSON, whole or not at all; non-finite floats become null."""
    return write_text(
        path, json.dumps(replace_nonfinite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    )


def replace_nonfinite(value: object) -> object:
    """Return `value` with every NaN and infinity replaced by None, in mappings and sequences too.

    JSON has no word for them, and the `NaN` that Python writes stops other readers (jq, pandas, JavaScript).
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [replace_nonfinite(item) for item in value]
    return value


def remove_temporary_files(folder: Path) -> None:
    """Remove the temporary files that processes which were killed in `write_whole` left in `folder`."""
    for path in folder.glob(".*.tmp"):
        if _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Make the content of `path` durable."""
    _sync(path, os.O_RDWR)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable, where the platform can (Windows opens no folders)."""
    if os.name == "posix":
        _sync(folder, os.O_RDONLY)


def _write_utf8(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def step_name(step: int) -> str:
    """Return `step-000010` for step 10: names that sort by step."""
    return f"step-{step:06d}"


def step_of(path: Path) -> int | None:
    """Return the step of a file or folder named by `step_name`, None for any other."""
    match = re.match(r"step-(\d+)(\.|$)", path.name)
    return int(match[1]) if match else None


LOCK = ".lock"
"""The file in the run folder. It stays when the run ends: only the system's lock on it counts, not its being there."""


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
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
                f"run {folder.name} is being written by {_lock_owner(descriptor)}; wait for it, or stop it first"
            ) from None
        except OSError as error:
            raise UserError(f"{folder / LOCK}: cannot be locked here: {error.strerror}") from None
        about = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, about.encode(), 0)
        yield
    finally:
        os.close(descriptor)  # which lets go of the lock


def _lock_owner(descriptor: int) -> str:
    """Name the process that wrote itself into the file; it may have the lock and not have come to that yet."""
    try:
        about = json.loads(os.pread(descriptor, 1000, 0))
        return f"process {about['pid']} on {about['host']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "another process"
