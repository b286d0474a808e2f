"""From a loss a token to one number: each aggregation is a weight a token, fixed by the lengths of the update.

Because the weights know the whole update, a loss is a plain sum of weight·loss: eight passes of one sequence and
one pass of eight add up to the same gradient.
"""

# MERGED: What the bounds did to an update, counted in tokens. *active*: the clamp binds and the gradient is zero, which depends on the advantage's sign: ratio above `upper` with a > 0, or below `lower` with a < 0. *outside*: the ratio is outside the interval, whatever the sign.
# MERGED: The clipped objective, for any ratio bounds: it is given two tensors and never learns where they came from.
# MERGED: Correction for a sampler that is another engine than the trainer.
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

Aggregation = Callable[[torch.Tensor, int], torch.Tensor]
"""(lengths_S int64 [S], max_tokens) -> weight of each token of sequence s, float32 [S]."""


def seq_mean_token_mean(lengths_S: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """Mean over the tokens of a sequence, then over sequences: 1/(S·length) (GRPO, BandPO)."""
    return 1.0 / (len(lengths_S) * lengths_S.float())


def token_mean(lengths_S: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """Mean over all tokens of the update: 1/Σ length (DAPO)."""
    return torch.full_like(lengths_S, 1.0 / int(lengths_S.sum()), dtype=torch.float32)


def seq_sum_norm(lengths_S: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """Sum over a sequence's tokens by a constant, then mean over sequences: 1/(S·max_tokens) (Dr. GRPO)."""
    return torch.full_like(lengths_S, 1.0 / (len(lengths_S) * max_tokens), dtype=torch.float32)


AGGREGATIONS: dict[str, Aggregation] = {
    "seq-mean-token-mean": seq_mean_token_mean,
    "token-mean": token_mean,
    "seq-sum-norm": seq_sum_norm,
}


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


def clip_metrics(counts: dict[str, torch.Tensor]) -> dict[str, float]:
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


MAX_LOG_RATIO = 20.0
"""exp(20) = 5e8: far beyond any bound, far below overflow."""


@dataclass(frozen=True)
class LossInputs:
    """One entry a sampled token of an update, all tensors 1-D [N] (no padding, so nothing is masked).

    Attributes:
        logprobs: log π(token) under the policy being updated, nats, with gradient.
        old_logprobs: log π_old(token), nats.
        lower, upper: the ratio's allowed interval, 0 ≤ lower ≤ 1 ≤ upper; upper may be inf.
        advantages: the advantage of the token's completion.
        weights: what the token counts in the update's loss (see `aggregation`).
        ref_logprobs: log π_reference(token), or None without a reference model.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    lower: torch.Tensor
    upper: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    ref_logprobs: torch.Tensor | None = None


@dataclass(frozen=True)
class LossOutputs:
    """The loss (a scalar with gradient) and the ratios it saw (detached, [N])."""

    loss: torch.Tensor
    ratios: torch.Tensor


def policy_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """Return r = π/π_old, the log ratio clamped to ±20 before exp so that it cannot overflow."""
    return torch.exp((logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def k3(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """Return the k3 estimate of KL(π‖π_other) a token, u − 1 − log u with u = π_other/π: unbiased, ≥ 0 (Schulman)."""
    log_u = (other_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_u) - log_u


def clipped_objective(
    inputs: LossInputs, dual_clip: float | None = 10.0, reference_kl: float = 0.0
) -> LossOutputs:
    """Return −Σ weight·min(r·a, clamp(r, lower, upper)·a), plus the reference penalty.

    For a < 0 a token's loss is capped at −dual_clip·a (dual-clip PPO, arXiv 1912.09729), so that one exploding
    ratio cannot rule the update.
    """
    ratios = policy_ratio(inputs.logprobs, inputs.old_logprobs)
    advantages = inputs.advantages
    clamped = torch.clamp(ratios, inputs.lower, inputs.upper)
    losses = -torch.minimum(ratios * advantages, clamped * advantages)
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)
    if inputs.ref_logprobs is not None:
        losses = losses + reference_kl * k3(inputs.logprobs, inputs.ref_logprobs)
    return LossOutputs(loss=(inputs.weights * losses).sum(), ratios=ratios.detach())


def truncated_importance(
    trainer_logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, cap: float
) -> torch.Tensor:
    """Return min(π_old/π_sampler, cap) a token: truncated importance sampling (Ionides 2008).

    The tokens were drawn from the sampler's π, the ratio is taken to the trainer's π_old; kernels, number formats
    and batch shapes make the two differ. The weight makes up for it, and the cap bounds its variance.

    Args:
        trainer_logprobs, sampler_logprobs: [N] float32, nats, of the same weights at the same temperature.

    Returns:
        [N] float32, without gradient.
    """
    return policy_ratio(trainer_logprobs.detach(), sampler_logprobs).clamp(max=cap)
