"""Piecewise polynomials in y = −log p, for functions that are smooth in log y near p = 1 and in y beyond.

64 pieces an octave of y up to y = 1, then 64 a unit: on a piece of relative half-width 1/128 a function that is
analytic within its own distance is met to about 2·256^−(degree+1). The piece is read off y's float64
representation and off y itself, so locating it costs no logarithm and no look-up.
"""

from __future__ import annotations

import numpy as np

from bandpo_cli.bounds.arrays import Array, arange, cast, namespace, pick

SMALLEST, LARGEST = 2.0**-64, 128.0
"""The range of y. Below it a bound has reached its limit p→1 to double precision; above it the new probability has."""

DEGREE = 6

_BITS = 6
_SHIFT = 52 - _BITS
_ONE = 1023 << 52
_FIRST = (1023 - 64) << _BITS
_LOG_PIECES = 64 << _BITS
_PIECES = _LOG_PIECES + int(LARGEST - 1.0) * 64 + 1

Place = tuple[Array, Array]
"""Index of the piece (int64) and the place in it, in [−½, ½)."""


def locate(y: Array) -> Place:
    """Piece and place in it for each y ≥ 0, clamped to the range. Shapes (T,)."""
    xp = namespace(y)
    bits = xp.clip(y, SMALLEST, 1.0).view(xp.int64)
    units = xp.clip(64.0 * y - 64.0, 0.0, 64.0 * (LARGEST - 1.0))
    whole = xp.floor(units)
    # The bits below the piece's, with the exponent of 1: a number in [1, 1 + 1/64), without a slow conversion.
    rest = ((bits & ((1 << _SHIFT) - 1)) | _ONE).view(xp.float64)
    place = (rest * 64.0 - 64.5) + (units - whole)
    return (bits >> _SHIFT) + (cast(whole, xp.int64) - _FIRST), place


def nodes(xp: object, device: object) -> list[Array]:
    """y at the Chebyshev nodes of every piece: DEGREE+1 arrays of shape (pieces,)."""
    piece = arange(_PIECES, xp, device)
    low, high = _edge(piece), _edge(piece + 1)
    return [0.5 * (low + high) + 0.5 * (high - low) * float(x) for x in _chebyshev(DEGREE)]


def _edge(piece: Array) -> Array:
    """Lower end of a piece."""
    xp = namespace(piece)
    logarithmic = ((xp.clip(piece, None, _LOG_PIECES) + _FIRST) << _SHIFT).view(xp.float64)
    return logarithmic + cast(xp.clip(piece - _LOG_PIECES, 0, None), xp.float64) / 64.0


def fit(values: tuple[Array, ...]) -> tuple[Array, ...]:
    """Coefficients in the place in the piece, constant first, from the values at `nodes`.

    The differences to one value are fitted, not the values: those reach −745 and their rounding would be magnified.
    """
    x = 0.5 * _chebyshev(len(values) - 1)
    inverse = np.linalg.inv(np.vander(x, increasing=True))
    middle = values[len(values) // 2]
    rows = [sum(float(c) * (value - middle) for c, value in zip(row, values, strict=True)) for row in inverse]
    return (rows[0] + middle, *rows[1:])


def evaluate(coefficients: tuple[Array, ...], where: Place) -> Array:
    """Horner's rule; shape of `where`'s parts."""
    piece, x = where
    result = pick(coefficients[-1], piece)
    for coefficient in coefficients[-2::-1]:
        result = result * x + pick(coefficient, piece)
    return result


def _chebyshev(degree: int) -> np.ndarray:
    return np.cos(np.pi * (np.arange(degree + 1) + 0.5) / (degree + 1))
