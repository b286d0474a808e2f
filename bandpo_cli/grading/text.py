r"""Tells whether two answers are the same text, up to spaces and the commands that only change how LaTeX looks."""

from __future__ import annotations

import re

_LOOKS = re.compile(
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
    text = _FONTS.sub(r" \1 ", _FRACTIONS.sub(r"\\frac", _SPACES.sub(" ", _LOOKS.sub(" ", answer))))
    text = _FREE_SPACE.sub("", " ".join(text.replace(r"\%", "%").split())).removesuffix(".")
    choice = _CHOICE.fullmatch(text)
    if choice:
        return choice[1]
    return text.casefold() if _WORDS.fullmatch(text) else text
