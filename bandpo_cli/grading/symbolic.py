r"""Equality of mathematical expressions by math-verify (sympy). Its time is unbounded: use it in worker processes only.

The time limits of the library are switched off, because a worker is killed at its deadline. An answer is parsed
completely or not at all: the search of the library for the last number in a sentence would find one in any answer.
"""

import logging
import re
import warnings
from functools import lru_cache
from typing import Any
from zlib import crc32

from math_verify import LatexExtractionConfig, LatexNormalizationConfig, parse, verify
from sympy import Eq, Expr, Float, I, Symbol, nsimplify, simplify, solve

from bandpo_cli.grading.quantities import Unit, conversion, unit_of
from bandpo_cli.grading.rewrites import list_items, named_values, readable, split, values_first

for _library in ("math_verify", "latex2sympy2_extended"):
    # Both warn about text that they cannot parse, which models often write.
    logging.getLogger(_library).setLevel(logging.CRITICAL + 1)
warnings.simplefilter("ignore")

# The library must not remove units: it takes a variable t or m at the end for a unit. `_split_unit` removes them.
_LATEX = LatexExtractionConfig(
    boxed_match_priority=-1,
    normalization_config=LatexNormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    ),
)
_TEXT_UNIT = re.compile(
    r"(?<=[0-9A-Za-z)}])\s*(?:\\[,;: ]\s*)?\\(?:text|mathrm|mbox|textrm)\s*(\{[^{}]*\}\s*(?:\^\{?[0-9]\}?)?)$"
)
_PLAIN_UNIT = re.compile(
    r"(?<=[0-9A-Za-z)}]) +((?:square |cubic |sq\.? )?[A-Za-z]{2,}(?: ?(?:/|per) ?[A-Za-z]+)?(?:\^ ?\{?[23]\}?)?)$"
)
_DEGREE = re.compile(r"(?<=\S)\s*\^ ?\{?\s?\\circ\s?\}?$")
_UNNAMED_UNITS = re.compile(r"(?:square |cubic |sq\.? )?units?")
# Words that the grammar would read as products, in which the order of the letters does not matter.
_WORDS = re.compile(
    r"[A-Z]{3,}|[A-Za-z]{4,}|(?i:no|on|yes|odd|one|two|six|ten|all|any|not|day|red|max|min)"
    r"|[A-Za-z]{2,}(?:[ -][A-Za-z]{2,})+"
)
_ELLIPSIS = re.compile(r"\.\.|\\[lcv]?dots(?![A-Za-z])")
_JUXTAPOSED_NUMBERS = re.compile(r"[0-9]\s+[0-9]")
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}")
_BASE = re.compile(r"[0-9]\s*+_\s*+(?:\{\s*+)?([0-9]++)")
_TOLERANCE = 1e-5  # Relative difference from which two values count as different
_ROUNDING = 1e-6  # Relative difference up to which a decimal is the rounded value of an irrational number
_NOISE = 1e-20  # Values up to this one may be rounding errors of 0, as for x - x
_TEST_POINTS = (0.5, 1.3)
"""Each variable gets one of these plus a fraction that depends on its name: positive, for roots and logarithms."""


def is_equal(gold: str, answer: str) -> bool:
    """Return True if an answer equals the reference, as expressions, equations, sets, intervals or matrices.

    Both are LaTeX or plain text; text that cannot be parsed equals nothing.
    """
    if _DATE.fullmatch(gold):  # would be read as a difference
        return False
    gold, answer = (values_first(readable(text.replace("$", " ")).strip()) for text in (gold, answer))
    if _JUXTAPOSED_NUMBERS.search(answer):  # "5 5" would be read as 10
        return False
    if any(_WORDS.fullmatch(text) or _ELLIPSIS.search(text) for text in (gold, answer)):
        return False  # equal texts are correct without this function
    if gold.count(":") > 1:  # the ratio 2:3:4 would be read as (2/3)/4
        terms = gold.split(":"), answer.split(":")
        return len(terms[0]) == len(terms[1]) and all(map(is_equal, *terms))
    bases, other_bases = _BASE.findall(gold), _BASE.findall(answer)  # 1001_2; the parser ignores them
    if bases and other_bases and bases != other_bases:
        return False
    pairs = _values_by_name(gold, answer)
    if pairs is not None:
        return bool(pairs) and all(map(is_equal, *zip(*pairs, strict=True)))
    (gold, unit), (answer, other_unit) = _split_unit(gold), _split_unit(answer)
    if conversion(unit, other_unit) != 1:
        return False
    if all(r"\approx" in text for text in (gold, answer)):  # the parser drops the value after it
        return is_equal(*(text.rpartition(r"\approx")[2].strip() for text in (gold, answer)))
    items, others = split(gold), split(answer)
    if len(items) == len(others) > len({*items}):  # the parser drops repeated values
        counts = (
            [sum(is_equal(item, other) for other in texts) for item in items] for texts in (items, others)
        )
        return next(counts) == next(counts)
    equations = [[part for part in parts if "=" in part] for parts in (items, others)]
    if len(equations[0]) == len(equations[1]) > 1:
        first, second = equations
        matches = [[is_equal(part, other) for other in second] for part in first]
        return all(map(any, matches)) and all(map(any, zip(*matches, strict=True)))
    try:
        golds, answers = _parse(gold), _parse(answer)
        return bool(golds and answers) and _is_equal(golds[0], answers[0])
    except Exception:  # noqa: BLE001  (sympy raises errors of many kinds on what models write)
        return False


