r"""Majority votes and text comparison: equal votes are answers that the grader cannot grade differently."""

from contextlib import suppress
from itertools import product

import pytest

from bandpo_cli.grading.answers import final_answer, grade_math, grade_number, right_hand_side, voted_answer
from bandpo_cli.grading.countdown import grade_countdown
from bandpo_cli.grading.quantities import in_unit_of, read_plain_number
from bandpo_cli.types import Grade, Problem


def vote(answer: str, grader: str = "math") -> str | None:
    return voted_answer(f"So it is.\nAnswer: {answer}", grader)


EQUAL_VOTES = r"""
0.5 | 1/2 | \frac12 | \dfrac{1}{2} | .50 | 2/4 | $\frac{1}{2}$ | \textbf{0.50}
1000 | 1,000 | 1{,}000 | 1000. | 1e3 | 10^3 | \$1,000 | 1000 dollars | \displaystyle 1000
50% | 50\% | 50 percent | 50.0%
-2 | −2 | \text{-2} | -2.0 | -4/2
\text{Monday} | monday | \mathrm{Monday}. | **Monday**
\left[0, 1\right) | [0,1) | [0,\, 1)
\text{(C)} | C | (C)
\frac{x}{2} | \dfrac{x}{2} | \tfrac{x} {2}
18 | $18$ dollars | 18 because 9 * 2 = 18 | 18 (nine eggs at $2 each)
\emptyset | \varnothing | \{ \}
1.5 million | 1.5 Million | 3/2 million
"""


def test_equal_votes():
    for line in EQUAL_VOTES.strip().splitlines():
        forms = product(("thus \\boxed{{{}}}.", "Answer: {}"), line.split(" | "))
        (shared,) = {voted_answer(text.format(form), "math") for text, form in forms}
        assert shared is not None, line


def test_different_votes():
    """A percent sign has two readings, a letter may be a variable, and there is no algebra."""
    forms = ("0.5", "50%", "50", "0.5%", "5 m", "5", r"2\sqrt{2}", r"\sqrt{8}", "x=5", "55", "5 5", "m", "M")
    forms += ("1,234", "1, 234", "x_1", "X_1", "[0,1)", "(0,1)", r"\{1\}", "{1}", "a b", "ab", "Monday")
    assert len({vote(form) for form in forms}) == len(forms)
    shown = ("1/2", "50 × 1/100", "monday")  # to users
    assert (vote("0.50"), vote("50%"), vote(r"\text{Monday}")) == shown


@pytest.mark.parametrize("grader", ["math", "number", "my.module:judge"])
def test_no_vote_without_an_answer(grader):
    boxes = (r"\boxed{", r"\boxed{}", r"\boxed{\text{ }}")
    for text in ("", "I do not know", "Answer:", f"Answer: {'9' * 1001}", *boxes):
        assert voted_answer(text, grader) is None


def test_longest_answers_and_numbers_vote():
    assert vote("x" * 1000) == "x" * 1000
    for form in ("9" * 1000, "9" * 990 + "e999", "0." + "1" * 990 + "e-999", "1" * 499 + "/" + "3" * 499):
        assert vote(form, "math")
        assert vote(form, "number")


def test_number_votes_for_the_number_that_its_grader_reads():
    """The right-hand side of an equation votes, a letter is read as a unit, and malformed answers do not vote."""
    assert vote("3 * 6 = 18", "number") == vote("18", "number") == vote("x = 18.0 m", "number") == "18"
    assert vote("Monday", "number") is None
    assert vote("3 * 6", "number") is None
    assert vote("3 * 6 = 18", "math") != "18"


def test_countdown_votes_with_the_complete_text():
    assert voted_answer(" (1 + 2) * 3\n", "countdown") == "(1+2)*3" == voted_answer("(1+2)*3", "countdown")
    assert voted_answer("1 2 + 3", "countdown") != voted_answer("12 + 3", "countdown")
    assert voted_answer("1 + 2", "countdown") != voted_answer("2 + 1", "countdown")
    assert voted_answer("Answer: 3", "countdown") != voted_answer("3", "countdown")
    assert voted_answer(" \n", "countdown") is None
    assert voted_answer("1" * 1001, "countdown") is None


