"""The paper's Band: KL(π_old‖π) ≤ δ, by Newton's method in the natural parameter (docs/bounds.md).

With s = min(p, 1−p) and t = logit q − logit s the constraint is F(t) = log1p(s·expm1(t)) − s·t = δ, smooth and convex
with F' = q−s. Its two roots are the bounds of the rarer side; those of the other side are the same two, exchanged. At a
root, log r = (1−s)·t − δ for the rarer side and −s·t − δ for the other one.

Since δ is fixed in a call, log r is an analytic function of y = −log p only. For many tokens it is interpolated by
piecewise polynomials through Newton's solutions; the piece is read from the bits of y, without a logarithm.

* In float64 (the functions `*_pieces`): 64 pieces per octave up to y = 1, then 64 per unit, because log r is smooth in
  log y near p = 1 and in y beyond. On a piece of relative half-width 1/128 a function that is analytic within its own
  distance has an error of about 2·256^−(degree+1).
* For float32 results (`kl_bounds_float32`): float32 throughout, with a relative error of about 2e-7. On a piece of
  relative half-width 2⁻¹¹ a parabola has an error of 1e-8. float32 cannot represent an exponent of 87 with 7 decimals,
  so the ratio at the middle of each piece is tabulated and only the small change of log r within it is computed.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from bandpo_cli.bounds.arrays import Array, RatioBounds, TokenProbs, arange, cast, device_of, namespace, take

_SMALLEST_S = 2.0**-200
"""Smallest s. The new probability is independent of s far above it, and below it 1/s² would overflow."""

_NEWTON_STEPS = 40
"""Sufficient from the outer starts: 30 and 48 steps agree to 6e-14 in t for log p in [−80, −1e-9], δ in [1e-4, 2]."""

MIN_TOKENS_FOR_TABLE = 4096
"""Smallest number of tokens for polynomials. Their tables are reused, since δ is the same in each step of training."""

_FIRST_OCTAVE, _LAST_OCTAVE = -36, 7
"""Range of y of the float32 tables: from 2⁻³⁶, where results equal the limit p→1, to 128, where 1/p overflows."""

_F32_BITS = 10
_F32_SHIFT = 23 - _F32_BITS
_HALF = 0.5 * 2.0**-_F32_BITS
_F32_ONE = 127 << 23
_F32_FIRST = (127 + _FIRST_OCTAVE) << _F32_BITS
_F32_PIECES = (_LAST_OCTAVE - _FIRST_OCTAVE) << _F32_BITS
_NODE = _HALF * math.sqrt(0.75)
"""Distance of the outer Chebyshev nodes of a parabola from its middle."""

_LOG_RATIO_FLOOR = -120.0
"""exp of this is 0 in float32; below it log r is too steep for a parabola per piece."""

Float32Table = tuple[Array, Array, Array]
"""One bound: its ratio at the middle of each piece, slope and curvature of log r there; float32, shapes (pieces,)."""

SMALLEST_Y, LARGEST_Y = 2.0**-64, 128.0
"""Range of y of the float64 pieces. Below it a bound equals its limit p→1 to double precision; above it the new
probability is constant."""

DEGREE = 6
"""Degree of the polynomial on each float64 piece."""

_F64_BITS = 6
_F64_SHIFT = 52 - _F64_BITS
_F64_ONE = 1023 << 52
_F64_FIRST = (1023 - 64) << _F64_BITS
_LOG_PIECES = 64 << _F64_BITS
_F64_PIECES = _LOG_PIECES + int(LARGEST_Y - 1.0) * 64 + 1

PieceIndex = tuple[Array, Array]
"""Index of the piece (int64) and the position in it, in [−½, ½)."""


def kl_bounds(tokens: TokenProbs, delta: float) -> RatioBounds:
    """Return the interval of ratios. The lower bound is about exp(−δ/p) for rare tokens and finally underflows to 0."""
    xp = namespace(tokens.logp)
    if len(tokens.logp) < MIN_TOKENS_FOR_TABLE:
        log_lower, log_upper = log_ratios(tokens, delta)
    else:
        log_lower, log_upper = _interpolate(tokens, delta)
    # The limit of the simplex, r ≤ 1/p, is applied to the logarithm: after exp it would need a second exponential.
    return RatioBounds(xp.exp(log_lower), xp.exp(xp.minimum(log_upper, -tokens.logp)))


def log_ratios(tokens: TokenProbs, delta: float) -> tuple[Array, Array]:
    """Return the logarithms of both bounds by Newton's method, each of shape (T,)."""
    xp = namespace(tokens.p)
    common = tokens.p > 0.5
    s = xp.clip(xp.minimum(tokens.p, tokens.m), _SMALLEST_S, None)
    fall = _newton((xp.log1p(-s) - delta) / s, s, delta)
    rise = _newton((delta - xp.log(s)) / (1.0 - s), s, delta)
    weight = xp.where(common, -s, 1.0 - s)
    beyond = xp.where(common, 0.0, xp.log(s) - xp.clip(tokens.logp, None, 0.0))
    lower = weight * xp.where(common, rise, fall) - delta
    return lower, weight * xp.where(common, fall, rise) - delta + xp.clip(beyond, 0.0, None)


