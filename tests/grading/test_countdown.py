"""Countdown grader: agrees with Python's values, gives the first verdict that applies, rejects other texts."""

import re

from hypothesis import given
from hypothesis import strategies as st

from bandpo_cli.grading.countdown import MAX_CHARS, evaluate_expression, grade_countdown
from bandpo_cli.types import Problem

PROBLEM = Problem("p", "1 3 7 8=28:", "28", "countdown", "countdown", {"numbers": "1 3 7 8"})


VERDICTS = {
    "correct": ["3*7+8-1", " (7*3) + (8-1) "], "wrong-value": ["1+3+7+8"],
    "wrong-numbers": ["3*7+8", "3*7+8-1-1", "4*7", "37-8-1", "28"], "malformed": ["3*7+8-1=28", ""],
}  # fmt: skip


def test_verdicts():
    for verdict, texts in VERDICTS.items():
        right = verdict == "correct"
        for text in texts:
            grade = grade_countdown(PROBLEM, text)
            assert (grade.verdict, grade.correct, grade.reward) == (verdict, right, float(right))


def value_and_numbers(text: str) -> tuple[int, list[int]]:
    return eval(text), [int(number) for number in re.findall(r"\d+", text)]


def is_expression(text: str) -> bool:
    """Return True if replacing subexpressions by the letter n leaves one n: a grammar of three rules."""
    reduced, previous = text.strip(), ""
    while reduced != previous:
        previous, reduced = reduced, re.sub(r"\( *n *\)|\bn *[-+*] *n\b|\b(?:0|[1-9][0-9]*)\b", "n", reduced)
    return reduced == "n"


EXPRESSIONS = st.recursive(
    st.integers(0, 120).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", " + ", "- "]), inner).map("".join),
        inner.map("({})".format),
    ),
    max_leaves=12,
)


@given(EXPRESSIONS.filter(lambda text: len(text) <= MAX_CHARS))
def test_value_and_numbers_equal_those_of_python(text):
    assert evaluate_expression(text) == value_and_numbers(text)


@given(st.text(alphabet="0123456789+-*() ", max_size=12))
def test_accepts_exactly_the_expressions_of_the_grammar_with_equal_values(text):
    expected = value_and_numbers(text.strip()) if is_expression(text) else None
    assert evaluate_expression(text) == expected


MALFORMED = """
+ -1 1+ 1+-2 (1 1) )( () 2(3) (1)(2) 007 00 1**2 1//2 1/2
(0)0 1.5 1e3 1_0 0x1 ² ١+٢ 1×2 1−2 __import__('os') 1+2=3 1+2; 1,2
"""


HOSTILE = [
    "(" * 10**6, "9" * 10**7, "1+" * 500_000 + "1", f"{'(' * 10**5}1{')' * 10**5}", " " * 10**6, "1" * 255 + "x",
]  # fmt: skip
"""Without the limit of the length, or with a regular expression that backtracks, they would take hours."""


def test_malformed_texts():
    for text in ["", " ", "1 2", "1\n+2", "0 0", *MALFORMED.split(), *HOSTILE]:
        assert evaluate_expression(text) is None, text[:99]


def test_depth_is_not_limited_below_the_longest_text():
    assert evaluate_expression("(" * 127 + "1" + ")" * 127) == (1, [1])
    assert evaluate_expression("1+(" * 63 + "1" + ")" * 63) == (64, [1] * 64)
