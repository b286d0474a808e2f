"""Ratio bounds: the Band of a trust region and its peers.

    from bandpo_cli.bounds import band_bounds
    lower, upper = band_bounds(old_logprobs, divergence="kl", delta=0.05, max_ratio=10.0)

Importing this needs numpy alone; torch is used when a tensor comes in.
"""

from bandpo_cli.bounds.arrays import RatioBounds
from bandpo_cli.bounds.band import band_bounds
from bandpo_cli.bounds.methods import BoundsFunction, ratio_bounds

__all__ = ["BoundsFunction", "RatioBounds", "band_bounds", "ratio_bounds"]
