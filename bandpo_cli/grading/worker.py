"""Worker process: one grader function (`module:function`), called for one line of JSON after another.

A line on standard input is the list of arguments of the function. A line on standard output is
`{"result": [reward, correct, verdict]}` or `{"error": ..., "out_of_memory": ...}`, in the same order. The first line on
standard output, after the function was imported, is `{"ready": true}`. The functions of this package and of users are
loaded and read in the same way.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, BinaryIO

from bandpo_cli.registries import load_function
from bandpo_cli.types import CORRECT, UNGRADED_VERDICTS, WRONG, Grade

MAX_VERDICT_CHARS = 40
"""Maximal length of the verdict of a custom grader."""


def grade_from_result(result: Any) -> Grade:
    """Convert the return value of a grader function into a grade.

    Args:
        result: A bool; a score in [0, 1], correct if it is 1; or a mapping with `score` and optionally `correct` (a
            bool) and `verdict` (1 to 40 characters, not one of `UNGRADED_VERDICTS`).

    Raises:
        ValueError: If `result` is anything else.
    """
    fields = result if isinstance(result, Mapping) else {"score": result}
    score = _score(fields.get("score"))
    correct = fields.get("correct", score >= 1)
    if not isinstance(correct, bool):
        raise ValueError(f"'correct' must be true or false, not {correct!r:.60}")
    verdict = fields.get("verdict", CORRECT.verdict if correct else WRONG.verdict)
    if (
        not isinstance(verdict, str)
        or not 0 < len(verdict) <= MAX_VERDICT_CHARS
        or verdict in UNGRADED_VERDICTS
    ):
        raise ValueError(
            f"'verdict' must be a short word other than {sorted(UNGRADED_VERDICTS)}, not {verdict!r:.60}"
        )
    return Grade(score, correct=correct, verdict=verdict)


def _score(value: Any) -> float:
    if hasattr(value, "item"):  # a numpy or torch scalar
        value = value.item()
    if not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise ValueError(
            f"a grader must return a bool, a score in [0, 1] or a dict with 'score', not {value!r:.60}"
        )
    return float(value)


def main(name: str, deadline: float, memory_gb: float) -> None:
    """Serve requests for `module:function` until standard input closes.

    Args:
        name: The function, as `module:function`.
        deadline: Seconds per answer. The parent enforces it; see the comment on the alarm below.
        memory_gb: Memory limit in GiB, in addition to what the imports use.
    """
    requests, replies = _claim_pipes()
    try:
        function = load_function(name)
    except ValueError as error:
        _reply(replies, {"error": str(error)})
        return
    _limit_memory(memory_gb)
    _reply(replies, {"ready": True})
    for line in requests:
        # If the parent is gone, no one enforces the deadline; then this alarm ends the process, whatever code runs.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 2 * deadline + 10)
        reply = _call(function, json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _reply(replies, reply)


def _call(function: Callable[..., Any], arguments: list[Any]) -> dict[str, Any]:
    try:
        grade = grade_from_result(function(*arguments))
    except BaseException as error:  # noqa: BLE001  (sys.exit in a custom function is an error like any other)
        message = f"{type(error).__name__}: {error!s:.300}"
        return {"error": message, "out_of_memory": isinstance(error, MemoryError)}
    return {"result": [grade.reward, grade.correct, grade.verdict]}


def _claim_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the protocol off descriptors 0 and 1, so that print() and input() in custom code cannot disturb it."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


def _limit_memory(memory_gb: float) -> None:
    """Limit the address space to the present size plus `memory_gb` GiB, and disable core files."""
    pages = Path("/proc/self/statm")
    used = int(pages.read_text().split()[0]) * resource.getpagesize() if pages.exists() else 0
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    requested = used + int(memory_gb * 2**30)
    limit = requested if hard == resource.RLIM_INFINITY else min(requested, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _reply(replies: BinaryIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    sys.exit("this module is started by bandpo_cli.grading.workers")
