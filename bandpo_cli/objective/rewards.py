"""From a grader's verdict to the reward that advantages are computed from."""

from __future__ import annotations

from bandpo_cli.config.run import RewardConfig
from bandpo_cli.types import Grade, Group


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


def has_spread(group: Group) -> bool:
    """Tell whether the group's rewards differ: where they do not, every advantage is 0 and nothing is learnt."""
    return len({rollout.grade.reward for rollout in group.rollouts_G}) > 1
