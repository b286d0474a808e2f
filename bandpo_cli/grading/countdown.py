"""Countdown grader: an arithmetic expression that uses each given number once and reaches the target.

Python's parser reads the expression. Nothing of a text is executed: the tree is evaluated here, and may contain whole
numbers and three operators only.
"""

import ast
import operator
import re

from bandpo_cli.types import CORRECT, MALFORMED, Grade, Problem

MAX_CHARS = 256
"""Longer texts are malformed without being parsed. This bounds the time and the number of digits per answer."""

_CHARACTERS = re.compile(r"(?:0(?![0-9])|[1-9][0-9]*+|[-+*() ])*")  # Python would accept "00"
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def grade_countdown(problem: Problem, text: str) -> Grade:
    """Grade the complete text: `malformed` if it is not an expression, `wrong-numbers` if it does not use each given
    number exactly once, `wrong-value` if it does not reach the target, else `correct`.
    """
    expression = evaluate_expression(text)
    if expression is None:
        return MALFORMED
    value, numbers = expression
    if sorted(numbers) != [int(number) for number in str(problem.extra["numbers"]).split()]:
        return Grade(0.0, correct=False, verdict="wrong-numbers")
    return CORRECT if value == int(problem.answer) else Grade(0.0, correct=False, verdict="wrong-value")


def evaluate_expression(text: str) -> tuple[int, list[int]] | None:
    """Return the value of whole numbers joined by + - * and parentheses, and the numbers from left to right.

    There is no unary minus; spaces are ignored. Return None for other texts and above `MAX_CHARS` characters.
    """
    stripped = text.strip()
    if len(text) > MAX_CHARS or not _CHARACTERS.fullmatch(stripped):
        return None
    numbers: list[int] = []

    def value_of(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                numbers.append(number)
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
                first = value_of(left)
                return int(_OPERATIONS[type(op)](first, value_of(right)))
        raise SyntaxError(f"{type(node).__name__} is not allowed")

    try:
        return value_of(ast.parse(stripped, mode="eval").body), numbers
    except SyntaxError:
        return None


def calculate(expression: str) -> int:
    """Evaluate an arithmetic expression.

    Args:
        expression: whole numbers with + - * and parentheses, as in 12*(3+4).
    """
    if (result := evaluate_expression(expression)) is None:
        raise ValueError("not an expression of whole numbers with + - * and parentheses")
    return result[0]