def _is_equal(gold: Any, answer: Any) -> bool:
    """Return True if two parsed expressions are equal."""
    if isinstance(gold, Eq) and not gold.free_symbols and not isinstance(answer, Eq):
        gold = gold.rhs
    if isinstance(gold, Eq) and isinstance(answer, Eq):
        if gold.lhs == answer.lhs:
            return _is_equal(gold.rhs, answer.rhs)
        if not gold.free_symbols or not answer.free_symbols:
            return _is_equal(gold.lhs, answer.lhs) and _is_equal(gold.rhs, answer.rhs)
        if simplify((gold.lhs - gold.rhs) / (answer.lhs - answer.rhs)).free_symbols and not solve(gold):
            return False  # the library takes equations without a solution for equal
    if _differ_at_test_points(gold, answer):
        return False
    if verify([gold], [answer], allow_set_relation_comp=True, timeout_seconds=None):
        return not _numbers_differ(gold, answer)
    if not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return False
    if gold.is_zero or answer.is_zero:  # the library compares 0 with a difference that it does not simplify
        return bool(simplify(nsimplify(gold - answer, rational=True).doit()) == 0)
    return _is_rounded(gold, answer) or _is_rounded(answer, gold)


def _values_by_name(gold: str, answer: str) -> list[tuple[str, str]] | None:
    """Return the pairs of values by name; none if the two cannot be compared, None if neither has names.

    If only one of them has names, they count in alphabetical order in an answer, and in the order of the reference.
    """
    golds, answers = named_values(gold), named_values(answer)
    if golds and answers:
        same = golds.keys() == answers.keys()
        return [(value, answers[name]) for name, value in golds.items()] if same else []
    if not golds and not answers:
        return None
    names = golds or sorted(answers, key=lambda name: name.lstrip("\\").lower())
    values = [(golds or answers)[name] for name in names]
    items = list_items(answer if golds else gold)
    if len(items) != len(values):
        return [] if golds or len(items) > 1 else None
    return list(zip(values, items, strict=True) if golds else zip(items, values, strict=True))


def _split_unit(latex: str) -> tuple[str, Unit]:
    r"""Return an expression without the unit at its end, and the unit: `2\sqrt{3} \text{ cm}`, `2 \pi cm`."""
    if match := _TEXT_UNIT.search(latex):
        unit = unit_of(match[1].strip("{").replace("}", " ", 1))
        if unit or match.end() - match.start(1) > len("{e}"):  # e is a number, and x a variable
            return latex[: match.start()], unit
    if match := _DEGREE.search(latex):
        return latex[: match.start()], unit_of("degrees")
    match = _PLAIN_UNIT.search(latex)
    if match and ((unit := unit_of(match[1])) or _UNNAMED_UNITS.fullmatch(match[1])):
        return latex[: match.start()], unit
    return latex, ()


@lru_cache(maxsize=256)
def _parse(latex: str) -> list[Any]:
    """Return the parsed expression in a list, or an empty list if `latex` cannot be parsed."""
    latex = latex.replace("\n", " ").strip()
    modes = {"fallback_mode": "no_fallback", "extraction_mode": "first_match"}
    return [*map(_with_imaginary_unit, parse(f"${latex}$", [_LATEX], parsing_timeout=None, **modes))]


def _with_imaginary_unit(expression: Any) -> Any:
    """Return an expression with the free symbol i as the imaginary unit, and other symbols as real numbers."""
    symbols = getattr(expression, "free_symbols", ())
    chosen = (symbol for symbol in symbols if symbol.name == "i" or not symbol.is_real)
    values = {item: I if item.name == "i" else Symbol(item.name, real=True) for item in chosen}
    return expression.xreplace(values) if values and hasattr(expression, "xreplace") else expression


def _differ_at_test_points(gold: Any, answer: Any) -> bool:
    """Return True if both are formulas with variables whose values exist and differ at all test points.

    This refutes most wrong formulas in a thousandth of the time that simplifying their difference takes.
    """
    both = isinstance(gold, Expr) and isinstance(answer, Expr)
    symbols = gold.free_symbols | answer.free_symbols if both else ()
    if not symbols:
        return False
    for point in _TEST_POINTS:
        values = {symbol: point + crc32(str(symbol).encode()) % 997 / 997 for symbol in symbols}
        try:
            first, second = complex(gold.evalf(subs=values)), complex(answer.evalf(subs=values))
        except (TypeError, ValueError, ArithmeticError):
            return False
        # A NaN compares as false, so that a formula without a value is not refuted.
        if not abs(first - second) > max(_TOLERANCE * max(abs(first), abs(second)), _NOISE):
            return False
    return True


def _numbers_differ(gold: Any, answer: Any) -> bool:
    """Return True if both are numbers whose relative difference is above the tolerance.

    math-verify compares six decimals and drops values below 1e-15: all small numbers of physics would be equal.
    """
    if not (isinstance(gold, Expr) and isinstance(answer, Expr) and gold.is_number and answer.is_number):
        return False
    try:
        difference = abs((gold - answer).evalf(20))
        if gold.is_zero:
            return bool(answer.is_zero is False)
        return bool(difference > _TOLERANCE * abs(gold.evalf(20)))
    except TypeError:  # not comparable, for example infinities
        return False


def _is_rounded(exact: Expr, decimal: Expr) -> bool:
    r"""Return True if a decimal is the value of an irrational number to six digits: \frac{\pi}{10^6}, 3.14159e-6."""
    if exact.has(Float) or not decimal.has(Float) or not (exact.is_number and decimal.is_number):
        return False
    if exact.doit().is_rational:
        return False
    try:
        return bool(abs((exact - decimal).evalf(20)) <= _ROUNDING * abs(exact.evalf(20)))
    except TypeError:
        return False


# Builds the tables of the parser at import, so that this time does not count for the first answer.
is_equal(r"\frac{x}{2}+\sqrt{3}", r"\sqrt{3} + 0.5x")
