"""kl's Band for many float32 tokens, computed in float32 throughout, at a relative error of about 2e-7.

δ is fixed in a call, so log r is a function of y = −log p alone, and analytic. Within a piece of relative half-width
2⁻¹¹ a parabola through three of Newton's solutions meets it to 1e-8. What float32 could not hold, an exponent of 87
with 7 digits behind the point, never arises: the ratio at the piece's middle is tabulated, and only the small change
of log r inside the piece is computed. The piece and the place in it are read off y's bits, without a logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from bandpo_cli.bounds.arrays import Array, arange, cast, namespace, pick, place
from bandpo_cli.bounds.values import RatioBounds, Tokens

LogRatios = Callable[[Tokens, float], tuple[Array, Array]]

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

_GONE = -120.0
"""exp of this is 0 in float32; beyond it log r falls so steeply that no piece could follow."""

Piece = tuple[Array, Array, Array]
"""Ratio at the middle, and slope and curvature of log r there; float32, (pieces,)."""


def kl_float32(logp: Array, delta: float, log_ratios: LogRatios) -> RatioBounds:
    """The interval of ratios for float32 `logp` of shape (T,); any number for NaN. `log_ratios` is Newton's."""
    xp = namespace(logp)
    lower, upper = _table(delta, log_ratios, type(logp).__qualname__, xp, place(logp))
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


def _evaluate(table: Piece, piece: Array, x: Array) -> Array:
    """In place throughout: fresh memory costs more here than the arithmetic."""
    ratio, slope, curvature = (pick(column, piece) for column in table)
    curvature *= x
    curvature += slope
    curvature *= x
    namespace(x).exp(curvature, out=curvature)
    curvature *= ratio
    return curvature


@lru_cache(maxsize=32)
def _table(delta: float, log_ratios: LogRatios, kind: str, xp: Any, device: Any) -> tuple[Piece, Piece]:
    """Both bounds' pieces, made on the device. `kind` keeps traced tensors out of the real ones' table."""
    number = arange(_PIECES, xp, device)
    octave = cast(number >> _BITS, xp.float64) + _FIRST_OCTAVE
    middle = 1.0 + _HALF + cast(number & ((1 << _BITS) - 1), xp.float64) * 2.0**-_BITS
    at_nodes = [
        log_ratios(Tokens(-xp.exp2(octave) * (middle + node)), delta) for node in (-_NODE, 0.0, _NODE)
    ]
    lower, upper = (_parabola(xp, *values) for values in zip(*at_nodes, strict=True))
    return lower, upper


def _parabola(xp: Any, left: Array, middle: Array, right: Array) -> Piece:
    left, middle, right = (xp.clip(value, _GONE, None) for value in (left, middle, right))
    slope = (right - left) / (2.0 * _NODE)
    curvature = (right + left - 2.0 * middle) / (2.0 * _NODE**2)
    return cast(xp.exp(middle), xp.float32), cast(slope, xp.float32), cast(curvature, xp.float32)
