"""The f-divergences: generators f, Bands in closed form, and custom f named `module:function`.

D_f(π‖π_old) = Σ π_old f(π/π_old) with f convex and f(1) = 0. A new divergence needs its f here (the functions `f_*`)
and an entry in `registries.DIVERGENCES`; without a closed form (the functions `*_bounds`) the generic solver computes
its Band.

The generators take u and x = u−1 separately, so that neither end loses its digits; u ≥ 0, and they return the shape
of their arguments. The closed forms are written as ratios, so that no small p cancels (docs/bounds.md). They take the
tokens and δ > 0 and return the roots of g(p, r) = δ, the upper at most 1/p. A lower root below 0 means that the region
extends beyond the simplex there: `band_bounds` clamps it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from bandpo_cli.bounds import solver
from bandpo_cli.bounds.arrays import Array, Generator, RatioBounds, TokenProbs, namespace
from bandpo_cli.custom_code import load_setting, user_code
from bandpo_cli.errors import ConfigError
from bandpo_cli.registries import DIVERGENCES, load_attribute

# Replace 0 and ∞ in the argument of a custom f, where an expression such as u·log u is not a number.
_NEAR_ZERO, _NEAR_INFINITY = 2.0**-1000, 2.0**1000


@dataclass(frozen=True)
class Divergence:
    """One f-divergence D_f(π‖π_old).

    Attributes:
        f: its generator, `f(u, u−1)`.
        solve: its Band, the ratios r with g(p, r) = δ, shapes (T,): the upper at most 1/p, the lower not yet clamped at
            0. In closed form, by a specific method or by the generic solver.
        solve_float32: the same from float32 log-probs to float32 ratios, for many tokens; None where `solve` is used.
    """

    f: Generator
    solve: Callable[[TokenProbs, float], RatioBounds]
    solve_float32: Callable[[Array, float], RatioBounds] | None = None


def find_divergence(name: str) -> Divergence:
    """Return the divergence of that name, or one with a custom f for `module:function`.

    Raises:
        ConfigError: there is no divergence of that name, or the custom f is not usable.
    """
    if name in DIVERGENCES:
        entry = DIVERGENCES[name]
        f: Generator = load_attribute(entry.generator)
        solve = entry.bounds and load_attribute(entry.bounds)
        solve_float32 = entry.bounds_float32 and load_attribute(entry.bounds_float32)
    elif ":" in name:
        f, solve, solve_float32 = custom_generator(name), None, None
    else:
        raise ConfigError(f"divergence '{name}' is not known{DIVERGENCES.suggestion(name)}")
    return Divergence(f, solve or partial(solver.solve_generic, f), solve_float32 or None)


def f_kl(u: Array, x: Array) -> Array:
    """Return −log u + u − 1."""
    xp = namespace(u)
    return x - xp.where(x < -0.5, xp.log(u), xp.log1p(x))


def f_reverse_kl(u: Array, x: Array) -> Array:
    """Return u log u − u + 1."""
    return _u_log_u(u, x) - x


def f_total_variation(u: Array, x: Array) -> Array:
    """Return ½|u−1|."""
    return 0.5 * abs(x)


def f_chi2(u: Array, x: Array) -> Array:
    """Return (u−1)²."""
    return x * x


def f_neyman(u: Array, x: Array) -> Array:
    """Return (u−1)²/u."""
    return x * x / u


def f_hellinger(u: Array, x: Array) -> Array:
    """Return (√u−1)²."""
    root = x / (1.0 + namespace(u).sqrt(u))
    return root * root


def f_le_cam(u: Array, x: Array) -> Array:
    """Return (u−1)²/(u+1)."""
    return x * x / (1.0 + u)


def f_jensen_shannon(u: Array, x: Array) -> Array:
    """Return ½u log(2u/(1+u)) + ½log(2/(1+u)), in nats."""
    return 0.5 * (_u_log_u(u, x) - (1.0 + u) * namespace(u).log1p(0.5 * x))


def total_variation_bounds(tokens: TokenProbs, delta: float) -> RatioBounds:
    """Return the roots of |q−p| = δ."""
    step = delta / tokens.p
    return _cap_at_simplex(tokens, 1.0 - step, 1.0 + step)


def chi2_bounds(tokens: TokenProbs, delta: float) -> RatioBounds:
    """Return the roots of (q−p)² = δ p(1−p)."""
    xp = namespace(tokens.p)
    step = xp.sqrt(delta * (tokens.m / tokens.p))
    return _cap_at_simplex(tokens, 1.0 - step, 1.0 + step)


def neyman_bounds(tokens: TokenProbs, delta: float) -> RatioBounds:
    """Return the roots of (q−p)² = δ q(1−q), Wilson's score interval; the lower one from the product of both."""
    xp, p = namespace(tokens.p), tokens.p
    upper = (2.0 * p + delta + xp.sqrt(delta * delta + 4.0 * delta * p * tokens.m)) / (2.0 * (1.0 + delta))
    return _cap_at_simplex(tokens, p / ((1.0 + delta) * upper), upper / p)


