"""Matching radii: the δ at which a region is as wide as another method, at one probability or on recorded tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bandpo_cli.bounds.arrays import TokenProbs
from bandpo_cli.bounds.divergences import divergence_at, find_divergence
from bandpo_cli.bounds.intervals import clip_state, ratio_bounds
from bandpo_cli.errors import ConfigError

if TYPE_CHECKING:  # the settings need pydantic
    from bandpo_cli.config.methods import MethodSettings, TrustRegionSettings


def matching_delta(name: str, prob: float, upper: float) -> float | None:
    """Return the δ whose Band has this upper bound at p = `prob`; None if no Band has it.

    There is none for upper > 1/p, which the simplex forbids, and for upper = 1/p where f(0) is infinite (kl, neyman),
    which only an infinite radius allows.

    Raises:
        ConfigError: p is outside (0, 1), upper ≤ 1, or `find_divergence` raises it for `name`.
    """
    if not 0.0 < prob < 1.0:
        raise ConfigError(f"p must be in (0, 1) for its upper bound to determine a radius, not {prob!r}")
    if not upper > 1.0:
        raise ConfigError(f"the upper bound to match must be > 1, not {upper!r}")
    if upper * prob > 1.0:
        return None
    with np.errstate(all="ignore"):
        delta = divergence_at(find_divergence(name), TokenProbs(np.log([prob])), upper)
    return delta if math.isfinite(delta) and delta > 0.0 else None


MIN_DELTA, MAX_DELTA = 1e-9, 10.0
"""Range of the search: the smallest radius allows almost no change, at the largest nearly all bounds saturate."""
_HALVINGS = 60
"""Steps of the bisection: they reduce the logarithmic range of 23 below the spacing of float64."""


@dataclass(frozen=True)
class RecordedTokens:
    """N tokens of rollouts, each at the update that trained on it.

    Attributes:
        old_logprobs: [N] float64, nats.
        ratios: [N] π/π_old at the time of the token's update.
        advantages: [N]; the sign determines which of the two bounds can be active.
    """

    old_logprobs: NDArray[np.float64]
    ratios: NDArray[np.float64]
    advantages: NDArray[np.float64]


class Match(NamedTuple):
    """A radius, with the active clip fractions of the method (`wanted`) and of the region (`reached`) on the tokens."""

    delta: float
    wanted: float
    reached: float


def clip_fraction(config: MethodSettings, tokens: RecordedTokens) -> float:
    """Return the share of tokens with an active clip: above `upper` with a > 0, or below `lower` with a < 0.

    Raises:
        ConfigError: the method has no interval of ratios.
    """
    bounds = ratio_bounds(config)(tokens.old_logprobs)
    return float(np.mean(clip_state(tokens.ratios, *bounds, tokens.advantages).active))


def match_clip_fraction(region: TrustRegionSettings, method: MethodSettings, tokens: RecordedTokens) -> Match:
    """Return the δ at which `region` clips the share of `tokens` that `method` clips; the δ of `region` is ignored.

    A wider region clips fewer tokens, so δ is found by bisection in its logarithm. The share is a step function of δ:
    `reached` is the value nearest to `wanted` at the step. It applies to these ratios; a run with that δ has others.

    Raises:
        ConfigError: the method clips none of the tokens, or more than any region does, or has no interval.
    """
    wanted = clip_fraction(method, tokens)

    def clipped(delta: float) -> float:
        return clip_fraction(region.model_copy(update={"delta": delta}), tokens)

    if wanted == 0.0:
        raise ConfigError(
            f"{method.method} clips none of the {len(tokens.ratios):,} recorded tokens, so every wide enough region "
            "matches it; record a run in which its clip is active (more optim.updates, a higher optim.lr)"
        )
    if clipped(MIN_DELTA) < wanted or clipped(MAX_DELTA) > wanted:
        raise ConfigError(
            f"no radius of {region.region()} clips {wanted:.3%} of the recorded tokens, as {method.method} does: it "
            f"can clip between {clipped(MAX_DELTA):.3%} and {clipped(MIN_DELTA):.3%}"
        )
    low, high = math.log(MIN_DELTA), math.log(MAX_DELTA)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if clipped(math.exp(middle)) > wanted else (low, middle)
    best = min((math.exp(low), math.exp(high)), key=lambda delta: abs(clipped(delta) - wanted))
    # Six digits: the share resolves no more, and users read and type this number.
    delta = float(f"{best:.6g}")
    return Match(delta, wanted, clipped(delta))
