"""Worker process: one grader function, called for one line of JSON after another.

A line on standard input is the list of the answers of one call, each a list of arguments; only functions that take
batches get more than one answer. A line on standard output is `{"results": [[reward, correct, verdict, has_reward],
...]}` or `{"error": ..., "out_of_memory": ...}`, in the same order. The first line on standard output, after the
function was imported, is `{"ready": true, "batched": ...}`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from bandpo_cli.grading.signatures import BatchGrader, grade_from_result, load_grader
from bandpo_cli.registries import load_function


def main(name: str, custom: bool, deadline: float, memory_gb: float) -> None:
    """Serve requests for a function until standard input closes.

    Args:
        name: The function, as `module:function`; of a custom grader, its name.
        custom: It is a custom grader; otherwise a function that an entry of `GRADERS` names.
        deadline: Seconds per answer. The parent enforces it; see the comment on the alarm below.
        memory_gb: Memory limit in GiB, in addition to what the imports use.
    """
    # The protocol leaves descriptors 0 and 1, so that print() and input() in custom code cannot disturb it.
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    try:
        if custom:
            grader = load_grader(name)
        else:
            function = load_function(name)
            grader = BatchGrader(lambda answers: [grade_from_result(function(*answer)) for answer in answers])
    except ValueError as error:
        _reply(replies, {"error": str(error)})
        return
    _limit_memory(memory_gb)
    _reply(replies, {"ready": True, "batched": grader.batched})
    for line in requests:
        # If the parent is gone, no one enforces the deadline; then this alarm ends the process, whatever code runs.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        answers = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, 2 * deadline * len(answers) + 10)
        reply = _call(grader, answers)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _reply(replies, reply)


def _call(grader: BatchGrader, answers: Sequence[Any]) -> dict[str, Any]:
    try:
        grades = grader.grade(answers)
    except BaseException as error:  # noqa: BLE001  (sys.exit in a custom function is an error like any other)
        message = f"{type(error).__name__}: {error!s:.300}"
        return {"error": message, "out_of_memory": isinstance(error, MemoryError)}
    return {"results": [[grade.reward, grade.correct, grade.verdict, grade.has_reward] for grade in grades]}


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
