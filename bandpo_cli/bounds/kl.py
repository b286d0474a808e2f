"""The paper's Band: KL(π_old‖π) ≤ δ, by Newton in the natural parameter (docs/bounds.md).

With s = min(p, 1−p) and t = logit q − logit s the constraint is F(t) = log1p(s·expm1(t)) − s·t = δ, smooth and
convex with F' = q−s. Its two roots are the bounds of the rarer side; the other side's are the same two, swapped.
On a root, log r = (1−s)·t − δ for the rarer side and −s·t − δ for the other one.

Since δ is fixed in a call, log r is a function of log p alone and analytic: many tokens are served by polynomials
through Newton's solutions (`pieces` in float64, `kl_float32` for float32 results).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from bandpo_cli.bounds import pieces
from bandpo_cli.bounds.arrays import Array, namespace, place
from bandpo_cli.bounds.kl_float32 import kl_float32
from bandpo_cli.bounds.values import RatioBounds, Tokens

_SMALLEST = 2.0**-200
"""Far below it the new probability depends no more on s, and 1/s² would overflow."""

_NEWTON_STEPS = 40
"""Enough from the outer starts: 30 and 48 steps agree to 6e-14 in t over log p in [−80, −1e-9] and δ in [1e-4, 2]."""

WORTHWHILE = 4096
"""From this many tokens on, polynomials: training comes back with the same δ step after step."""


def kl(tokens: Tokens, delta: float) -> RatioBounds:
    """The interval of ratios. The lower bound is about exp(−δ/p) for rare tokens and underflows to 0 in the end."""
    xp = namespace(tokens.logp)
    if len(tokens.logp) < WORTHWHILE:
        log_lower, log_upper = log_ratios(tokens, delta)
    else:
        log_lower, log_upper = _from_pieces(tokens, delta)
    # The simplex, r ≤ 1/p, costs nothing here and an exponential later.
    return RatioBounds(xp.exp(log_lower), xp.exp(xp.minimum(log_upper, -tokens.logp)))


def kl_short(logp: Array, delta: float) -> RatioBounds:
    """The same for many float32 tokens at once, in float32."""
    return kl_float32(logp, delta, log_ratios)


def log_ratios(tokens: Tokens, delta: float) -> tuple[Array, Array]:
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


def _from_pieces(tokens: Tokens, delta: float) -> tuple[Array, Array]:
    xp = namespace(tokens.logp)
    y = -tokens.logp
    where = pieces.locate(y)
    lower, upper = _coefficients(delta, type(y).__qualname__, xp, place(y))
    return pieces.evaluate(lower, where), pieces.evaluate(upper, where) + xp.clip(
        y - pieces.LARGEST, 0.0, None
    )


@lru_cache(maxsize=32)
def _coefficients(
    delta: float, kind: str, xp: Any, device: Any
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Both bounds' pieces, made on the device. `kind` keeps traced tensors out of the real ones' table."""
    nodes = pieces.nodes(xp, device)
    solved = [log_ratios(Tokens(-y), delta) for y in nodes]
    lower, upper = zip(*solved, strict=True)
    return pieces.fit(lower), pieces.fit(upper)
