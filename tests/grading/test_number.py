"""Plain numbers and units: the usual notations are read in linear time, compared exactly, and other texts rejected."""

import re
from fractions import Fraction

from hypothesis import assume, given
from hypothesis import strategies as st

from bandpo_cli.grading.answers import grade_math, grade_number
from bandpo_cli.grading.quantities import Number, equal, read_number, read_unit, rounds_to
from bandpo_cli.grading.rewrites import MAX_ANSWER_CHARS
from bandpo_cli.types import CORRECT, WRONG, Grade, Problem

NUMBERS = r"""
18: 18 | 18. | 18 eggs per day | $18
27: 27.0
7: 007
2: +2
1/2: .5 | 1/2
-5: -5 | − 5 | -$5 | -₹5
1234: 1,234
1234567: 1{,}234,567
10234: 10\,234
10000: 10,\!000
2469/2: 1,234.50
37/2: \$18.50
-1/3: -1./3 | \dfrac{-1}{3}
7/2: 3 1/2 | 3\frac12
3/2000: 1.5 \times 10^{-3}
2000: 2x10^3
100000: 10^{5}
45: 45^\circ
3: 3 miles/hour
18: (18) | 18mph | 18hours | 18 GB | 18 € | 18¢ | 18 kWh | 18 ppm | 18°C
5: €5 | \approx 5 | approximately 5 km | About $5 | USD 5 | Rs. 5
5: 5cm^2 | 5 \mathrm{~cm} | 5 min | 5 in the morning | 5 m
5: 5 dollars at the farmers’ market | 5 hours on average | 5 km by bus
4500000000000000000000000000000000: 4.5e33
"""
OTHER_TEXTS = r"""
- | $ | x | five | ½ | ٣ | 5² | 1_000 | 0x10 | 1e9999 | 1/0 | \frac{1}{0} | 12:30 | 1,2 | 1,23 | 1,2345 | 5, 6 | --5
5 5 | 5 or 6 | 5 or more | 5 and | 5^2 | 5! | 5 x | 5x | 5ab | 5i | 5 pi | 5\pi | 5\sqrt{2} | 5 sqrt | 5 half | 5 minus
1/2/3 | 5+6 | 5=6 | not 5 | 5 eggs 3 | 5 at | 5 by the hour | about | aboutx 5
"""


def read(text: str) -> Number:
    number = read_number(text)
    assert number is not None, text
    return number


def test_read_plain_numbers():
    for line in NUMBERS.strip().splitlines():
        value, _, texts = line.partition(": ")
        assert {read(text).value for text in texts.split(" | ")} == {Fraction(value)}, line


def test_other_texts_are_not_plain_numbers():
    for text in ("", " ", *re.split(r" \| |\n", OTHER_TEXTS.strip())):
        assert read_number(text) is None, text
    assert read_number("9" * MAX_ANSWER_CHARS) is not None
    assert read_number("9" * (MAX_ANSWER_CHARS + 1)) is None


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**30), max_value=10**30))
def test_decimals_equal_those_of_python(value):
    for text in (str(value), f"{value:f}", f"{value:,f}"):
        assert read(text).value == Fraction(value)


@given(st.text(alphabet="0123456789.,-+/$%{}\\^ eEx*×frac", max_size=20), st.text(max_size=5))
def test_surrounding_spaces_are_ignored(text, tail):
    bare = (text + tail).strip()
    assume(not bare.endswith("\\"))  # a backslash and a space are a LaTeX space
    assert read_number(f"  {text}{tail} ") == read_number(bare)


EQUAL = """50%|50 50\\%|1/2 50{percent}|50% 1.5{million}|1,500,000 1.5{million}|1.5 1500{thousand}|1.5{million} 0.1|1/10
1e-5|0.00001"""
DIFFERENT = "50%|0.5% 1.5{million}|1.5{thousand} 50%|5 0.33|1/3 1.77e-6|2.26e-10 1000000|1000001"
ROUNDED = "1/3|0.333333 -2/3|-0.666667"
NOT_ROUNDED = "1/3|0.33333 1/3|0.333334 1/300000|0.000003 0.333333|0.3333333 1000001/3|333334"


def test_equality_and_fractions_that_round_to_a_decimal_of_six_digits():
    for function, equal_pairs, other_pairs in ((equal, EQUAL, DIFFERENT), (rounds_to, ROUNDED, NOT_ROUNDED)):
        for pairs, expected in ((equal_pairs, True), (other_pairs, False)):
            for pair in pairs.split():
                first, second = (read(text.replace("{", " ").strip("}")) for text in pair.split("|"))
                assert function(first, second) is expected, pair
                assert equal(first, second) is equal(second, first), pair


FORMS_OF_18 = [
    "18,", "18;", "(18)", "18mph", "18hours", "18 GB", "'18'", "$18$,", "18 ✅", "18 o'clock", "\ufeff18",
]  # fmt: skip
OTHER_UNITS = ["18 km", "18 cm^2", "18 kg", "€18", "18 cents"]


def test_number_reads_punctuation_units_and_fractions():
    assert {grade_number(of_answer("18"), f"Answer: {text}") for text in FORMS_OF_18} == {CORRECT}
    same = {"1.5": "1½", "-18": "(-18)", "1/3": "0.\\overline{3}", "1000000": "1 000 000", "18 cm": "0.18 m"}
    for reference, text in same.items():
        assert grade_number(of_answer(reference), f"Answer: {text}") == CORRECT, text
    assert grade_number(of_answer("2 million dollars"), "Answer: 2 million euros") == WRONG
    assert grade_number(of_answer("10 am"), "Answer: 10 pm") == WRONG
    assert {grade_number(of_answer("18 cm"), f"Answer: {text}") for text in OTHER_UNITS} == {WRONG}
    assert grade_number(of_answer("$18"), "Answer: 18 dollars per day") == CORRECT


def of_answer(answer: str) -> Problem:
    return Problem("1", "", answer, "set", "number")


SENTENCE = " apples whereas the total number, "


def test_long_text_that_is_not_a_unit_is_rejected_without_backtracking():
    """With backtracking it would take hours."""
    for text in (f" {'a' * 200_000},", " word" * 40_000 + "5", " a^2" * 40_000 + "^", SENTENCE * 6_000):
        assert read_unit(text) is None
    assert read_unit(" apples" * 30_000) == (1, False)


PENS = r"5000 pens should be produced for a cost of $\$ 200$."


def test_sentence_after_a_number_goes_to_the_symbolic_comparison():
    words = "5" + " some words that go on" * 40 + "!"
    sentence = f"5{SENTENCE}grows"
    cases = [(PENS, "5000"), (PENS, r"\boxed{200}"), (sentence, "7"), ("7", sentence), ("7", words)]
    for reference, answer in cases:
        verdict = grade_math(Problem("1", "", reference, "set", "math"), f"Answer: {answer}")
        assert not isinstance(verdict, Grade), reference
    same = Problem("1", "", PENS, "set", "math")
    assert grade_math(same, rf"So we conclude: \boxed{{{PENS}}}") == CORRECT
