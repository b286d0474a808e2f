"""The methods that are an interval of ratios: clip, clip-higher, DCPO, RIPO, ATR, and no clipping.

Their loss, as that of the Band, is `methods.loss.IntervalLoss`: a ratio outside its interval loses its gradient there.
"""

import math
from typing import Literal

from pydantic import Field

from bandpo_cli.bounds.arrays import Array, namespace
from bandpo_cli.bounds.intervals import BoundsFunction, bounds_of_probability, fixed_bounds
from bandpo_cli.methods.settings import IntervalSettings, MaxRatio, MethodSettings
from bandpo_cli.settings_validation import Positive


class ClipSettings(IntervalSettings):
    """One fixed interval for every token (PPO, GRPO)."""

    text = "clip (GRPO, PPO): {s.interval}"
    method: Literal["clip"] = "clip"


class ClipHigherSettings(IntervalSettings):
    """The fixed interval with a higher upper end (DAPO)."""

    text = "clip-higher: {s.interval}"
    method: Literal["clip-higher"] = "clip-higher"
    eps_high: float = Field(0.28, gt=0)


class DcpoSettings(MethodSettings):
    """Bounds that widen as the token gets rarer (DCPO, arXiv 2509.02333)."""

    text = "dcpo: dynamic bounds, ε = {s.eps_low:g}/{s.eps_high:g}"
    method: Literal["dcpo"] = "dcpo"
    eps_low: float = Field(0.16, gt=0)
    eps_high: float = Field(0.2, gt=0)
    """The ε of the lower and of the upper bound, in the formula of the paper."""
    max_ratio: MaxRatio | None = 10.0
    """Cap on the upper bound; null for none."""

    def ratio_bounds(self) -> BoundsFunction:
        """Return ½ + ½√max(1−4ε₋/p, 0) and min(½ + ½√(1+4ε₊/p), max_ratio); [1, 1] for NaN."""

        def ends(inverse_p: Array) -> tuple[Array, Array]:
            xp = namespace(inverse_p)
            lower = 0.5 + 0.5 * xp.sqrt(xp.clip(1.0 - 4.0 * self.eps_low * inverse_p, 0.0, None))
            upper = 0.5 + 0.5 * xp.sqrt(1.0 + 4.0 * self.eps_high * inverse_p)
            return lower, upper if self.max_ratio is None else xp.clip(upper, None, self.max_ratio)

        return bounds_of_probability(ends)


class RipoSettings(MethodSettings):
    """Bounds 1 ± √(δ/π_old), which keep π_old·(r − 1)² at most δ (RIPO, arXiv 2607.10169)."""

    text = "RIPO: ratio in 1 ± √(δ/π_old), δ = {s.delta:g}, within [{s.min_ratio:g}, {s.max_ratio:g}]"
    method: Literal["ripo"] = "ripo"
    delta: Positive = 0.05
    min_ratio: float = Field(0.5, ge=0, lt=1)
    max_ratio: MaxRatio = 10.0
    """The lower bound is at least min_ratio, the upper bound at most max_ratio."""

    def ratio_bounds(self) -> BoundsFunction:
        """Return max(1 − √(δ/p), min_ratio) and min(1 + √(δ/p), max_ratio) (equation 11); [1, 1] for NaN.

        The upper bound may exceed 1/p.
        """

        def ends(inverse_p: Array) -> tuple[Array, Array]:
            xp = namespace(inverse_p)
            width = xp.sqrt(self.delta * inverse_p)
            return xp.clip(1.0 - width, self.min_ratio, None), xp.clip(1.0 + width, None, self.max_ratio)

        return bounds_of_probability(ends)


class AtrSettings(MethodSettings):
    """The ratios whose k3 estimate r − 1 − log r is at most δ, the same for every probability (arXiv 2602.05494)."""

    text = "ATR: ratio with r − 1 − log r ≤ {s.delta:g}, for tokens of any probability"
    method: Literal["atr"] = "atr"
    delta: Positive = 0.05
    """The largest k3 estimate, in nats. The default is the radius of the Band, and not a value of the paper."""

    @property
    def ends(self) -> tuple[float, float]:
        """Both ends of the interval, −W₀ and −W₋₁ of −e^(−1−δ), by Newton's method in t = log r.

        h(t) = e^t − 1 − t is convex and exceeds δ at both starts, so the steps converge from one side.
        """
        roots = []
        for t in (-1.0 - self.delta, math.log1p(self.delta + math.sqrt(2.0 * self.delta))):
            for _ in range(50):
                t -= (math.expm1(t) - t - self.delta) / math.expm1(t)
            roots.append(math.exp(t))
        return roots[0], roots[1]

    def ratio_bounds(self) -> BoundsFunction:
        return fixed_bounds(*self.ends)


class NoClipSettings(MethodSettings):
    """No clipping: the control that every comparison needs."""

    text = "none: no bound on the ratio"
    method: Literal["none"] = "none"

    def ratio_bounds(self) -> BoundsFunction:
        """Return [0, ∞] for every token."""
        return fixed_bounds(0.0, math.inf)
