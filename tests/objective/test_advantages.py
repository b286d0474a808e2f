"""Rewards by hand: the range, the over-long penalty, and groups without reward spread."""

from __future__ import annotations

import pytest

from bandpo_cli.config.run import RewardConfig
from bandpo_cli.objective.advantages import has_reward_spread, shaped_reward
from bandpo_cli.types import Completion, Grade, Group, Problem, Rollout

RIGHT, WRONG, HALF = Grade(1.0, True, "correct"), Grade(0.0, False, "wrong"), Grade(0.5, False, "partly")


@pytest.mark.parametrize(("grade", "reward"), [(RIGHT, 1.0), (WRONG, -1.0), (HALF, 0.0)])
def test_the_graders_reward_is_scaled_to_the_range(grade: Grade, reward: float) -> None:
    assert shaped_reward(grade, 5, 10, RewardConfig(correct=1.0, wrong=-1.0)) == reward


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (16_384, 0.0), (18_432, 0.5), (20_480, 1.0), (20_479, 4095 / 4096)]
)
def test_the_over_long_penalty_equals_dapo(length: int, penalty: float) -> None:
    """DAPO's settings: at most 20,480 tokens, of which the last 4,096 are the buffer."""
    config = RewardConfig(overlong_buffer=4096)
    assert shaped_reward(RIGHT, length, 20_480, config) == pytest.approx(1.0 - penalty)
    assert shaped_reward(WRONG, length, 20_480, config) == pytest.approx(-penalty)


def test_a_group_has_spread_if_its_rewards_differ() -> None:
    problem = Problem("p", "", "", "test", "math")
    completion = Completion((1,), (-0.1,), "stop", 0)

    def group(*grades: Grade) -> Group:
        return Group(problem, tuple(Rollout(problem, "", (1,), completion, "", grade) for grade in grades))

    assert has_reward_spread(group(RIGHT, WRONG, WRONG))
    assert not has_reward_spread(group(WRONG, WRONG))
    assert not has_reward_spread(group(RIGHT, RIGHT))
