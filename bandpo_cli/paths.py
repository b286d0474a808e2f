"""Paths as users write them, looked at without an error of the file system's ever getting out."""

from __future__ import annotations

from pathlib import Path


def user_path(text: str) -> Path:
    """Return the path with ~ as the user's home; a ~name that is nobody's stays as it is."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def is_there(path: Path) -> bool:
    """Tell whether there is a file or folder that can be looked at; a name that no file can have is none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
