r"""Units of measurement after a number: which are known, and how quantities are compared.

The rule: two known units are compared, with the conversion between units of one kind (5 km are 5,000 m); if only one of
two answers has a known unit, the unit is ignored. Other words after a number (apples, in total) are always ignored.
"""

import re
from fractions import Fraction
from itertools import zip_longest

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
_POWERS = {"square": 2, "sq": 2, "squared": 2, "²": 2, "cubic": 3, "cu": 3, "cubed": 3, "³": 3}
_SCALES = {"C": "celsius", "Celsius": "celsius", "F": "fahrenheit", "Fahrenheit": "fahrenheit"}


Unit = tuple[tuple[str, int], ...]
"""A product of units: names in `UNITS` with their powers."""


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
        exponent = _POWERS.get(word) or (int(token.lstrip("^{ ")) if token[0] == "^" and token[1:] else None)
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
