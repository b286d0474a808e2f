"""kl's Band for many float32 tokens, computed in float32 throughout, at a relative error of about 2e-7.

δ is fixed in a call, so log r is a function of y = −log p alone, and analytic. Within a piece of relative half-width
2⁻¹¹ a parabola through three of Newton's solutions meets it to 1e-8. What float32 could not hold, an exponent of 87
with 7 digits behind the point, never arises: the ratio at the piece's middle is tabulated, and only the small change
of log r inside the piece is computed. The piece and the place in it are read off y's bits, without a logarithm.
"""

# MERGED: Piecewise polynomials in y = −log p, for functions that are smooth in log y near p = 1 and in y beyond. 64 pieces an octave of y up to y = 1, then 64 a unit: on a piece of relative half-width 1/128 a function that is analytic within its own distance is met to about 2·256^−(degree+1). The piece is read off y's float64 representation and off y itself, so locating it costs no logarithm and no look-up.
# MERGED: The paper's Band: KL(π_old‖π) ≤ δ, by Newton in the natural parameter (docs/bounds.md). With s = min(p, 1−p) and t = logit q − logit s the constraint is F(t) = log1p(s·expm1(t)) − s·t = δ, smooth and convex with F' = q−s. Its two roots are the bounds of the rarer side; the other side's are the same two, swapped. On a root, log r = (1−s)·t − δ for the rarer side and −s·t − δ for the other one. Since δ is fixed in a call, log r is a function of log p alone and analytic: many tokens are served by polynomials through Newton's solutions (`pieces` in float64, `kl_float32` for float32 results).
from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from bandpo_cli.bounds.arrays import Array, RatioBounds, TokenProbs, arange, cast, device_of, namespace, take

LogRatios = Callable[[TokenProbs, float], tuple[Array, Array]]

_FIRST_OCTAVE, _LAST_OCTAVE = -36, 7
"""y from 2⁻³⁶, where the limit p→1 is reached in float32, to 128, where float32 holds no 1/p any more."""

_BITS = 10
_SHIFT = 23 - _BITS
_HALF = 0.5 * 2.0**-_BITS
_ONE = 127 << 23
_FIRST = (127 + _FIRST_OCTAVE) << _BITS
_PIECES = (_LAST_OCTAVE - _FIRST_OCTAVE) << _BITS
_NODE = _HALF * math.sqrt(0.75)
"""The outer Chebyshev nodes of a parabola."""

_LOG_RATIO_FLOOR = -120.0
"""exp of this is 0 in float32; beyond it log r falls so steeply that no piece could follow."""

Float32Table = tuple[Array, Array, Array]
"""Ratio at the middle, and slope and curvature of log r there; float32, (pieces,)."""


def evaluate_float32_table(logp: Array, delta: float, log_ratios: LogRatios) -> RatioBounds:
    """The interval of ratios for float32 `logp` of shape (T,); any number for NaN. `log_ratios` is Newton's."""
    xp = namespace(logp)
    lower, upper = _table(delta, log_ratios, type(logp).__qualname__, xp, device_of(logp))
    y = -logp
    bits = xp.clip(y, 2.0**_FIRST_OCTAVE, None).view(xp.int32)
    piece = bits >> _SHIFT
    piece -= _FIRST
    xp.clip(piece, 0, _PIECES - 1, out=piece)
    # The bits below the piece's, with the exponent of 1: a number in [1, 1 + 2⁻¹⁰), its middle taken off exactly.
    bits &= (1 << _SHIFT) - 1
    bits |= _ONE
    x = bits.view(xp.float32)
    x -= 1.0 + _HALF
    low, high = _evaluate(lower, piece, x), _evaluate(upper, piece, x)
    return RatioBounds(low, xp.minimum(high, xp.exp(y, out=y), out=high))


def _evaluate(table: Float32Table, piece: Array, x: Array) -> Array:
    """In place throughout: fresh memory costs more here than the arithmetic."""
    ratio, slope, curvature = (take(column, piece) for column in table)
    curvature *= x
    curvature += slope
    curvature *= x
    namespace(x).exp(curvature, out=curvature)
    curvature *= ratio
    return curvature


