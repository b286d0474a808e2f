"""Grader of the checks, imported by the worker processes and so without torch."""

import time
import zlib
from typing import Any

GRADER = f"{__name__}:grade"
"""The grader by its name in settings."""
SLOW_GRADER = f"{__name__}:grade_slowly"
"""The same verdicts, with the time that a program or a judge takes for one."""
SLOW_S = 0.05


def grade(text: str, reference: str, extra: Any) -> bool:
    """Return a verdict that depends on every character, so that the rewards of a group differ."""
    return zlib.crc32(text.encode()) % 2 == 0


def grade_slowly(text: str, reference: str, extra: Any) -> bool:
    """Return the verdict of `grade` after `SLOW_S` seconds."""
    time.sleep(SLOW_S)
    return grade(text, reference, extra)
