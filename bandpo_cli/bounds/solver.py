"""The Band of any f: a bracketed, derivative-free root finder in the natural parameter, with tabulated starts.

With s = min(p, 1−p), the new ratio of the rarer side is ρ(t) = eᵗκ and that of the other side κ(t) =
1/(1+s·expm1(t)); G(t) = s·f(ρ) + (1−s)·f(κ) is 0 at t = 0 and increases on both sides, to finite values where the bound
saturates. The method is by T. R. Chandrupatla, Adv. Eng. Softw. 28 (1997) 145, which halves the bracket whenever
inverse quadratic interpolation is not safe.

For many tokens the root t(s) is solved once at the edges of 64 bins per octave and interpolated linearly, with an error
of (1/64)²/8 ≈ 3e-5, as the start of two interpolations. The bin of s is read from the top bits of its float64
representation, without a logarithm.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from bandpo_cli.bounds.arrays import Array, Generator, RatioBounds, TokenProbs, is_on_host, namespace, take

RootFunction = Callable[[Array, float, int], Array]
"""`root(s, delta, side)`: the natural parameter t of the new probability; side +1 for t > 0, −1 for t < 0."""

SMALLEST = 2.0**-128
"""Smallest s. Below it the new probability is independent of s to double precision; the exponents stay finite."""

_BITS = 6
_SHIFT = 52 - _BITS
_FIRST = (1023 - 128) << _BITS  # the top bits of SMALLEST
_EDGES = (127 << _BITS) + 2  # up to s = ½, and one more bin for ½ itself

MIN_TOKENS_FOR_TABLE = _EDGES
"""Smallest number of tokens for which a table is faster even if it is used only once."""

_MAX_T = 700.0  # exp(709) overflows
_MAX_STEPS = 48  # 48 halvings reduce an interval of 700 to 2e-12; interpolation needs fewer steps
_CONVERGED_STEP = 1e-7  # a last correction below this has an error of about itself times the squared margin
_TOLERANCE = 2.0**-45  # absolute, in t: a relative error of 3e-14 in a ratio


def solve_generic(f: Generator, tokens: TokenProbs, delta: float) -> RatioBounds:
    """Return the interval of ratios for any f. For p < 2⁻¹²⁸ the new probability is that at 2⁻¹²⁸."""
    xp, roots = tokens.xp, RootFinder(f)
    common = tokens.p > 0.5
    s = xp.clip(xp.minimum(tokens.p, tokens.m), SMALLEST, None)
    find = roots if len(s) < MIN_TOKENS_FOR_TABLE else roots.from_table
    fall, rise = find(s, delta, -1), find(s, delta, +1)
    smallest, _, largest_other, _ = _ratio_pair(s, fall)
    largest, _, smallest_other, _ = _ratio_pair(s, rise)
    largest = xp.where(xp.isfinite(rise), largest, 1.0 / s) * (s / tokens.p)
    upper = xp.minimum(xp.where(common, largest_other, largest), 1.0 / tokens.p)
    return RatioBounds(xp.where(common, smallest_other, smallest), upper)


@dataclass(frozen=True)
class RootFinder:
    """Root finder for one f. Instances with the same f are equal, so that calls share their tables."""

    f: Generator

    def __call__(self, s: Array, delta: float, side: int) -> Array:
        """Return the root t on one side, ±inf where the bound saturates. Shape of `s`, which is in (0, ½]."""
        xp = namespace(s)
        zero = xp.zeros_like(s)
        far = zero + side * _MAX_T
        at_far = xp.clip(self._excess(s, delta, far), 0.0, None)
        t = chandrupatla(lambda t: self._excess(s, delta, t), zero, far, zero - delta, at_far)
        return self._saturate(t, s, delta, side)

    def from_table(self, s: Array, delta: float, side: int) -> Array:
        """Return the root by a secant and an inverse quadratic around the table's line, else by the full search."""
        xp = namespace(s)
        guess = initial_guess(self, s, delta, side)
        margin = side * (2e-4 if side > 0 else 1e-4 * (1.0 + abs(guess)))
        low, high = guess - margin, guess + margin
        at_low, at_high = self._excess(s, delta, low), self._excess(s, delta, high)
        x = low - at_low * ((high - low) / (at_high - at_low))
        at_x = self._excess(s, delta, x)
        first, second = (x - low) / (at_x - at_low), (high - x) / (at_high - at_x)
        step = at_x * (first - at_low * (second - first) / (at_high - at_low))
        t, converged = x - step, (at_low < 0.0) & (at_high > 0.0) & (abs(step) < _CONVERGED_STEP)
        if not is_on_host(s):
            return xp.where(converged, t, self(s, delta, side))
        t = self._saturate(t, s, delta, side)
        (rest,) = xp.where(~(converged | xp.isinf(t)))
        if len(rest):
            t[rest] = self(s[rest], delta, side)
        return t

    def limit(self, s: Array, side: int) -> Array:
        """Return G at t = ±∞: all mass on the rarer side for side > 0, none for side < 0."""
        zero = namespace(s).zeros_like(s)
        if side > 0:
            return s * self.f(1.0 / s, (1.0 - s) / s) + (1.0 - s) * self.f(zero, zero - 1.0)
        return s * self.f(zero, zero - 1.0) + (1.0 - s) * self.f(1.0 / (1.0 - s), s / (1.0 - s))

    def _excess(self, s: Array, delta: float, t: Array) -> Array:
        """Return G(t) − δ."""
        rare, rare_x, other, other_x = _ratio_pair(s, t)
        return s * self.f(rare, rare_x) + (1.0 - s) * self.f(other, other_x) - delta

    def _saturate(self, t: Array, s: Array, delta: float, side: int) -> Array:
        """Return `t`, ±inf where G stays within δ on the whole side."""
        return namespace(s).where(self.limit(s, side) <= delta, side * math.inf, t)


