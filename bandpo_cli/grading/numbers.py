r"""Plain numbers as people and LaTeX write them, with currency signs and units: reading and exact comparison.

The only arithmetic is one division and one power of ten, both bounded, so that any text is read in bounded time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_ANSWER_CHARS = 1000
"""Longer final answers are malformed. This bounds the work per answer before any deadline applies."""

_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]*)?|\.[0-9]+)"
_POWER = r"10 ?\^ ?(?:\{ ?[+-]?[0-9]{1,3} ?\}|[+-]?[0-9]{1,3})"
_SIGNED = rf"[+-]? ?{_DECIMAL}"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?) ?(?:"
    rf"(?:(?P<integer>{_INTEGER}) ?)?\\[dtc]?frac ?"
    rf"(?:\{{ ?(?P<numerator>{_SIGNED}) ?\}} ?\{{ ?(?P<denominator>{_SIGNED}) ?\}}"
    r"|(?P<numerator1>[0-9]) ?(?P<denominator1>[0-9]))"
    rf"|(?:(?P<integer2>{_INTEGER}) )?(?P<numerator2>{_DECIMAL}) ?/ ?(?P<denominator2>{_SIGNED})"
    rf"|(?P<power>{_POWER})"
    rf"|(?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>[+-]?[0-9]{{1,3}})(?![0-9])"
    rf"| ?(?:\\times|\\cdot|\*|×|·|x) ?(?P<times>{_POWER}))?)"
)
_UNICODE_VARIANTS = str.maketrans({"−": "-", "–": "-", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "’": "'"})
_GROUPED = re.compile(r"\{,\}|,\\!|(?<=[0-9])\\,(?=[0-9]{3})")  # 10{,}000, 10,\!000 and 10\,000
_LATEX_SPACING = re.compile(r"\\[,;:! ]|~|\\(?:left|right)(?![A-Za-z])")
_APPROXIMATELY = re.compile(r"(?:\\approx|\\sim|≈|=|(?i:approximately|about)(?![A-Za-z])) ?")
_CURRENCY = re.compile(r"([+-]?) ?(?:\\?\$|US\$|USD|EUR|GBP|Rs\.?|€|£|¥|₹) ?(?=[-+.0-9])")

_POWERS = {"percent": -2, "hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NON_UNIT_WORDS = re.compile(
    r"and|but|cosh?|cot|csc|cubed|det|exp|factorial|half|halves|inf|infinity|lim|log|minus|mod|not|or|over|pi|plus"
    r"|sinh?|sqrt|squared|tanh?",
    re.IGNORECASE,
)
"""Words that change the value of the number before them, or the statement about it."""
_SHORT_UNIT = re.compile(
    r"[msghlLAVWJNKCF]|[cmkn]m|k?g|mg|in|ft|yd|mi|m[lL]|lb|oz|hr|Hz|k[WJ]|eV|[ap]m|AM|PM|a|an|of|to|US"
)
"""Units of one or two letters, and words between units; any others are variables, as in 5ab."""
_PREPOSITION = re.compile(r"at|by|on")
"""Accepted after a unit, as in "18 dollars at the market"; directly after a number they may be variables."""
FONT = re.compile(
    r"\\(?:text(?:bf|rm|it|normal|sf|tt)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname)\s*\{([^{}]*)\}"
)
"""A font command of LaTeX; its group is the content."""
_DEGREES = re.compile(r"\^ ?(?:\\circ|\{ ?\\circ ?\})|\\degree|\\circ|°")
# One letter per repetition: with "[A-Za-z]+" here, a text that does not match takes time exponential in its letters.
_UNIT = re.compile(r"(?:[A-Za-z ./()'*²³-]|\^ ?(?:\{ ?-?[1-4] ?\}|-?[1-4]))*")


@dataclass(frozen=True)
class Number:
    """A number and the form it was written in.

    Attributes:
        value: The value of the digits.
        scale: 1/100 after a percent sign, 10**6 after "million", else 1. "50%" is equal to 50 and to 0.5.
        places: The number of digits after the decimal point of a plain decimal, else None.
        is_fraction: Whether it was written as a fraction.
        has_letter: Whether a single letter follows, which is a unit (5 m) or else a variable.
    """

    value: Fraction
    scale: Fraction
    places: int | None
    is_fraction: bool
    has_letter: bool

    def __str__(self) -> str:
        """Return the value, and the scale if it is not 1: `50 × 1/100`."""
        return f"{self.value}" + ("" if self.scale == 1 else f" × {self.scale}")


def read_number(text: str) -> Number | None:
    """Read a number with an optional currency sign before it and an optional unit after it.

    Return None for anything else and for texts longer than `MAX_ANSWER_CHARS` characters.
    """
    if len(text) > MAX_ANSWER_CHARS:
        return None
    text = " ".join(_LATEX_SPACING.sub(" ", _GROUPED.sub(",", text.translate(_UNICODE_VARIANTS))).split())
    if approximately := _APPROXIMATELY.match(text):
        text = text[approximately.end() :]
    text = _CURRENCY.sub(r"\1", text, count=1)
    match = _NUMBER.match(text)
    unit = read_unit(text[match.end() :]) if match else None
    if match is None or unit is None:
        return None
    try:
        value = _value(match)
    except ZeroDivisionError:
        return None
    is_fraction = not (match["power"] or match["decimal"])
    is_plain = match["decimal"] and not (match["exponent"] or match["times"])
    places = len(match["decimal"].partition(".")[2]) if is_plain else None
    scale, has_letter = unit
    return Number(-value if match["sign"] == "-" else value, scale, places, is_fraction, has_letter)


def equal(first: Number, second: Number) -> bool:
    """Return True if the values are exactly equal.

    If only one of the two has a percent sign or a word like "million", the values with and without it are compared.
    """
    if first.scale == second.scale:
        return first.value == second.value
    scaled = first.value * first.scale == second.value * second.scale
    return scaled or (1 in (first.scale, second.scale) and first.value == second.value)


def rounds_to(exact: Number, decimal: Number) -> bool:
    """Return True if `exact` is a fraction and `decimal` its value to six digits or more, as 1/3 and 0.333333."""
    if not exact.is_fraction or not decimal.places or exact.scale != decimal.scale:
        return False
    digits = abs(decimal.value) * 10**decimal.places
    return digits >= 10**5 and round(exact.value, decimal.places) == decimal.value


def read_unit(text: str) -> tuple[Fraction, bool] | None:
    r"""Read the text after a number: words, `\text{...}`, degree signs; None if it is neither empty nor a unit.

    Returns:
        The scale (1/100 for percent, 10**6 for million, else 1), and whether the text is a single letter, which may be
        a variable.
    """
    if not text.strip():
        return Fraction(1), False
    is_letter = len(text.strip()) == 1 and text.strip().isalpha()
    is_attached = text[0].isascii() and text[0].isalpha()
    text = FONT.sub(r" \1 ", _DEGREES.sub(" degrees ", text).replace("\\%", "%").replace("%", " percent "))
    words = re.findall(r"[A-Za-z]+", text)
    if not words or not _UNIT.fullmatch(text) or not _is_unit(words[0]):
        return None
    if not all(_is_unit(word) or _PREPOSITION.fullmatch(word) for word in words[1:]):
        return None
    if is_attached and not _SHORT_UNIT.fullmatch(words[0]):
        return None
    return Fraction(10) ** _POWERS.get(words[0].lower(), 0), is_letter


def _is_unit(word: str) -> bool:
    return bool(_SHORT_UNIT.fullmatch(word)) or (len(word) > 2 and not _NON_UNIT_WORDS.fullmatch(word))


def _value(match: re.Match[str]) -> Fraction:
    """Return the value of the matched number without its sign."""
    if match["power"]:
        return _power_of_ten(match["power"])
    if match["decimal"]:
        exponent = match["exponent"]
        factor = _power_of_ten(match["times"]) if match["times"] else Fraction(10) ** int(exponent or 0)
        return _decimal(match["decimal"]) * factor
    numerator, denominator = (
        _decimal(match[name] or match[f"{name}1"] or match[f"{name}2"])
        for name in ("numerator", "denominator")
    )
    return _decimal(match["integer"] or match["integer2"] or "0") + numerator / denominator


def _power_of_ten(text: str) -> Fraction:
    return Fraction(10) ** int(text.partition("^")[2].strip(" {}"))


def _decimal(text: str) -> Fraction:
    integer, _, places = text.replace(",", "").replace(" ", "").partition(".")
    return Fraction(int(integer + places), 10 ** len(places))
