"""Starts for the iterative solvers: in one call δ is fixed, so a root is a function of the probability alone.

The root t(s) in the natural parameter is solved once at the edges of 64 bins an octave and joined by lines, whose
error is of the order of (1/64)²/8 ≈ 3e-5. The bin of s is read off the top bits of its float64 representation,
so a look-up costs no logarithm.
"""

# MERGED: The Band of any f: a bracketed, derivative-free solver in the natural parameter. With s = min(p, 1−p), the rarer side's new ratio is ρ(t) = eᵗκ and the other side's κ(t) = 1/(1+s·expm1(t)); G(t) = s·f(ρ) + (1−s)·f(κ) falls to 0 at t = 0 and rises on both sides, to finite values where the bound saturates. Method: T. R. Chandrupatla, Adv. Eng. Softw. 28 (1997) 145, which halves the bracket whenever inverse quadratic interpolation is not safe.
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from bandpo_cli.bounds.arrays import (
    Array,
    Generator,
    RatioBounds,
    TokenProbs,
    arange,
    device_of,
    false_like,
    is_on_host,
    namespace,
    take,
)

RootFunction = Callable[[Array, float, int], Array]
"""`root(s, delta, side)`: the natural parameter t of the new probability; side +1 for t > 0, −1 for t < 0."""

SMALLEST = 2.0**-128
"""Below it the new probability no longer depends on s to double precision, and the exponents stay finite."""

_BITS = 6
_SHIFT = 52 - _BITS
_FIRST = (1023 - 128) << _BITS  # the top bits of SMALLEST
_EDGES = (127 << _BITS) + 2  # up to s = ½, and one bin more for ½ itself

MIN_TOKENS_FOR_TABLE = _EDGES
"""From this many tokens on a table pays for itself even when it serves one call."""


@lru_cache(maxsize=64)
def _piecewise_linear(
    root: RootFunction, delta: float, side: int, kind: str, xp: Any, device: Any
) -> tuple[Array, Array]:
    """Intercepts and slopes of t against s in each bin. `kind` keeps traced tensors out of the real ones' table."""
    edges = ((arange(_EDGES, xp, device) + _FIRST) << _SHIFT).view(xp.float64)
    t = root(edges, delta, side)
    slopes = (t[1:] - t[:-1]) / (edges[1:] - edges[:-1])
    return t[:-1] - slopes * edges[:-1], slopes


def initial_guess(root: RootFunction, s: Array, delta: float, side: int) -> Array:
    """The root at s in [SMALLEST, ½] to about 3e-5·(1+|t|), NaN in a bin where it ceases to exist. Shape of `s`."""
    xp = namespace(s)
    intercepts, slopes = _piecewise_linear(root, delta, side, type(s).__qualname__, xp, device_of(s))
    bins = (s.view(xp.int64) >> _SHIFT) - _FIRST
    return take(intercepts, bins) + take(slopes, bins) * s


_MAX_T = 700.0  # exp(709) overflows
_MAX_STEPS = 48  # halving alone takes 700 to 2e-12 in 48, and interpolation does the rest
_CONVERGED_STEP = 1e-7  # a last correction below it leaves an error of its product with the squared margin
_TOLERANCE = 2.0**-45  # absolute, in t: a relative error of 3e-14 in a ratio


def _ratio_pair(s: Array, t: Array) -> tuple[Array, Array, Array, Array]:
    """ρ, ρ−1, κ, κ−1, each to its own relative precision."""
    xp = namespace(s)
    rise = xp.expm1(t)
    other = 1.0 / (1.0 + s * rise)
    return xp.exp(t) * other, (1.0 - s) * rise * other, other, -s * rise * other


@dataclass(frozen=True)
class RootFinder:
    """Root finder of one f; equal for equal f, so that tables are shared between calls."""

    f: Generator

    def __call__(self, s: Array, delta: float, side: int) -> Array:
        """The root t on one side, ±inf where the bound saturates. Shape of `s`, which lies in (0, ½]."""
        full = self._full_bracket(s, delta, side)
        t, _ = self._search(s, delta, full, _MAX_STEPS)
        return self._saturate(t, s, delta, side)

    def from_table(self, s: Array, delta: float, side: int) -> Array:
        """The same, by two interpolations around the table's line; what they do not settle is searched in full."""
        xp = namespace(s)
        guess = initial_guess(self, s, delta, side)
        margin = side * (2e-4 if side > 0 else 1e-4 * (1.0 + abs(guess)))
        t, settled = _interpolate(lambda x: self._excess(s, delta, x), guess - margin, guess + margin)
        if not is_on_host(s):
            return xp.where(settled, t, self(s, delta, side))
        t = self._saturate(t, s, delta, side)
        (rest,) = xp.where(~(settled | xp.isinf(t)))
        if len(rest):
            t[rest] = self(s[rest], delta, side)
        return t

    def limit(self, s: Array, side: int) -> Array:
        """G at t = ±∞: all mass moved to the rarer side, or all of its own gone."""
        xp = namespace(s)
        zero = xp.zeros_like(s)
        if side > 0:
            return s * self.f(1.0 / s, (1.0 - s) / s) + (1.0 - s) * self.f(zero, zero - 1.0)
        return s * self.f(zero, zero - 1.0) + (1.0 - s) * self.f(1.0 / (1.0 - s), s / (1.0 - s))

    def _excess(self, s: Array, delta: float, t: Array) -> Array:
        rare, rare_x, other, other_x = _ratio_pair(s, t)
        return s * self.f(rare, rare_x) + (1.0 - s) * self.f(other, other_x) - delta

    def _full_bracket(self, s: Array, delta: float, side: int) -> tuple[Array, Array, Array, Array]:
        zero = namespace(s).zeros_like(s)
        far = zero + side * _MAX_T
        return zero, far, zero - delta, namespace(s).clip(self._excess(s, delta, far), 0.0, None)

    def _saturate(self, t: Array, s: Array, delta: float, side: int) -> Array:
        return namespace(s).where(self.limit(s, side) <= delta, side * math.inf, t)

    def _search(self, s: Array, delta: float, bracket: tuple[Array, ...], steps: int) -> tuple[Array, Array]:
        return chandrupatla(lambda t: self._excess(s, delta, t), bracket, steps)


