r"""Plain numbers as people and LaTeX write them, with the units of measurement after them, and their comparison.

Any text is read in bounded time: the only arithmetic is one division and one power of ten, both bounded. Two known
units are compared, with the conversion between units of one kind (5 km are 5,000 m); if only one of two answers has a
known unit, the unit is ignored. Other words after a number (apples, in total) are always ignored.
"""

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import zip_longest

from bandpo_cli.grading.rewrites import MAX_ANSWER_CHARS

_TABLE = """
length: 1 m meter metre; 1000 km kilometer kilometre; 0.01 cm centimeter centimetre; 0.001 mm millimeter millimetre
length: 1e-6 micrometer; 1e-9 nm nanometer; 0.0254 in inch inche; 0.3048 ft foot feet; 0.9144 yd yard; 1609.344 mi mile
time: 1 s sec second; 60 min minute; 3600 h hr hour; 86400 day; 604800 week; 0.001 ms millisecond
months: 1 month; 12 yr year|mass: 1000 kg kilogram; 1 g gram; 0.001 mg milligram; 453.59237 lb; 28.349523125 oz ounce
morning: 1 am AM|evening: 1 pm PM|volume: 1 L l liter litre; 0.001 mL ml milliliter millilitre
volume: 3.785411784 gal gallon; 0.946352946 quart; 0.473176473 pint; 0.2365882365 cup
volume: 0.01478676478125 tablespoon tbsp; 0.00492892159375 teaspoon tsp
dollars: 1 USD $ usd dollar buck; 0.01 ¢ cent penny pennie|euros: 1 EUR € eur euro|sterling: 1 GBP £ gbp
rupees: 1 INR ₹ Rs inr rupee|yen: 1 JPY ¥ jpy yen|degrees: 1 deg degree|radians: 1 rad radian
Celsius: 1 celsius|Fahrenheit: 1 fahrenheit|temperature: 1 K kelvin|amount: 1 mol mole|concentration: 1 ppm
force: 1 N newton|energy: 1 J joule; 1000 kJ kilojoule; 3600000 kWh kwh; 1.602176634e-19 eV; 4.184 calorie; 4184 kcal
power: 1 W watt; 1000 kW kilowatt; 1e6 MW megawatt|voltage: 1 V volt|current: 1 A amp ampere|rotation: 1 rpm
frequency: 1 Hz hertz; 1e3 kHz; 1e6 MHz|data: 1 KB kb kilobyte; 1e3 MB megabyte; 1e6 GB gb gigabyte; 1e9 TB terabyte
"""
"""Kinds of units, and the units of each kind with their factor."""
UNITS = {
    name: (kind, Fraction(entry.split()[0]))
    for kind, _, entries in (line.partition(":") for line in re.split(r"\||\n", _TABLE.strip()))
    for entry in entries.split(";")
    for name in entry.split()[1:]
}
_LARGE = ("hundred", "thousand", "million", "billion", "trillion")
_MONEY = ("dollars", "euros", "sterling", "rupees", "yen")
_RATES = {"mph": "mi/h", "kmh": "km/h", "kph": "km/h", "fps": "ft/s"}
_RATE = re.compile(rf"(?<![A-Za-z])(?:{'|'.join(_RATES)})(?![A-Za-z])", re.IGNORECASE)
_TOKEN = re.compile(r"\$|[A-Za-z]+|\^ ?\{? ?-?[0-9]|[^\sA-Za-z}]")
_UNIT_POWERS = {"square": 2, "sq": 2, "squared": 2, "²": 2, "cubic": 3, "cu": 3, "cubed": 3, "³": 3}
_SCALES = {"C": "celsius", "Celsius": "celsius", "F": "fahrenheit", "Fahrenheit": "fahrenheit"}


Unit = tuple[tuple[str, int], ...]  # A product of units: names in `UNITS` with their powers


def known_name(word: str) -> str | None:
    """Return the name in `UNITS` that a word stands for, else None; the case of one or two letters matters."""
    lower = word.lower() if len(word) > 2 else word
    names = word, lower, lower.removesuffix("s") if len(word) > 2 else word
    return next((name for name in names if name in UNITS), None)


def is_known(word: str) -> bool:
    """Return True if a word is a unit or a rate such as mph."""
    return known_name(word) is not None or word.lower() in _RATES


