"""Rewrites of plain text: the example of every row, text that must stay, and the longest text."""

import re
from fractions import Fraction

import pytest

from bandpo_cli.grading.quantities import conversion, unit_of
from bandpo_cli.grading.rewrites import (
    CHARACTERS,
    EXPRESSIONS,
    MAX_ANSWER_CHARS,
    list_items,
    named_values,
    readable,
    split,
    tidy,
    values_first,
)  # fmt: skip


@pytest.mark.parametrize("row", [*CHARACTERS, *EXPRESSIONS], ids=lambda row: row[2])
def test_every_row_does_what_its_example_shows(row):
    pattern, replacement, example, result = row
    assert re.sub(pattern, replacement, example) == result


READABLE = {
    "2*sqrt(x+1)/3": r"2\cdot \sqrt {x+1}/3", "e^(2(x+1))": "e^{2(x+1)}", "x**(1/2)": "x^{1/2}", "√3/2": r"\sqrt{3}/2",
    "(-∞, 1)": r"(-\infty , 1)", r"\frac{\sqrt 3}{2}": r"\frac{\sqrt{3}}{2}", "prison": "prison",
    r"\text{log of pi}": r"\text{log of pi}", r"\mathrm{sin}": r"\mathrm{sin}", r"\alpha + \pi": r"\alpha + \pi",
}  # fmt: skip


def test_readable_text():
    assert {text: readable(text) for text in READABLE} == READABLE


def test_latex_is_not_rewritten_twice():
    for row in EXPRESSIONS:
        once = readable(row[2])
        assert readable(once).replace(" ", "") == once.replace(" ", "")


PIECES = [
    "(", ")", "**", "^(", "sqrt(", r"\frac", r"\frac{", "1", "1.", "0.1", " ", "3 ", "[", "{", r"\color{", "√", "a",
]  # fmt: skip


def test_answers_of_the_largest_size_are_rewritten():
    for piece in PIECES:
        text = (piece * MAX_ANSWER_CHARS)[:MAX_ANSWER_CHARS]
        for function in (tidy, readable, split, named_values, list_items, values_first, unit_of):
            function(text)
    assert tidy("½" * (MAX_ANSWER_CHARS + 1)) == "½" * (MAX_ANSWER_CHARS + 1)


def test_names_and_lists():
    assert named_values("x=1, y=2") == named_values("(x,y)=(1,2)") == {"x": "1", "y": "2"}
    assert named_values("x = 5") == named_values("1, 2") == named_values("x+y=1, x=2") == {}
    assert values_first("x_1=2, x_2=3") == values_first("x=2 or x=3") == "2, 3"
    assert values_first("5 = x") == "x = 5"
    assert values_first("x=1, y=2") == "x=1, y=2"
    assert list_items(r"\left(1, (2,3)\right)") == ["1", "(2,3)"]
    assert list_items("(0,1),(2,3)") == ["(0,1)", "(2,3)"]
    assert split(r"1 \text{ and } \{2, 3\}") == ["1", r"\{2, 3\}"]


CONVERSIONS = [
    ("km", "m", Fraction(1, 1000)), (" kilograms", "g", Fraction(1, 1000)), ("km/h", "mph", Fraction("1.609344")),
    ("cm^2", "square cm", 1), ("apples", "cm", 1), ("dollars per day", "$", 1), ("degrees Celsius", "degrees F", None),
    ("cm", "cm^2", None), ("$", "€", None), ("degrees", "radians", None), ("km/h", "km", None), ("s", "kg", None),
]  # fmt: skip


def test_units_of_one_kind_are_converted_and_others_differ():
    for first, second, factor in CONVERSIONS:
        assert conversion(unit_of(first), unit_of(second)) == factor, (first, second)
    assert unit_of("in total") == unit_of("x") == unit_of("") == ()
