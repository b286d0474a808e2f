"""The Bands that have a closed form, written as ratios so that no small p cancels (docs/bounds.md).

Every function takes the tokens and δ > 0 and returns the roots of g(p, r) = δ, the upper at most 1/p. A lower one
below 0 means that the region reaches past the simplex there: `band_bounds` clamps it.
"""

from __future__ import annotations

import math

from bandpo_cli.bounds.arrays import Array, namespace
from bandpo_cli.bounds.values import RatioBounds, Tokens


def total_variation(tokens: Tokens, delta: float) -> RatioBounds:
    """|q−p| = δ."""
    step = delta / tokens.p
    return _within_the_simplex(tokens, 1.0 - step, 1.0 + step)


def chi2(tokens: Tokens, delta: float) -> RatioBounds:
    """(q−p)² = δ p(1−p)."""
    xp = namespace(tokens.p)
    step = xp.sqrt(delta * (tokens.m / tokens.p))
    return _within_the_simplex(tokens, 1.0 - step, 1.0 + step)


def neyman(tokens: Tokens, delta: float) -> RatioBounds:
    """(q−p)² = δ q(1−q): Wilson's score interval. The lower root from the product of both, which does not cancel."""
    xp, p = namespace(tokens.p), tokens.p
    upper = (2.0 * p + delta + xp.sqrt(delta * delta + 4.0 * delta * p * tokens.m)) / (2.0 * (1.0 + delta))
    return _within_the_simplex(tokens, p / ((1.0 + delta) * upper), upper / p)


def hellinger(tokens: Tokens, delta: float) -> RatioBounds:
    """√q = sin(asin√p ± φ) with cos φ = 1−δ/2, by the addition theorem; δ ≥ 2 is the largest distance there is."""
    xp = namespace(tokens.p)
    delta = min(delta, 2.0)
    cosine, sine = 1.0 - delta / 2.0, math.sqrt(delta * (1.0 - delta / 4.0))
    swing = xp.sqrt(tokens.m / tokens.p) * sine
    lower, upper = xp.clip(cosine - swing, 0.0, None), cosine + swing
    past_the_corner = tokens.m * cosine**2 <= tokens.p * sine**2
    most = 1.0 / tokens.p
    return _within_the_simplex(tokens, lower * lower, xp.where(past_the_corner, most, upper * upper))


def le_cam(tokens: Tokens, delta: float) -> RatioBounds:
    """Roots of (2+δ)q² − 2Bq + 2p² − δp(2−p) with B = δ(1−p) + 2p; the lower one again from the product."""
    xp, p = namespace(tokens.p), tokens.p
    sum_ = delta * tokens.m + 2.0 * p + xp.sqrt(delta * delta + 8.0 * delta * p * tokens.m)
    return _within_the_simplex(
        tokens, (2.0 * p - delta * (1.0 + tokens.m)) / sum_, sum_ / ((2.0 + delta) * p)
    )


def _within_the_simplex(tokens: Tokens, lower: Array, upper: Array) -> RatioBounds:
    return RatioBounds(lower, namespace(upper).minimum(upper, 1.0 / tokens.p))
