"""Files on disk: atomic and durable writes, strict JSON, lines of metrics, digests, names by step, versions, and locks.

A file that `write_atomically` writes is either complete or absent: a crash or a full disk never leaves half of one.
`run_lock` allows one writing process per run and per sweep; the operating system holds the lock for the process and
releases it when the process ends, for whatever reason.
"""

import hashlib
import json
import math
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout, lock_descriptor
from pydantic_core import from_json
from xxhash import xxh3_64

from bandpo_cli import __version__
from bandpo_cli.errors import UserError
from bandpo_cli.paths import check_regular_file, path_exists, read_json_object
from bandpo_cli.processes.watch import FOLDER_VARIABLE, Wait

LOCK = ".lock"
"""The lock file in a run folder. It stays when the run ends: only the system's lock on it counts, not its existence."""
ACQUIRE_TIMEOUT_S = 1.0  # for the lock of a run: longer than `is_locked` in another process holds it

_UMASK = os.umask(0o022)
os.umask(_UMASK)  # the only way to read it; at import, before there are threads

_MAX_STEPS = 10**12  # larger than any measurement
_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")


def write_atomically(path: Path, write: Callable[[Path], object]) -> Path:
    """Let `write` fill a temporary file beside `path`, flush it to the disk, then rename it to `path`.

    This order (write, fsync, rename, fsync the folder) keeps the old file until the new one is on the disk.
    Raises what `write` or the file system raises; `path` is then unchanged and the temporary file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)
    return path


def write_text(path: Path, text: str) -> Path:
    """Write `text` as UTF-8, atomically."""
    return write_atomically(path, partial(Path.write_bytes, data=text.encode()))


def write_json(path: Path, value: object) -> Path:
    """Write `value` as indented JSON, atomically; non-finite floats become null."""
    return write_text(path, json_bytes(value).decode())


def json_bytes(value: object) -> bytes:
    """Return the content of the file that `write_json` writes."""
    text = json.dumps(replace_nonfinite(value), indent=2, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode()


def iterate_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a `metrics.jsonl`, none when there is no such file; a truncated last line is left out.

    Raises UserError when another line is not a JSON object with a step.
    """
    if not path_exists(path):
        return
    check_regular_file(path, str(path))
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield parse_metrics(line, f"{path}, line {number}")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def read_metrics_after(path: Path, offset: int, limit: int | None = None) -> tuple[list[dict[str, Any]], int]:
    """Return at most `limit` records after the first `offset` bytes of a `metrics.jsonl`, and the offset after them."""
    records: list[dict[str, Any]] = []
    if path_exists(path):
        with path.open("rb") as file:
            file.seek(offset)
            for line in islice(file, limit):
                if line.endswith(b"\n"):  # the last line may still be written
                    records.append(parse_metrics(line, path))
                    offset += len(line)
    return records, offset


def parse_metrics(line: bytes, where: Path | str) -> dict[str, Any]:
    """Return the record in a line of `metrics.jsonl`. Raises UserError, which begins with `where`, if it has none."""
    try:
        record: dict[str, Any] = from_json(line)  # in a quarter of the time of the json module
        if type(step := record["step"]) is not int or not 0 <= step < _MAX_STEPS:
            raise ValueError
    except (ValueError, TypeError, KeyError):
        text = line.decode("utf-8", errors="replace").removesuffix("\n")
        raise UserError(f"{where} is not a JSON object with a step: {text[:80]!r}") from None
    return record


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


def file_checksum(path: Path) -> str:
    """Return the 64-bit XXH3 hash of the content of `path`, in hexadecimal: it notices damage, not forgery."""
    checksum, buffer = xxh3_64(), memoryview(bytearray(2**18))  # fits into the cache of a core
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            checksum.update(buffer[:size])
    return checksum.hexdigest()


@contextmanager
def export_folder(out: Path) -> Iterator[Path]:
    """Yield a hidden folder that becomes `out` at the end of the block; after an error neither of them exists.

    An error of the file system is a UserError that names the option `--out`.
    """
    hidden = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        hidden.mkdir(parents=True)
        yield hidden
        hidden.rename(out)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    sync(out.absolute().parent)


def link_or_copy(source: str, target: str) -> None:
    """Make `target` a hard link to the file `source`, or a copy where the file system refuses the link."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def remove_temporary_files(folder: Path) -> None:
    """Remove the temporary files in `folder` of processes that were killed in `write_atomically`."""
    for path in folder.glob(".*.tmp"):
        if _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


def apply_umask(path: Path) -> None:
    """Give a file the permissions of a file that `open` makes here: read and write for all, less the umask."""
    path.chmod(0o666 & ~_UMASK)


def sync(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def step_name(step: int) -> str:
    """Return `step-000010` for step 10: names that sort by step."""
    return f"step-{step:06d}"


def step_of(path: Path | os.DirEntry[str]) -> int | None:
    """Return the step of a file or folder named by `step_name`, None for any other."""
    match = re.match(r"step-(\d+)(\.|$)", path.name)
    return int(match[1]) if match else None


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of the run or sweep in `folder` within the body; a process that is forked there does not keep it.

    Raises UserError if another process holds the lock (the message has its id and host), or `folder` is not writable.
    """
    if not folder.is_dir():  # filelock would create it
        raise UserError(f"{folder}: cannot be written to: there is no such folder")
    lock = FileLock(folder / LOCK, fallback_to_soft=False)
    try:
        lock.acquire(timeout=ACQUIRE_TIMEOUT_S)
    except Timeout:
        try:
            owner = json.loads((folder / LOCK).read_text(encoding="utf-8"))
            writer = f"process {owner['pid']} on {owner['host']}"
        except (OSError, ValueError, TypeError, KeyError):  # the process may not have written its id yet
            writer = "another process"
        raise UserError(
            f"{folder.name} is being written by {writer}; wait for it, or stop it first"
        ) from None
    except OSError as error:
        raise UserError(f"{folder}: cannot be written to: {error.strerror}") from None
    try:
        stacks = os.environ.get(FOLDER_VARIABLE)
        owner = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "stacks": stacks})
        (folder / LOCK).write_text(owner, encoding="utf-8")
        yield
    finally:
        lock.release()


def wait_for_lock(path: Path) -> AbstractContextManager[object]:
    """Acquire the lock of a file, however long another process holds it; the result releases it at the end."""
    with Wait(f"the lock {path}", "another process holds it, which may be sending this run to a tracker"):
        return FileLock(path).acquire()


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of the run in `folder`; a dead process holds none."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)  # the run may belong to another user
    except OSError:
        return False
    try:
        return not lock_descriptor(descriptor, blocking=False)
    finally:
        os.close(descriptor)  # releases the lock if it was free


def check_version(folder: Path) -> None:
    """Raise UserError if a later version of the package has written to the run or evaluation in `folder`."""
    from packaging.version import InvalidVersion, Version

    newest = Version("0")
    with suppress(UserError, AttributeError, TypeError, InvalidVersion):  # a missing or damaged file
        env = read_json_object(folder / "env.json")
        parts = (env, *env.get("resumes", ()))
        newest = max(Version(part.get("versions", {}).get("bandpo", "0")) for part in parts)
    if newest > Version(__version__):
        raise UserError(
            f"{folder}: written by bandpo {newest}, and this is {__version__}; install the later version"
        )
