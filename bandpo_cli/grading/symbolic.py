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
from sympy import Expr

for _library in ("math_verify", "latex2sympy2_extended"):
    # Both warn about text that they cannot parse, which models often write.
    logging.getLogger(_library).setLevel(logging.CRITICAL + 1)
warnings.simplefilter("ignore")

# The library must not remove units: it takes a variable t or m at the end for a unit. `_TEXT_UNIT` removes the units in
# \text{}.
_LATEX = LatexExtractionConfig(
    boxed_match_priority=-1,
    normalization_config=LatexNormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    ),
)
_TEXT_UNIT = re.compile(
    r"(?<=[0-9A-Za-z)}])\s*(?:\\[,;: ]\s*)?\\(?:text|mathrm|mbox|textrm)\s*\{[^{}]*\}\s*(?:\^\{?[0-9]\}?)?$"
)
# Energies E_1 and the solar mass M_⊙: the grammar reads E as the number e, and \odot as an operator.
_NAMES = (
    (re.compile(r"(?<![A-Za-z\\])E\s*_"), r"\\mathrm{E}_"),
    (re.compile(r"_\s*+(?:\{\s*+)?\\odot\s*\}?"), "_{sun}"),
)
_JUXTAPOSED_NUMBERS = re.compile(r"[0-9]\s+[0-9]")
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}")
_BASE = re.compile(r"[0-9]\s*+_\s*+(?:\{\s*+)?([0-9]++)")
_TOLERANCE = 1e-5
"""Relative difference from which two values count as different."""
_TEST_POINTS = (0.5, 1.3)
"""Each variable gets one of these plus a fraction that depends on its name: positive, for roots and logarithms."""


def is_equal(gold: str, answer: str) -> bool:
    """Return True if an answer equals the reference, as expressions, equations, sets, intervals or matrices.

    Both are LaTeX; text that cannot be parsed equals nothing.
    """
    if _JUXTAPOSED_NUMBERS.search(answer):  # "5 5" would be read as 10
        return False
    if _DATE.fullmatch(gold):  # would be read as a difference
        return False
    if gold.count(":") > 1:  # the ratio 2:3:4 would be read as (2/3)/4
        terms = gold.split(":"), answer.split(":")
        return len(terms[0]) == len(terms[1]) and all(map(is_equal, *terms))
    bases, other_bases = _BASE.findall(gold), _BASE.findall(answer)  # 1001_2; the parser ignores them
    if bases and other_bases and bases != other_bases:
        return False
    golds, answers = _parse(gold), _parse(answer)
    if not golds or not answers or _differ_at_test_points(golds[0], answers[0]):
        return False
    verified = bool(verify(golds, answers, allow_set_relation_comp=True, timeout_seconds=None))
    return verified and not _numbers_differ(golds[0], answers[0])


@lru_cache(maxsize=256)
def _parse(latex: str) -> list[Any]:
    """Return the parsed expression in a list, or an empty list if `latex` cannot be parsed."""
    latex = _TEXT_UNIT.sub("", latex.replace("$", " ").replace("\n", " ").strip())
    for name, readable in _NAMES:
        latex = name.sub(readable, latex)
    modes = {"fallback_mode": "no_fallback", "extraction_mode": "first_match"}
    return list(parse(f"${latex}$", [_LATEX], parsing_timeout=None, **modes))


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
        if not abs(first - second) > _TOLERANCE * max(abs(first), abs(second)):
            return False
    return True


def _numbers_differ(gold: Any, answer: Any) -> bool:
    """Return True if both are numbers whose relative difference is above the tolerance.

    math-verify compares six decimals and drops values below 1e-15: all small numbers of physics would be equal.
    """
    if not (isinstance(gold, Expr) and isinstance(answer, Expr) and gold.is_number and answer.is_number):
        return False
    try:
        return bool(abs((gold - answer).evalf(20)) > _TOLERANCE * abs(gold.evalf(20)))
    except TypeError:  # not comparable, for example infinities
        return False


# Builds the tables of the parser at import, so that this time does not count for the first answer.
is_equal(r"\frac{x}{2}+\sqrt{3}", r"\sqrt{3} + 0.5x")