def unit_of(text: str) -> Unit:
    """Return the known unit with which the text after a number begins; it is empty if there is none."""
    tokens = _TOKEN.findall(_RATE.sub(lambda match: _RATES[match[0].lower()], text))
    unit: list[tuple[str, int]] = []
    sign, pending, is_open = 1, 1, False
    for token, after in zip_longest(tokens, tokens[1:], fillvalue=""):
        word = token.lower()
        exponent = _UNIT_POWERS.get(word) or (
            int(token.lstrip("^{ ")) if token[0] == "^" and token[1:] else None
        )
        name = known_name(_SCALES.get(token, token))
        if is_open and word in ("/", "per"):
            sign, is_open = -1, False
        elif exponent and is_open:
            unit[-1] = unit[-1][0], unit[-1][1] * exponent
        elif exponent:
            pending = exponent
        elif word in _LARGE and not unit:
            continue
        elif name is None or (name == "in" and after.isalpha()):
            break
        else:
            if name in _SCALES.values() and unit and unit[-1][0] in ("deg", "degree"):
                unit.pop()
            unit.append((name, sign * pending))
            pending, is_open = 1, True
    return tuple(unit)


def conversion(first: Unit, second: Unit) -> Fraction | None:
    """Return the factor from the second unit to the first: 1 if a unit is missing, None for units of other kinds.

    An amount of money without a rate is compared with the money of a rate: $18 and 18 dollars per day.
    """
    if not first or not second:
        return Fraction(1)
    if 1 in (len(first), len(second)) and all(UNITS[unit[0][0]][0] in _MONEY for unit in (first, second)):
        first, second = first[:1], second[:1]
    (factor, powers), (other_factor, other_powers) = _measure(first), _measure(second)
    return other_factor / factor if powers == other_powers else None


def _measure(unit: Unit) -> tuple[Fraction, dict[str, int]]:
    """Return the factor of a unit, and the power of each kind."""
    factor, powers = Fraction(1), dict[str, int]()
    for name, power in unit:
        kind, size = UNITS[name]
        factor *= size**power
        powers[kind] = powers.get(kind, 0) + power
    return factor, powers


_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]*)?|\.[0-9]+)"
_POWER = r"10 ?\^ ?(?:\{ ?[+-]?[0-9]{1,3} ?\}|[+-]?[0-9]{1,3})"
_SIGNED = rf"[+-]? ?{_DECIMAL}"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?) ?(?:"
    rf"(?:(?P<integer>{_INTEGER}) ?)?\\[dtc]?frac ?"
    rf"(?:\{{ ?(?P<numerator>{_SIGNED}) ?\}} ?\{{ ?(?P<denominator>{_SIGNED}) ?\}}"
    r"|(?P<numerator1>[0-9]) ?(?P<denominator1>[0-9]))"
    rf"|(?:(?P<integer1>{_INTEGER}) )?(?P<numerator2>{_DECIMAL}) ?/ ?(?P<denominator2>{_SIGNED})"
    rf"|(?P<power>{_POWER})"
    rf"|(?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>[+-]?[0-9]{{1,3}})(?![0-9])"
    rf"| ?(?:\\times|\\cdot|\*|×|·|x) ?(?P<power1>{_POWER}))?)"
)
"""A number; the digit of a group distinguishes the alternatives, one of which matches."""
_SIGNS = ("€", "£", "¥", "₹", "¢")
_PARENTHESES = re.compile(r"^\(([^()]*)\)$")
_UNICODE_VARIANTS = str.maketrans({"−": "-", "–": "-", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "’": "'"})
_GROUPED = re.compile(r"\{,\}|,\\!|(?<=[0-9])\\,(?=[0-9]{3})")  # 10{,}000, 10,\!000 and 10\,000
_LATEX_SPACING = re.compile(r"\\[,;:! ]|~|\\(?:left|right)(?![A-Za-z])")
_APPROXIMATELY = re.compile(r"^(?:\\approx|\\sim|≈|=|(?i:approximately|about)(?![A-Za-z])) ?")
_CURRENCY = re.compile(r"([+-]?) ?(?:\\|US)?(\$|USD|EUR|GBP|Rs|€|£|¥|₹)\.? ?(?=[-+.0-9])")

_POWERS = {"percent": -2, "hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NON_UNIT_WORDS = re.compile(
    r"and|but|cosh?|cot|csc|cubed|det|exp|factorial|half|halves|inf|infinity|lim|log|minus|mod|not|or|over|pi|plus"
    r"|sinh?|sqrt|squared|tanh?",
    re.IGNORECASE,
)
"""Words that change the value of the number before them, or the statement about it."""
_SHORT_UNIT = re.compile(r"[msghlLAVWJNKCF]|[ap]m|AM|PM|a|an|of|to|US|sq|cu")
"""Letters that may be units, and words between units; other short words than units are variables, as in 5ab."""
_PREPOSITION = re.compile(r"at|by|on")
"""Accepted after a unit, as in "18 dollars at the market"; directly after a number they may be variables."""
DISPLAY_COMMANDS = re.compile(
    r"\\(?:left|right|big|Big|bigl|bigr|Bigl|Bigr|displaystyle|textstyle|limits)(?![A-Za-z])|\$|\\[()\[\]]"
)
FONT = re.compile(
    r"\\(?:text(?:bf|rm|it|normal|sf|tt)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname)\s*\{([^{}]*)\}"
)
"""A font command of LaTeX; its group is the content."""
_DEGREES = re.compile(r"\^ ?(?:\\circ|\{ ?\\circ ?\})|\\degree|\\circ|°")
# One letter per repetition: with "[A-Za-z]+" here, a text that does not match takes time exponential in its letters.
_UNIT = re.compile(r"(?:[A-Za-z ./()'*²³€£¥₹¢-]|\^ ?(?:\{ ?-?[1-4] ?\}|-?[1-4]))*")


