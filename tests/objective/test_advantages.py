"""Rewards by hand (range, over-long penalty, reward spread), and advantages against their definition."""

import math
import statistics
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
import torch

from bandpo_cli.config.batch_and_sampling import RewardConfig
from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import ObjectiveConfig
from bandpo_cli.errors import ConfigError
from bandpo_cli.objective.advantages import (
    STD_EPS,
    check_estimator,
    estimate_advantages,
    group_advantages,
    has_reward_spread,
    shaped_rewards,
    wrong_peers,
)
from bandpo_cli.training.metrics import rollout_metrics
from bandpo_cli.types import GRADER_ERROR, NOT_APPLICABLE, TIMEOUT, Completion, Grade, Group, Problem, Rollout

RIGHT, WRONG, HALF = Grade(1.0, True, "correct"), Grade(0.0, False, "wrong"), Grade(0.5, False, "partly")


def group_of(grades: list[Grade]) -> Group:
    problem, completion = Problem("p", "", "", "test", "math"), Completion((1,), (-0.1,), "stop", 0)
    return Group(problem, tuple(Rollout(problem, "", (1,), completion, "", grade) for grade in grades))


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (16_384, 0.0), (18_432, 0.5), (20_480, 1.0), (20_479, 4095 / 4096)]
)
def test_the_over_long_penalty_equals_dapo(length, penalty):
    """DAPO's settings: at most 20,480 tokens, of which the last 4,096 are the buffer."""
    config = RewardConfig(overlong_buffer=4096)
    assert shaped_rewards([RIGHT, WRONG], [length] * 2, 20_480, config) == pytest.approx(
        [1.0 - penalty, -penalty]
    )


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [
        ([0.1 + 0.2, 0.3, 0.3, 0.3], True),  # one unit of rounding in float64
        ([0.7, 0.7 * (1 + 1e-7), 0.7, 0.7], True),  # one unit in float32, in which a reward model computes
        ([0.1 + 0.2 - 0.3, 0.0, 0.0], True),  # 5.6e-17: the digits that cancel are those of rewards around 1
        ([1000.1, 1000.1 * (1 + 1e-7), 1000.1], True),
        ([-1.0, -1.0 + 9e-7], True),
        ([-1.0, -1.0 + 2e-6], False),
        ([1e6, 1e6 + 0.5], True),
        ([1e6, 1e6 + 2.0], False),
        ([1.0, 1.0, 1.0 - 1 / 4096], False),  # the over-long penalty of one token
    ],
)
@pytest.mark.parametrize("normalize_std", [True, False])
def test_rewards_that_differ_by_rounding_are_equal_for_sampling_advantages_and_metrics(
    rewards, equal, normalize_std
):
    """The advantages of the others equal those of exact fractions, whose square root has 60 digits."""
    group = group_of([Grade(reward, False, "wrong") for reward in rewards])
    assert has_reward_spread(group) is not equal
    assert rollout_metrics([group])["train/uniform_group_fraction"] == equal
    found = group_advantages(torch.tensor([rewards], dtype=torch.float64), normalize_std)[0].tolist()
    values = [Fraction(reward) for reward in rewards]
    centred = [value - sum(values) / len(values) for value in values]
    variance = sum(value * value for value in centred) / (len(values) - 1)
    with localcontext(prec=60):
        root = (Decimal(variance.numerator) / variance.denominator).sqrt()
    scale = Fraction(root) + Fraction(STD_EPS) if normalize_std else 1
    expected = [0.0] * len(rewards) if equal else [float(value / scale) for value in centred]
    assert found == pytest.approx(expected, rel=1e-9, abs=0)


def test_completions_without_a_reward_are_in_no_mean_and_have_no_advantage():
    """The others of each group have the advantages of a smaller group; a single one and none have 0."""
    rewards = torch.tensor([[1, 9, 0, 0.5], [9, 9, 1, 9], [9, 9, 9, 9], [1, 0, 0, 0]])
    has_reward = rewards != 9
    found = group_advantages(rewards, True, has_reward)
    spread = statistics.stdev([1.0, 0.0, 0.5]) + 1e-6
    assert found[0].tolist() == pytest.approx([0.5 / spread, 0.0, -0.5 / spread, 0.0])
    assert found[1:3].tolist() == [[0.0] * 4] * 2
    assert torch.equal(found[3], group_advantages(rewards)[3])


@pytest.mark.parametrize("missing", [NOT_APPLICABLE, TIMEOUT, GRADER_ERROR])
def test_a_missing_reward_is_no_spread(missing):
    assert not has_reward_spread(group_of([RIGHT, missing, RIGHT]))


def test_shares_of_wrong_peers():
    """Of completions with a reward; one that is partly right is not correct."""
    assert wrong_peers(group_of([RIGHT, WRONG, HALF, RIGHT])) == pytest.approx([2 / 3, 0, 0, 2 / 3])
    assert wrong_peers(group_of([RIGHT, TIMEOUT, WRONG, NOT_APPLICABLE])) == [1, 0, 0, 0]
    assert wrong_peers(group_of([RIGHT, RIGHT])) == wrong_peers(group_of([WRONG, WRONG])) == [0, 0]
    assert wrong_peers(group_of([RIGHT])) == [0]


