r"""Finds the final answer in a text: a model's completion, or the worked solution that a data set gives.

Three forms are known, and the one that starts last in the text counts: a line `Answer: 18`, a `\boxed{18}`, and
GSM8K's line `#### 18`. All work is linear in the text's last `MAX_CHARS` characters.
"""

from __future__ import annotations

import re

MAX_CHARS = 20_000
"""Only this many characters at the end of a text are read."""

_BOX = r"\\(?:boxed|fbox|framebox)(?![A-Za-z])"
_LABEL = r"(?<![A-Za-z])answer[ \t*_]*[:：]"
_HASHES = r"^[ \t]*####(?!#)"
_LAST_BOX = re.compile(_BOX)
_MARKER = re.compile(f"(?P<box>{_BOX})|(?i:{_LABEL})|{_HASHES}", re.MULTILINE)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is part of a set, and closes nothing
_BARE = re.compile(r"[ \t]+([^\s\\{}$]+)")  # "\boxed 5", as some solutions of MATH have it
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


def final_answer(text: str) -> str | None:
    r"""Return the answer in the last `Answer: ...` line, `\boxed{...}` or `#### ...` line of `text`, unwrapped.

    None when there is none of them, or the last one is empty or a box that never closes.
    """
    tail = text[-MAX_CHARS:]
    marker = _last_match(_MARKER, tail)
    if marker is None:
        return None
    if marker["box"]:
        return _box_content(tail, marker.end())
    line = tail[marker.end() :].partition("\n")[0]
    return unwrap(line) or None


def last_boxed(text: str) -> str | None:
    r"""Return what is in the last `\boxed{...}` (`\fbox`, `\framebox`), unwrapped; None without one that closes."""
    tail = text[-MAX_CHARS:]
    marker = _last_match(_LAST_BOX, tail)
    return None if marker is None else _box_content(tail, marker.end())


def unwrap(answer: str) -> str:
    r"""Take off what only dresses an answer: spaces, `$...$`, `\(...\)`, `**...**`, a full stop at the end."""
    while True:
        bare = answer.strip(" \t\r\n*`").removesuffix(".").rstrip()
        for left, right in _WRAPPERS:
            inner = bare[len(left) : -len(right)]
            if bare.startswith(left) and bare.endswith(right) and inner and left not in inner:
                bare = inner
                break
        if bare == answer:
            return answer
        answer = bare


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = None
    for last in pattern.finditer(text):  # noqa: B007  (only the last is wanted)
        pass
    return last


def _box_content(text: str, start: int) -> str | None:
    """What stands in the braces that open at `start`, or the bare word there."""
    bare = _BARE.match(text, start)
    if bare:
        return unwrap(bare[1]) or None
    depth, opened = 0, -1
    for brace in _BRACE.finditer(text, start):
        if opened < 0 and (brace[0] != "{" or text[start : brace.start()].strip()):
            return None
        if brace[0] == "{":
            opened = brace.end() if opened < 0 else opened
            depth += 1
        elif brace[0] == "}":
            depth -= 1
            if depth == 0:
                return unwrap(text[opened : brace.start()]) or None
    return None
