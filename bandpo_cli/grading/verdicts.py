"""The grades that graders give."""

from __future__ import annotations

from bandpo_cli.types import Grade

CORRECT = Grade(1.0, correct=True, verdict="correct")
WRONG = Grade(0.0, correct=False, verdict="wrong")
MALFORMED = Grade(0.0, correct=False, verdict="malformed")
TIMEOUT = Grade(0.0, correct=False, verdict="timeout")
GRADER_ERROR = Grade(0.0, correct=False, verdict="grader-error")

NO_VERDICT = frozenset({TIMEOUT.verdict, GRADER_ERROR.verdict})
"""Verdicts that say nothing about the answer."""