@lru_cache(maxsize=32)
def _table(
    delta: float, log_ratios: LogRatios, kind: str, xp: Any, device: Any
) -> tuple[Float32Table, Float32Table]:
    """Both bounds' pieces, made on the device. `kind` keeps traced tensors out of the real ones' table."""
    number = arange(_PIECES, xp, device)
    octave = cast(number >> _BITS, xp.float64) + _FIRST_OCTAVE
    middle = 1.0 + _HALF + cast(number & ((1 << _BITS) - 1), xp.float64) * 2.0**-_BITS
    at_nodes = [
        log_ratios(TokenProbs(-xp.exp2(octave) * (middle + node)), delta) for node in (-_NODE, 0.0, _NODE)
    ]
    lower, upper = (_parabola(xp, *values) for values in zip(*at_nodes, strict=True))
    return lower, upper


def _parabola(xp: Any, left: Array, middle: Array, right: Array) -> Float32Table:
    left, middle, right = (xp.clip(value, _LOG_RATIO_FLOOR, None) for value in (left, middle, right))
    slope = (right - left) / (2.0 * _NODE)
    curvature = (right + left - 2.0 * middle) / (2.0 * _NODE**2)
    return cast(xp.exp(middle), xp.float32), cast(slope, xp.float32), cast(curvature, xp.float32)


SMALLEST, LARGEST = 2.0**-64, 128.0
"""The range of y. Below it a bound has reached its limit p→1 to double precision; above it the new probability has."""

DEGREE = 6

_PIECES_BITS = 6
_PIECES_SHIFT = 52 - _PIECES_BITS
_PIECES_ONE = 1023 << 52
_PIECES_FIRST = (1023 - 64) << _PIECES_BITS
_LOG_PIECES = 64 << _PIECES_BITS
_PIECES_PIECES = _LOG_PIECES + int(LARGEST - 1.0) * 64 + 1

PieceIndex = tuple[Array, Array]
"""Index of the piece (int64) and the place in it, in [−½, ½)."""


def locate_piece(y: Array) -> PieceIndex:
    """Piece and place in it for each y ≥ 0, clamped to the range. Shapes (T,)."""
    xp = namespace(y)
    bits = xp.clip(y, SMALLEST, 1.0).view(xp.int64)
    units = xp.clip(64.0 * y - 64.0, 0.0, 64.0 * (LARGEST - 1.0))
    whole = xp.floor(units)
    # The bits below the piece's, with the exponent of 1: a number in [1, 1 + 1/64), without a slow conversion.
    rest = ((bits & ((1 << _PIECES_SHIFT) - 1)) | _PIECES_ONE).view(xp.float64)
    place = (rest * 64.0 - 64.5) + (units - whole)
    return (bits >> _PIECES_SHIFT) + (cast(whole, xp.int64) - _PIECES_FIRST), place


def piece_nodes(xp: object, device: object) -> list[Array]:
    """y at the Chebyshev nodes of every piece: DEGREE+1 arrays of shape (pieces,)."""
    piece = arange(_PIECES_PIECES, xp, device)
    low, high = _edge(piece), _edge(piece + 1)
    return [0.5 * (low + high) + 0.5 * (high - low) * float(x) for x in _chebyshev(DEGREE)]


def _edge(piece: Array) -> Array:
    """Lower end of a piece."""
    xp = namespace(piece)
    logarithmic = ((xp.clip(piece, None, _LOG_PIECES) + _PIECES_FIRST) << _PIECES_SHIFT).view(xp.float64)
    return logarithmic + cast(xp.clip(piece - _LOG_PIECES, 0, None), xp.float64) / 64.0


