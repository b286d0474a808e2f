r"""What may stand after a number without changing it: units as words, in \text{...}, degrees; and what scales it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_SCALES = {
    "percent": Fraction(1, 100),
    "hundred": Fraction(100),
    "thousand": Fraction(10**3),
    "million": Fraction(10**6),
    "billion": Fraction(10**9),
    "trillion": Fraction(10**12),
}
_NO_UNIT = re.compile(
    r"and|but|cosh?|cot|csc|cubed|det|exp|factorial|half|halves|inf|infinity|lim|log|minus|mod|not|or|over|pi|plus"
    r"|sinh?|sqrt|squared|tanh?",
    re.IGNORECASE,
)
"""Words that make another number, or another claim, of the number before them."""
_SHORT_UNIT = re.compile(
    r"[msghlLAVWJNKCF]|[cmkn]m|k?g|mg|in|ft|yd|mi|m[lL]|lb|oz|hr|Hz|k[WJ]|eV|[ap]m|AM|PM|a|an|of|to|US"
)
"""Units of one or two letters, and words between units; any others are variables, as in 5ab."""

_FONT = re.compile(r"\\(?:text(?:bf|rm|it|normal)?|math(?:rm|bf|it)|mbox|operatorname)\s*\{([^{}]*)\}")
_DEGREES = re.compile(r"\^ ?(?:\\circ|\{ ?\\circ ?\})|\\degree|\\circ|°")
# One letter at a time: with "[A-Za-z]+" here, a text that fails would take time exponential in its letters.
_UNIT = re.compile(r"(?:[A-Za-z ./()'*²³-]|\^ ?(?:\{ ?-?[1-4] ?\}|-?[1-4]))*")


@dataclass(frozen=True)
class Unit:
    """What follows a number: its scale (1/100 for percent, 10**6 for million), and whether it may be a variable."""

    scale: Fraction
    is_letter: bool


NOTHING = Unit(Fraction(1), is_letter=False)


def read_unit(text: str) -> Unit | None:
    """Read what follows a number; None when it is neither nothing nor a unit."""
    if not text.strip():
        return NOTHING
    is_letter = len(text.strip()) == 1 and text.strip().isalpha()
    is_attached = text[0].isascii() and text[0].isalpha()
    text = _DEGREES.sub(" degrees ", text).replace("\\%", "%").replace("%", " percent ")
    text = _FONT.sub(r" \1 ", text)
    words = re.findall(r"[A-Za-z]+", text)
    if not words or not _UNIT.fullmatch(text) or not all(map(_is_unit, words)):
        return None
    if is_attached and not _SHORT_UNIT.fullmatch(words[0]):
        return None
    return Unit(_SCALES.get(words[0].lower(), Fraction(1)), is_letter)


def _is_unit(word: str) -> bool:
    return bool(_SHORT_UNIT.fullmatch(word)) or (len(word) > 2 and not _NO_UNIT.fullmatch(word))
