r"""Tells whether two answers are the same text, up to spaces and the commands that only change how LaTeX looks."""

# MERGED: First stages of the graders `number` and `math`: whatever plain numbers and equal texts decide, at once.
# MERGED: What a completion votes for in a majority vote: its final answer, written in one way for each value.
from __future__ import annotations

import re
from collections.abc import Callable

from bandpo_cli.extract import final_answer, unwrap
from bandpo_cli.grading.numbers import Number, equal, read_number, rounds_to
from bandpo_cli.registries import GRADERS, GraderEntry, load_attribute
from bandpo_cli.types import CORRECT, MALFORMED, WRONG, Grade, Problem

_DISPLAY_COMMANDS = re.compile(
    r"\\(?:left|right|big|Big|bigl|bigr|Bigl|Bigr|displaystyle|textstyle|limits)(?![A-Za-z])|\$|\\[()\[\]]"
)
_SPACES = re.compile(r"\\(?:quad|qquad)(?![A-Za-z])|\\[,;:! ]|~")
_FRACTIONS = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_FONTS = re.compile(
    r"\\(?:text(?:bf|rm|it|normal|sf|tt)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname)\s*\{([^{}]*)\}"
)
_FREE_SPACE = re.compile(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])")
_CHOICE = re.compile(r"\(([A-Za-z])\)")
_WORDS = re.compile(r"[A-Za-z]{2,}(?: [A-Za-z]+)*")


def same_text(gold: str, answer: str) -> bool:
    """True when both say the same in the same characters; an empty text is equal to none."""
    canonical = canonical_text(gold)
    return bool(canonical) and canonical == canonical_text(answer)


def canonical_text(answer: str) -> str:
    r"""Drop what does not change what is said: fonts, spacing, `\left`, the size of fractions, the case of words.

    A space between two letters or digits stays, so that "5 5" is not 55.
    """
    text = _FONTS.sub(
        r" \1 ", _FRACTIONS.sub(r"\\frac", _SPACES.sub(" ", _DISPLAY_COMMANDS.sub(" ", answer)))
    )
    text = _FREE_SPACE.sub("", " ".join(text.replace(r"\%", "%").split())).removesuffix(".")
    choice = _CHOICE.fullmatch(text)
    if choice:
        return choice[1]
    return text.casefold() if _WORDS.fullmatch(text) else text


MAX_ANSWER_CHARS = 1000
"""A longer final answer is malformed: it bounds the work of a worker before its deadline has to."""

_EQUALS = re.compile(r"(?<![\\<>!:=])=(?!=)")


def grade_number(problem: Problem, text: str) -> Grade:
    """`correct` when the final answer is the reference's number exactly; `malformed` when it is no plain number.

    Of an equation ("3 * 6 = 18") the right side counts.

    Raises:
        ValueError: the reference is no plain number.
    """
    gold = read_number(unwrap(problem.answer))
    if gold is None:
        raise ValueError(
            f"its answer {problem.answer!r:.60} is no plain number; take the grader 'math' for it"
        )
    answer = _final_answer(text)
    number = None if answer is None else read_number(right_hand_side(answer))
    if number is None:
        return MALFORMED
    return CORRECT if equal(gold, number) else WRONG


def grade_math(problem: Problem, text: str) -> Grade | tuple[str, str]:
    """A verdict where plain numbers or equal texts decide; else (reference, answer) for `symbolic.equal`."""
    answer = _final_answer(text)
    if answer is None:
        return MALFORMED
    reference = unwrap(problem.answer)
    gold, number = read_number(reference), read_number(answer)
    if gold is not None and number is not None and not gold.has_letter:  # "3 m" may be three masses
        right = equal(gold, number) or rounds_to(gold, number) or rounds_to(number, gold)
        return CORRECT if right else WRONG
    return CORRECT if same_text(reference, answer) else (reference, answer)


def right_hand_side(answer: str) -> str:
    """Return what stands to the right of the last equals sign, all of it where there is none."""
    return _EQUALS.split(answer)[-1].strip()


def _final_answer(text: str) -> str | None:
    answer = final_answer(text)
    return None if answer is None or len(answer) > MAX_ANSWER_CHARS else answer


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
    path = GRADERS[grader].vote if grader in GRADERS else GraderEntry.vote
    answer: str | None = load_attribute(path)(text)
    return answer


def vote_expression(text: str) -> str | None:
    """Return the final answer of `text` as a vote of the grader `math` and of custom graders."""
    return _write_vote(final_answer(text), _write_expression)


def vote_number(text: str) -> str | None:
    """Return the final answer of `text` as a vote of the grader `number`."""
    return _write_vote(final_answer(text), _write_number)


def vote_countdown(text: str) -> str | None:
    """Return `text` without spaces as a vote of the grader `countdown`."""
    return _write_vote(text.strip(), lambda answer: _FREE_SPACES.sub("", answer))


def _write_vote(answer: str | None, write: Callable[[str], str | None]) -> str | None:
    return None if not answer or len(answer) > MAX_ANSWER_CHARS else write(answer) or None


def _write_number(answer: str) -> str | None:
    number = read_number(right_hand_side(answer))
    return None if number is None else _number_text(number)


def _write_expression(answer: str) -> str:
    bare = canonical_text(answer)
    number = read_number(answer) or read_number(bare)  # \textbf{0.50} is no number yet
    return bare if number is None or number.has_letter else _number_text(number)  # "3 m" may be three masses


def _number_text(number: Number) -> str:
    scale = "" if number.scale == 1 else f" × {number.scale}"
    return f"{number.value}{scale}"
