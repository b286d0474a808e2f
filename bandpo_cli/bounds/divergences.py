"""The Bands that have a closed form, written as ratios so that no small p cancels (docs/bounds.md).

Every function takes the tokens and δ > 0 and returns the roots of g(p, r) = δ, the upper at most 1/p. A lower one
below 0 means that the region reaches past the simplex there: `band_bounds` clamps it.
"""

# MERGED: A user's own f, named `module:function`: found, checked once, and then solved like any other.
# MERGED: The functions f of the divergences, given u and x = u−1 apart so that neither end loses its digits. D_f(π‖π_old) = Σ π_old f(π/π_old), f convex with f(1) = 0. Shapes are the argument's; u ≥ 0.
# MERGED: The divergences by name. Adding one is adding an entry: without `solve`, the generic solver finds its Band.
from __future__ import annotations

import importlib
import math
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from bandpo_cli.bounds import solver
from bandpo_cli.bounds.arrays import Array, Generator, RatioBounds, TokenProbs, namespace
from bandpo_cli.bounds.kl import kl_bounds, kl_bounds_float32
from bandpo_cli.errors import ConfigError, nearest


def total_variation_bounds(tokens: TokenProbs, delta: float) -> RatioBounds:
    """|q−p| = δ."""
    step = delta / tokens.p
    return _cap_at_simplex(tokens, 1.0 - step, 1.0 + step)


def chi2_bounds(tokens: TokenProbs, delta: float) -> RatioBounds:
    """(q−p)² = δ p(1−p)."""
    xp = namespace(tokens.p)
    step = xp.sqrt(delta * (tokens.m / tokens.p))
    return _cap_at_simplex(tokens, 1.0 - step, 1.0 + step)


def neyman_bounds(tokens: TokenProbs, delta: float) -> RatioBounds:
    """(q−p)² = δ q(1−q): Wilson's score interval. The lower root from the product of both, which does not cancel."""
    xp, p = namespace(tokens.p), tokens.p
    upper = (2.0 * p + delta + xp.sqrt(delta * delta + 4.0 * delta * p * tokens.m)) / (2.0 * (1.0 + delta))
    return _cap_at_simplex(tokens, p / ((1.0 + delta) * upper), upper / p)


def hellinger_bounds(tokens: TokenProbs, delta: float) -> RatioBounds:
    """√q = sin(asin√p ± φ) with cos φ = 1−δ/2, by the addition theorem; δ ≥ 2 is the largest distance there is."""
    xp = namespace(tokens.p)
    delta = min(delta, 2.0)
    cosine, sine = 1.0 - delta / 2.0, math.sqrt(delta * (1.0 - delta / 4.0))
    swing = xp.sqrt(tokens.m / tokens.p) * sine
    lower, upper = xp.clip(cosine - swing, 0.0, None), cosine + swing
    past_the_corner = tokens.m * cosine**2 <= tokens.p * sine**2
    most = 1.0 / tokens.p
    return _cap_at_simplex(tokens, lower * lower, xp.where(past_the_corner, most, upper * upper))


def le_cam_bounds(tokens: TokenProbs, delta: float) -> RatioBounds:
    """Roots of (2+δ)q² − 2Bq + 2p² − δp(2−p) with B = δ(1−p) + 2p; the lower one again from the product."""
    xp, p = namespace(tokens.p), tokens.p
    sum_ = delta * tokens.m + 2.0 * p + xp.sqrt(delta * delta + 8.0 * delta * p * tokens.m)
    return _cap_at_simplex(tokens, (2.0 * p - delta * (1.0 + tokens.m)) / sum_, sum_ / ((2.0 + delta) * p))


def _cap_at_simplex(tokens: TokenProbs, lower: Array, upper: Array) -> RatioBounds:
    return RatioBounds(lower, namespace(upper).minimum(upper, 1.0 / tokens.p))


