"""The clipped policy loss: its inputs, per-token weights, importance correction, and clip metrics.

The loss receives ratio bounds as two tensors and does not depend on the method that computed them. An aggregation
turns per-token losses into one number by a weight per token, which is fixed by the completion lengths of the complete
update: the loss is the sum of weight·loss, so eight passes of one sequence and one pass of eight give the same
gradient.

Terms of the clip metrics: a token is *clipped* ("active") where the clamp binds and its gradient is zero, which
depends on the sign of its advantage; its ratio is *outside* where it is not within the bounds, for any sign
(`bandpo_cli.bounds.methods.clip_state`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from bandpo_cli.bounds.methods import clip_state

MAX_LOG_RATIO = 20.0
"""Limit of |log ratio|: exp(20) = 5e8 is far beyond any bound and far below overflow."""

PROBABILITY_EDGES = (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0)
"""Edges of the bins of π_old(token) in the clip metrics; a bin includes its upper edge and excludes its lower one."""

BIN_NAMES = tuple(f"p_{low:g}_{high:g}" for low, high in pairwise(PROBABILITY_EDGES))


@dataclass(frozen=True)
class LossInputs:
    """The n sampled tokens of a micro-batch; all tensors are flat, [n], without padding and therefore without a mask.

    Attributes:
        logprobs: [n] float32, log π(token) under the policy being updated, nats, with gradient.
        old_logprobs: [n] float32, log π_old(token), nats.
        lower, upper: [n], the bounds of the ratio, 0 ≤ lower ≤ 1 ≤ upper; upper may be inf.
        advantages: [n], the advantage of the token's completion.
        weights: [n], weight of the token in the update's loss (see `Aggregation`), times its importance correction.
        ref_logprobs: [n], log π_reference(token), nats; None without a reference model.
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
    """The result of `clipped_objective`.

    Attributes:
        loss: scalar with gradient, the micro-batch's share of the update's loss.
        ratios: [n], π/π_old, detached.
    """

    loss: torch.Tensor
    ratios: torch.Tensor


def clipped_objective(
    inputs: LossInputs, dual_clip: float | None = 10.0, reference_kl: float = 0.0
) -> LossOutputs:
    """Return the loss −Σ weight·min(r·a, clamp(r, lower, upper)·a), plus the KL penalty to the reference model.

    Args:
        inputs: the tokens, with r = π/π_old and advantage a each.
        dual_clip: for a < 0 a token's loss is at most −dual_clip·a (dual-clip PPO, arXiv 1912.09729), so that a
            single very large ratio does not dominate the update; None for no such limit.
        reference_kl: coefficient of the per-token k3 estimate of KL(π‖π_reference); used if `ref_logprobs` is given.
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


def policy_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """Return π/π_old per token, [n]; the log ratio is clamped to ±20 before exp, so that it cannot overflow."""
    return torch.exp((logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def k3(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """Return the k3 estimate of KL(π‖π_other) per token, [n], nats: u − 1 − log u with u = π_other/π.

    It is unbiased for tokens sampled from π, and not negative (Schulman, "Approximating KL divergence").
    """
    log_u = (other_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_u) - log_u


def truncated_importance(
    trainer_logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, cap: float
) -> torch.Tensor:
    """Return min(π_old/π_sampler, cap) per token: truncated importance sampling (Ionides 2008).

    The tokens were sampled from the sampler's π, while the ratio is computed relative to the trainer's π_old. The two
    differ where the sampler is another engine than the trainer, by kernels, number formats and batch shapes. The
    weight corrects for the difference; the cap limits its variance.

    Args:
        trainer_logprobs, sampler_logprobs: [N] float32, nats, of the same weights at the same temperature.

    Returns:
        [N] float32, without gradient.
    """
    return policy_ratio(trainer_logprobs.detach(), sampler_logprobs).clamp(max=cap)


Aggregation = Callable[[torch.Tensor, int], torch.Tensor]
"""(lengths_S int64 [S], max_tokens) -> weight of each token of sequence s, float32 [S]."""


def seq_mean_token_mean(lengths_S: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """Return 1/(S·length): the mean over the tokens of a sequence, then over sequences (GRPO, BandPO)."""
    return 1.0 / (len(lengths_S) * lengths_S.float())


def token_mean(lengths_S: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """Return 1/Σ length: the mean over all tokens of the update (DAPO)."""
    return torch.full_like(lengths_S, 1.0 / int(lengths_S.sum()), dtype=torch.float32)


def seq_sum_norm(lengths_S: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """Return 1/(S·max_tokens): a sequence's sum over a constant, then the mean over sequences (Dr. GRPO)."""
    return torch.full_like(lengths_S, 1.0 / (len(lengths_S) * max_tokens), dtype=torch.float32)


AGGREGATIONS: dict[str, Aggregation] = {
    "seq-mean-token-mean": seq_mean_token_mean,
    "token-mean": token_mean,
    "seq-sum-norm": seq_sum_norm,
}


def clip_counts(
    ratios: torch.Tensor,
    lower: torch.Tensor,
    upper: torch.Tensor,
    advantages: torch.Tensor,
    old_logprobs: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Count the clipped tokens of an update; the counts of several updates can be added.

    Args:
        ratios, lower, upper, advantages, old_logprobs: [N] each; old log-probs in nats.

    Returns:
        int64 scalars, and by bin of π_old int64 [bins] (`PROBABILITY_EDGES`).
    """
    state = clip_state(ratios, lower, upper, advantages)
    active = state.active
    edges = torch.tensor(PROBABILITY_EDGES[1:-1], device=ratios.device, dtype=torch.float64)
    bins = torch.bucketize(old_logprobs.double().exp(), edges)
    size = len(BIN_NAMES)
    return {
        "tokens": torch.tensor(ratios.numel(), device=ratios.device),
        "active": active.sum(),
        "upper": state.at_upper.sum(),
        "lower": state.at_lower.sum(),
        "outside": state.outside.sum(),
        "tokens_by_bin": torch.bincount(bins, minlength=size),
        "active_by_bin": torch.bincount(bins[active], minlength=size),
    }


def clip_metrics(counts: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the `clip/` metrics of summed counts; a bin without tokens has no active fraction."""
    tokens = max(int(counts["tokens"]), 1)
    metrics = {
        f"clip/{name}_fraction": int(counts[name]) / tokens
        for name in ("active", "upper", "lower", "outside")
    }
    per_bin = zip(BIN_NAMES, counts["active_by_bin"].tolist(), counts["tokens_by_bin"].tolist(), strict=True)
    for name, active, in_bin in per_bin:
        metrics[f"clip/token_share/{name}"] = in_bin / tokens
        if in_bin:
            metrics[f"clip/active_fraction/{name}"] = active / in_bin
    return metrics
