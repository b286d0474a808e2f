"""The paper's Band: KL(π_old‖π) ≤ δ, by Newton's method in the natural parameter (docs/bounds.md).

With s = min(p, 1−p) and t = logit q − logit s the constraint is F(t) = log1p(s·expm1(t)) − s·t = δ, smooth and convex
with F' = q−s. Its two roots are the bounds of the rarer side; those of the other side are the same two, exchanged. At a
root, log r = (1−s)·t − δ for the rarer side and −s·t − δ for the other one.

Many tokens need fewer steps:

* In float64 the two last steps are enough from the table of starts that the generic solver has, too.
* For float32 results (`kl_bounds_float32`), log r is interpolated as a function of y = −log p, in float32 throughout,
  with a relative error of about 2e-7. The piece is read from the bits of y, without a logarithm. On a piece of relative
  half-width 2⁻¹¹ a parabola has an error of 1e-8. float32 cannot represent an exponent of 87 with 7 decimals, so the
  ratio at the middle of each piece is tabulated and only the small change of log r within it is computed.
"""

import math
from functools import lru_cache
from typing import Any

from bandpo_cli.bounds.arrays import Array, RatioBounds, TokenProbs, cast, namespace, take
from bandpo_cli.bounds.solver import SMALLEST, initial_guess

# Sufficient from the outer starts: 30 and 48 steps agree to 6e-14 in t for log p in [−80, −1e-9], δ in [1e-4, 2].
_NEWTON_STEPS = 40
_STEPS_FROM_TABLE = 2  # Sufficient from the table, whose error of 3e-5 each step squares
MIN_TOKENS_FOR_TABLE = 4096
"""Smallest number of tokens for tables, which are reused, since δ is the same in each step of training."""
# Range of y of the float32 tables: from 2⁻³⁶, where results equal the limit p→1, to 128, where 1/p overflows.
_FIRST_OCTAVE, _LAST_OCTAVE = -36, 7

_F32_BITS = 10
_F32_SHIFT = 23 - _F32_BITS
_HALF = 0.5 * 2.0**-_F32_BITS
_F32_ONE = 127 << 23
_F32_FIRST = (127 + _FIRST_OCTAVE) << _F32_BITS
_F32_PIECES = (_LAST_OCTAVE - _FIRST_OCTAVE) << _F32_BITS
_NODE = _HALF * math.sqrt(0.75)  # Distance of the outer Chebyshev nodes of a parabola from its middle
_LOG_RATIO_FLOOR = -120.0  # exp of this is 0 in float32; below it log r is too steep for a parabola per piece

Float32Table = tuple[Array, ...]
"""One bound: its ratio at the middle of each piece, slope and curvature of log r there; float32, shapes (pieces,)."""


def kl_bounds(tokens: TokenProbs, delta: float) -> RatioBounds:
    """Return the interval of ratios. The lower bound is about exp(−δ/p) for rare tokens and finally underflows to 0."""
    xp = namespace(tokens.logp)
    log_lower, log_upper = _log_ratios(tokens, delta, from_table=len(tokens.logp) >= MIN_TOKENS_FOR_TABLE)
    # The limit of the simplex, r ≤ 1/p, is applied to the logarithm: after exp it would need a second exponential.
    return RatioBounds(xp.exp(log_lower), xp.exp(xp.minimum(log_upper, -tokens.logp)))


def _log_ratios(tokens: TokenProbs, delta: float, from_table: bool) -> tuple[Array, Array]:
    """Return the logarithms of both bounds, each of shape (T,)."""
    xp = namespace(tokens.p)
    common = tokens.p > 0.5
    s = xp.clip(xp.minimum(tokens.p, tokens.m), SMALLEST, None)
    fall, rise = _newton(s, delta, -1, from_table), _newton(s, delta, +1, from_table)
    weight = xp.where(common, -s, 1.0 - s)
    beyond = xp.where(common, 0.0, xp.log(s) - xp.clip(tokens.logp, None, 0.0))
    lower = weight * xp.where(common, rise, fall) - delta
    return lower, weight * xp.where(common, fall, rise) - delta + xp.clip(beyond, 0.0, None)


def _newton(s: Array, delta: float, side: int, from_table: bool = False) -> Array:
    """Return the root by Newton's method.

    The start is the table of the generic solver, or outside of the root, where the steps converge monotonically without
    a bracket.
    """
    xp = namespace(s)
    if from_table:
        t = initial_guess(_newton, s, delta, side)
    else:
        t = (delta - xp.log(s)) / (1.0 - s) if side > 0 else (xp.log1p(-s) - delta) / s
    for _ in range(_STEPS_FROM_TABLE if from_table else _NEWTON_STEPS):
        w = s * xp.expm1(t)
        t = t - (xp.log1p(w) - s * t - delta) / ((s + w) / (1.0 + w) - s)
    return t


def kl_bounds_float32(logp: Array, delta: float) -> RatioBounds:
    """Return the interval of ratios for many float32 log-probs, shape (T,), computed in float32; undefined for NaN."""
    xp = namespace(logp)
    lower, upper = _float32_tables(delta, type(logp).__qualname__, xp, logp.device)
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
    number = xp.arange(_F32_PIECES, dtype=xp.int64, device=device)
    octave = cast(number >> _F32_BITS, xp.float64) + _FIRST_OCTAVE
    center = 1.0 + _HALF + cast(number & ((1 << _F32_BITS) - 1), xp.float64) * 2.0**-_F32_BITS
    nodes = (TokenProbs(-xp.exp2(octave) * (center + node)) for node in (-_NODE, 0.0, _NODE))
    at_nodes = [_log_ratios(tokens, delta, from_table=False) for tokens in nodes]
    tables = []
    # A parabola through log r at the Chebyshev nodes of each piece.
    for values in zip(*at_nodes, strict=True):
        left, middle, right = (xp.clip(value, _LOG_RATIO_FLOOR, None) for value in values)
        slope = (right - left) / (2.0 * _NODE)
        curvature = (right + left - 2.0 * middle) / (2.0 * _NODE**2)
        tables.append(tuple(cast(column, xp.float32) for column in (xp.exp(middle), slope, curvature)))
    return tables[0], tables[1]
