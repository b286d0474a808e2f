"""The clipped objective, for any ratio bounds: it is given two tensors and never learns where they came from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