def hellinger_bounds(tokens: TokenProbs, delta: float) -> RatioBounds:
    """Return the ratios of √q = sin(asin√p ± φ) with cos φ = 1−δ/2, by the addition theorem; δ > 2 counts as 2."""
    xp = namespace(tokens.p)
    delta = min(delta, 2.0)
    cosine, sine = 1.0 - delta / 2.0, math.sqrt(delta * (1.0 - delta / 4.0))
    spread = xp.sqrt(tokens.m / tokens.p) * sine
    lower, upper = xp.clip(cosine - spread, 0.0, None), cosine + spread
    beyond_corner = tokens.m * cosine**2 <= tokens.p * sine**2
    return _cap_at_simplex(tokens, lower * lower, xp.where(beyond_corner, 1.0 / tokens.p, upper * upper))


def le_cam_bounds(tokens: TokenProbs, delta: float) -> RatioBounds:
    """Return the roots of (2+δ)q² − 2Bq + 2p² − δp(2−p) with B = δ(1−p) + 2p; the lower one from the product."""
    xp, p = namespace(tokens.p), tokens.p
    sum_ = delta * tokens.m + 2.0 * p + xp.sqrt(delta * delta + 8.0 * delta * p * tokens.m)
    return _cap_at_simplex(tokens, (2.0 * p - delta * (1.0 + tokens.m)) / sum_, sum_ / ((2.0 + delta) * p))


@lru_cache(maxsize=64)
def custom_generator(name: str) -> Generator:
    """Load `module:function`; raise ConfigError unless it is finite, 0 at 1 and convex for u from 1e-4 to 1e4.

    The function takes u = π/π_old as an array (numpy, or torch when the log-probabilities are tensors) and returns f(u)
    of the same shape.
    """
    u = np.unique(np.concatenate([np.logspace(-4, 4, 161), np.linspace(0.5, 1.5, 41)]))
    function: Callable[[Array], Array] = load_setting("divergence", name)
    with user_code(f"divergence '{name}'", function), np.errstate(all="ignore"):
        values = np.asarray(function(u), np.float64)
        if values.shape != u.shape:
            raise ValueError(f"f(u) has shape {values.shape} for u of shape {u.shape}")
        if not np.isfinite(values).all():
            raise ValueError(f"f(u) is not finite at u = {u[~np.isfinite(values)][0]:g}")
        if abs(at_one := float(function(np.ones(1))[0])) > 1e-9:
            raise ValueError(f"f(1) must be 0 and is {at_one:g}")
        # convex: each value lies on or below the chord of its two neighbours
        left, middle, right = values[:-2], values[1:-1], values[2:]
        above = middle - (left + (right - left) * (u[1:-1] - u[:-2]) / (u[2:] - u[:-2]))
        if (above > 1e-9 * (np.abs(left) + np.abs(right) + 1e-3)).any():
            raise ValueError(f"f is not convex: it bends down at u = {u[1:-1][above.argmax()]:g}")
    return lambda u, x: function(namespace(u).clip(u, _NEAR_ZERO, _NEAR_INFINITY))


def _u_log_u(u: Array, x: Array) -> Array:
    """Return u log u, which is 0 at u = 0 although the logarithm is not finite there."""
    xp = namespace(u)
    return u * xp.log1p(xp.clip(x, -1.0 + 2.0**-53, None))


def _cap_at_simplex(tokens: TokenProbs, lower: Array, upper: Array) -> RatioBounds:
    """Return the bounds with the upper one at most 1/p."""
    return RatioBounds(lower, namespace(upper).minimum(upper, 1.0 / tokens.p))
