"""Paths given by users, reading of small text and JSON files, and commits in the hub's local cache.

Errors of a path become False, an empty list or a ConfigError.
"""

import difflib
import json
import os
import re
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from bandpo_cli.errors import ConfigError, UserError, first_line

MAX_CONFIG_BYTES = 2**20
"""Maximum size of a config file in bytes, more than ten thousand times what one needs."""

MODEL_CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
"""The files by which a folder with a complete model, and one with an adapter in the format of peft, are recognized."""

GGUF_ADVICE = (
    "GGUF holds quantized weights for inference; a Hugging Face folder is needed, with config.json, model.safetensors "
    "and tokenizer files: the folder of the original model, or what save_pretrained writes after "
    "from_pretrained(FOLDER, gguf_file=NAME) of transformers"
)


def user_path(text: str) -> Path:
    """Return the path with ~ expanded to the home folder; a ~name of an unknown user stays unchanged."""
    return Path(os.path.expanduser(text))


def given_path(value: Any, name: str = "runs_dir") -> Path:
    """Return a path that a script has given as `name`. Raises UserError for any other value."""
    if not isinstance(value, str | os.PathLike):
        raise UserError(f"{name} = {value!r:.80}: expected a path")
    return Path(value)


path_exists = os.path.exists
"""Unlike `Path.exists`, False for a file that is not accessible and for a name that no file can have."""


def is_adapter_folder(folder: Path) -> bool:
    """Return whether a folder holds an adapter for a model in place of a complete model."""
    return path_exists(folder / ADAPTER_CONFIG) and not path_exists(folder / MODEL_CONFIG)


def gguf_file(path: Path) -> Path | None:
    """Return the GGUF file that `path` is or, as a folder, contains; None if there is none."""
    if path.is_file():
        return path if path.suffix.lower() == ".gguf" else None
    return next(iter(sorted(path.glob("*.[gG][gG][uU][fF]"))), None)


def nearest_file(path: Path, suffixes: Collection[str]) -> str:
    """Return `` (did you mean 'x'?)`` for a file beside `path` with a similar name, or an empty string.

    Only files with one of `suffixes` count. A common suffix does not make two names similar.
    """
    try:
        files = {file.stem: file for file in path.parent.glob("*.*") if file.suffix.lower() in suffixes}
    except (OSError, ValueError):
        return ""
    stems = difflib.get_close_matches(path.stem[:100], files, n=1, cutoff=0.7)
    return f" (did you mean '{files[stems[0]]}'?)" if stems else ""


def relative_to_cwd(path: Path) -> Path:
    """Return `path` relative to the current folder if it lies in it, else unchanged."""
    try:
        return path.absolute().relative_to(Path.cwd())
    except ValueError:
        return path


def folders_containing(folder: Path, file: str) -> list[str]:
    """Return the sorted names of the subfolders of `folder` that contain `file`; none if `folder` cannot be read."""
    try:
        return sorted(path.parent.name for path in folder.glob(f"*/{file}"))
    except (OSError, ValueError):
        return []


def check_regular_file(path: Path, where: str) -> int:
    """Return the size of a regular file in bytes. Reading a pipe or a device might never end.

    Raises ConfigError, which begins with `where`, if the file does not exist, is not a regular file, or is the pointer
    that git clone leaves of a large file without git-lfs.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or error}") from None
    except ValueError:
        raise ConfigError(f"{where}: no file can have that name") from None
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe or device"
        raise ConfigError(f"{where}: is {kind}; name a regular file")
    if status.st_size < 1024:  # a pointer is smaller, by the specification of git-lfs
        with suppress(OSError), path.open("rb") as file:
            if file.read().startswith(b"version https://git-lfs"):
                what = "is a git-lfs pointer without the content of the file"
                raise ConfigError(f"{where}: {what}; run git lfs pull there")
    return status.st_size


def read_text(path: Path, where: str, max_bytes: int | None = MAX_CONFIG_BYTES) -> str:
    """Read a UTF-8 text file of at most `max_bytes` bytes (None: any size), with or without a byte order mark.

    Raises ConfigError, which begins with `where`, if the file is missing, too large or not UTF-8 text.
    """
    size = check_regular_file(path, where)
    if max_bytes is not None and size > max_bytes:
        raise ConfigError(f"{where}: has {size:,} bytes; at most {max_bytes:,} are expected")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: not a text file (UTF-8 is expected)") from None
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or error}") from None


def read_json_object(path: Path, where: str | None = None, max_bytes: int | None = None) -> dict[str, Any]:
    """Return the JSON object that a text file holds; see `read_text`. `where` is the path by default.

    Raises UserError if the file cannot be read, is not JSON, or holds another JSON type.
    """
    where = where or str(path)
    text = read_text(path, where, max_bytes)
    try:
        content = json.loads(text)
        if isinstance(content, dict):
            return content
        defect = "expected a JSON object"
    except (ValueError, RecursionError) as error:
        defect = f"not readable as JSON: {first_line(error)}"
    raise UserError(f"{where}: {defect}; restore the file from a copy")


def is_commit(text: object) -> bool:
    """Return whether `text` is the full hash of a commit."""
    return isinstance(text, str) and re.fullmatch(r"[0-9a-f]{40}", text) is not None


def cached_commit(
    repository: str, kind: Literal["model", "dataset"], revision: str | None = None
) -> str | None:
    """Return the hash of a repository, or of a revision of it, on the hub when it was last loaded here."""
    if is_commit(revision):
        return revision
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"{kind}s--{repository.replace('/', '--')}"
    try:
        commit = (folder / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return commit if is_commit(commit) else None
