"""A divergence of your own: the α-divergence with α = ½, and its Band.

    bandpo bounds 0.01 0.5 --divergence examples.custom_divergence:alpha_half --delta 0.05
    bandpo train --divergence examples.custom_divergence:alpha_half --delta 0.05

Any convex f with f(1) = 0 defines one: D_f(π‖π_old) = Σ π_old(a) f(π(a)/π_old(a)). The generic solver finds the bounds.
"""

from __future__ import annotations

import numpy as np

from bandpo_cli.bounds import band_bounds


def alpha_half(u):  # type: ignore[no-untyped-def]
    """Return 4(1 − √u) + 2(u − 1), twice the squared Hellinger generator, for an array of ratios u ≥ 0."""
    return 4 * (1 - u**0.5) + 2 * (u - 1)


if __name__ == "__main__":
    probabilities = np.array([0.001, 0.01, 0.1, 0.5, 0.9])
    bounds = band_bounds(np.log(probabilities), "examples.custom_divergence:alpha_half", delta=0.05)
    for p, lower, upper in zip(probabilities, bounds.lower, bounds.upper, strict=True):
        print(f"p = {p:<6} ratio {lower:.4f} to {upper:.4f}")
