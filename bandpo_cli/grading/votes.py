"""What a completion votes for in a majority vote: its final answer, written in one way for each value."""

from __future__ import annotations

import re
from collections.abc import Callable

from bandpo_cli.extract import final_answer
from bandpo_cli.grading.answers import MAX_ANSWER_CHARS, right_side
from bandpo_cli.grading.number import Number, read_number
from bandpo_cli.grading.text import canonical_text

_FREE_SPACES = re.compile(r"(?<![0-9 ]) +| +(?![0-9 ])")  # those in "1 2" stay: it is not 12


def voted_answer(text: str, grader: str) -> str | None:
    r"""Return the answer in `text` in a canonical form; None for a completion that has none.

    Plain numbers count by value (0.50 is 1/2; 50% stays apart from 0.5, since either may be meant), other answers by
    their text without what LaTeX only dresses it with. Expressions that are equal in value alone (2\sqrt{2} and
    \sqrt{8}) are different votes. What the grader `number` cannot read does not vote, and of an equation it reads the
    right side. A countdown completion is its answer whole, spaces apart.

    Equal votes are judged alike, but for decimals that stand for a quotient: 0.333333 is right for 1/3 in `math`, and
    neither 0.3333330 nor 333333/1000000 is.
    """
    find, write = _VOTES.get(grader, (final_answer, _write_expression))
    answer = find(text)
    return None if not answer or len(answer) > MAX_ANSWER_CHARS else write(answer) or None


def _write_number(answer: str) -> str | None:
    number = read_number(right_side(answer))
    return None if number is None else _written(number)


def _write_expression(answer: str) -> str:
    bare = canonical_text(answer)
    number = read_number(answer) or read_number(bare)  # \textbf{0.50} is no number yet
    return bare if number is None or number.has_letter else _written(number)  # "3 m" may be three masses


def _written(number: Number) -> str:
    scale = "" if number.scale == 1 else f" × {number.scale}"
    return f"{number.value}{scale}"


_VOTES: dict[str, tuple[Callable[[str], str | None], Callable[[str], str | None]]] = {
    "number": (final_answer, _write_number),
    "countdown": (str.strip, lambda answer: _FREE_SPACES.sub("", answer)),
}
"""By grader: what finds the answer in a text, and what writes it in one way."""
