"""Group-relative advantages (GRPO, arXiv 2402.03300)."""

# MERGED: From a grader's verdict to the reward that advantages are computed from.
from __future__ import annotations

import torch

from bandpo_cli.config.run import RewardConfig
from bandpo_cli.types import Grade, Group

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


def shaped_reward(grade: Grade, length: int, max_tokens: int, config: RewardConfig) -> float:
    """Scale the grader's credit (0 to 1) to the wanted range, less the soft over-long penalty.

    The penalty (DAPO, arXiv 2503.14476, eq. 13) is 0 up to max_tokens − overlong_buffer tokens and falls from there
    in a line to −overlong_penalty at max_tokens.

    Args:
        grade: with `reward` as the grader gave it.
        length: sampled tokens, the end token included.
    """
    reward = config.wrong + (config.correct - config.wrong) * grade.reward
    if not config.overlong_buffer:
        return reward
    over = max(0, length - (max_tokens - config.overlong_buffer))
    return reward - config.overlong_penalty * min(1.0, over / config.overlong_buffer)


def has_reward_spread(group: Group) -> bool:
    """Tell whether the group's rewards differ: where they do not, every advantage is 0 and nothing is learnt."""
    return len({rollout.grade.reward for rollout in group.rollouts_G}) > 1