BATCH_STD = statistics.stdev([1, 0, 0.5, 2, 1, 1, 1, 1, 0, *[1.0] * 4, *[0.0] * 4])
"""Of all rewards of the test below: one reward of the first group is missing, and two of the third."""


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # [1, 0, –, 0.5], mean 0.5; [2, 1, 1, 1], mean 1.25; [1, –, 0, –]; the rewards of two groups are all equal
        ("rloo", [[0.75, -0.75, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3], [1, 0, -1, 0]]),
        ("maxrl", [[1, -1, 0, 0], [0.6, -0.2, -0.2, -0.2], [1, 0, -1, 0]]),
        ("batch", [[0.5, -0.5, 0, 0], [0.75, -0.25, -0.25, -0.25], [0.5, 0, -0.5, 0]]),
        ("examples.custom_advantages:median_advantages", [[0.5, -0.5, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]),
    ],
)
def test_estimators_equal_a_case_by_hand(estimator, expected):
    objective = ObjectiveConfig(advantages=estimator)
    rewards = torch.tensor([[1, 0, 9, 0.5], [2, 1, 1, 1], [1, 9, 0, 9], [1, 1, 1, 1], [0, 0, 0, 0]]).double()
    found = estimate_advantages(objective, rewards, rewards != 9)
    scale = BATCH_STD + STD_EPS if estimator == "batch" else 1.0
    expected = torch.tensor([*expected, [0] * 4, [0] * 4], dtype=torch.float64)
    torch.testing.assert_close(found * scale, expected, rtol=0, atol=1e-12)
    if estimator == "maxrl":  # a group of a negative mean would have no gradient
        with pytest.raises(ConfigError, match="a reward is -1 and must not be negative"):
            estimate_advantages(objective, 0.0 - rewards.clamp(max=1), rewards != 9)


def test_gdpo_equals_a_case_by_hand():
    """Two groups of three, the weights 1 and −0.5; a completion without a reward, and a value that does not apply."""
    nan = math.nan
    answer = [[1.0, 0.0, 0.0], [1.0, 1.0, 9.0]]
    length = [[2.0, 4.0, nan], [1.0, 3.0, 9.0]]
    of_answer, of_length = (1 - 1 / 3) / statistics.stdev([1, 0, 0]), 1 / math.sqrt(2)
    summed = [
        [of_answer + 0.5 * of_length, -of_answer / 2 - 0.5 * of_length, -of_answer / 2],
        [0.5 * of_length, -0.5 * of_length, 0.0],
    ]
    scale = statistics.stdev([*summed[0], *summed[1][:2]])
    parts = [(1.0, torch.tensor(answer)), (-0.5, torch.tensor(length))]
    has_reward = torch.tensor([[True] * 3, [True, True, False]])
    objective = ObjectiveConfig(advantages="gdpo")
    found = estimate_advantages(objective, torch.zeros(2, 3), has_reward, parts)
    expected = torch.tensor(summed, dtype=torch.float64) / scale
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)
    uniform = [(1.0, torch.ones(2, 3)), (2.0, torch.zeros(2, 3))]
    assert not estimate_advantages(objective, torch.zeros(2, 3), has_reward, uniform).any()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({}, "name two or more in task.rewards"),
        ({"task": {"rewards": [{}, {"grader": "format", "weight": 0}]}}, "name two or more in task.rewards"),
        ({"task": {"rewards": [{}, "format"]}, "sampling": {"dynamic": True}}, "sampling.dynamic"),
        ({"task": {"rewards": [{}, "format"]}, "reward": {"overlong_buffer": 2}}, "reward.overlong_buffer"),
    ],
)
def test_gdpo_needs_several_rewards_and_no_sum(sections, message):
    with pytest.raises(ConfigError, match=message):
        resolve([{"objective": {"advantages": "gdpo"}, **sections}])


@pytest.mark.parametrize("estimator", ["group", "rloo", "maxrl", "batch"])
def test_groups_of_one_reward_or_none_have_no_advantage(estimator):
    objective = ObjectiveConfig(advantages=estimator)
    for mask in ([[True, False]], [[False, False]]):
        found = estimate_advantages(objective, torch.tensor([[1.0, 0.0]]), torch.tensor(mask))
        assert found.tolist() == [[0.0, 0.0]]


BROKEN = """import torch
def transposed(rewards, mask):
    return rewards.T
def uniform(rewards, mask):
    return (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
def typo(rewards, mask):
    return rewards.maen()
"""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "transposed",
            r"advantage for each of the rewards, \[P, G\] = \[4, 3\], not \[3, 4\] \(broken.*py:2, in t",
        ),
        (
            "uniform",
            r"returned \[nan, nan, nan\] for a group with the rewards \[0.0, 0.0, 0.0\] \(broken.*py:4",
        ),
        (
            "typo",
            r"AttributeError: 'Tensor' object has no attribute 'maen' \(broken_estimators.py:7, in typo\)",
        ),
        ("typ", r"has no function 'typ' \(did you mean 'typo'\?\)"),
    ],
)
def test_mistakes_in_an_estimator_name_the_line(tmp_path, monkeypatch, function, message):
    (tmp_path / "broken_estimators.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=f"objective.advantages = 'broken_estimators:{function}': .*{message}"
    ):
        check_estimator(ObjectiveConfig(advantages=f"broken_estimators:{function}"))