@dataclass(frozen=True)
class Number:
    """A number and the form it was written in; "50%" is equal to 50 and to 0.5."""

    value: Fraction
    scale: Fraction  # 1/100 after a percent sign, 10**6 after "million", else 1
    places: int | None  # digits after the decimal point of a plain decimal
    is_fraction: bool
    has_letter: bool  # a single letter follows, which is a unit (5 m) or a variable
    unit: Unit = ()  # the unit of measurement, if it is a known one

    def __str__(self) -> str:
        """Return the value, and the scale if it is not 1: `50 × 1/100`."""
        return f"{self.value}" + ("" if self.scale == 1 else f" × {self.scale}")


def read_number(text: str) -> Number | None:
    """Read a number with an optional currency sign and unit; return None for other texts, and for very long ones."""
    if len(text) > MAX_ANSWER_CHARS:
        return None
    text = " ".join(_LATEX_SPACING.sub(" ", _GROUPED.sub(",", text.translate(_UNICODE_VARIANTS))).split())
    text = _APPROXIMATELY.sub("", _PARENTHESES.sub(r"\1", text))
    currency = _CURRENCY.match(text)
    text = _CURRENCY.sub(r"\1", text, count=1)
    match = _NUMBER.match(text)
    unit = read_unit(text[match.end() :]) if match else None
    if match is None or unit is None:
        return None
    groups = match.groupdict("").items()
    parts = {name.rstrip("12"): re.sub("[ ,]", "", part) for name, part in groups if part}
    places = None
    if is_fraction := "numerator" in parts:
        if (denominator := Fraction(parts["denominator"])) == 0:
            return None
        value = Fraction(parts.get("integer", 0)) + Fraction(parts["numerator"]) / denominator
    else:
        decimal, power = parts.get("decimal", "1"), parts.get("power", "10^0").partition("^")[2].strip("{}")
        value = Fraction(f"{decimal}e{parts.get('exponent', power)}")
        if parts.keys() <= {"sign", "decimal"}:
            places = len(decimal.partition(".")[2])
    scale, has_letter = unit
    known = unit_of(_without_fonts(text[match.end() :])) or unit_of(currency[2] if currency else "")
    return Number(-value if match["sign"] == "-" else value, scale, places, is_fraction, has_letter, known)


def in_unit_of(gold: Number, number: Number) -> Number | None:
    """Return the number converted to the unit of `gold`; None if the two have units of different kinds."""
    factor = conversion(gold.unit, number.unit)
    if factor == 1:
        return number
    return None if factor is None else replace(number, value=number.value * factor, unit=gold.unit)


def equal(first: Number, second: Number) -> bool:
    """Return True if the values are equal, with or without a percent sign or "million" that only one of them has."""
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

    Return the scale (1/100 for percent, 10**6 for million, else 1), and whether it is a letter, maybe a variable.
    """
    if not text.strip():
        return Fraction(1), False
    is_letter = len(text.strip()) == 1 and text.strip().isalpha()
    is_attached = text[0].isascii() and text[0].isalpha()
    text = _without_fonts(text)
    words = re.findall(r"[A-Za-z]+", text)
    is_known_unit = is_known(words[0]) if words else text.strip() in _SIGNS
    if not (words or is_known_unit) or not _UNIT.fullmatch(text):
        return None
    if is_attached and not (_SHORT_UNIT.fullmatch(words[0]) or is_known_unit):
        return None
    for index, word in enumerate(words):
        is_short = is_known(word) or _SHORT_UNIT.fullmatch(word)
        is_unit = is_short or (len(word) > 2 and not _NON_UNIT_WORDS.fullmatch(word))
        if not is_unit and (index == 0 or not _PREPOSITION.fullmatch(word)):
            return None
    return Fraction(10) ** _POWERS.get(words[0].lower() if words else "", 0), is_letter


def _without_fonts(text: str) -> str:
    """Return the text after a number with the content of fonts, and with degree and percent signs as words."""
    return FONT.sub(r" \1 ", _DEGREES.sub(" degrees ", text).replace("\\%", "%").replace("%", " percent "))


def read_plain_number(answer: str) -> Number | None:
    r"""Read a number as `read_number` does, also one in math delimiters or fonts: `$18$ dollars`, `\mathbf{18}`."""
    return read_number(answer) or read_number(FONT.sub(r" \1 ", DISPLAY_COMMANDS.sub(" ", answer)))
