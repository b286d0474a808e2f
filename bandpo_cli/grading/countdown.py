"""Countdown grader: an arithmetic expression that uses each given number once and reaches the target.

A small parser evaluates the expression; no text of a model is ever executed as Python.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from bandpo_cli.types import CORRECT, MALFORMED, Grade, Problem

MAX_CHARS = 256
"""Longer texts are malformed without being parsed. This bounds the time and the number of digits per answer."""

_TOKEN = re.compile(r"0|[1-9][0-9]*|[-+*()]")  # "007" becomes three adjacent numbers, which is malformed
_TOKENS = re.compile(r"[-+*() 0-9]*")
_OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_PRECEDENCE = {"(": 0, "+": 1, "-": 1, "*": 2}


def grade_countdown(problem: Problem, text: str) -> Grade:
    """Grade the complete text as an expression: `correct`, or the first that applies of the verdicts below.

    `malformed`: not an expression. `wrong-numbers`: does not use each given number exactly once. `wrong-value`: does
    not reach the target.
    """
    expression = evaluate_expression(text)
    if expression is None:
        return MALFORMED
    value, numbers = expression
    if sorted(numbers) != [int(number) for number in str(problem.extra["numbers"]).split()]:
        return Grade(0.0, correct=False, verdict="wrong-numbers")
    return CORRECT if value == int(problem.answer) else Grade(0.0, correct=False, verdict="wrong-value")


def evaluate_expression(text: str) -> tuple[int, list[int]] | None:
    """Evaluate whole numbers joined by + - * and parentheses. There is no unary minus; spaces are ignored.

    The parser uses two stacks (Dijkstra's shunting yard algorithm) instead of recursion, so nesting depth is free.

    Returns:
        The value and the numbers of the expression, from left to right; None if `text` is anything else or longer than
        `MAX_CHARS` characters.
    """
    stripped = text.strip()
    if len(text) > MAX_CHARS or not _TOKENS.fullmatch(stripped):
        return None
    values: list[int] = []
    operators: list[str] = []
    numbers: list[int] = []
    expects_operand = True
    for token in _TOKEN.findall(stripped):
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
                return None
            operators.pop()
        else:
            return None
    if expects_operand:
        return None
    _reduce(values, operators, down_to=1)
    return None if operators else (values[0], numbers)


def _reduce(values: list[int], operators: list[str], down_to: int) -> None:
    """Apply the pending operators whose precedence is at least `down_to`."""
    while operators and _PRECEDENCE[operators[-1]] >= down_to:
        right, left = values.pop(), values.pop()
        values.append(_OPERATIONS[operators.pop()](left, right))
