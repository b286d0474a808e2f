"""The paper's Band: KL(π_old‖π) ≤ δ, by Newton in the natural parameter (DESIGN §3).

With s = min(p, 1−p) and t = logit q − logit s the constraint is F(t) = log1p(s·expm1(t)) − s·t = δ, smooth and
convex with F' = q−s and F'' = q(1−q). Its two roots are the bounds of the rarer side; the other side's are the
same two, swapped. On a root, log r = (1−s)·t − δ for the rarer side and −s·t − δ for the other one.
"""

from __future__ import annotations

import math

from bandpo_cli.bounds import table
from bandpo_cli.bounds.arrays import Array, namespace
from bandpo_cli.bounds.values import RatioBounds, Tokens

_NEWTON_STEPS = 40
"""Enough from the outer starts for every s and δ in [1e-6, 10]: 30 and 48 agree to 6e-14 over DESIGN §3's range."""


def root(s: Array, delta: float, side: int) -> Array:
    """The root t of F by plain Newton from outside, where it converges monotonically: no bracket is needed."""
    xp = namespace(s)
    t = (delta - xp.log(s)) / (1.0 - s) if side > 0 else (xp.log1p(-s) - delta) / s
    for _ in range(_NEWTON_STEPS):
        w = s * xp.expm1(t)
        t = t - (xp.log1p(w) - s * t - delta) / ((s + w) / (1.0 + w) - s)
    return t


def _halley(t: Array, s: Array, delta: float) -> Array:
    """One step of third order: from the table's 3e-5 to double precision."""
    xp = namespace(s)
    w = s * xp.expm1(t)
    q = (s + w) / (1.0 + w)
    slope = q - s
    newton = (xp.log1p(w) - s * t - delta) / slope
    return t - newton / (1.0 - 0.5 * newton * (q * (1.0 - q)) / slope)


def _solve(s: Array, delta: float, side: int) -> Array:
    if len(s) < table.WORTHWHILE:
        return root(s, delta, side)
    return _halley(table.start(root, s, delta, side), s, delta)


def kl(tokens: Tokens, delta: float) -> RatioBounds:
    """The interval of ratios. The lower bound is about exp(−δ/p) for rare tokens and underflows to 0 in the end."""
    xp = namespace(tokens.p)
    common = tokens.p > 0.5
    s = xp.clip(xp.minimum(tokens.p, tokens.m), table.SMALLEST, None)
    fall, rise = _solve(s, delta, -1), _solve(s, delta, +1)
    weight = xp.where(common, -s, 1.0 - s)
    lower = xp.exp(weight * xp.where(common, rise, fall) - delta)
    beyond = xp.clip(math.log(table.SMALLEST) - tokens.logp, 0.0, None)
    upper = xp.exp(weight * xp.where(common, fall, rise) - delta + beyond)
    return RatioBounds(lower, upper)
