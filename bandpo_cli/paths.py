"""Paths as users write them, looked at without an error of the file system's ever getting out."""

from __future__ import annotations

import stat
from pathlib import Path

from bandpo_cli.errors import ConfigError

MAX_CONFIG_BYTES = 2**20
"""Bytes that a file of settings may have: more than ten thousand times what one needs."""


def user_path(text: str) -> Path:
    """Return the path with ~ as the user's home; a ~name that is nobody's stays as it is."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def path_exists(path: Path) -> bool:
    """Tell whether there is a file or folder that can be looked at; a name that no file can have is none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def folders_containing(folder: Path, file: str) -> list[str]:
    """Return the names of what lies in `folder` and has such a file; none where no such folder can be."""
    try:
        return sorted(path.parent.name for path in folder.glob(f"*/{file}"))
    except (OSError, ValueError):
        return []


def check_regular_file(path: Path, where: str) -> int:
    """Return the size of a regular file, in bytes. A pipe or a device could be read for ever.

    Raises:
        ConfigError: it is not there, or something else; the line begins with `where`.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or error}") from None
    except ValueError:
        raise ConfigError(f"{where}: no file can have that name") from None
    if not stat.S_ISREG(found.st_mode):
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "a pipe or device"
        raise ConfigError(f"{where}: is {kind}; name a regular file")
    return found.st_size


def read_text(path: Path, where: str, most: int = MAX_CONFIG_BYTES) -> str:
    """Read a text file of `most` bytes at most, in UTF-8 with or without a byte order mark.

    Raises:
        ConfigError: that is not what lies there; the line begins with `where`.
    """
    check_regular_file(path, where)
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise ConfigError(f"{where}: larger than {most:,} bytes, which no such file is")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: not a text file (UTF-8 is expected)") from None
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or error}") from None
