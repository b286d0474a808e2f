"""What the bounds did to an update, counted in tokens.

*active*: the clamp binds and the gradient is zero, which depends on the advantage's sign: ratio above `upper` with
a > 0, or below `lower` with a < 0. *outside*: the ratio is outside the interval, whatever the sign.
"""

from __future__ import annotations

from itertools import pairwise

import torch

PROBABILITY_EDGES = (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0)
"""Bins of π_old(token) for the figures by probability; a bin holds its upper edge, not its lower one."""

BIN_NAMES = tuple(f"p_{low:g}_{high:g}" for low, high in pairwise(PROBABILITY_EDGES))


def clip_counts(
    ratios: torch.Tensor,
    lower: torch.Tensor,
    upper: torch.Tensor,
    advantages: torch.Tensor,
    old_logprobs: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Count tokens; all inputs [N], all outputs additive over updates (int64 scalars, or [bins] by probability)."""
    above, below = ratios > upper, ratios < lower
    at_upper, at_lower = above & (advantages > 0), below & (advantages < 0)
    active = at_upper | at_lower
    edges = torch.tensor(PROBABILITY_EDGES[1:-1], device=ratios.device, dtype=torch.float64)
    bins = torch.bucketize(old_logprobs.double().exp(), edges)
    size = len(BIN_NAMES)
    return {
        "tokens": torch.tensor(ratios.numel(), device=ratios.device),
        "active": active.sum(),
        "upper": at_upper.sum(),
        "lower": at_lower.sum(),
        "outside": (above | below).sum(),
        "tokens_by_bin": torch.bincount(bins, minlength=size),
        "active_by_bin": torch.bincount(bins[active], minlength=size),
    }


def clip_fractions(counts: dict[str, torch.Tensor]) -> dict[str, float]:
    """Turn summed counts into the `clip/` metrics; a bin without tokens has no active fraction."""
    tokens = max(int(counts["tokens"]), 1)
    figures = {
        f"clip/{name}_fraction": int(counts[name]) / tokens
        for name in ("active", "upper", "lower", "outside")
    }
    per_bin = zip(BIN_NAMES, counts["active_by_bin"].tolist(), counts["tokens_by_bin"].tolist(), strict=True)
    for name, active, in_bin in per_bin:
        figures[f"clip/token_share/{name}"] = in_bin / tokens
        if in_bin:
            figures[f"clip/active_fraction/{name}"] = active / in_bin
    return figures
