"""The Band of any f: a bracketed, derivative-free solver in the natural parameter.

With s = min(p, 1−p), the rarer side's new ratio is ρ(t) = eᵗκ and the other side's κ(t) = 1/(1+s·expm1(t));
G(t) = s·f(ρ) + (1−s)·f(κ) falls to 0 at t = 0 and rises on both sides, to finite values where the bound saturates.
Method: T. R. Chandrupatla, Adv. Eng. Softw. 28 (1997) 145, which halves the bracket whenever
inverse quadratic interpolation is not safe.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from bandpo_cli.bounds import table
from bandpo_cli.bounds.arrays import Array, asking_is_free, namespace, no_flags
from bandpo_cli.bounds.generators import Generator
from bandpo_cli.bounds.values import RatioBounds, Tokens

_FARTHEST = 700.0  # exp(709) overflows
_STEPS = 48  # halving alone takes 700 to 2e-12 in 48, and interpolation does the rest
_SETTLED = 1e-7  # a last correction below it leaves an error of its product with the squared margin
_TOLERANCE = 2.0**-45  # absolute, in t: a relative error of 3e-14 in a ratio


def _ratios(s: Array, t: Array) -> tuple[Array, Array, Array, Array]:
    """ρ, ρ−1, κ, κ−1, each to its own relative precision."""
    xp = namespace(s)
    rise = xp.expm1(t)
    other = 1.0 / (1.0 + s * rise)
    return xp.exp(t) * other, (1.0 - s) * rise * other, other, -s * rise * other


@dataclass(frozen=True)
class Roots:
    """Root finder of one f; equal for equal f, so that tables are shared between calls."""

    f: Generator

    def __call__(self, s: Array, delta: float, side: int) -> Array:
        """The root t on one side, ±inf where the bound saturates. Shape of `s`, which lies in (0, ½]."""
        full = self._full_bracket(s, delta, side)
        t, _ = self._search(s, delta, full, _STEPS)
        return self._saturate(t, s, delta, side)

    def from_table(self, s: Array, delta: float, side: int) -> Array:
        """The same, by two interpolations around the table's line; what they do not settle is searched in full."""
        xp = namespace(s)
        guess = table.start(self, s, delta, side)
        margin = side * (2e-4 if side > 0 else 1e-4 * (1.0 + abs(guess)))
        t, settled = _interpolate(lambda x: self._excess(s, delta, x), guess - margin, guess + margin)
        if not asking_is_free(s):
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
        rare, rare_x, other, other_x = _ratios(s, t)
        return s * self.f(rare, rare_x) + (1.0 - s) * self.f(other, other_x) - delta

    def _full_bracket(self, s: Array, delta: float, side: int) -> tuple[Array, Array, Array, Array]:
        zero = namespace(s).zeros_like(s)
        far = zero + side * _FARTHEST
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
    return x - step, (at_low < 0.0) & (at_high > 0.0) & (abs(step) < _SETTLED)


def chandrupatla(
    excess: Callable[[Array], Array], bracket: tuple[Array, ...], steps: int
) -> tuple[Array, Array]:
    """Root of `excess` in each bracket (a, b, excess(a), excess(b)) of opposite signs, and where it is settled.

    Where values can be looked at freely the loop ends when all are settled, else after `steps`.
    """
    a, b, fa, fb = bracket
    xp = namespace(a)
    fraction: Array = 0.5
    done = no_flags(a)
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
        if asking_is_free(a) and bool(done.all()):
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


def solve(f: Generator, tokens: Tokens, delta: float) -> RatioBounds:
    """The interval of ratios for any f. Beyond p = 2⁻¹²⁸ the new probability is that at 2⁻¹²⁸."""
    xp, roots = namespace(tokens.p), Roots(f)
    common = tokens.p > 0.5
    s = xp.clip(xp.minimum(tokens.p, tokens.m), table.SMALLEST, None)
    find = roots if len(s) < table.WORTHWHILE else roots.from_table
    fall, rise = find(s, delta, -1), find(s, delta, +1)
    least, _, most_other, _ = _ratios(s, fall)
    most, _, least_other, _ = _ratios(s, rise)
    most = xp.where(xp.isfinite(rise), most, 1.0 / s) * (s / tokens.p)
    upper = xp.minimum(xp.where(common, most_other, most), 1.0 / tokens.p)
    return RatioBounds(xp.where(common, least_other, least), upper)