def _newton(t: Array, s: Array, delta: float) -> Array:
    """Return the root, from a start outside of it, where Newton's method converges monotonically without a bracket."""
    xp = namespace(s)
    for _ in range(_NEWTON_STEPS):
        w = s * xp.expm1(t)
        t = t - (xp.log1p(w) - s * t - delta) / ((s + w) / (1.0 + w) - s)
    return t


def _interpolate(tokens: TokenProbs, delta: float) -> tuple[Array, Array]:
    """Return the logarithms of both bounds by the polynomials in float64, each of shape (T,)."""
    xp = namespace(tokens.logp)
    y = -tokens.logp
    index = locate_piece(y)
    lower, upper = _coefficients(delta, type(y).__qualname__, xp, device_of(y))
    return evaluate_pieces(lower, index), evaluate_pieces(upper, index) + xp.clip(y - LARGEST_Y, 0.0, None)


@lru_cache(maxsize=32)
def _coefficients(
    delta: float, kind: str, xp: Any, device: Any
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Return the pieces of both bounds on the device. `kind` separates the tables of traced and real tensors."""
    nodes = piece_nodes(xp, device)
    solved = [log_ratios(TokenProbs(-y), delta) for y in nodes]
    lower, upper = zip(*solved, strict=True)
    return fit_pieces(lower), fit_pieces(upper)


def locate_piece(y: Array) -> PieceIndex:
    """Return the piece and the position in it for each y ≥ 0, clamped to the range. Shapes (T,)."""
    xp = namespace(y)
    bits = xp.clip(y, SMALLEST_Y, 1.0).view(xp.int64)
    units = xp.clip(64.0 * y - 64.0, 0.0, 64.0 * (LARGEST_Y - 1.0))
    unit = xp.floor(units)
    # The bits below those of the piece, with the exponent of 1: a number in [1, 1 + 1/64), without a conversion.
    rest = ((bits & ((1 << _F64_SHIFT) - 1)) | _F64_ONE).view(xp.float64)
    position = (rest * 64.0 - 64.5) + (units - unit)
    return (bits >> _F64_SHIFT) + (cast(unit, xp.int64) - _F64_FIRST), position


def piece_nodes(xp: Any, device: Any) -> list[Array]:
    """Return y at the Chebyshev nodes of every piece: DEGREE+1 arrays of shape (pieces,)."""
    piece = arange(_F64_PIECES, xp, device)
    low, high = _edge(piece), _edge(piece + 1)
    return [0.5 * (low + high) + 0.5 * (high - low) * float(x) for x in _chebyshev(DEGREE)]


def _edge(piece: Array) -> Array:
    """Return the lower end of each piece."""
    xp = namespace(piece)
    logarithmic = ((xp.clip(piece, None, _LOG_PIECES) + _F64_FIRST) << _F64_SHIFT).view(xp.float64)
    return logarithmic + cast(xp.clip(piece - _LOG_PIECES, 0, None), xp.float64) / 64.0


def fit_pieces(values: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return the coefficients of a polynomial in the position, constant first, from the values at the nodes.

    The differences to one value are fitted, not the values: those reach −745 and their rounding would be magnified.
    """
    x = 0.5 * _chebyshev(len(values) - 1)
    inverse = np.linalg.inv(np.vander(x, increasing=True))
    middle = values[len(values) // 2]
    rows = [sum(float(c) * (value - middle) for c, value in zip(row, values, strict=True)) for row in inverse]
    return (rows[0] + middle, *rows[1:])


def evaluate_pieces(coefficients: tuple[Array, ...], index: PieceIndex) -> Array:
    """Return the polynomials at the given positions, by Horner's rule. Shape (T,)."""
    piece, x = index
    result = take(coefficients[-1], piece)
    for coefficient in coefficients[-2::-1]:
        result = result * x + take(coefficient, piece)
    return result


def _chebyshev(degree: int) -> np.ndarray:
    """Return the degree+1 Chebyshev nodes in (−1, 1)."""
    return np.cos(np.pi * (np.arange(degree + 1) + 0.5) / (degree + 1))


def kl_bounds_float32(logp: Array, delta: float) -> RatioBounds:
    """Return the interval of ratios for many float32 log-probs, shape (T,), computed in float32; undefined for NaN."""
    xp = namespace(logp)
    lower, upper = _float32_tables(delta, type(logp).__qualname__, xp, device_of(logp))
    y = -logp
    bits = xp.clip(y, 2.0**_FIRST_OCTAVE, None).view(xp.int32)
    piece = bits >> _F32_SHIFT
    piece -= _F32_FIRST
    xp.clip(piece, 0, _F32_PIECES - 1, out=piece)
    # The bits below those of the piece, with the exponent of 1, are a number in [1, 1 + 2⁻¹⁰); minus its middle.
    bits &= (1 << _F32_SHIFT) - 1
    bits |= _F32_ONE
    x = bits.view(xp.float32)
    x -= 1.0 + _HALF
    low, high = _evaluate(lower, piece, x), _evaluate(upper, piece, x)
    return RatioBounds(low, xp.minimum(high, xp.exp(y, out=y), out=high))


def _evaluate(table: Float32Table, piece: Array, x: Array) -> Array:
    """Return the ratios of one bound. All operations are in place: new memory would cost more than the arithmetic."""
    ratio, slope, curvature = (take(column, piece) for column in table)
    curvature *= x
    curvature += slope
    curvature *= x
    namespace(x).exp(curvature, out=curvature)
    curvature *= ratio
    return curvature


@lru_cache(maxsize=32)
def _float32_tables(delta: float, kind: str, xp: Any, device: Any) -> tuple[Float32Table, Float32Table]:
    """Return the tables of both bounds on the device. `kind` separates those of traced and real tensors."""
    number = arange(_F32_PIECES, xp, device)
    octave = cast(number >> _F32_BITS, xp.float64) + _FIRST_OCTAVE
    middle = 1.0 + _HALF + cast(number & ((1 << _F32_BITS) - 1), xp.float64) * 2.0**-_F32_BITS
    at_nodes = [
        log_ratios(TokenProbs(-xp.exp2(octave) * (middle + node)), delta) for node in (-_NODE, 0.0, _NODE)
    ]
    lower, upper = (_parabola(xp, *values) for values in zip(*at_nodes, strict=True))
    return lower, upper


def _parabola(xp: Any, left: Array, middle: Array, right: Array) -> Float32Table:
    """Return the parabolas through log r at the three Chebyshev nodes of each piece."""
    left, middle, right = (xp.clip(value, _LOG_RATIO_FLOOR, None) for value in (left, middle, right))
    slope = (right - left) / (2.0 * _NODE)
    curvature = (right + left - 2.0 * middle) / (2.0 * _NODE**2)
    return cast(xp.exp(middle), xp.float32), cast(slope, xp.float32), cast(curvature, xp.float32)
