"""Grader of the checks, imported by the worker processes and so without torch."""

from __future__ import annotations

import zlib
from typing import Any

GRADER = f"{__name__}:grade"
"""The grader by its name in settings."""


def grade(text: str, reference: str, extra: Any) -> bool:
    """Return a verdict that depends on every character, so that the rewards of a group differ."""
    return zlib.crc32(text.encode()) % 2 == 0
