"""First stages of the graders `number` and `math`: whatever plain numbers and equal texts decide, at once."""

from __future__ import annotations

import re

from bandpo_cli.extract import final_answer, unwrap
from bandpo_cli.grading.number import equal, read_number, rounds_to
from bandpo_cli.grading.text import same_text
from bandpo_cli.grading.verdicts import CORRECT, MALFORMED, WRONG
from bandpo_cli.types import Grade, Problem

MAX_ANSWER_CHARS = 1000
"""A longer final answer is malformed: it bounds the work of a worker before its deadline has to."""

_EQUALS = re.compile(r"(?<![\\<>!:=])=(?!=)")


def grade_number(problem: Problem, text: str) -> Grade:
    """`correct` when the final answer is the reference's number exactly; `malformed` when it is no plain number.

    Of an equation ("3 * 6 = 18") the right side counts.

    Raises:
        ValueError: the reference is no plain number.
    """
    gold = read_number(unwrap(problem.answer))
    if gold is None:
        raise ValueError(
            f"its answer {problem.answer!r:.60} is no plain number; take the grader 'math' for it"
        )
    answer = _answer(text)
    number = None if answer is None else read_number(right_side(answer))
    if number is None:
        return MALFORMED
    return CORRECT if equal(gold, number) else WRONG


def grade_math(problem: Problem, text: str) -> Grade | tuple[str, str]:
    """A verdict where plain numbers or equal texts decide; else (reference, answer) for `symbolic.equal`."""
    answer = _answer(text)
    if answer is None:
        return MALFORMED
    reference = unwrap(problem.answer)
    gold, number = read_number(reference), read_number(answer)
    if gold is not None and number is not None and not gold.has_letter:  # "3 m" may be three masses
        right = equal(gold, number) or rounds_to(gold, number) or rounds_to(number, gold)
        return CORRECT if right else WRONG
    return CORRECT if same_text(reference, answer) else (reference, answer)


def right_side(answer: str) -> str:
    """Return what stands to the right of the last equals sign, all of it where there is none."""
    return _EQUALS.split(answer)[-1].strip()


def _answer(text: str) -> str | None:
    answer = final_answer(text)
    return None if answer is None or len(answer) > MAX_ANSWER_CHARS else answer