_NEAR_ZERO, _NEAR_INFINITY = (
    2.0**-1000,
    2.0**1000,
)  # stand for 0 and ∞, where an f such as u·log u is not a number
_PATH_LOCK = threading.Lock()


@lru_cache(maxsize=64)
def custom_generator(name: str) -> Generator:
    """Load and check `module:function`.

    The function takes u = π/π_old as an array (numpy, or torch when the log-probabilities are tensors) and
    returns f(u) of the same shape; f is convex with f(1) = 0. Raises ConfigError naming the function otherwise.
    """
    function = _load(name)
    _check(name, function)

    def f(u: Array, x: Array) -> Array:
        return function(namespace(u).clip(u, _NEAR_ZERO, _NEAR_INFINITY))

    return f


def _load(name: str) -> Callable[[Array], Array]:
    module_name, _, function_name = name.partition(":")
    module = _import(name, module_name)
    function = getattr(module, function_name, None)
    if function is None:
        raise ConfigError(
            f"divergence '{name}': module '{module_name}' has no '{function_name}'{nearest(function_name, dir(module))}"
        )
    if not callable(function):
        raise ConfigError(
            f"divergence '{name}': '{function_name}' is no function but a {type(function).__name__}"
        )
    return function  # type: ignore[no-any-return]


def _import(name: str, module_name: str) -> Any:
    """Import with the current folder searched first, as `python -m` would."""
    here = str(Path.cwd())
    with _PATH_LOCK:
        sys.path.insert(0, here)
        try:
            return importlib.import_module(module_name)
        except Exception as error:
            raise ConfigError(
                f"divergence '{name}': importing '{module_name}' failed: {type(error).__name__}: {error} "
                f"(searched the current folder {here} and the Python path)"
            ) from error
        finally:
            sys.path.remove(here)


def _check(name: str, function: Callable[[Array], Array]) -> None:
    """Refuse what is not finite, not zero at 1 or not convex on a grid of u from 1e-4 to 1e4."""
    u = np.concatenate([np.logspace(-4, 4, 161), np.linspace(0.5, 1.5, 41)])
    u = np.unique(u)
    with np.errstate(all="ignore"):
        try:
            values, at_one = np.asarray(function(u), np.float64), float(function(np.ones(1))[0])
        except Exception as error:
            raise ConfigError(
                f"divergence '{name}': calling it with a numpy array of ratios failed: {type(error).__name__}: "
                f"{error}; it must take an array u and return f(u) of the same shape"
            ) from error
    if values.shape != u.shape:
        raise ConfigError(f"divergence '{name}': f(u) has shape {values.shape} for u of shape {u.shape}")
    if not np.isfinite(values).all():
        raise ConfigError(f"divergence '{name}': f(u) is not finite at u = {u[~np.isfinite(values)][0]:g}")
    if abs(at_one) > 1e-9:
        raise ConfigError(f"divergence '{name}': f(1) must be 0 and is {at_one:g}")
    _check_convex(name, u, values)


def _check_convex(name: str, u: np.ndarray, values: np.ndarray) -> None:
    chord = values[:-2] + (values[2:] - values[:-2]) * (u[1:-1] - u[:-2]) / (u[2:] - u[:-2])
    above = values[1:-1] - chord
    scale = np.abs(values[:-2]) + np.abs(values[2:]) + 1e-3
    if (above > 1e-9 * scale).any():
        raise ConfigError(
            f"divergence '{name}': f is not convex: it bends down at u = {u[1:-1][above.argmax()]:g}"
        )


def f_kl(u: Array, x: Array) -> Array:
    """−log u + u − 1."""
    xp = namespace(u)
    return x - xp.where(x < -0.5, xp.log(u), xp.log1p(x))


def f_reverse_kl(u: Array, x: Array) -> Array:
    """u log u − u + 1."""
    return _u_log_u(u, x) - x


def f_total_variation(u: Array, x: Array) -> Array:
    """½|u−1|."""
    return 0.5 * abs(x)


