"""The ratio-bound methods as functions of the old log-probabilities, built from their settings.

The loss receives the bounds and does not depend on the method. A new method needs a settings class in
`config.methods`, a function here from these settings to a `BoundsFunction`, and an entry in `registries.METHODS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from bandpo_cli.bounds.arrays import (
    Array,
    RatioBounds,
    as_array,
    empty_like,
    namespace,
    no_grad_no_warnings,
    output_dtype,
    to_float64,
)
from bandpo_cli.bounds.band import logprob_bounds
from bandpo_cli.errors import ConfigError
from bandpo_cli.registries import METHODS, load_attribute

if TYPE_CHECKING:  # the settings need pydantic, the functions of this module numpy alone
    from bandpo_cli.config.methods import (
        BandSettings,
        DcpoSettings,
        IntervalSettings,
        MethodSettings,
        NoClipSettings,
    )
    from bandpo_cli.config.policy_losses import DppoSettings, GmpoSettings

BoundsFunction = Callable[[Array], RatioBounds]
"""Old log-probabilities of any shape → bounds of that shape; types, NaN and devices are handled as in `band_bounds`."""


def ratio_bounds(config: MethodSettings) -> BoundsFunction:
    """Return the bounds function of the method that `config` describes.

    Raises:
        ConfigError: the method has no interval of ratios; the message gives the reason.
    """
    method = METHODS[config.method]
    if method.bounds is None:
        raise ConfigError(f"{method.name} has no interval of ratios: {method.without_bounds}")
    function: BoundsFunction = load_attribute(method.bounds)(config)
    return function


class ClipState(NamedTuple):
    """The effect of a method on each token: boolean arrays of the shape of the ratios.

    Attributes:
        at_upper: the token's advantage is positive and its gradient zero; with bounds: its ratio is above `upper`.
        at_lower: the token's advantage is negative and its gradient zero; with bounds: its ratio is below `lower`.
        outside: the ratio is outside the method's region, for any sign of the advantage; None without a region.
    """

    at_upper: Array
    at_lower: Array
    outside: Array | None

    @property
    def active(self) -> Array:
        """Whether the method removes the token's gradient."""
        return self.at_upper | self.at_lower


def clip_state(ratios: Array, lower: Array, upper: Array, advantages: Array) -> ClipState:
    """Return which tokens the bounds clip; all arguments are numpy arrays, or all are tensors, of one shape."""
    above, below = ratios > upper, ratios < lower
    return ClipState(
        at_upper=above & (advantages > 0), at_lower=below & (advantages < 0), outside=above | below
    )


def band(config: BandSettings) -> BoundsFunction:
    """Return the Band, capped at `max_ratio` and widened to the interval of `relax` where that is set."""

    def bounds(old_logprobs: Array) -> RatioBounds:
        band = logprob_bounds(old_logprobs, config.divergence, config.delta, config.max_ratio)
        if config.relax is None:
            return band
        xp = namespace(band.lower)
        return RatioBounds(
            xp.clip(band.lower, None, 1.0 - config.relax.eps_low),
            xp.clip(band.upper, 1.0 + config.relax.eps_high, None),
        )

    return bounds


def clip(config: IntervalSettings) -> BoundsFunction:
    """Return [1−eps_low, 1+eps_high] for every token."""
    return _fixed(1.0 - config.eps_low, 1.0 + config.eps_high)


def gmpo(config: GmpoSettings) -> BoundsFunction:
    """Return [e^−log_eps_low, e^log_eps_high] for every token."""
    return _fixed(math.exp(-config.log_eps_low), math.exp(config.log_eps_high))


def dppo(config: DppoSettings) -> BoundsFunction:
    """Return the Band of the same divergence and radius, without a cap.

    A binary divergence of (p, 1−p) is at most δ exactly where the ratio is in the Band, whose other tokens move in
    proportion.
    """
    return lambda old_logprobs: logprob_bounds(old_logprobs, config.divergence, config.delta, None)


def no_clip(config: NoClipSettings) -> BoundsFunction:
    """Return [0, ∞] for every token."""
    return _fixed(0.0, math.inf)


def dcpo(config: DcpoSettings) -> BoundsFunction:
    """Return ½ + ½√max(1−4ε₋/p, 0) and min(½ + ½√(1+4ε₊/p), max_ratio) (arXiv 2509.02333); [1, 1] for NaN."""

    def bounds(old_logprobs: Array) -> RatioBounds:
        x = as_array(old_logprobs)
        xp, dtype = namespace(x), output_dtype(x)
        with no_grad_no_warnings(x):
            inverse_p = xp.exp(-xp.clip(to_float64(x), None, 0.0))
            lower = 0.5 + 0.5 * xp.sqrt(xp.clip(1.0 - 4.0 * config.eps_low * inverse_p, 0.0, None))
            upper = 0.5 + 0.5 * xp.sqrt(1.0 + 4.0 * config.eps_high * inverse_p)
            capped = upper if config.max_ratio is None else xp.clip(upper, None, config.max_ratio)
            low, high = empty_like(x, dtype), empty_like(x, dtype)
            low[...] = xp.nan_to_num(lower, nan=1.0)
            high[...] = xp.nan_to_num(capped, nan=1.0, posinf=math.inf)
            return RatioBounds(low, high)

    return bounds


def _fixed(lower: float, upper: float) -> BoundsFunction:
    def bounds(old_logprobs: Array) -> RatioBounds:
        x = as_array(old_logprobs)
        low, high = (empty_like(x, output_dtype(x)) for _ in range(2))
        low[...], high[...] = lower, upper
        return RatioBounds(low, high)

    return bounds
