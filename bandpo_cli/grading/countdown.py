"""Judges answers to countdown: each given number used once, and the target reached."""

from __future__ import annotations

from bandpo_cli.grading.expression import MalformedExpression, parse_expression
from bandpo_cli.types import Grade, Problem


def grade_countdown(problem: Problem, text: str) -> Grade:
    """Give `correct`, or `malformed`, `wrong-numbers`, `wrong-value`: the first of them that holds."""
    try:
        expression = parse_expression(text)
    except MalformedExpression:
        return Grade(0.0, correct=False, verdict="malformed")
    if sorted(expression.numbers) != problem_numbers(problem):
        return Grade(0.0, correct=False, verdict="wrong-numbers")
    if expression.value != int(problem.answer):
        return Grade(0.0, correct=False, verdict="wrong-value")
    return Grade(1.0, correct=True, verdict="correct")


def problem_numbers(problem: Problem) -> list[int]:
    """The numbers that a countdown problem gives, sorted."""
    return [int(number) for number in str(problem.extra["numbers"]).split()]
