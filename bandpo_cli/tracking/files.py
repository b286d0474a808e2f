"""Files that are either whole or not there: what a crash or a full disk leaves is never half a file."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")


def write_whole(path: Path, write: Callable[[Path], None]) -> Path:
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
    return write_whole(path, lambda temporary: _put(temporary, text))


def write_json(path: Path, value: object) -> Path:
    """Write `value` as indented JSON, whole or not at all; non-finite floats become null."""
    return write_text(path, json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def finite(value: object) -> object:
    """Return `value` with every NaN and infinity replaced by None, in mappings and sequences too.

    JSON has no word for them, and the `NaN` that Python writes stops other readers (jq, pandas, JavaScript).
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [finite(item) for item in value]
    return value


def remove_temporary(folder: Path) -> None:
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


def _put(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
