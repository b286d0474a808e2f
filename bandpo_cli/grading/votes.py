"""What a completion votes for in a majority vote: its final answer, written in one way for each value."""

from __future__ import annotations

from bandpo_cli.extract import final_answer
from bandpo_cli.grading.answers import MAX_ANSWER_CHARS
from bandpo_cli.grading.number import read_number
from bandpo_cli.grading.text import canonical_text


def voted_answer(text: str, grader: str) -> str | None:
    r"""Return the answer in `text` in a canonical form; None for a completion that has none.

    Plain numbers count by value (0.50 is 1/2; 50% stays apart from 0.5, since either may be meant), other answers by
    their text without what LaTeX only dresses it with. Expressions that are equal in value alone (2\sqrt{2} and
    \sqrt{8}) are different votes. A countdown completion is its answer whole.
    """
    answer = text.strip() if grader == "countdown" else final_answer(text)
    if not answer or len(answer) > MAX_ANSWER_CHARS:
        return None
    number = None if grader == "countdown" else read_number(answer)
    if number is None or number.has_letter:
        return canonical_text(answer) or None
    scale = "" if number.scale == 1 else f" × {number.scale}"
    return f"{number.value}{scale}"
