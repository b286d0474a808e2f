"""Intervals of ratios: the type of bounds functions, clipped tokens, and matching radii.

A matching radius is the δ at which a region is as wide as another method, at one probability or on recorded tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bandpo_cli.bounds.arrays import (
    Array,
    RatioBounds,
    TokenProbs,
    as_array,
    cast,
    namespace,
    no_grad_no_warnings,
    output_dtype,
)
from bandpo_cli.bounds.band import find_divergence
from bandpo_cli.errors import ConfigError

if TYPE_CHECKING:
    from bandpo_cli.methods.settings import MethodSettings, TrustRegionSettings

BoundsFunction = Callable[[Array], RatioBounds]
"""Old log-probabilities of any shape → bounds of that shape; types, NaN and devices are handled as in `band_bounds`."""


def fixed_bounds(lower: float, upper: float) -> BoundsFunction:
    """Return the same interval for every token."""

    def bounds(old_logprobs: Array) -> RatioBounds:
        x = as_array(old_logprobs)
        full_like, dtype = namespace(x).full_like, output_dtype(x)
        return RatioBounds(full_like(x, lower, dtype=dtype), full_like(x, upper, dtype=dtype))

    return bounds


def bounds_of_probability(ends: Callable[[Array], tuple[Array, Array]]) -> BoundsFunction:
    """Return the bounds that `ends` computes from 1/p in float64."""

    def bounds(old_logprobs: Array) -> RatioBounds:
        x = as_array(old_logprobs)
        xp, dtype = namespace(x), output_dtype(x)
        with no_grad_no_warnings(x):
            inverse_p = xp.exp(-xp.clip(cast(x, xp.float64), None, 0.0))
            known = (xp.nan_to_num(bound, nan=1.0, posinf=math.inf) for bound in ends(inverse_p))
            return RatioBounds(*(cast(bound, dtype) for bound in known))

    return bounds


class ClipState(NamedTuple):
    """The effect of a method on each token: boolean arrays of the shape of the ratios."""

    at_upper: Array  # the advantage is positive and the gradient 0; with bounds: the ratio is above `upper`
    at_lower: Array  # the advantage is negative and the gradient 0; with bounds: the ratio is below `lower`
    outside: Array | None  # the ratio is outside the region, for any advantage; None without a region

    @property
    def active(self) -> Array:
        """Whether the method removes the token's gradient."""
        return self.at_upper | self.at_lower


def clip_state(ratios: Array, lower: Array, upper: Array, advantages: Array) -> ClipState:
    """Return which tokens the bounds clip; all arguments are numpy arrays, or all are tensors, of one shape."""
    above, below = ratios > upper, ratios < lower
    return ClipState(above & (advantages > 0), below & (advantages < 0), outside=above | below)


def matching_delta(name: str, prob: float, upper: float) -> float | None:
    """Return the δ whose Band has this upper bound at p = `prob`, in (0, 1); ConfigError for other p, or upper ≤ 1.

    There is none for upper > 1/p, which the simplex forbids, and for upper = 1/p where f(0) is infinite (kl, neyman),
    which only an infinite radius allows.
    """
    if not 0.0 < prob < 1.0:
        raise ConfigError(f"p must be in (0, 1) for its upper bound to determine a radius, not {prob!r}")
    if not upper > 1.0:
        raise ConfigError(f"the upper bound to match must be > 1, not {upper!r}")
    if upper * prob > 1.0:
        return None
    f = find_divergence(name).f
    # g(p, r) of docs/bounds.md; in arrays of one element, since a custom f takes arrays
    with np.errstate(all="ignore"):
        tokens, x = TokenProbs(np.log([prob])), np.array([upper - 1.0])
        other_x = np.clip(-tokens.p * x / tokens.m, -1.0, None)
        (delta,) = (tokens.p * f(1.0 + x, x) + tokens.m * f(1.0 + other_x, other_x)).tolist()
    return delta if math.isfinite(delta) and delta > 0.0 else None


MIN_DELTA, MAX_DELTA = 1e-9, 10.0
"""Range of the search: the smallest radius allows almost no change, at the largest nearly all bounds saturate."""
_HALVINGS = 60  # Steps of the bisection: they reduce the logarithmic range of 23 below the spacing of float64


@dataclass(frozen=True)
class RecordedTokens:
    """N tokens of rollouts at the updates that trained on them: log π_old in nats, π/π_old, advantages; [N] each."""

    old_logprobs: NDArray[np.float64]
    ratios: NDArray[np.float64]
    advantages: NDArray[np.float64]


class Match(NamedTuple):
    """A radius, with the active clip fractions of the method (`wanted`) and of the region (`reached`) on the tokens."""

    delta: float
    wanted: float
    reached: float


def clip_fraction(config: MethodSettings, tokens: RecordedTokens) -> float:
    """Return the share of tokens with an active clip. Raise ConfigError if the method has no interval of ratios."""
    bounds = config.ratio_bounds()(tokens.old_logprobs)
    return float(np.mean(clip_state(tokens.ratios, *bounds, tokens.advantages).active))


def match_clip_fraction(region: TrustRegionSettings, method: MethodSettings, tokens: RecordedTokens) -> Match:
    """Return the δ at which `region` clips the share of `tokens` that `method` clips; the δ of `region` is ignored.

    A wider region clips fewer tokens, so δ is found by bisection in its logarithm. The share is a step function of δ:
    `reached` is the value nearest to `wanted`. A run with that δ has other ratios.

    Raises:
        ConfigError: the method clips none of the tokens, or more than any region does, or has no interval.
    """
    wanted = clip_fraction(method, tokens)

    def clipped(delta: float) -> float:
        return clip_fraction(region.model_copy(update={"delta": delta}), tokens)

    if wanted == 0.0:
        what = f"{method.method} clips none of the {len(tokens.ratios):,} recorded tokens"
        raise ConfigError(f"{what}; record a run in which it does (more optim.updates, a higher optim.lr)")
    most, least = clipped(MIN_DELTA), clipped(MAX_DELTA)
    if not least <= wanted <= most:
        what = f"no radius of {region.region()} clips {wanted:.3%} of the recorded tokens, as {method.method} does"
        raise ConfigError(f"{what}: it can clip between {least:.3%} and {most:.3%}")
    low, high = math.log(MIN_DELTA), math.log(MAX_DELTA)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if clipped(math.exp(middle)) > wanted else (low, middle)
    best = min((math.exp(low), math.exp(high)), key=lambda delta: abs(clipped(delta) - wanted))
    # Six digits: the share resolves no more, and users read and type this number.
    delta = float(f"{best:.6g}")
    return Match(delta, wanted, clipped(delta))
