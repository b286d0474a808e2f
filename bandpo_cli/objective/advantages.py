"""Group-relative advantages (GRPO, arXiv 2402.03300)."""

from __future__ import annotations

import torch

STD_EPS = 1e-6
"""Keeps a group whose rewards are all alike at advantage 0 instead of 0/0."""


def group_advantages(rewards_PG: torch.Tensor, normalize_std: bool = True) -> torch.Tensor:
    """Return how much better each completion did than its group.

    Args:
        rewards_PG: [P, G] float, one row a problem.
        normalize_std: divide by the group's (unbiased) standard deviation + 1e-6; without, rewards are only centred.

    Returns:
        [P, G] of the same dtype.
    """
    centred = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    if not normalize_std:
        return centred
    return centred / (rewards_PG.std(dim=1, keepdim=True) + STD_EPS)
