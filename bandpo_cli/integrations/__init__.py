"""The Band in other trainers: one module per trainer, imported where that trainer is installed.

The modules need the trainer and `bandpo_cli.bounds`, and nothing else of this package (docs/integrations.md).
`band_losses` is for trainers whose policy loss is a function that they call.
"""

import torch

from bandpo_cli.bounds import band_bounds
from bandpo_cli.bounds.intervals import ClipState, clip_state

MAX_LOG_RATIO = 20.0
"""Limit of |log ratio|, as in verl: exp(20) = 5e8 is far beyond any bound and far below overflow."""


def band_losses(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    divergence: str,
    delta: float,
    max_ratio: float | None,
    relax: tuple[float, float] | None = None,
) -> tuple[torch.Tensor, ClipState]:
    """Return −min(r·a, clamp(r, lower, upper)·a) of each token, and which tokens the bounds clip.

    Args:
        logprobs: log π(token), nats, any shape, with gradient.
        old_logprobs, advantages: log π_old(token) in nats, and a of each token; the same shape.
        divergence, delta, max_ratio: the settings of the Band, as in `band_bounds`, which raises ConfigError.
        relax: ε_low and ε_high; the interval is then never tighter than [1 − ε_low, 1 + ε_high].
    """
    lower, upper = band_bounds(old_logprobs, divergence, delta, max_ratio)
    if relax is not None:
        lower, upper = lower.clamp(max=1 - relax[0]), upper.clamp(min=1 + relax[1])
    ratios = torch.exp((logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    clamped = torch.clamp(ratios, lower, upper)
    losses = -torch.minimum(ratios * advantages, clamped * advantages)
    return losses, clip_state(ratios.detach(), lower, upper, advantages)
