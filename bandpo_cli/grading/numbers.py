r"""What may stand after a number without changing it: units as words, in \text{...}, degrees; and what scales it."""

# MERGED: Reads plain numbers as people and LaTeX write them, and compares them exactly. No arithmetic is done but one division and one power of ten, both bounded, so that any text is read at once.
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


NO_UNIT = Unit(Fraction(1), is_letter=False)


def read_unit(text: str) -> Unit | None:
    """Read what follows a number; None when it is neither nothing nor a unit."""
    if not text.strip():
        return NO_UNIT
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


MAX_CHARS = 1000
"""A longer text is no plain number."""

_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.[0-9]*)?|\.[0-9]+)"
_POWER = r"10 ?\^ ?(?:\{ ?[+-]?[0-9]{1,3} ?\}|[+-]?[0-9]{1,3})"
_SIGNED = rf"[+-]? ?{_DECIMAL}"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?) ?(?:"
    rf"(?:(?P<whole>{_WHOLE}) ?)?\\[dtc]?frac ?(?:\{{ ?(?P<over>{_SIGNED}) ?\}} ?\{{ ?(?P<under>{_SIGNED}) ?\}}"
    r"|(?P<over1>[0-9]) ?(?P<under1>[0-9]))"
    rf"|(?:(?P<whole2>{_WHOLE}) )?(?P<over2>{_DECIMAL}) ?/ ?(?P<under2>{_SIGNED})"
    rf"|(?P<power>{_POWER})"
    rf"|(?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>[+-]?[0-9]{{1,3}})(?![0-9])"
    rf"| ?(?:\\times|\\cdot|\*|×|·|x) ?(?P<times>{_POWER}))?)"
)
_UNICODE_VARIANTS = str.maketrans({"−": "-", "–": "-", "\u00a0": " ", "\u202f": " ", "\u2009": " "})
_GROUPED = re.compile(r"\{,\}|,\\!|(?<=[0-9])\\,(?=[0-9]{3})")  # 10{,}000, 10,\!000 and 10\,000
_LATEX_SPACING = re.compile(r"\\[,;:! ]|~|\\(?:left|right)(?![A-Za-z])")
_APPROXIMATELY = re.compile(r"(?:\\approx|\\sim|≈|=) ?")
_CURRENCY = re.compile(r"([+-]?) ?(?:\\?\$|US\$|€|£|¥) ?(?=[-+.0-9])")


@dataclass(frozen=True)
class Number:
    """A number and how it was written.

    Attributes:
        value: what the digits say.
        scale: 1/100 after a percent sign, 10**6 after "million", else 1. Either reading may be meant: "50%" is
            right for 50 and for 0.5.
        places: digits after the point where it was written as a plain decimal, else None.
        is_quotient: it was written as a fraction.
        has_letter: a bare letter follows, a unit (5 m) or else a variable.
    """

    value: Fraction
    scale: Fraction
    places: int | None
    is_quotient: bool
    has_letter: bool


def read_number(text: str) -> Number | None:
    """Read a number with a currency sign before it or a unit after it; None when `text` is anything else."""
    if len(text) > MAX_CHARS:
        return None
    text = " ".join(_LATEX_SPACING.sub(" ", _GROUPED.sub(",", text.translate(_UNICODE_VARIANTS))).split())
    text = _CURRENCY.sub(
        r"\1", _APPROXIMATELY.sub("", text, count=1) if _APPROXIMATELY.match(text) else text, count=1
    )
    match = _NUMBER.match(text)
    unit = read_unit(text[match.end() :]) if match else None
    if match is None or unit is None:
        return None
    try:
        value = _value(match)
    except ZeroDivisionError:
        return None
    quotient = not (match["power"] or match["decimal"])
    plain = match["decimal"] and not (match["exponent"] or match["times"])
    places = len(match["decimal"].partition(".")[2]) if plain else None
    value = -value if match["sign"] == "-" else value
    return Number(value, unit.scale, places, quotient, unit.is_letter)


def equal(first: Number, second: Number) -> bool:
    """Exact equality; a percent sign or a "million" on one side only leaves both of its readings open."""
    if first.scale == second.scale:
        return first.value == second.value
    scaled = first.value * first.scale == second.value * second.scale
    return scaled or (1 in (first.scale, second.scale) and first.value == second.value)


def rounds_to(exact: Number, decimal: Number) -> bool:
    """True for a quotient and its decimal to six digits or more, as 1/3 and 0.333333."""
    if not exact.is_quotient or not decimal.places or exact.scale != decimal.scale:
        return False
    digits = abs(decimal.value) * 10**decimal.places
    return digits >= 10**5 and round(exact.value, decimal.places) == decimal.value


def _value(match: re.Match[str]) -> Fraction:
    """The number without its sign."""
    if match["power"]:
        return _power_of_ten(match["power"])
    if match["decimal"]:
        exponent = match["exponent"]
        factor = _power_of_ten(match["times"]) if match["times"] else Fraction(10) ** int(exponent or 0)
        return _decimal(match["decimal"]) * factor
    over, under = (match[name] or match[f"{name}1"] or match[f"{name}2"] for name in ("over", "under"))
    return _decimal(match["whole"] or match["whole2"] or "0") + _decimal(over) / _decimal(under)


def _power_of_ten(text: str) -> Fraction:
    return Fraction(10) ** int(text.partition("^")[2].strip(" {}"))


def _decimal(text: str) -> Fraction:
    whole, _, places = text.replace(",", "").replace(" ", "").partition(".")
    sign = -1 if whole.startswith("-") else 1
    digits = whole.lstrip("+-") + places
    return Fraction(sign * int(digits), 10 ** len(places))
