"""Countdown grader: the first verdict that applies, for any text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandpo_cli.grading.countdown import grade_countdown, problem_numbers
from bandpo_cli.types import Problem

PROBLEM = Problem("p", "1 3 7 8=28:", "28", "countdown", "countdown", {"numbers": "1 3 7 8"})


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("3*7+8-1", "correct"),
        (" (7*3) + (8-1) ", "correct"),
        ("1+3+7+8", "wrong-value"),
        ("3*7+8", "wrong-numbers"),
        ("3*7+8-1-1", "wrong-numbers"),
        ("4*7", "wrong-numbers"),
        ("37-8-1", "wrong-numbers"),
        ("28", "wrong-numbers"),
        ("3*7+8-1=28", "malformed"),
        ("", "malformed"),
    ],
)
def test_verdicts(text: str, verdict: str) -> None:
    grade = grade_countdown(PROBLEM, text)
    assert (grade.verdict, grade.correct, grade.reward) == (
        verdict,
        verdict == "correct",
        float(verdict == "correct"),
    )


@given(st.one_of(st.text(), st.text(alphabet="1378+-*() ")))
def test_grading_never_raises(text: str) -> None:
    assert grade_countdown(PROBLEM, text).verdict in {"correct", "wrong-value", "wrong-numbers", "malformed"}


def test_problem_numbers_are_read_from_extra() -> None:
    assert problem_numbers(PROBLEM) == [1, 3, 7, 8]
