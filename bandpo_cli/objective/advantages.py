"""Rewards, and advantage estimators (`objective.advantages`).

An estimator returns exactly 0 without a reward, and where all rewards of a group are equal (`equal_rewards`): such a
group has no gradient, and an update leaves it out. A custom one decides this itself.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from bandpo_cli.config.batch_and_sampling import RewardConfig
from bandpo_cli.config.run import ObjectiveConfig
from bandpo_cli.custom_code import load_setting
from bandpo_cli.errors import ConfigError, user_code
from bandpo_cli.registries import ADVANTAGES, load_attribute
from bandpo_cli.types import Grade, Group

STD_EPS = 1e-6
"""Added to the standard deviation, so that the advantages of a group whose rewards hardly differ stay bounded."""


REWARD_TOLERANCE = 1e-6
"""Rewards of a group that differ by at most this, relative to the largest of them where that exceeds 1, are equal. It
is eight units of rounding in float32, in which many graders compute."""


def group_advantages(
    rewards_PG: Tensor, normalize_std: bool = True, has_reward_PG: Tensor | None = None
) -> Tensor:
    """Return the advantage of each completion: its reward less the mean of its group, in standard deviations (GRPO).

    Source: arXiv 2402.03300; without the deviation it is Dr. GRPO's (arXiv 2503.20783).

    Args:
        rewards_PG: [P, G] float, one row per problem. The values are computed in float64.
        normalize_std: divide by the group's (unbiased) standard deviation + 1e-6; otherwise rewards are only centred.
        has_reward_PG: [P, G] bool, False for completions without a reward, which are in no mean; None if all have one.
    """
    present = torch.ones_like(rewards_PG, dtype=torch.bool) if has_reward_PG is None else has_reward_PG
    _, centred, count = _centred(rewards_PG, present)
    if normalize_std:
        variance = centred.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + STD_EPS)
    return centred.to(rewards_PG.dtype)


def rloo_advantages(rewards_PG: Tensor, has_reward_PG: Tensor) -> Tensor:
    """Return each reward less the mean of the other rewards of its group, [P, G] (RLOO, arXiv 2402.14740).

    Equal to verl 0.9.1, `compute_rloo_outcome_advantage`, and to TRL 1.16, `RLOOTrainer`, for groups of two or more.
    """
    _, centred, count = _centred(rewards_PG, has_reward_PG)
    others = (count - 1).clamp(min=1)
    return centred * count / others


def maxrl_advantages(rewards_PG: Tensor, has_reward_PG: Tensor) -> Tensor:
    """Return (reward − mean)/mean with the mean of the group, 0 where it is 0, [P, G] (MaxRL, arXiv 2602.02710).

    Equal to prime-rl, `orchestrator/algo/max_rl.py`. Raise ConfigError for a negative reward, which a custom function
    may return.
    """
    if (least := rewards_PG.where(has_reward_PG, 0.0).amin()) < 0:
        raise ConfigError(f"objective.advantages = 'maxrl': a reward is {least:g} and must not be negative")
    mean, centred, _ = _centred(rewards_PG, has_reward_PG)
    return (centred / mean).where(mean > 0, 0.0)


def batch_advantages(rewards_PG: Tensor, has_reward_PG: Tensor) -> Tensor:
    """Return (reward − mean of the group)/(standard deviation of all rewards + 1e-6), [P, G] (arXiv 2508.08221).

    Equal to TRL 1.16, `scale_rewards="batch"`, which adds 1e-4.
    """
    _, centred, _ = _centred(rewards_PG, has_reward_PG)
    present = rewards_PG.double()[has_reward_PG]
    return centred / ((present.std() if len(present) > 1 else 0.0) + STD_EPS)


def gdpo_advantages(
    rewards_PG: Tensor, has_reward_PG: Tensor, parts: Sequence[tuple[float, Tensor]]
) -> Tensor:
    """Return the weighted sum of the `group_advantages` of several rewards, over its standard deviation + 1e-6, [P, G].

    `parts` are weight and values, [P, G], of each reward, NaN where it does not apply. The deviation is that of all
    completions with a reward. Their mean, which the source subtracts, is 0.

    Source: GDPO, arXiv 2601.05242. Equal to TRL 1.16, `multi_objective_aggregation="normalize_then_sum"`, which adds
    1e-4. verl 0.9.1 (`gdpo`) takes mean and deviation over tokens.
    """
    summed = torch.zeros_like(rewards_PG, dtype=torch.float64)
    for weight, values_PG in parts:
        present = has_reward_PG & ~values_PG.isnan()
        summed += weight * group_advantages(values_PG.double(), has_reward_PG=present)
    present = summed[has_reward_PG]
    return summed / ((present.std() if len(present) > 1 else 0.0) + STD_EPS)


def estimate_advantages(
    objective: ObjectiveConfig,
    rewards_PG: Tensor,
    has_reward_PG: Tensor,
    parts: Sequence[tuple[float, Tensor]] = (),
) -> Tensor:
    """Return the advantages of the groups of a step by `objective.advantages`, [P, G].

    `parts` are as for `gdpo_advantages`. A custom function receives the rewards in float64, 0 where there is none, and
    the mask. Raise ConfigError if it fails, or returns another shape or values that are not finite.
    """
    name = objective.advantages
    if name in ADVANTAGES:
        # Only `group` has this argument: the settings refuse the value False for other estimators.
        options: dict[str, Any] = {} if objective.advantage_std else {"normalize_std": False}
        options |= {"parts": parts} if ADVANTAGES[name].by_part else {}
        compute = load_attribute(ADVANTAGES[name].compute)
        return cast(Tensor, compute(rewards_PG, has_reward_PG=has_reward_PG, **options))
    function = load_setting("objective.advantages", name)
    with user_code(f"objective.advantages = '{name}'", function):
        rewards = rewards_PG.double().where(has_reward_PG, 0.0)
        advantages = torch.as_tensor(function(rewards, has_reward_PG), dtype=torch.float64)
        if advantages.shape != rewards.shape:
            shapes = f"{[*rewards.shape]}, not {[*advantages.shape]}"
            raise ValueError(f"it must return an advantage for each of the rewards, [P, G] = {shapes}")
        advantages = advantages.where(has_reward_PG, 0.0)
        if (wrong := ~advantages.isfinite().all(dim=1)).any():
            found, given = advantages[wrong][0].tolist(), rewards[wrong][0].tolist()
            raise ValueError(f"it returned {found} for a group with the rewards {given}")
    return advantages


def check_estimator(objective: ObjectiveConfig) -> None:
    """Raise ConfigError if a custom function fails on four groups of three rewards."""
    rewards = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.5, -1.0, 0.0]])
    estimate_advantages(objective, rewards, torch.tensor([[True] * 3] * 3 + [[True, True, False]]))


def _centred(rewards_PG: Tensor, has_reward_PG: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean [P, 1], rewards less the mean [P, G] and number of rewards [P, 1] of each group, in float64.

    The centred rewards are 0 in a group whose rewards are all equal, and without a reward.
    """
    rewards = rewards_PG.double()
    count = has_reward_PG.sum(dim=1, keepdim=True)
    mean = rewards.where(has_reward_PG, 0.0).sum(dim=1, keepdim=True) / count
    centred = (rewards - mean).where(has_reward_PG & ~equal_rewards(rewards, has_reward_PG), 0.0)
    return mean, centred, count


