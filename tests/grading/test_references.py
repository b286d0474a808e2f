"""References that the grader `math` cannot parse: their number and the first of them, and no worker for numbers."""

import logging
from unittest.mock import patch

import pytest

from bandpo_cli.config.batch_and_sampling import GradingConfig
from bandpo_cli.experiments.plan import check_graders
from bandpo_cli.grading import answers as references
from bandpo_cli.grading.answers import unparsed_references
from bandpo_cli.types import Problem

UNPARSED = [r"\frac{1}{", r"\undefinedthing{3}", "3 & 4"]


def problems(*answers: str, grader: str = "math") -> list[Problem]:
    return [Problem(f"p{index}", "", answer, "set", grader) for index, answer in enumerate(answers)]


def test_numbers_and_words_need_no_worker():
    plain = problems("18", "1,234.5 dollars", "Monday", r"\text{no solution}", "B", "½", "18 cm")
    with patch.object(references, "GraderWorkers", side_effect=AssertionError("a worker is spawned")):
        assert unparsed_references(plain, GradingConfig()) is None


@pytest.mark.slow
def test_references_that_cannot_be_parsed_are_counted_and_the_first_are_shown(caplog):
    read = ["√2", "x**2+1", "2 pi", r"\frac{1}{2}x", "x=1, y=2", r"\ln 2"]
    assert unparsed_references(problems(*read), GradingConfig()) is None
    with caplog.at_level(logging.WARNING, "bandpo_cli"):
        check_graders(problems("18", *read, *UNPARSED, "1 & 2"), trial=GradingConfig())
    first, (message,) = ", ".join(map(repr, UNPARSED)), caplog.messages
    line = "grader 'math': 4 of 10 references that are formulas cannot be parsed, so that only the same text"
    assert message == f"{line} is correct: {first}"
    with patch.object(references, "MAX_PARSED", 2):
        line = unparsed_references(problems(*UNPARSED), GradingConfig())
    assert "2 of 2 references that are formulas cannot be parsed (a sample of 3 formulas)" in line