def chandrupatla(excess: Callable[[Array], Array], a: Array, b: Array, fa: Array, fb: Array) -> Array:
    """Return the root of `excess` in each bracket [a, b], with its values fa and fb of opposite signs there.

    On the host the loop ends when all tokens have converged; on an accelerator, where testing for that would
    synchronize, after `_MAX_STEPS` steps.
    """
    xp = namespace(a)
    fraction: Array = 0.5
    done, best = xp.zeros_like(a, dtype=xp.bool), a
    for _ in range(_MAX_STEPS):
        x = a + fraction * (b - a)
        fx = excess(x)
        same = (fx < 0.0) == (fa < 0.0)
        c, fc = xp.where(same, a, b), xp.where(same, fa, fb)
        b, fb = xp.where(same, b, a), xp.where(same, fb, fa)
        a, fa = x, fx
        best = xp.where(done, best, xp.where(abs(fa) < abs(fb), a, b))
        least = (_TOLERANCE + 4e-16 * abs(best)) / abs(b - a)
        done = done | (fx == 0.0) | ~(least < 0.5)
        if is_on_host(a) and bool(done.all()):
            break
        # The next fraction: the inverse quadratic through the last three points if it is safe, else ½.
        xi, phi = (a - b) / (c - b), (fa - fb) / (fc - fb)
        safe = (phi * phi < xi) & ((1.0 - phi) * (1.0 - phi) < 1.0 - xi)
        quadratic = fa / (fb - fa) * fc / (fb - fc) + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
        least = xp.clip(least, None, 0.5)
        fraction = xp.clip(xp.where(safe, quadratic, 0.5), least, 1.0 - least)
    return best


def initial_guess(root: RootFunction, s: Array, delta: float, side: int) -> Array:
    """Return the root at s in [SMALLEST, ½] to about 3e-5·(1+|t|), NaN in a bin where none exists. Shape of `s`."""
    xp = namespace(s)
    intercepts, slopes = _piecewise_linear(root, delta, side, type(s).__qualname__, xp, s.device)
    bins = (s.view(xp.int64) >> _SHIFT) - _FIRST
    return take(intercepts, bins) + take(slopes, bins) * s


@lru_cache(maxsize=64)
def _piecewise_linear(
    root: RootFunction, delta: float, side: int, kind: str, xp: Any, device: Any
) -> tuple[Array, Array]:
    """Return intercepts and slopes of t against s per bin. `kind` separates the tables of traced and real tensors."""
    edges = ((xp.arange(_EDGES, dtype=xp.int64, device=device) + _FIRST) << _SHIFT).view(xp.float64)
    t = root(edges, delta, side)
    slopes = (t[1:] - t[:-1]) / (edges[1:] - edges[:-1])
    return t[:-1] - slopes * edges[:-1], slopes


def _ratio_pair(s: Array, t: Array) -> tuple[Array, Array, Array, Array]:
    """Return ρ, ρ−1, κ, κ−1, each with full relative precision."""
    xp = namespace(s)
    rise = xp.expm1(t)
    other = 1.0 / (1.0 + s * rise)
    return xp.exp(t) * other, (1.0 - s) * rise * other, other, -s * rise * other