def _interpolate(excess: Callable[[Array], Array], low: Array, high: Array) -> tuple[Array, Array]:
    """Root between `low` and `high` by the chord and then the inverse quadratic, and where that can be trusted."""
    at_low, at_high = excess(low), excess(high)
    slope = (high - low) / (at_high - at_low)
    x = low - at_low * slope
    at_x = excess(x)
    first, second = (x - low) / (at_x - at_low), (high - x) / (at_high - at_x)
    step = at_x * (first - at_low * (second - first) / (at_high - at_low))
    return x - step, (at_low < 0.0) & (at_high > 0.0) & (abs(step) < _CONVERGED_STEP)


def chandrupatla(
    excess: Callable[[Array], Array], bracket: tuple[Array, ...], steps: int
) -> tuple[Array, Array]:
    """Root of `excess` in each bracket (a, b, excess(a), excess(b)) of opposite signs, and where it is settled.

    Where values can be looked at freely the loop ends when all are settled, else after `steps`.
    """
    a, b, fa, fb = bracket
    xp = namespace(a)
    fraction: Array = 0.5
    done = false_like(a)
    best = a
    for _ in range(steps):
        x = a + fraction * (b - a)
        fx = excess(x)
        same = (fx < 0.0) == (fa < 0.0)
        c, fc = xp.where(same, a, b), xp.where(same, fa, fb)
        b, fb = xp.where(same, b, a), xp.where(same, fb, fa)
        a, fa = x, fx
        nearest = xp.where(abs(fa) < abs(fb), a, b)
        best = xp.where(done, best, nearest)
        least = (_TOLERANCE + 4e-16 * abs(best)) / abs(b - a)
        done = done | (fx == 0.0) | ~(least < 0.5)
        if is_on_host(a) and bool(done.all()):
            break
        fraction = _next_fraction(xp, (a, b, c), (fa, fb, fc), least)
    return best, done


def _next_fraction(xp: object, points: tuple[Array, ...], values: tuple[Array, ...], least: Array) -> Array:
    """Where in [a, b] to look next: the inverse quadratic through the last three points if it is safe, else ½."""
    (a, b, c), (fa, fb, fc) = points, values
    where, clip = xp.where, xp.clip  # type: ignore[attr-defined]
    xi, phi = (a - b) / (c - b), (fa - fb) / (fc - fb)
    safe = (phi * phi < xi) & ((1.0 - phi) * (1.0 - phi) < 1.0 - xi)
    quadratic = fa / (fb - fa) * fc / (fb - fc) + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
    least = clip(least, None, 0.5)
    fraction = where(safe, quadratic, 0.5)
    return where(fraction < least, least, where(fraction > 1.0 - least, 1.0 - least, fraction))


def solve_generic(f: Generator, tokens: TokenProbs, delta: float) -> RatioBounds:
    """The interval of ratios for any f. Beyond p = 2⁻¹²⁸ the new probability is that at 2⁻¹²⁸."""
    xp, roots = namespace(tokens.p), RootFinder(f)
    common = tokens.p > 0.5
    s = xp.clip(xp.minimum(tokens.p, tokens.m), SMALLEST, None)
    find = roots if len(s) < MIN_TOKENS_FOR_TABLE else roots.from_table
    fall, rise = find(s, delta, -1), find(s, delta, +1)
    least, _, most_other, _ = _ratio_pair(s, fall)
    most, _, least_other, _ = _ratio_pair(s, rise)
    most = xp.where(xp.isfinite(rise), most, 1.0 / s) * (s / tokens.p)
    upper = xp.minimum(xp.where(common, most_other, most), 1.0 / tokens.p)
    return RatioBounds(xp.where(common, least_other, least), upper)
