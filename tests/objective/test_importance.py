"""Importance weights: by hand for every rule, at extreme log-probs, and their settings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import ObjectiveConfig
from bandpo_cli.errors import ConfigError
from bandpo_cli.objective.importance import RULES, importance_weights

RATIOS = [[1.0, 4.0], [0.5, 0.5, 0.5], [1.1], [1.0, 0.2, 1.25]]
"""π_old/π_sampler of the tokens of four completions; the geometric means are 2, 0.5, 1.1 and 0.25 ** (1/3)."""

BY_HAND = {
    "token-truncate": ({}, [1.0, 1.5, 0.5, 0.5, 0.5, 1.1, 1.0, 0.2, 1.25]),
    "sequence-truncate": ({}, [1.5, 1.5, 0.5, 0.5, 0.5, 1.1, *[0.25 ** (1 / 3)] * 3]),
    "token-mask": ({}, [1.0, 0.0, 0.0, 0.0, 0.0, 1.1, 1.0, 0.0, 1.25]),  # the floor is the inverse of the cap
    "token-mask above a floor": ({"importance_floor": 0.4}, [1.0, 0.0, 0.5, 0.5, 0.5, 1.1, 1.0, 0.0, 1.25]),
    "sequence-mask": ({"importance_floor": 0.6}, [0.0] * 5 + [1.1] + [0.25 ** (1 / 3)] * 3),
    "sequence-mask-any": ({"importance_floor": 0.4}, [0.0, 0.0, 0.5, 0.5, 0.5, 1.1, 0.0, 0.0, 0.0]),
}
"""Settings beside the cap of 1.5, and the weights of the tokens."""


def weights_by(rule: str, cap: float | None = 1.5, **more: Any) -> torch.Tensor | None:
    """Return the weights of the tokens of `RATIOS`."""
    sampler = torch.linspace(-3, -0.5, 9)
    ratios = torch.tensor([ratio for item in RATIOS for ratio in item])
    objective = ObjectiveConfig(importance=rule, importance_cap=cap, **more)  # type: ignore[arg-type]
    lengths = torch.tensor([len(item) for item in RATIOS])
    return importance_weights(sampler + ratios.log(), sampler, lengths, objective)


@pytest.mark.parametrize("rule", BY_HAND)
def test_weights_are_those_computed_by_hand(rule: str) -> None:
    more, expected = BY_HAND[rule]
    found = weights_by(rule.partition(" ")[0], **more)
    assert found is not None
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_every_rule_of_the_settings_has_a_function_and_a_case() -> None:
    names = ObjectiveConfig.model_fields["importance"].annotation.__args__  # type: ignore[union-attr]
    assert set(RULES) == set(names) == {case.partition(" ")[0] for case in BY_HAND}


def test_without_a_cap_there_is_no_correction() -> None:
    assert weights_by("token-truncate", None) is None


log_prob = st.floats(-1e4, 0.0, width=32)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=20)
@given(rows=st.lists(st.tuples(log_prob, log_prob | st.just(-math.inf)), min_size=2, max_size=6))
def test_weights_of_extreme_log_probs_are_limited(rule: str, rows: list[tuple[float, float]]) -> None:
    """A sampler that reports probability 0 for its own token, by rounding, gets the weight of the cap, or is masked."""
    trainer, sampler = torch.tensor(rows).unbind(1)
    objective = ObjectiveConfig(importance=rule)  # type: ignore[arg-type]
    weights = importance_weights(trainer, sampler, torch.tensor([1, len(rows) - 1]), objective)
    assert weights is not None
    assert ((weights >= 0) & (weights <= 2)).all()
    if rule == "token-truncate":
        assert (weights > 0).all()


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ({"importance": "token-masked"}, ["objective.importance = 'token-masked'", "did you mean 'token-mask'"]),
        ({"importance_floor": 0.5}, ["importance_floor = 0.5", "no effect", "'token-truncate'"]),
        ({"importance": "token-mask", "importance_cap": None}, ["'token-mask'", "needs importance_cap"]),
        ({"importance": "token-mask", "importance_cap": 0.5}, ["[2, 0.5]", "importance_floor ≤ 1 ≤"]),
        ({"importance": "sequence-mask", "importance_floor": 1.2}, ["[1.2, 2]", "importance_floor ≤ 1 ≤"]),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_meant_are_one_line(layer: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve([{"objective": layer}])
    assert "\n" not in str(raised.value)
    assert [word for word in words if word not in str(raised.value)] == []
