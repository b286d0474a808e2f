"""Countdown grader: an arithmetic expression that uses each given number once and reaches the target.

A small parser evaluates the expression; no text of a model is ever executed as Python.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from bandpo_cli.types import Grade, Problem

MAX_CHARS = 256
"""Longer texts are malformed without being parsed. This bounds the time and the number of digits per answer."""

_TOKEN = re.compile(r"0|[1-9][0-9]*|[-+*()]| ")  # "007" becomes three adjacent numbers, which is malformed
_OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_PRECEDENCE = {"(": 0, "+": 1, "-": 1, "*": 2}


class MalformedExpression(ValueError):
    """The text is not an expression."""


@dataclass(frozen=True)
class Expression:
    """An evaluated expression.

    Attributes:
        value: The value of the expression.
        numbers: The numbers in the expression, from left to right.
    """

    value: int
    numbers: tuple[int, ...]


def grade_countdown(problem: Problem, text: str) -> Grade:
    """Grade the complete text as an expression: `correct`, or the first that applies of the verdicts below.

    `malformed`: not an expression. `wrong-numbers`: does not use each given number exactly once. `wrong-value`: does
    not reach the target.
    """
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
    """Return the given numbers of a countdown problem, sorted."""
    return [int(number) for number in str(problem.extra["numbers"]).split()]


def parse_expression(text: str) -> Expression:
    """Evaluate whole numbers joined by + - * and parentheses. There is no unary minus; spaces are ignored.

    The parser uses two stacks (Dijkstra's shunting yard algorithm) instead of recursion, so nesting depth is free.

    Raises:
        MalformedExpression: If `text` is anything else or longer than `MAX_CHARS` characters.
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
                raise MalformedExpression("a closing parenthesis has no opening one")
            operators.pop()
        else:
            raise MalformedExpression(f"unexpected {token!r}")
    if expects_operand:
        raise MalformedExpression("the expression is incomplete")
    _reduce(values, operators, down_to=1)
    if operators:
        raise MalformedExpression("an opening parenthesis has no closing one")
    return Expression(values[0], tuple(numbers))


def _tokens(text: str) -> list[str]:
    """Split into numbers and symbols without spaces; raise MalformedExpression for any other character."""
    if len(text) > MAX_CHARS:
        raise MalformedExpression(f"longer than {MAX_CHARS} characters")
    stripped = text.strip()
    tokens = _TOKEN.findall(stripped)
    if "".join(tokens) != stripped:
        raise MalformedExpression("a character that is not allowed in an expression")
    return [token for token in tokens if token != " "]


def _reduce(values: list[int], operators: list[str], down_to: int) -> None:
    """Apply the pending operators whose precedence is at least `down_to`."""
    while operators and _PRECEDENCE[operators[-1]] >= down_to:
        right, left = values.pop(), values.pop()
        values.append(_OPERATIONS[operators.pop()](left, right))
