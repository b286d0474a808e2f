"""Starts for the iterative solvers: in one call δ is fixed, so a root is a function of the probability alone.

The root t(s) in the natural parameter is solved once at the edges of 64 bins an octave and joined by lines, whose
error is of the order of (1/64)²/8 ≈ 3e-5. The bin of s is read off the top bits of its float64 representation,
so a look-up costs no logarithm.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from bandpo_cli.bounds.arrays import Array, arange, namespace, pick, place

RootFinder = Callable[[Array, float, int], Array]
"""`root(s, delta, side)`: the natural parameter t of the new probability; side +1 for t > 0, −1 for t < 0."""

SMALLEST = 2.0**-128
"""Below it the new probability no longer depends on s to double precision, and the exponents stay finite."""

_BITS = 6
_SHIFT = 52 - _BITS
_FIRST = (1023 - 128) << _BITS  # the top bits of SMALLEST
_EDGES = (127 << _BITS) + 2  # up to s = ½, and one bin more for ½ itself

WORTHWHILE = _EDGES
"""From this many tokens on a table pays for itself even when it serves one call."""


@lru_cache(maxsize=64)
def _lines(root: RootFinder, delta: float, side: int, kind: str, xp: Any, device: Any) -> tuple[Array, Array]:
    """Intercepts and slopes of t against s in each bin. `kind` keeps traced tensors out of the real ones' table."""
    edges = ((arange(_EDGES, xp, device) + _FIRST) << _SHIFT).view(xp.float64)
    t = root(edges, delta, side)
    slopes = (t[1:] - t[:-1]) / (edges[1:] - edges[:-1])
    return t[:-1] - slopes * edges[:-1], slopes


def start(root: RootFinder, s: Array, delta: float, side: int) -> Array:
    """The root at s in [SMALLEST, ½] to about 3e-5·(1+|t|), NaN in a bin where it ceases to exist. Shape of `s`."""
    xp = namespace(s)
    intercepts, slopes = _lines(root, delta, side, type(s).__qualname__, xp, place(s))
    bins = (s.view(xp.int64) >> _SHIFT) - _FIRST
    return pick(intercepts, bins) + pick(slopes, bins) * s
