"""Group-relative advantages (GRPO, arXiv 2402.03300)."""

from __future__ import annotations

import torch

STD_EPS = 1e-6
"""Bounds the advantages of a group whose rewards hardly differ."""


def group_advantages(rewards_PG: torch.Tensor, normalize_std: bool = True) -> torch.Tensor:
    """Return how much better each completion did than its group.

    Args:
        rewards_PG: [P, G] float, one row a problem.
        normalize_std: divide by the group's (unbiased) standard deviation + 1e-6; without, rewards are only centred.

    Returns:
        [P, G] of the same dtype; exactly 0 throughout a group whose rewards are all alike.
    """
    centred = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    # The mean of 0.1, 0.1, 0.1, ... is not 0.1 in floating point, and over STD_EPS the difference would be a signal.
    alike = (rewards_PG == rewards_PG[:, :1]).all(dim=1, keepdim=True)
    scale = rewards_PG.std(dim=1, keepdim=True) + STD_EPS if normalize_std else 1.0
    return (centred / scale).masked_fill(alike, 0.0)
