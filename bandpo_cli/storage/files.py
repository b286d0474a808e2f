"""Files on disk: atomic and durable writes, strict JSON, digests, names by step, and locks.

A file that `write_atomically` writes is either complete or absent: a crash or a full disk never leaves half of one.
`run_lock` allows one writing process per run; the operating system holds the lock for the process and releases it
when the process ends, for whatever reason.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bandpo_cli.errors import UserError
from bandpo_cli.paths import check_regular_file

LOCK = ".lock"
"""The lock file in a run folder. It stays when the run ends: only the system's lock on it counts, not its existence."""

_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")
_MAX_ERROR_CHARS = 200


def write_atomically(path: Path, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a temporary file beside `path`, flush it to the disk, then rename it to `path`.

    This order (write, fsync, rename, fsync the folder) keeps the old file until the new one is on the disk.
    Raises what `write` or the file system raises; `path` is then unchanged and the temporary file is removed.
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
    """Write `text` as UTF-8, atomically."""
    return write_atomically(path, lambda temporary: _write_utf8(temporary, text))


def write_json(path: Path, value: object) -> Path:
    """Write `value` as indented JSON, atomically; non-finite floats become null."""
    return write_text(
        path, json.dumps(replace_nonfinite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    )


def read_json_object(path: Path, where: str | None = None, max_bytes: int | None = None) -> dict[str, Any]:
    """Return the JSON object that a regular file holds, UTF-8 with or without a byte order mark.

    Args:
        where: start of the error messages, the path by default.
        max_bytes: largest accepted file size; None for no limit.

    Raises:
        UserError: the file is missing, not a regular file, too large, not JSON, or holds another JSON type.
    """
    where = str(path) if where is None else where
    size = check_regular_file(path, where)
    if max_bytes is not None and size > max_bytes:
        raise UserError(f"{where}: has {size:,} bytes; at most {max_bytes:,} are expected")
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{where}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        line = (str(error).splitlines() or [""])[0][:_MAX_ERROR_CHARS]
        raise UserError(f"{where}: not readable as JSON: {line}; restore the file from a copy") from None
    if not isinstance(content, dict):
        raise UserError(f"{where}: expected a JSON object; restore the file from a copy")
    return content


def replace_nonfinite(value: object) -> object:
    """Return `value` with every NaN and infinity replaced by None, in mappings and sequences too.

    JSON cannot express them, and other readers (jq, pandas, JavaScript) reject the `NaN` that Python writes.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [replace_nonfinite(item) for item in value]
    return value


def file_digest(path: Path) -> str:
    """Return the SHA-256 of the content of `path`, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_temporary_files(folder: Path) -> None:
    """Remove the temporary files in `folder` of processes that were killed in `write_atomically`."""
    for path in folder.glob(".*.tmp"):
        if _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Flush the content of `path` to the disk."""
    _sync(path, os.O_RDWR)


def sync_folder(folder: Path) -> None:
    """Flush the names in `folder` to the disk, where the platform can (Windows cannot open folders)."""
    if os.name == "posix":
        _sync(folder, os.O_RDONLY)


def step_name(step: int) -> str:
    """Return `step-000010` for step 10: names that sort by step."""
    return f"step-{step:06d}"


def step_of(path: Path) -> int | None:
    """Return the step of a file or folder named by `step_name`, None for any other."""
    match = re.match(r"step-(\d+)(\.|$)", path.name)
    return int(match[1]) if match else None


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Wait for the exclusive lock of the file `path` and hold it within the body. Does nothing on Windows.

    It is a lock of the open file (flock), so it excludes the other threads of this process as well as other
    processes. The system releases it when the process dies.
    """
    if os.name != "posix":
        yield
        return
    import fcntl

    with path.open("w") as file:
        # Never remove the file: a waiting process and one that creates the file again could then both hold the lock.
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Unlock explicitly: a process forked within the body has the file open too, which would keep the lock.
            fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of the run in `folder` within the body; does not wait for it.

    It is a POSIX record lock (lockf), unlike that of `file_lock`: child processes do not inherit it, so no orphan
    can keep a run locked, and it works across the machines of a network file system that supports locks. It does
    not exclude other threads, and closing any descriptor of the lock file releases it. Windows has no such locks:
    there this does nothing.

    Raises:
        UserError: another process holds the lock (the message has its id and host), or `folder` is not writable.
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
        except (
            BlockingIOError,
            PermissionError,
        ):  # POSIX allows either error for a lock that another process holds
            raise UserError(
                f"run {folder.name} is being written by {_lock_owner(descriptor)}; wait for it, or stop it first"
            ) from None
        except OSError as error:
            raise UserError(f"{folder / LOCK}: cannot be locked here: {error.strerror}") from None
        owner = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, owner.encode(), 0)
        yield
    finally:
        os.close(descriptor)  # releases the lock


def is_locked(folder: Path) -> bool:
    """Return whether another process holds the lock of the run in `folder`; a dead process holds none.

    Do not call it in the process that holds the lock: closing the file, as this does, would release that lock.
    """
    if os.name != "posix":
        return False
    import fcntl

    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)  # releases the lock


def _write_utf8(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock_owner(descriptor: int) -> str:
    """Return the process that the lock file names; a process that has just taken the lock may not be in it yet."""
    try:
        owner = json.loads(os.pread(descriptor, 1000, 0))
        return f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "another process"
