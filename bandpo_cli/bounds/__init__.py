"""Ratio bounds of tokens: the Band of a trust region, and the methods it is compared with.

    from bandpo_cli.bounds import band_bounds
    lower, upper = band_bounds(old_logprobs, divergence="kl", delta=0.05, max_ratio=10.0)

The package imports numpy only; it uses torch when the input is a tensor. `ratio_bounds` and `BoundsFunction` are
imported on first use, because they need the settings of the methods and therefore pydantic.
"""

from typing import TYPE_CHECKING, Any

from bandpo_cli.bounds.arrays import RatioBounds
from bandpo_cli.bounds.band import band_bounds

if TYPE_CHECKING:
    from bandpo_cli.bounds.methods import BoundsFunction, ratio_bounds

__all__ = ["BoundsFunction", "RatioBounds", "band_bounds", "ratio_bounds"]


def __getattr__(name: str) -> Any:
    """Import the names of `bounds.methods`."""
    if name in ("BoundsFunction", "ratio_bounds"):
        from bandpo_cli.bounds import methods

        return getattr(methods, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
