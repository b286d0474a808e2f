"""A function named `module:function`: found, called, and its result read. The same for ours and for a user's own."""

# MERGED: What a worker process runs: one function, called for one line of JSON after another. A line in is the list of the function's arguments; a line out is `{"result": [reward, correct, verdict]}` or `{"error": ...}`, in the same order. The first line out, once the function is imported, is `{"ready": true}`.
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


def grade_from_result(result: Any) -> Grade:
    """Turn what a function returned into a grade.

    A bool; a score in [0, 1], right from 1 on; or a mapping with `score` and perhaps `correct` and `verdict`.

    Raises:
        ValueError: for anything else.
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
    if hasattr(value, "item"):  # a number of numpy's or torch's
        value = value.item()
    if not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise ValueError(
            f"a grader returns a bool, a score in [0, 1] or a dict with 'score', not {value!r:.60}"
        )
    return float(value)


def main(name: str, deadline: float, memory_gb: float) -> None:
    """Serve `module:function` until stdin closes."""
    requests, replies = _claim_pipes()
    try:
        function = load_function(name)
    except ValueError as error:
        _reply(replies, {"error": str(error)})
        return
    _limit_memory(memory_gb)
    _reply(replies, {"ready": True})
    for line in requests:
        # Should the parent be gone, nobody kills at the deadline; the kernel then does, whatever the code is at.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 2 * deadline + 10)
        reply = _judge(function, json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _reply(replies, reply)


def _judge(function: Callable[..., Any], arguments: list[Any]) -> dict[str, Any]:
    try:
        grade = grade_from_result(function(*arguments))
    except BaseException as error:  # noqa: BLE001  (sys.exit in a user's function is an error like any other)
        return {"error": f"{type(error).__name__}: {error!s:.300}", "spent": isinstance(error, MemoryError)}
    return {"result": [grade.reward, grade.correct, grade.verdict]}


def _claim_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the protocol off stdin and stdout, so that a print or an input() in a user's code cannot touch it."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


def _limit_memory(memory_gb: float) -> None:
    """Cap the address space at what the imports took and `memory_gb` more; leave no core files."""
    pages = Path("/proc/self/statm")
    taken = int(pages.read_text().split()[0]) * resource.getpagesize() if pages.exists() else 0
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = taken + int(memory_gb * 2**30)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _reply(replies: BinaryIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    sys.exit("start it through bandpo_cli.grading.workers")
