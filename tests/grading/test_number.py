"""Plain numbers: the usual notations are read, compared exactly, and other texts are rejected."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bandpo_cli.grading.numbers import MAX_CHARS, equal, read_number, rounds_to


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(
            ("18", 18),
            ("18.", 18),
            ("27.0", 27),
            ("007", 7),
            (".5", "1/2"),
            ("+2", 2),
            ("-5", -5),
            ("− 5", -5),
        ),
        *(
            ("1,234", 1234),
            ("1{,}234,567", 1234567),
            ("10\\,234", 10234),
            ("10,\\!000", 10000),
            ("1,234.50", "2469/2"),
        ),
        *(("$18", 18), ("\\$18.50", "37/2"), ("-$5", -5), ("€5", 5), ("\\approx 5", 5)),
        *(
            ("1/2", "1/2"),
            ("-1./3", "-1/3"),
            ("3 1/2", "7/2"),
            ("\\dfrac{-1}{3}", "-1/3"),
            ("3\\frac12", "7/2"),
        ),
        *(("4.5e33", 45 * 10**32), ("1.5 \\times 10^{-3}", "3/2000"), ("2x10^3", 2000), ("10^{5}", 10**5)),
        *(
            ("18 eggs per day", 18),
            ("5cm^2", 5),
            ("5 \\mathrm{~cm}", 5),
            ("45^\\circ", 45),
            ("3 miles/hour", 3),
        ),
        *(("5 min", 5), ("5 in the morning", 5), ("5 m", 5)),
        *(("5 dollars at the farmers’ market", 5), ("5 hours on average", 5), ("5 km by bus", 5)),
        *(("approximately 5 km", 5), ("About $5", 5), ("USD 5", 5), ("-₹5", -5), ("Rs. 5", 5)),
    ],
)
def test_read_plain_numbers(text: str, value: int | str) -> None:
    number = read_number(text)
    assert number is not None
    assert number.value == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " ",
            "-",
            "$",
            "x",
            "five",
            "½",
            "٣",
            "5²",
            "1_000",
            "0x10",
            "1e9999",
            "1/0",
            "\\frac{1}{0}",
            "12:30",
        ),
        *(
            "1,2",
            "1,23",
            "1,2345",
            "5 5",
            "5 or 6",
            "5 or more",
            "5 and",
            "5, 6",
            "5^2",
            "5!",
            "5 x",
            "5x",
            "5ab",
            "5i",
        ),
        *(
            "5 pi",
            "5\\pi",
            "5\\sqrt{2}",
            "5 sqrt",
            "5 half",
            "1/2/3",
            "5+6",
            "5=6",
            "not 5",
            "--5",
            "5 minus",
            "5 eggs 3",
            "5 at",
            "5 by the hour",
            "about",
            "aboutx 5",
        ),
    ],
)
def test_other_texts_are_not_plain_numbers(text: str) -> None:
    assert read_number(text) is None


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**30), max_value=10**30))
def test_decimals_equal_those_of_python(value: Decimal) -> None:
    for text in (str(value), f"{value:f}", f"{value:,f}"):
        number = read_number(text)
        assert number is not None
        assert number.value == Fraction(value)


@given(st.text(alphabet="0123456789.,-+/$%{}\\^ eEx*×frac", max_size=20), st.text(max_size=5))
def test_surrounding_spaces_are_ignored(text: str, tail: str) -> None:
    bare = (text + tail).strip()
    assume(not bare.endswith("\\"))  # a backslash and a space are a LaTeX space
    assert read_number(f"  {text}{tail} ") == read_number(bare)


def same(first: str, second: str) -> bool:
    one, other = read_number(first), read_number(second)
    assert one is not None
    assert other is not None
    assert equal(one, other) == equal(other, one)
    return equal(one, other)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        *(("50%", "50", True), ("50\\%", "1/2", True), ("50%", "0.5%", False), ("50 percent", "50%", True)),
        *(
            ("1.5 million", "1,500,000", True),
            ("1.5 million", "1.5", True),
            ("1.5 million", "1.5 thousand", False),
        ),
        *(
            ("1500 thousand", "1.5 million", True),
            ("50%", "5", False),
            ("0.1", "1/10", True),
            ("0.33", "1/3", False),
        ),
        *(("1.77e-6", "2.26e-10", False), ("1000000", "1000001", False), ("1e-5", "0.00001", True)),
    ],
)
def test_equality(first: str, second: str, expected: bool) -> None:
    assert same(first, second) is expected


@pytest.mark.parametrize(
    ("exact", "decimal", "expected"),
    [
        *(
            ("1/3", "0.333333", True),
            ("1/3", "0.33333", False),
            ("1/3", "0.333334", False),
            ("-2/3", "-0.666667", True),
        ),
        *(("1/300000", "0.000003", False), ("0.333333", "0.3333333", False), ("1000001/3", "333334", False)),
    ],
)
def test_fraction_equals_its_decimal_to_six_digits(exact: str, decimal: str, expected: bool) -> None:
    first, second = read_number(exact), read_number(decimal)
    assert first is not None
    assert second is not None
    assert rounds_to(first, second) is expected


def test_number_of_digits_is_limited() -> None:
    assert read_number("9" * MAX_CHARS) is not None
    assert read_number("9" * (MAX_CHARS + 1)) is None
