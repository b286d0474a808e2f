r"""Equality of mathematical expressions by math-verify (sympy). Unbounded: it runs in worker processes alone.

Its own time limits are switched off, since a worker is killed at its deadline. A whole answer is parsed or none of
it: the library's search for the last number in a sentence would find one in any answer.
"""

from __future__ import annotations

import logging
import re
import warnings
from functools import lru_cache
from typing import Any
from zlib import crc32

from math_verify import LatexExtractionConfig, LatexNormalizationConfig, parse, verify
from sympy import Expr

logging.disable()  # both libraries warn about what they cannot parse, and models write a lot of that
warnings.simplefilter("ignore")

# Units stay: the library takes a variable t or m at the end for one. Those in \text{} are taken off here.
_LATEX = LatexExtractionConfig(
    boxed_match_priority=-1,
    normalization_config=LatexNormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    ),
)
_TEXT_UNIT = re.compile(
    r"(?<=[0-9A-Za-z)}])\s*(?:\\[,;: ]\s*)?\\(?:text|mathrm|mbox|textrm)\s*\{[^{}]*\}\s*(?:\^\{?[0-9]\}?)?$"
)
# Energies E_1 and the sun's M_⊙: the grammar takes E for the number e, and \odot for an operator.
_NAMES = (
    (re.compile(r"(?<![A-Za-z\\])E\s*_"), r"\\mathrm{E}_"),
    (re.compile(r"_\s*\{?\s*\\odot\s*\}?"), "_{sun}"),
)
_JUXTAPOSED_NUMBERS = re.compile(r"[0-9]\s+[0-9]")
_FAR = 1e-5
_POINTS = (
    0.5,
    1.3,
)  # each variable is this and a fraction of its own: positive, as roots and logarithms want them


def is_equal(gold: str, answer: str) -> bool:
    """Whether `answer` equals the reference, as expressions, equations, sets, intervals or matrices."""
    if _JUXTAPOSED_NUMBERS.search(answer):  # "5 5" would be read as 10
        return False
    golds, answers = _parse(gold), _parse(answer)
    if not golds or not answers or _differ_at_test_points(golds[0], answers[0]):
        return False
    if not verify(golds, answers, allow_set_relation_comp=True, timeout_seconds=None):
        return False
    return not _numbers_differ(golds[0], answers[0])


@lru_cache(maxsize=256)
def _parse(latex: str) -> list[Any]:
    """The expression in a list, or an empty list."""
    latex = _TEXT_UNIT.sub("", latex.replace("$", " ").replace("\n", " ").strip())
    for name, readable in _NAMES:
        latex = name.sub(readable, latex)
    return list(
        parse(
            f"${latex}$",
            [_LATEX],
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=None,
        )
    )


def _differ_at_test_points(gold: Any, answer: Any) -> bool:
    """Whether both are formulas that plainly differ where their variables are given numbers.

    Most wrong formulas are refuted so in a thousandth of the time that simplifying their difference takes. Numbers are
    not judged here, nor relations and sets, nor what has no value at the points (functions without a definition).
    """
    if not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return False
    symbols = gold.free_symbols | answer.free_symbols
    if not symbols:
        return False
    for point in _POINTS:
        values = {symbol: point + crc32(str(symbol).encode()) % 997 / 997 for symbol in symbols}
        try:
            first, second = complex(gold.evalf(subs=values)), complex(answer.evalf(subs=values))
        except (TypeError, ValueError, ArithmeticError):
            return False
        # A NaN compares as false: what has no value refutes nothing.
        if not abs(first - second) > _FAR * max(abs(first), abs(second)):
            return False
    return True


def _numbers_differ(gold: Any, answer: Any) -> bool:
    """Whether both are numbers that plainly differ.

    math-verify compares at six decimals, and drops what is below 1e-15: all of the small numbers of physics are
    equal to it.
    """
    if not (isinstance(gold, Expr) and isinstance(answer, Expr) and gold.is_number and answer.is_number):
        return False
    try:
        return bool(abs((gold - answer).evalf(20)) > _FAR * abs(gold.evalf(20)))
    except TypeError:  # not comparable, as infinities are
        return False


is_equal(
    r"\frac{x}{2}+\sqrt{3}", r"\sqrt{3} + 0.5x"
)  # builds the parser's tables, so that no answer pays for them