def f_chi2(u: Array, x: Array) -> Array:
    """(u−1)²."""
    return x * x


def f_neyman(u: Array, x: Array) -> Array:
    """(u−1)²/u."""
    return x * x / u


def f_hellinger(u: Array, x: Array) -> Array:
    """(√u−1)²."""
    root = x / (1.0 + namespace(u).sqrt(u))
    return root * root


def f_le_cam(u: Array, x: Array) -> Array:
    """(u−1)²/(u+1)."""
    return x * x / (1.0 + u)


def f_jensen_shannon(u: Array, x: Array) -> Array:
    """½u log(2u/(1+u)) + ½log(2/(1+u)), in nats."""
    return 0.5 * (_u_log_u(u, x) - (1.0 + u) * namespace(u).log1p(0.5 * x))


def _u_log_u(u: Array, x: Array) -> Array:
    """U log u, which is 0 at u = 0 although the logarithm is not finite there."""
    xp = namespace(u)
    return u * xp.log1p(xp.clip(x, -1.0 + 2.0**-53, None))


@dataclass(frozen=True)
class Divergence:
    """One f-divergence D_f(π‖π_old).

    Attributes:
        region: what the trust region bounds, for people.
        f: its generator, `f(u, u−1)`.
        solve: its Band in closed form or by a method of its own; None for the generic solver.
        solve_float32: the same from float32 log-probs to float32 ratios, for many tokens; None where `solve` serves.
    """

    region: str
    f: Generator
    solve: Callable[[TokenProbs, float], RatioBounds] | None = None
    solve_float32: Callable[[Array, float], RatioBounds] | None = None

    def roots(self, tokens: TokenProbs, delta: float) -> RatioBounds:
        """Ratios at which g(p, r) = δ; the upper at most 1/p, the lower not yet clamped at 0. Shapes (T,)."""
        return self.solve(tokens, delta) if self.solve else solver.solve_generic(self.f, tokens, delta)


DIVERGENCES: dict[str, Divergence] = {
    "kl": Divergence("KL(π_old‖π), nats", f_kl, kl_bounds, kl_bounds_float32),
    "reverse-kl": Divergence("KL(π‖π_old), nats", f_reverse_kl),
    "tv": Divergence("total variation", f_total_variation, total_variation_bounds),
    "chi2": Divergence("Pearson χ²(π‖π_old)", f_chi2, chi2_bounds),
    "neyman": Divergence("Neyman χ²(π_old‖π)", f_neyman, neyman_bounds),
    "hellinger": Divergence("squared Hellinger", f_hellinger, hellinger_bounds),
    "le-cam": Divergence("triangular discrimination", f_le_cam, le_cam_bounds),
    "js": Divergence("Jensen–Shannon, nats", f_jensen_shannon),
}


def find_divergence(name: str) -> Divergence:
    """The divergence of that name, or a user's own f for `module:function`. Raises ConfigError."""
    if name in DIVERGENCES:
        return DIVERGENCES[name]
    if ":" not in name:
        raise ConfigError(
            f"divergence '{name}' is not known{nearest(name, DIVERGENCES)}; "
            f"known: {', '.join(DIVERGENCES)}, or your own f as module:function"
        )
    return Divergence("your own f", custom_generator(name))


def divergence_at(divergence: Divergence, tokens: TokenProbs, ratio: float) -> float:
    """g(p, r) of docs/bounds.md: the least divergence at which a token of probability p can have ratio r ≤ 1/p.

    `tokens` hold one token, as numpy arrays of shape (1,). inf where no radius is enough, as r = 1/p for kl.
    """
    xp, p, m = namespace(tokens.p), tokens.p, tokens.m
    x = xp.zeros_like(p) + (ratio - 1.0)
    other_x = xp.clip(-p * x / m, -1.0, None)
    terms = p * divergence.f(1.0 + x, x) + m * divergence.f(1.0 + other_x, other_x)
    return float(terms[0])
