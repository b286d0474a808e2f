"""Divergences: generator and closed form of each trust region."""

from __future__ import annotations

from dataclasses import dataclass

from bandpo_cli.registries.registry import Entry, Registry


@dataclass(frozen=True)
class DivergenceEntry(Entry):
    """An f-divergence D_f(π‖π_old); `summary` says what the trust region bounds.

    Attributes:
        generator: the function f, a `bounds.arrays.Generator`: `f(u, u−1)`.
        bounds: the Band in closed form or by a method of its own, from tokens and δ to the roots; None for the generic
            solver.
        bounds_float32: the same from float32 log-probs to float32 ratios, for many tokens; None where `bounds` serves.
    """

    generator: str
    bounds: str | None = None
    bounds_float32: str | None = None


# fmt: off
_DIVERGENCES = "bandpo_cli.bounds.divergences"

DIVERGENCES = Registry("divergence", [
    DivergenceEntry("kl", "KL(π_old‖π), nats", f"{_DIVERGENCES}:f_kl",
                    "bandpo_cli.bounds.kl:kl_bounds", "bandpo_cli.bounds.kl:kl_bounds_float32"),
    DivergenceEntry("reverse-kl", "KL(π‖π_old), nats", f"{_DIVERGENCES}:f_reverse_kl"),
    DivergenceEntry("tv", "total variation", f"{_DIVERGENCES}:f_total_variation",
                    f"{_DIVERGENCES}:total_variation_bounds"),
    DivergenceEntry("chi2", "Pearson χ²(π‖π_old)", f"{_DIVERGENCES}:f_chi2", f"{_DIVERGENCES}:chi2_bounds"),
    DivergenceEntry("neyman", "Neyman χ²(π_old‖π)", f"{_DIVERGENCES}:f_neyman", f"{_DIVERGENCES}:neyman_bounds"),
    DivergenceEntry("hellinger", "squared Hellinger", f"{_DIVERGENCES}:f_hellinger",
                    f"{_DIVERGENCES}:hellinger_bounds"),
    DivergenceEntry("le-cam", "triangular discrimination", f"{_DIVERGENCES}:f_le_cam",
                    f"{_DIVERGENCES}:le_cam_bounds"),
    DivergenceEntry("js", "Jensen–Shannon, nats", f"{_DIVERGENCES}:f_jensen_shannon"),
], custom="a custom f as module:function")
# fmt: on
