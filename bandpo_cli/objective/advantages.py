"""Rewards and group-relative advantages (GRPO, arXiv 2402.03300)."""

from __future__ import annotations

import torch

from bandpo_cli.config.run import RewardConfig
from bandpo_cli.types import Grade, Group

STD_EPS = 1e-6
"""Added to the standard deviation, so that the advantages of a group whose rewards hardly differ stay bounded."""


def group_advantages(
    rewards_PG: torch.Tensor, normalize_std: bool = True, has_reward_PG: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the advantage of each completion: its reward less the mean of its group, in standard deviations.

    Args:
        rewards_PG: [P, G] float, one row per problem.
        normalize_std: divide by the group's (unbiased) standard deviation + 1e-6; otherwise rewards are only centred.
        has_reward_PG: [P, G] bool, False for completions without a reward; they are in no mean and no deviation. None
            where all have one.

    Returns:
        [P, G] of the same dtype; exactly 0 in a group whose rewards are all equal, and without a reward.
    """
    if has_reward_PG is not None and not has_reward_PG.all():
        advantages_PG = torch.zeros_like(rewards_PG)
        for index, has_reward_G in enumerate(has_reward_PG):
            if has_reward_G.sum() > 1:
                rewards = rewards_PG[index : index + 1, has_reward_G]
                advantages_PG[index, has_reward_G] = group_advantages(rewards, normalize_std)[0]
        return advantages_PG
    centred = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    # In floating point the mean of 0.1, 0.1, 0.1, ... is not 0.1; divided by STD_EPS the difference would be a signal.
    equal = (rewards_PG == rewards_PG[:, :1]).all(dim=1, keepdim=True)
    scale = rewards_PG.std(dim=1, keepdim=True) + STD_EPS if normalize_std else 1.0
    return (centred / scale).masked_fill(equal, 0.0)


def shaped_reward(grade: Grade, length: int, max_tokens: int, config: RewardConfig) -> float:
    """Return the reward that advantages are computed from.

    The grader's reward (0 to 1) is scaled to the range from `reward.wrong` to `reward.correct`, less the soft
    over-long penalty (DAPO, arXiv 2503.14476, eq. 13): 0 up to max_tokens − overlong_buffer tokens, then linear in the
    length up to overlong_penalty at max_tokens.

    Args:
        grade: the grader's verdict, with its unscaled `reward`.
        length: number of sampled tokens, including the end token.
        max_tokens: `sampling.max_tokens`.
    """
    reward = config.wrong + (config.correct - config.wrong) * grade.reward
    if not config.overlong_buffer:
        return reward
    over = max(0, length - (max_tokens - config.overlong_buffer))
    return reward - config.overlong_penalty * min(1.0, over / config.overlong_buffer)


def has_reward_spread(group: Group) -> bool:
    """Return whether the group's rewards differ; if they are all equal, every advantage is 0 and so is the gradient."""
    return len({rollout.grade.reward for rollout in group.rollouts_G if rollout.grade.has_reward}) > 1
