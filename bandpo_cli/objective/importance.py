"""Correction for a sampler that is another engine than the trainer."""

from __future__ import annotations

import torch

from bandpo_cli.objective.loss import policy_ratio


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
