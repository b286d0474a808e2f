"""Units after a number: read in linear time, with the same accepted texts as an equivalent nested pattern."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys

import pytest

from bandpo_cli.grading import numbers
from bandpo_cli.grading.answers import grade_math
from bandpo_cli.types import Grade, Problem

NESTED = re.compile(r"(?:[A-Za-z]+|[ ./()'*²³-]|\^ ?(?:\{ ?-?[1-4] ?\}|-?[1-4]))*")
"""An ambiguous pattern for the same language, exponential in the letters of rejected texts: for short texts only."""
SENTENCE = " apples whereas the total number, "


def test_accepts_the_same_texts_as_the_nested_pattern_up_to_six_characters() -> None:
    texts = ["".join(each) for n in range(7) for each in itertools.product("a ^{}-15", repeat=n)]
    different = [
        text for text in texts if bool(NESTED.fullmatch(text)) != bool(numbers._UNIT.fullmatch(text))
    ]
    assert not different
    assert 100 < sum(bool(numbers._UNIT.fullmatch(text)) for text in texts) < len(texts) / 2


def test_accepts_the_same_texts_as_the_nested_pattern_on_random_pieces() -> None:
    pieces = [
        "km",
        "per hour",
        "/",
        "^{-2}",
        "^ 3",
        "^{ 4 }",
        "²",
        "(s)",
        "'",
        "-",
        " ",
        ".",
        "^5",
        ",",
        "é",
        "{",
        "ſ",
    ]
    rng = random.Random(0)
    accepted = 0
    for _ in range(20_000):
        text = "".join(rng.choices(pieces, k=rng.randrange(1, 6)))[:18]
        assert bool(NESTED.fullmatch(text)) == bool(numbers._UNIT.fullmatch(text)), text
        accepted += bool(NESTED.fullmatch(text))
    assert accepted > 1000


def test_accepts_the_same_single_characters_as_the_nested_pattern() -> None:
    for code in range(0x3000):
        assert bool(NESTED.fullmatch(chr(code))) == bool(numbers._UNIT.fullmatch(chr(code))), chr(code)


@pytest.mark.parametrize(
    "tail",
    ["' ' + 'a' * 200_000 + ','", "' word' * 40_000 + '5'", "' a^2' * 40_000 + '^'", f"{SENTENCE!r} * 6_000"],
)
def test_long_text_that_is_not_a_unit_is_rejected_without_backtracking(tail: str) -> None:
    code = f"from bandpo_cli.grading.numbers import read_unit; assert read_unit({tail}) is None"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_long_unit_is_accepted() -> None:
    assert numbers.read_unit(" apples" * 30_000) == numbers.NO_UNIT


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        (r"5000 pens should be produced for a cost of $\$ 200$.", "5000"),
        (f"5{SENTENCE}", "7"),
        ("7", f"5{SENTENCE}"),
        ("7", "5" + " some words that go on" * 40 + "!"),
    ],
)
def test_sentence_after_a_number_goes_to_the_symbolic_comparison(reference: str, answer: str) -> None:
    verdict = grade_math(Problem("1", "", reference, "set", "math"), f"Answer: {answer}")
    assert not isinstance(verdict, Grade)


def test_reference_sentence_with_two_numbers_is_correct_only_as_a_complete_answer() -> None:
    reference = r"5000 pens should be produced for a cost of $\$ 200$."
    problem = Problem("1", "", reference, "college_math", "math")
    verdict = grade_math(problem, rf"So we conclude: \boxed{{{reference}}}")
    assert isinstance(verdict, Grade)
    assert verdict.verdict == "correct"
    # The reference is not a plain number: one of its two numbers alone does not decide in the first stage.
    assert not isinstance(grade_math(problem, r"\boxed{200}"), Grade)