def equal_rewards(rewards_PG: Tensor, has_reward_PG: Tensor) -> Tensor:
    """Return whether the rewards of each group are equal up to `REWARD_TOLERANCE`, [P, 1]; true for fewer than two."""
    most = rewards_PG.where(has_reward_PG, -math.inf).amax(dim=1, keepdim=True)
    least = rewards_PG.where(has_reward_PG, math.inf).amin(dim=1, keepdim=True)
    return most - least <= REWARD_TOLERANCE * torch.maximum(most.abs(), least.abs()).clamp(min=1.0)


def shaped_rewards(
    grades: Sequence[Grade], lengths: Sequence[int], max_tokens: int, config: RewardConfig
) -> list[float]:
    """Return the rewards that advantages are computed from, one per grade.

    The grader's reward (0 to 1) is scaled to the range from `reward.wrong` to `reward.correct`, less the soft
    over-long penalty (DAPO, arXiv 2503.14476, eq. 13): 0 up to `max_tokens` − overlong_buffer sampled tokens, then
    linear in the length up to overlong_penalty at `max_tokens`.
    """
    rewards = [config.wrong + (config.correct - config.wrong) * grade.reward for grade in grades]
    if not (buffer := config.overlong_buffer):
        return rewards
    over = (min(1.0, max(0, length - (max_tokens - buffer)) / buffer) for length in lengths)
    return [reward - config.overlong_penalty * share for reward, share in zip(rewards, over, strict=True)]


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
