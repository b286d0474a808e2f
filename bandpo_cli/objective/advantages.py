"""Rewards and group-relative advantages (GRPO, arXiv 2402.03300)."""

import math

import torch
from torch import Tensor

from bandpo_cli.config.run import RewardConfig
from bandpo_cli.types import Grade, Group

STD_EPS = 1e-6
"""Added to the standard deviation, so that the advantages of a group whose rewards hardly differ stay bounded."""


REWARD_TOLERANCE = 1e-6
"""Rewards of a group that differ by at most this, relative to the largest of them where that exceeds 1, are equal. It
is eight units of rounding in float32, in which many graders compute."""


def group_advantages(
    rewards_PG: Tensor, normalize_std: bool = True, has_reward_PG: Tensor | None = None
) -> Tensor:
    """Return the advantage of each completion: its reward less the mean of its group, in standard deviations.

    Args:
        rewards_PG: [P, G] float, one row per problem. The values are computed in float64.
        normalize_std: divide by the group's (unbiased) standard deviation + 1e-6; otherwise rewards are only centred.
        has_reward_PG: [P, G] bool, False for completions without a reward; they are in no mean and no deviation. None
            where all have one.

    Returns:
        [P, G] of the same dtype; exactly 0 in a group whose rewards are all equal (`equal_rewards`), and without a
        reward.
    """
    rewards = rewards_PG.double()
    present = torch.ones_like(rewards, dtype=torch.bool) if has_reward_PG is None else has_reward_PG
    count = present.sum(dim=1, keepdim=True)
    mean = rewards.where(present, 0.0).sum(dim=1, keepdim=True) / count
    centred = (rewards - mean).where(present & ~equal_rewards(rewards, present), 0.0)
    if normalize_std:
        variance = centred.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + STD_EPS)
    return centred.to(rewards_PG.dtype)


def equal_rewards(rewards_PG: Tensor, has_reward_PG: Tensor) -> Tensor:
    """Return whether the rewards of each group are equal up to `REWARD_TOLERANCE`, [P, 1]; true for fewer than two."""
    most = rewards_PG.where(has_reward_PG, -math.inf).amax(dim=1, keepdim=True)
    least = rewards_PG.where(has_reward_PG, math.inf).amin(dim=1, keepdim=True)
    return most - least <= REWARD_TOLERANCE * torch.maximum(most.abs(), least.abs()).clamp(min=1.0)


def shaped_reward(grade: Grade, length: int, max_tokens: int, config: RewardConfig) -> float:
    """Return the reward that advantages are computed from.

    The grader's reward (0 to 1) is scaled to the range from `reward.wrong` to `reward.correct`, less the soft
    over-long penalty (DAPO, arXiv 2503.14476, eq. 13): 0 up to max_tokens − overlong_buffer tokens, then linear in the
    length up to overlong_penalty at max_tokens.

    Args:
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
    grades = [rollout.grade for rollout in group.rollouts_G]
    rewards = torch.tensor([[grade.reward for grade in grades]], dtype=torch.float64)
    return not equal_rewards(rewards, torch.tensor([[grade.has_reward for grade in grades]])).item()


def wrong_peers(group: Group) -> list[float]:
    """Return for each completion of a group the share of the other completions that are not correct, [G].

    0 for a completion that is not correct. Completions without a reward do not count.
    """
    graded = [rollout.grade.correct for rollout in group.rollouts_G if rollout.grade.has_reward]
    share = (len(graded) - sum(graded)) / max(1, len(graded) - 1)
    return [share * rollout.grade.correct for rollout in group.rollouts_G]
