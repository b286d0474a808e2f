"""Time and outcome for long and unusual texts: linear time everywhere, a verdict for every completion.

The functions that read text of models and data are called with 200,000 characters of many shapes in a process with a
limit on its time: `python -m tests.test_long_texts 24` takes every 24th shape, and those that took quadratic time
once; without a number it takes all.
"""

import contextlib
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bandpo_cli.config.batch_and_sampling import GradingConfig
from bandpo_cli.config.task import Fields
from bandpo_cli.errors import UserError, nearest, one_line
from bandpo_cli.grading.answers import (
    canonical_text,
    final_answer,
    grade_math,
    grade_number,
    right_hand_side,
    unwrap,
    vote_countdown,
    vote_expression,
    vote_number,
)
from bandpo_cli.grading.countdown import grade_countdown
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.grading.quantities import read_number, read_unit
from bandpo_cli.grading.rewrites import MAX_ANSWER_CHARS
from bandpo_cli.tasks.completions import read_completions
from bandpo_cli.tasks.question_answers import question_key, read_question
from bandpo_cli.tasks.rows import as_answer, as_level
from bandpo_cli.tasks.task import bare_question, compatibility_form
from bandpo_cli.types import Grade, Problem

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


def print_slow_calls(step: int) -> None:
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


LONG_TEXTS = st.builds(
    lambda pieces, length, end: "".join(pieces) * (length // len("".join(pieces))) + end,
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=4),
    st.integers(1, 40_000),
    st.sampled_from(["", "Answer: 5", "\\boxed{5}", "}", "\n#### 5"]),
)
VERDICTS = {"correct", "wrong", "malformed", "wrong-numbers", "wrong-value"}


@pytest.mark.slow
def test_texts_of_many_shapes_take_linear_time():
    command = [sys.executable, "-m", "tests.test_long_texts", "24"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[-1:] == ["END"], f"used up its CPU time or failed after: {lines[-1:]} {done.stderr[-500:]}"
    assert [line for line in lines if line.startswith("SLOW")] == []


@settings(deadline=None, max_examples=25)
@given(LONG_TEXTS)
def test_every_long_text_gets_a_verdict_and_a_short_vote_also_as_a_reference(text):
    grade_or_pair = grade_math(Problem("p", "", "5", "t", "math"), text)
    if not isinstance(grade_or_pair, Grade):
        assert max(map(len, grade_or_pair)) <= MAX_ANSWER_CHARS
    problems = [Problem("p", "", "5", "t", grader, {"numbers": "2 3"}) for grader in ("number", "countdown")]
    with GraderPool(GradingConfig()) as pool:
        grades = pool.grade(problems, [text, text])
        assert not any(use.error for use in pool.uses.values())
    assert {grade.verdict for grade in grades} <= VERDICTS
    for vote in (vote_expression, vote_number, vote_countdown):
        assert len(vote(text) or "") <= 6 * MAX_ANSWER_CHARS
    assert as_answer(text) != ""
    assert isinstance(grade_math(Problem("p", "", text, "t", "math"), "Answer: 5"), Grade | tuple)


def test_compatibility_form_of_up_to_thirty_marks_is_nfkc():
    rng = random.Random(0)
    for _ in range(300):
        marks = "".join(rng.choices("\u0300\u0327\u0345\u05b0\u3099", k=rng.randrange(25, 31)))
        text = f"a{marks}e{marks} {marks}"
        assert compatibility_form(text) == unicodedata.normalize("NFKC", text)
    assert unicodedata.normalize("NFKC", "a" + "\u0327" * 31) != compatibility_form("a" + "\u0327" * 31)


def test_long_numbers_of_a_problem_give_one_short_error_line():
    problem = Problem("p", "", "5", "t", "countdown", {"numbers": "x" * 100_000 + "\n\x1b"})
    with GraderPool(GradingConfig()) as pool:
        assert [grade.verdict for grade in pool.grade([problem], ["2+3"])] == ["grader-error"]
        assert len(pool.uses["countdown"].error) <= 1000
        assert pool.uses["countdown"].error.isprintable()


def test_canonical_text_of_a_long_text_is_not_longer():
    for piece in PIECES:
        text = piece * (20_000 // len(piece))
        assert len(canonical_text(text)) <= 3 * len(text)


if __name__ == "__main__":
    print_slow_calls(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
