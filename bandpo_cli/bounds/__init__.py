"""Ratio bounds of tokens: the Band of a trust region.

    from bandpo_cli.bounds import band_bounds
    lower, upper = band_bounds(old_logprobs, divergence="kl", delta=0.05, max_ratio=10.0)

The package needs numpy alone: it uses torch when the input is a tensor.
"""

from bandpo_cli.bounds.arrays import RatioBounds
from bandpo_cli.bounds.band import band_bounds
from bandpo_cli.bounds.intervals import BoundsFunction

__all__ = ["BoundsFunction", "RatioBounds", "band_bounds"]
