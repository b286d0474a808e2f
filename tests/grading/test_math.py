"""Graders `math` and `number`: equal answers in any form are correct, and no number is taken from a sentence."""

from __future__ import annotations

import pytest

from bandpo_cli.config.run import GradingConfig
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.types import Grade, Problem


def pairs(table: str) -> list[list[str]]:
    """Return the pairs (reference, answer) of a table."""
    return [pair.split(" == ") for pair in table.strip().replace("\n", " | ").split(" | ")]


EQUAL = pairs(r"""
5 == 5.0 | 5 == x = 5 | 5 == 5 \text{ apples} | 5 == 2+3 | 5 == \sqrt{25} | 120 == 5! | 1,234 == 1234
\frac{1}{2} == 0.5 | \frac{1}{3} == 0.333333 | 15\% == 0.15 | 2\sqrt{2} == \sqrt{8} | 2\sqrt{2} == 2.828427
x^2+2x+1 == (x+1)^2 | x+1 == \frac{x^2-1}{x-1} | 1 == \sin^2(x)+\cos^2(x)
C_{1} e^{-2t}+C_2 == C_2+\frac{C_1}{e^{2t}} | 1+\sqrt{3} i == 1+i\sqrt{3} | \{1,2\} == 2, 1
(1,2) == \left(1, 2\right) | (-\infty, 2] == x \le 2 | [1,2] == x \in [1,2]
\begin{pmatrix}1\\2\end{pmatrix} == \begin{bmatrix}1\\2\end{bmatrix} | \sqrt{2}\text{ cm} == \sqrt{2}
\frac{1}{3} E_{1}+\frac{2}{3} E_{2} == \frac{E_1+2E_2}{3} | 2 L_{\odot} == L_\odot + L_\odot
6.02 \times 10^{23} == 60.2 \times 10^{22} | \text{Tuesday} == Tuesday
""")
DIFFERENT = pairs(r"""
5 == 6 | 5 == 5.0001 | 5 == 5 or 6 | 5 == 5 \text{ or } 6 | 5 == not 5 | 5 == \neq 5 | 5 == 5, 6 | 5,6 == 5
10 == 5 5 | 5 == x | x^2+1 == x^2+1.01 | C_1 e^{t} == C_1 e^{-t} | x == |x|+1 | \pi == 3.14 | \frac{1}{3} == 0.33
0.000002 == \sqrt{10^{-12}} | \frac{10^{-24}}{3} == \frac{10^{-24}}{7}
\sqrt{2} \cdot 10^{-20} == \sqrt{3} \cdot 10^{-20} | [1,2) == (1,2) | (-\infty, 2] == x < 2
\frac{37}{4} m == \frac{37}{4} | \frac{1}{m} t == \frac{1}{m} | E_{1} == E_{2} | \infty == -\infty
5 == \frac{0}{0}
""")


def grades(pool: GraderPool, pairs: list[list[str]], form: str) -> list[Grade]:
    problems = [Problem(gold, "", gold, "test", "math") for gold, _ in pairs]
    return pool.grade(problems, [form % answer for _, answer in pairs])


@pytest.mark.parametrize("form", ["So.\nAnswer: %s", "Answer: $%s$.", "so $\\boxed{%s}$."])
def test_equal_answers_are_correct(pool: GraderPool, form: str) -> None:
    found = grades(pool, EQUAL, form)
    assert [pair for pair, grade in zip(EQUAL, found, strict=True) if grade.verdict != "correct"] == []
    assert {(grade.reward, grade.correct) for grade in found} == {(1.0, True)}


@pytest.mark.parametrize("form", ["So.\nAnswer: %s", "so $\\boxed{%s}$."])
def test_different_answers_are_wrong(pool: GraderPool, form: str) -> None:
    found = grades(pool, DIFFERENT, form)
    assert [pair for pair, grade in zip(DIFFERENT, found, strict=True) if grade.verdict != "wrong"] == []
    assert {(grade.reward, grade.correct) for grade in found} == {(0.0, False)}


@pytest.mark.parametrize(
    "text", ["", "5", "the answer is 5", "\\boxed{5", "Answer:", f"Answer: {'5+' * 600}5"]
)
def test_no_answer_in_the_required_form_is_malformed(pool: GraderPool, text: str) -> None:
    for grader in ("math", "number"):
        [grade] = pool.grade([Problem("p", "", "5", "test", grader)], [text])
        assert (grade.verdict, grade.reward, grade.correct) == ("malformed", 0.0, False)


NUMBERS = [
    ("18", "18 eggs", "correct"), ("18", "3 \\times 6 = 18", "correct"), ("18", "19", "wrong"),
    ("0.333333", "1/3", "wrong"), ("18", "eighteen", "malformed"), ("18", "9+9", "malformed"),
    ("x+1", "18", "grader-error"),
]  # fmt: skip


def test_number_grader() -> None:
    problems = [Problem("p", "", gold, "test", "number") for gold, _, _ in NUMBERS]
    with GraderPool(GradingConfig()) as pool:
        grades = pool.grade(problems, [f"Answer: {answer}" for _, answer, _ in NUMBERS])
        assert "problem p: its answer 'x+1' is not a plain number" in pool.errors["number"]
    assert [grade.verdict for grade in grades] == [verdict for _, _, verdict in NUMBERS]
