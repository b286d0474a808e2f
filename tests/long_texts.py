"""Functions that read text of models and data, called with 200,000 characters of many shapes; a program for a test.

python -m tests.long_texts         # all shapes
python -m tests.long_texts 12      # every twelfth, and those that took quadratic time in an earlier version
"""

import contextlib
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bandpo_cli.config.task import Fields
from bandpo_cli.errors import UserError, nearest, one_line
from bandpo_cli.extract import final_answer, unwrap
from bandpo_cli.grading.answers import (
    canonical_text,
    grade_math,
    grade_number,
    read_number,
    read_unit,
    right_hand_side,
    vote_countdown,
    vote_expression,
    vote_number,
)
from bandpo_cli.grading.countdown import grade_countdown
from bandpo_cli.tasks.completions import read_completions
from bandpo_cli.tasks.fields import as_answer, as_level, read_question
from bandpo_cli.tasks.prompts import bare_question
from bandpo_cli.tasks.question_answers import question_key
from bandpo_cli.types import Problem

LENGTH = 200_000
SHORTER = 8
"""Factor between the two lengths at which a call of more than `SUSPICIOUS_S` is compared with a line."""
SUSPICIOUS_S = 0.5
MAX_RATIO = 3 * SHORTER
"""Largest ratio of CPU times that counts as linear; it is 64 for quadratic time."""
CPU_LIMIT_S = 120

PIECES = [
    " ", "\n", "\t", "\u00a0", "0", "9", "1 ", "1,", "1,000", ".", " .", "*.", "-", "- ", "--1", "+", "+1", "e9",
    "1e999 ", "1/", "9!", "(", ")", "((", "()", "{", "}", "{}", "\\{", "\\", "\\\\", "$", "$$", "\\(", "\\[", "\\]",
    "*", "`", "**x**", "=", "x=", "==", "%", "5% ", "^", "^{2}", "^ 2", "_", "_ ", "~", "\\,", "{,}", "\\text{",
    "\\text{a}", "\\text ", "\\left(", "\\frac", "\\frac{1}{", "\\boxed", "\\boxed{", "\\boxed{1}", "\\boxed ",
    "answer", "answer:", "Answer: 5 ", "answer \n", "#", "####", "#### 1\n", "a", "a ", " apples", "ab. ", "\u00b2",
    "\u0300", "\u0300\u0327", "\uff9e", "\ufdfa", "\uac00\u11a8", "\u0130", "\u2028", "\x00", "\ud800", "\U0001f600",
    '"', "[", "[{", '{"a":', "1" * 4000 + ",", "://", "<|im_end|>",
]  # fmt: skip
EARLIER_FINDINGS = [" .", "\u0300\u0327", "\uff9e"]
BEGINNINGS = ["", "Answer: ", "\\boxed{", "5"]
ENDINGS = ["", "}", "5", ","]


def calls(folder: Path) -> dict[str, Callable[[str], Any]]:
    """Return the functions by name, each from a text."""

    def problem(reference: str, **extra: object) -> Problem:
        return Problem("p", "q", reference, "set", "math", extra)

    def stored(text: str) -> object:
        path = folder / "rows.jsonl"
        row = {"question": text, "answer": text, "completions": [text]}
        path.write_text(f"{json.dumps(row)}\n{text}\n", "utf-8", "surrogatepass")
        return read_completions(path)

    plain = [final_answer, unwrap, read_number, read_unit, canonical_text, right_hand_side,
             vote_expression, vote_number, vote_countdown, as_answer, as_level, question_key, bare_question,
             one_line]  # fmt: skip
    return {function.__name__: function for function in plain} | {
        "grade_number": lambda text: grade_number(problem("5"), text),
        "grade_math": lambda text: grade_math(problem("5"), text),
        "grade_math, reference": lambda text: grade_math(problem(text), "Answer: 5"),
        "grade_countdown": lambda text: grade_countdown(problem("5", numbers="2 3"), text),
        "grade_countdown, numbers": lambda text: grade_countdown(problem(text, numbers=text), "2+3"),
        "read_question": lambda text: read_question({"q": text}, Fields(question="q"), "row 1"),
        "nearest": lambda text: nearest(text, ["math", "number"]),
        "read_completions": stored,
    }


def cpu_time(call: Callable[[str], Any], text: str) -> float:
    """Return the seconds of CPU time of a call, which may refuse the text."""
    started = time.process_time()
    with contextlib.suppress(UserError, ValueError):
        call(text)
    return time.process_time() - started


def main(step: int) -> None:
    """Print the calls that take more than linear time; the system ends this process after `CPU_LIMIT_S` of CPU time."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
    pieces = dict.fromkeys([*EARLIER_FINDINGS, *PIECES[::step]])
    with tempfile.TemporaryDirectory() as folder:
        for name, call in calls(Path(folder)).items():
            for number, piece in enumerate(pieces):
                begin, end = BEGINNINGS[number % 4], ENDINGS[number // 4 % 4]
                for before, after in dict.fromkeys([("", ""), (begin, end)]):
                    case = f"{name} on {before!r} + {piece[:20]!r} * n + {after!r}"
                    print(case, flush=True)
                    times = LENGTH // len(piece)
                    text, eighth = (before + piece * n + after for n in (times, times // SHORTER))
                    seconds = cpu_time(call, text)
                    if seconds > SUSPICIOUS_S:  # on a busy machine measurements differ by a factor of three
                        seconds = min(seconds, *(cpu_time(call, text) for _ in range(2)))
                        shorter = statistics.median(cpu_time(call, eighth) for _ in range(3))
                        if seconds > MAX_RATIO * shorter:
                            print(f"SLOW {case}: {seconds:.1f} s, {shorter:.2f} s for an eighth", flush=True)
    print("END", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
