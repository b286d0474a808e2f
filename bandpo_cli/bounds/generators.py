"""The functions f of the divergences, given u and x = u−1 apart so that neither end loses its digits.

D_f(π‖π_old) = Σ π_old f(π/π_old), f convex with f(1) = 0. Shapes are the argument's; u ≥ 0.
"""

from __future__ import annotations

from collections.abc import Callable

from bandpo_cli.bounds.arrays import Array, namespace

Generator = Callable[[Array, Array], Array]
"""`f(u, x)` with x = u−1."""


def kl(u: Array, x: Array) -> Array:
    """−log u + u − 1."""
    xp = namespace(u)
    return x - xp.where(x < -0.5, xp.log(u), xp.log1p(x))


def reverse_kl(u: Array, x: Array) -> Array:
    """u log u − u + 1."""
    return _u_log_u(u, x) - x


def total_variation(u: Array, x: Array) -> Array:
    """½|u−1|."""
    return 0.5 * abs(x)


def chi2(u: Array, x: Array) -> Array:
    """(u−1)²."""
    return x * x


def neyman(u: Array, x: Array) -> Array:
    """(u−1)²/u."""
    return x * x / u


def hellinger(u: Array, x: Array) -> Array:
    """(√u−1)²."""
    root = x / (1.0 + namespace(u).sqrt(u))
    return root * root


def le_cam(u: Array, x: Array) -> Array:
    """(u−1)²/(u+1)."""
    return x * x / (1.0 + u)


def jensen_shannon(u: Array, x: Array) -> Array:
    """½u log(2u/(1+u)) + ½log(2/(1+u)), in nats."""
    return 0.5 * (_u_log_u(u, x) - (1.0 + u) * namespace(u).log1p(0.5 * x))


def _u_log_u(u: Array, x: Array) -> Array:
    """U log u, which is 0 at u = 0 although the logarithm is not finite there."""
    xp = namespace(u)
    return u * xp.log1p(xp.clip(x, -1.0 + 2.0**-53, None))
