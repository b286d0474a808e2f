"""Metrics over the tokens of a step's updates: clipped tokens, and gradient weights by probability bin and sign.

Terms: a token is *clipped* ("active") where the method removes its gradient; for interval methods where a bound binds,
which depends on the sign of the advantage. Its ratio is *outside* where it is not within the bounds, for any sign.
The *gradient weight* is the factor w in the gradient w·a·∇log π (`objective.loss.LossOutputs`).
"""

from __future__ import annotations

from itertools import pairwise

import torch

from bandpo_cli.bounds.methods import ClipState

PROBABILITY_EDGES = (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0)
"""Edges of the bins of π_old(token); a bin includes its upper edge and excludes its lower one."""

BIN_NAMES = tuple(f"p_{low:g}_{high:g}" for low, high in pairwise(PROBABILITY_EDGES))


def probability_bins(old_logprobs: torch.Tensor) -> torch.Tensor:
    """Return the bin of each token's π_old, int64 [N]."""
    edges = torch.tensor(PROBABILITY_EDGES[1:-1], device=old_logprobs.device, dtype=torch.float64)
    return torch.bucketize(old_logprobs.double().exp(), edges)


def clip_counts(
    state: ClipState, old_logprobs: torch.Tensor, left_out_logprobs: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Count the clipped tokens of an update; the counts of several updates can be added.

    Args:
        state: [N] each.
        old_logprobs: [N], nats.
        left_out_logprobs: [M], nats: log π_old of the tokens that have an advantage of 0 and no ratio; not clipped.

    Returns:
        int64 scalars, and by bin of π_old int64 [bins] (`PROBABILITY_EDGES`).
    """
    active, size = state.active, len(BIN_NAMES)
    bins = probability_bins(old_logprobs)
    all_logprobs = old_logprobs if left_out_logprobs is None else torch.cat([old_logprobs, left_out_logprobs])
    counts = {
        "tokens": torch.tensor(all_logprobs.numel(), device=old_logprobs.device),
        "tokens_with_ratio": torch.tensor(old_logprobs.numel(), device=old_logprobs.device),
        "active": active.sum(),
        "upper": state.at_upper.sum(),
        "lower": state.at_lower.sum(),
        "tokens_by_bin": torch.bincount(probability_bins(all_logprobs), minlength=size),
        "active_by_bin": torch.bincount(bins[active], minlength=size),
    }
    if state.outside is not None:
        counts["outside"] = state.outside.sum()
    return counts


def clip_metrics(counts: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the `clip/` metrics of summed counts; a bin without tokens has no active fraction."""
    tokens = max(int(counts["tokens"]), 1)
    metrics = {f"clip/{name}_fraction": int(counts[name]) / tokens for name in ("active", "upper", "lower")}
    if "outside" in counts:
        metrics["clip/outside_fraction"] = int(counts["outside"]) / max(int(counts["tokens_with_ratio"]), 1)
    per_bin = zip(BIN_NAMES, counts["active_by_bin"].tolist(), counts["tokens_by_bin"].tolist(), strict=True)
    for name, active, in_bin in per_bin:
        metrics[f"clip/token_share/{name}"] = in_bin / tokens
        if in_bin:
            metrics[f"clip/active_fraction/{name}"] = active / in_bin
    return metrics


def gradient_metrics(
    gradient_weights: torch.Tensor, advantages: torch.Tensor, old_logprobs: torch.Tensor
) -> dict[str, float]:
    """Return the `gradient/` metrics of a step's tokens; tokens with an advantage of 0 are left out.

    Args:
        gradient_weights, advantages, old_logprobs: [N] each.

    Returns:
        The share of tokens with zero gradient, and the mean, smallest and largest weight: of all tokens, and by sign
        of the advantage and bin of π_old. Empty where every advantage is 0.
    """
    used = advantages != 0
    if not used.any():
        return {}
    weights, positive = gradient_weights[used].double(), advantages[used] > 0
    metrics = _weight_metrics(weights, "")
    bins = probability_bins(old_logprobs[used])
    for sign, has_sign in (("positive", positive), ("negative", ~positive)):
        for index, name in enumerate(BIN_NAMES):
            chosen = weights[has_sign & (bins == index)]
            if len(chosen):
                metrics |= _weight_metrics(chosen, f"/{sign}/{name}")
    return metrics


def _weight_metrics(weights: torch.Tensor, suffix: str) -> dict[str, float]:
    return {
        f"gradient/zero_fraction{suffix}": (weights == 0).double().mean().item(),
        f"gradient/weight_mean{suffix}": weights.mean().item(),
        f"gradient/weight_min{suffix}": weights.min().item(),
        f"gradient/weight_max{suffix}": weights.max().item(),
    }