FORMS = r"""
0.5 | 1/2 | \frac12 | \frac{2}{4} | .50 | 50% | 50\% | 50 percent | 0.5% | 50 | 5 | 5.0 | 5 m | 5m | 5 m. | $5$ m
5\text{ m} | 5 meters | \$5 | $5 | 5 dollars | = 5 | x = 5 | x=5 | 2 + 3 = 5 | 2+3 | \approx 5 | 1,000 | 1000 | 1e3
10^3 | 1 thousand | 1.5 million | 1500000 | 1500 thousand | -5 | −5 | - 5 | --5 | 3 1/2 | 3\frac12 | 7/2 | 3.5 | 1/3
0.333333 | 0.33 | \textbf{5} | \displaystyle 5 | \text{5 m} | \mathbf{50\%} | \big 1/2 | 5° | 5^\circ | 0 | -0
\text{Monday} | monday | Monday. | m | M | (C) | C | [0, 1) | \left[0,1\right) | 5 5 | 55 | \sqrt{8} | 2\sqrt{2} | x
5x | 5 x | y < 5 | 1e-5 | 0.00001 | 10^{-5} | 12:30 | 5! | 5,6
""".strip().replace("\n", " | ").split(" | ")  # fmt: skip
FORMATS = ["{}", "${}$", "{}.", r"\text{{{}}}"]


def has_unit_of(reference: str, answer: str) -> bool:
    """Return whether both are numbers without units of different kinds; votes ignore units, grades do not."""
    gold = read_plain_number(reference)
    number = read_plain_number(right_hand_side(final_answer(answer) or ""))
    return gold is None or number is None or in_unit_of(gold, number) == number


@pytest.mark.parametrize(("grader", "judge"), [("number", grade_number), ("math", grade_math)])
def test_equal_votes_get_equal_grades(grader, judge):
    """Every form in every format, with every tenth form as the reference; a second stage may grade what is no Grade."""
    answers_by_vote = {}
    for form, format_ in product(FORMS, FORMATS):
        answer = f"Answer: {format_.format(form)}"
        answers_by_vote.setdefault(voted_answer(answer, grader), set()).add(answer)
    answers_by_vote.pop(None, None)
    assert sum(len(answers) > 1 for answers in answers_by_vote.values()) > 15
    for reference in FORMS[::10]:
        problem = Problem("p", "?", reference, "s", grader)
        with suppress(ValueError):  # not a plain number: not a reference for the grader `number`
            for votes in answers_by_vote.values():
                answers = [answer for answer in votes if has_unit_of(reference, answer)]
                grades = {grade for answer in answers if isinstance(grade := judge(problem, answer), Grade)}
                assert len(grades) <= 1, (reference, answers)


def test_equal_countdown_votes_get_equal_grades():
    """Every text of up to four of these characters, as an answer to "make 12 of 12" and to "make 3 of 1 and 2"."""
    texts = ["".join(item) for length in range(1, 5) for item in product("12+ $.\n", repeat=length)]
    for answer, numbers in (("12", "12"), ("3", "1 2")):
        problem = Problem("p", "?", answer, "s", "countdown", {"numbers": numbers})
        verdicts = {}
        for text in texts:
            verdict = grade_countdown(problem, text).verdict
            verdicts.setdefault(voted_answer(text, "countdown"), set()).add(verdict)
        assert {vote for vote, given in verdicts.items() if len(given) > 1} == set()
        assert {"correct"} in verdicts.values()


def test_decimals_that_stand_for_a_fraction_are_the_exception():
    """The docstring of `voted_answer` documents it; the grade of such a vote is the mean."""
    problem = Problem("p", "?", "1/3", "s", "math")
    first, second = "Answer: 0.333333", "Answer: 0.3333330"
    assert voted_answer(first, "math") == voted_answer(second, "math")
    assert grade_math(problem, first) != grade_math(problem, second)
