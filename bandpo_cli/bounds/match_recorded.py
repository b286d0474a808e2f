"""At which radius does a Band clip as many of some recorded tokens as another method does?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bandpo_cli.bounds.methods import ratio_bounds
from bandpo_cli.config.bounds import BandBounds, BoundsConfig
from bandpo_cli.errors import ConfigError

LEAST, MOST = 1e-9, 10.0
"""The radii that are looked at: the smallest hardly allows any change, at the largest nearly all bounds saturate."""
_HALVINGS = 60


@dataclass(frozen=True)
class RecordedTokens:
    """N tokens of rollouts, each at its own update.

    Attributes:
        old_logprobs: [N] float64, nats.
        ratios: [N] π/π_old at the time of the token's update.
        advantages: [N]; the sign says which of the two bounds can bind.
    """

    old_logprobs: NDArray[np.float64]
    ratios: NDArray[np.float64]
    advantages: NDArray[np.float64]


class Match(NamedTuple):
    """A radius, and the active clip fractions of the method and of the Band with it on the recorded tokens."""

    delta: float
    wanted: float
    reached: float


def active_fraction(config: BoundsConfig, tokens: RecordedTokens) -> float:
    """Return the share of tokens whose clamp binds: above `upper` with a > 0, or below `lower` with a < 0."""
    bounds = ratio_bounds(config)(tokens.old_logprobs)
    above = (tokens.ratios > bounds.upper) & (tokens.advantages > 0)
    below = (tokens.ratios < bounds.lower) & (tokens.advantages < 0)
    return float(np.mean(above | below))


def match_recorded(band: BandBounds, method: BoundsConfig, tokens: RecordedTokens) -> Match:
    """Return the δ at which `band` clips the share of `tokens` that `method` clips; its own δ is not looked at.

    A wider Band clips fewer, so δ is found by bisection in its logarithm. The share is a step function of δ: `reached`
    is the one nearest to `wanted` at the step. It answers for these ratios; a run with that δ makes other ones.

    Raises:
        ConfigError: the method clips none of the tokens, or more than any Band does.
    """
    wanted = active_fraction(method, tokens)

    def clipped(delta: float) -> float:
        return active_fraction(band.model_copy(update={"delta": delta}), tokens)

    if wanted == 0.0:
        raise ConfigError(
            f"{method.method} clips none of the {len(tokens.ratios):,} recorded tokens, so every wide enough Band "
            "matches it; record a run in which it binds (more optim.updates, a higher optim.lr)"
        )
    if clipped(LEAST) < wanted or clipped(MOST) > wanted:
        raise ConfigError(
            f"no Band of {band.divergence} clips {wanted:.3%} of the recorded tokens, as {method.method} does: it can "
            f"clip between {clipped(MOST):.3%} and {clipped(LEAST):.3%}"
        )
    low, high = math.log(LEAST), math.log(MOST)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if clipped(math.exp(middle)) > wanted else (low, middle)
    best = min((math.exp(low), math.exp(high)), key=lambda delta: abs(clipped(delta) - wanted))
    # Six digits: the share cannot tell more apart, and a person has to read and type it.
    delta = float(f"{best:.6g}")
    return Match(delta, wanted, clipped(delta))
