r"""Extraction of the final answer from a text: a completion, or the worked solution of a data set.

Three forms are recognised, and the one that starts last in the text counts: a line `Answer: 18`, a `\boxed{18}`, and
GSM8K's line `#### 18`. The running time is linear in the last `MAX_CHARS` characters of the text.
"""

import re
from collections import deque

MAX_CHARS = 20_000
"""Number of characters at the end of a text that are searched."""

_BOX = r"\\(?:boxed|fbox|framebox)(?![A-Za-z])(?=\s*\{|[ \t]+(?![A-Za-z]{2})[^\s\\{}$])"
_LABEL = r"(?<![A-Za-z])answer[ \t*_]*[:：]"
_HASHES = r"^[ \t]*####(?!#)"
_MARKER = re.compile(f"(?P<box>{_BOX})|(?i:{_LABEL})|{_HASHES}", re.MULTILINE)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is part of the content
_BARE = re.compile(r"[ \t]+([^\s\\{}$]+)")  # "\boxed 5", as in some solutions of MATH
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("'", "'"), ('"', '"'), ("“", "”"))
_THINKING, _END_OF_THINKING = "<think>", "</think>"
_LEADING = " \t\r\n*`"
_TRAILING = ".。,;*`" + "".join(char for char in map(chr, range(0x3001)) if char.isspace())


def final_answer(text: str) -> str | None:
    r"""Return the answer in the last `Answer: ...` line, `\boxed{...}` or `#### ...` line of `text`, unwrapped.

    Text up to the last `</think>` is not searched. Return None if there is none of the forms, or if the last one is
    empty or a box without a closing brace, or if `<think>` is not closed.
    """
    text = text.rpartition(_END_OF_THINKING)[2]
    if _THINKING in text:
        return None
    tail = text[-MAX_CHARS:]
    marker = next(iter(deque(_MARKER.finditer(tail), maxlen=1)), None)
    if marker is None:
        return None
    if marker["box"]:
        return _box_content(tail, marker.end())
    line = tail[marker.end() :].partition("\n")[0].partition("</answer>")[0]
    if tail[tail.rfind("\n", 0, marker.start()) + 1 : marker.start()].lstrip().startswith("|"):
        line = line.strip("| \t\r")  # a row of a Markdown table; elsewhere |-18| is an absolute value
    return unwrap(line) or None


def unwrap(answer: str) -> str:
    r"""Return the answer without its formatting: spaces, `$...$`, `\(...\)`, `**...**`, full stops, commas."""
    while True:  # at most five rounds: a wrapper is removed only if none of its kind is inside
        stripped = answer.rstrip(_TRAILING)
        goes_on = stripped[-1:].isdigit() and answer[len(stripped) :].lstrip().startswith("...")  # 0.333...
        answer = f"{stripped}..." if goes_on else stripped
        answer = answer.lstrip(_LEADING)
        for left, right in _WRAPPERS:
            inner = answer[len(left) : -len(right)]
            if answer.startswith(left) and answer.endswith(right) and inner and left not in inner:
                answer = inner
                break
        else:
            return answer


def _box_content(text: str, start: int) -> str | None:
    """Return the content of the braces that open at `start`, or the word there; None without a closing brace."""
    bare = _BARE.match(text, start)
    if bare:
        return unwrap(bare[1]) or None
    depth, content_start = 0, -1
    for brace in _BRACE.finditer(text, start):
        if content_start < 0 and (brace[0] != "{" or text[start : brace.start()].strip()):
            return None
        if brace[0] == "{":
            content_start = brace.end() if content_start < 0 else content_start
            depth += 1
        elif brace[0] == "}":
            depth -= 1
            if depth == 0:
                return unwrap(text[content_start : brace.start()]) or None
    return None
