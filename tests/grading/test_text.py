"""Text comparison: differences in LaTeX appearance are ignored, other differences are not."""

from __future__ import annotations

import pytest

from bandpo_cli.grading.answers import same_text


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("\\text{Monday}", "monday"),
        ("\\text{(C)}", "C"),
        ("\\dfrac{1}{2}x", "\\frac{1}{2} x"),
        ("\\left[ 0, 1 \\right)", "[0,1)"),
        ("(0,\\, \\infty)", "(0, \\infty)"),
        ("$\\mathrm{even}$", "even."),
        ("e^{t} / 3", "e^{t}/3"),
        ("I(0)", "$I(0)$"),
    ],
)
def test_same_text_in_another_form(gold: str, answer: str) -> None:
    assert same_text(gold, answer)
    assert same_text(answer, gold)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("", ""),
        ("\\text{ }", "$"),
        ("55", "5 5"),
        ("m", "M"),
        ("x_1", "X_1"),
        ("[0,1)", "(0,1)"),
        ("Monday", "Tuesday"),
        ("\\leftarrow", "arrow"),
        ("a b", "ab"),
        ("\\{1\\}", "{1}"),
    ],
)
def test_different_texts(gold: str, answer: str) -> None:
    assert not same_text(gold, answer)
