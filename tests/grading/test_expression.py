"""Parser of countdown expressions: agrees with the Python parser, and rejects all other texts quickly."""

from __future__ import annotations

import ast
import operator
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandpo_cli.grading.countdown import MAX_CHARS, MalformedExpression, parse_expression

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


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


NUMBERS = st.integers(0, 120).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", " + ", "- "]), inner).map("".join),
        inner.map("({})".format),
    ),
    max_leaves=12,
)


@given(EXPRESSIONS.filter(lambda text: len(text) <= MAX_CHARS))
def test_value_and_numbers_equal_those_of_the_python_parser(text: str) -> None:
    value, numbers = evaluate_with_ast(text)
    parsed = parse_expression(text)
    assert parsed.value == value
    assert list(parsed.numbers) == numbers


@given(st.text(alphabet="0123456789+-*() ", max_size=12).filter(lambda text: not re.search(r"0\d", text)))
def test_accepts_exactly_the_expressions_of_python_with_equal_values(text: str) -> None:
    try:
        expected = evaluate_with_ast(text.strip())
    except (
        SyntaxError,
        ValueError,
    ):  # ValueError: a unary operator or a call, which countdown does not allow
        with pytest.raises(MalformedExpression):
            parse_expression(text)
    else:
        assert (parse_expression(text).value, list(parse_expression(text).numbers)) == expected


@given(st.text())
def test_any_text_is_parsed_or_malformed(text: str) -> None:
    try:
        parsed = parse_expression(text)
    except MalformedExpression:
        return
    assert parsed.numbers, "an expression without a number"


MALFORMED = """
+ -1 1+ 1+-2 (1 1) )( () 2(3) (1)(2) 007 1**2 1//2 1/2
1.5 1e3 1_0 0x1 ² ١+٢ 1×2 1−2 __import__('os') 1+2=3 1+2; 1,2
"""


@pytest.mark.parametrize("text", ["", " ", "1 2", *MALFORMED.split()])
def test_malformed(text: str) -> None:
    with pytest.raises(MalformedExpression):
        parse_expression(text)


@pytest.mark.parametrize(
    "text", ["(" * 10**6, "9" * 10**6, "1+" * 500_000 + "1", "(" * 10**5 + "1" + ")" * 10**5, " " * 10**6]
)
def test_hostile_texts_are_rejected_quickly(text: str) -> None:
    started = time.process_time()
    with pytest.raises(MalformedExpression):
        parse_expression(text)
    assert time.process_time() - started < 0.1


def test_deep_nesting_within_the_length_limit_is_parsed() -> None:
    deep = (MAX_CHARS - 1) // 2
    assert parse_expression("(" * deep + "7" + ")" * deep).value == 7