def fit_pieces(values: tuple[Array, ...]) -> tuple[Array, ...]:
    """Coefficients in the place in the piece, constant first, from the values at `nodes`.

    The differences to one value are fitted, not the values: those reach −745 and their rounding would be magnified.
    """
    x = 0.5 * _chebyshev(len(values) - 1)
    inverse = np.linalg.inv(np.vander(x, increasing=True))
    middle = values[len(values) // 2]
    rows = [sum(float(c) * (value - middle) for c, value in zip(row, values, strict=True)) for row in inverse]
    return (rows[0] + middle, *rows[1:])


def evaluate_pieces(coefficients: tuple[Array, ...], where: PieceIndex) -> Array:
    """Horner's rule; shape of `where`'s parts."""
    piece, x = where
    result = take(coefficients[-1], piece)
    for coefficient in coefficients[-2::-1]:
        result = result * x + take(coefficient, piece)
    return result


def _chebyshev(degree: int) -> np.ndarray:
    return np.cos(np.pi * (np.arange(degree + 1) + 0.5) / (degree + 1))


_SMALLEST = 2.0**-200
"""Far below it the new probability depends no more on s, and 1/s² would overflow."""

_NEWTON_STEPS = 40
"""Enough from the outer starts: 30 and 48 steps agree to 6e-14 in t over log p in [−80, −1e-9] and δ in [1e-4, 2]."""

MIN_TOKENS_FOR_TABLE = 4096
"""From this many tokens on, polynomials: training comes back with the same δ step after step."""


def kl_bounds(tokens: TokenProbs, delta: float) -> RatioBounds:
    """The interval of ratios. The lower bound is about exp(−δ/p) for rare tokens and underflows to 0 in the end."""
    xp = namespace(tokens.logp)
    if len(tokens.logp) < MIN_TOKENS_FOR_TABLE:
        log_lower, log_upper = log_ratios(tokens, delta)
    else:
        log_lower, log_upper = _interpolate(tokens, delta)
    # The simplex, r ≤ 1/p, costs nothing here and an exponential later.
    return RatioBounds(xp.exp(log_lower), xp.exp(xp.minimum(log_upper, -tokens.logp)))


def kl_bounds_float32(logp: Array, delta: float) -> RatioBounds:
    """The same for many float32 tokens at once, in float32."""
    return evaluate_float32_table(logp, delta, log_ratios)


def log_ratios(tokens: TokenProbs, delta: float) -> tuple[Array, Array]:
    """Logarithms of both bounds by Newton alone, each of shape (T,)."""
    xp = namespace(tokens.p)
    common = tokens.p > 0.5
    s = xp.clip(xp.minimum(tokens.p, tokens.m), _SMALLEST, None)
    fall = _newton((xp.log1p(-s) - delta) / s, s, delta)
    rise = _newton((delta - xp.log(s)) / (1.0 - s), s, delta)
    weight = xp.where(common, -s, 1.0 - s)
    beyond = xp.where(common, 0.0, xp.log(s) - xp.clip(tokens.logp, None, 0.0))
    lower = weight * xp.where(common, rise, fall) - delta
    return lower, weight * xp.where(common, fall, rise) - delta + xp.clip(beyond, 0.0, None)


def _newton(t: Array, s: Array, delta: float) -> Array:
    """From outside the root, where Newton's method converges monotonically: no bracket is needed."""
    xp = namespace(s)
    for _ in range(_NEWTON_STEPS):
        w = s * xp.expm1(t)
        t = t - (xp.log1p(w) - s * t - delta) / ((s + w) / (1.0 + w) - s)
    return t


def _interpolate(tokens: TokenProbs, delta: float) -> tuple[Array, Array]:
    xp = namespace(tokens.logp)
    y = -tokens.logp
    where = locate_piece(y)
    lower, upper = _coefficients(delta, type(y).__qualname__, xp, device_of(y))
    return evaluate_pieces(lower, where), evaluate_pieces(upper, where) + xp.clip(y - LARGEST, 0.0, None)


@lru_cache(maxsize=32)
def _coefficients(
    delta: float, kind: str, xp: Any, device: Any
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Both bounds' pieces, made on the device. `kind` keeps traced tensors out of the real ones' table."""
    nodes = piece_nodes(xp, device)
    solved = [log_ratios(TokenProbs(-y), delta) for y in nodes]
    lower, upper = zip(*solved, strict=True)
    return fit_pieces(lower), fit_pieces(upper)
