"""Reads arithmetic that a model wrote. Nothing of it is ever run as Python."""

# MERGED: Judges answers to countdown: each given number used once, and the target reached.
from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from bandpo_cli.types import Grade, Problem

MAX_CHARS = 256
"""Longer texts are malformed unread: it bounds the work, and the digits, that a hostile answer can cause."""

_TOKEN = re.compile(r"0|[1-9][0-9]*|[-+*()]| ")  # "007" falls apart into three numbers, and so is malformed
_OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_PRECEDENCE = {"(": 0, "+": 1, "-": 1, "*": 2}


class MalformedExpression(ValueError):
    """The text is not an expression."""


@dataclass(frozen=True)
class Expression:
    """What an expression comes to, and the numbers in it from left to right."""

    value: int
    numbers: tuple[int, ...]


def parse_expression(text: str) -> Expression:
    """Evaluate whole numbers joined by + - * and parentheses. There is no unary minus; spaces are free.

    Two stacks (Dijkstra's shunting yard) instead of recursion: depth costs nothing.

    Raises:
        MalformedExpression: for anything else, and for more than `MAX_CHARS` characters.
    """
    values: list[int] = []
    operators: list[str] = []
    numbers: list[int] = []
    expects_operand = True
    for token in _tokens(text):
        if expects_operand and token.isdigit():
            values.append(int(token))
            numbers.append(values[-1])
            expects_operand = False
        elif expects_operand and token == "(":
            operators.append(token)
        elif not expects_operand and token in _OPERATIONS:
            _reduce(values, operators, down_to=_PRECEDENCE[token])
            operators.append(token)
            expects_operand = True
        elif not expects_operand and token == ")":
            _reduce(values, operators, down_to=1)
            if not operators:
                raise MalformedExpression("a parenthesis closes that never opened")
            operators.pop()
        else:
            raise MalformedExpression(f"{token!r} out of place")
    if expects_operand:
        raise MalformedExpression("the expression ends too soon")
    _reduce(values, operators, down_to=1)
    if operators:
        raise MalformedExpression("a parenthesis opens that never closes")
    return Expression(values[0], tuple(numbers))


def _tokens(text: str) -> list[str]:
    """Split into numbers and symbols, spaces dropped; raise MalformedExpression for any other character."""
    if len(text) > MAX_CHARS:
        raise MalformedExpression(f"longer than {MAX_CHARS} characters")
    stripped = text.strip()
    tokens = _TOKEN.findall(stripped)
    if "".join(tokens) != stripped:
        raise MalformedExpression("a character that no expression has")
    return [token for token in tokens if token != " "]


def _reduce(values: list[int], operators: list[str], down_to: int) -> None:
    """Apply the waiting operators that bind at least as tightly as `down_to`."""
    while operators and _PRECEDENCE[operators[-1]] >= down_to:
        right, left = values.pop(), values.pop()
        values.append(_OPERATIONS[operators.pop()](left, right))


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
