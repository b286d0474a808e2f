"""Countdown grader: agrees with the Python parser, gives the first verdict that applies, rejects other texts."""

from __future__ import annotations

import ast
import operator
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandpo_cli.grading.countdown import MAX_CHARS, evaluate_expression, grade_countdown
from bandpo_cli.types import Problem

PROBLEM = Problem("p", "1 3 7 8=28:", "28", "countdown", "countdown", {"numbers": "1 3 7 8"})
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@pytest.mark.parametrize(
    ("verdict", "texts"),
    [
        ("correct", ["3*7+8-1", " (7*3) + (8-1) "]),
        ("wrong-value", ["1+3+7+8"]),
        ("wrong-numbers", ["3*7+8", "3*7+8-1-1", "4*7", "37-8-1", "28"]),
        ("malformed", ["3*7+8-1=28", ""]),
    ],
)
def test_verdicts(verdict: str, texts: list[str]) -> None:
    for text in texts:
        grade = grade_countdown(PROBLEM, text)
        right = verdict == "correct"
        assert (grade.verdict, grade.correct, grade.reward) == (verdict, right, float(right))


def evaluate_with_ast(text: str) -> tuple[int, list[int]]:
    """Return the value and the numbers of an expression by the Python parser, an independent implementation."""

    def visit(node: ast.AST) -> tuple[int, list[int]]:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value, [node.value]
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            (left, first), (right, last) = visit(node.left), visit(node.right)
            return OPERATIONS[type(node.op)](left, right), first + last
        raise ValueError(ast.dump(node))

    return visit(ast.parse(text, mode="eval").body)


EXPRESSIONS = st.recursive(
    st.integers(0, 120).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", " + ", "- "]), inner).map("".join),
        inner.map("({})".format),
    ),
    max_leaves=12,
)


@given(EXPRESSIONS.filter(lambda text: len(text) <= MAX_CHARS))
def test_value_and_numbers_equal_those_of_the_python_parser(text: str) -> None:
    assert evaluate_expression(text) == evaluate_with_ast(text)


@given(st.text(alphabet="0123456789+-*() ", max_size=12).filter(lambda text: not re.search(r"0\d", text)))
def test_accepts_exactly_the_expressions_of_python_with_equal_values(text: str) -> None:
    try:
        expected = evaluate_with_ast(text.strip())
    except (
        SyntaxError,
        ValueError,
    ):  # ValueError: a unary operator or a call, which countdown does not allow
        expected = None
    assert evaluate_expression(text) == expected


MALFORMED = """
+ -1 1+ 1+-2 (1 1) )( () 2(3) (1)(2) 007 1**2 1//2 1/2
1.5 1e3 1_0 0x1 ² ١+٢ 1×2 1−2 __import__('os') 1+2=3 1+2; 1,2
"""


def test_malformed_texts() -> None:
    for text in ["", " ", "1 2", *MALFORMED.split()]:
        assert evaluate_expression(text) is None, text


@pytest.mark.parametrize(
    "text", ["(" * 10**6, "9" * 10**6, "1+" * 500_000 + "1", "(" * 10**5 + "1" + ")" * 10**5, " " * 10**6]
)
def test_hostile_texts_are_rejected_quickly(text: str) -> None:
    started = time.process_time()
    assert evaluate_expression(text) is None
    assert time.process_time() - started < 0.1
