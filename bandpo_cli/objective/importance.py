"""Importance corrections for the gap between the sampler's and the trainer's log-probs."""

from __future__ import annotations

import torch

from bandpo_cli.objective.loss import policy_ratio


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
