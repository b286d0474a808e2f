"""The clipped objective and importance weights, against definitions in plain Python and values by hand."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import ObjectiveConfig
from bandpo_cli.errors import ConfigError
from bandpo_cli.methods.importance_correction import SINGLE_RULES, importance_weights
from bandpo_cli.methods.loss import IntervalLoss, LossBatch
from bandpo_cli.methods.ratio_intervals import ClipSettings
from bandpo_cli.objective.policy_objective import (
    AGGREGATIONS,
    entropy_threshold,
    k3,
    next_entropy_bonus,
    off_policy_tokens,
    policy_objective,
)

log_prob, float32 = st.floats(-12.0, -1e-3), st.floats(-1e4, 0.0, width=32)
advantage = st.just(0.0) | st.floats(0.01, 3.0) | st.floats(-3.0, -0.01)
tokens = st.lists(
    st.tuples(log_prob, log_prob, st.floats(0.0, 1.0), st.floats(1.0, 20.0), advantage, st.floats(0.01, 1.0)),
    min_size=1,
    max_size=12,
)


def loss_of(
    rows: list[tuple[float, ...]],
    dual_clip: float | None = ObjectiveConfig().dual_clip,
    ref: list[float] | None = None,
    reference_kl: float = 0.0,
) -> float:
    """Return the loss of tokens given as (new, old, lower, upper, advantage, weight), each a completion of its own."""
    new, old, lower, upper, advantages, weights = torch.tensor(rows, dtype=torch.float64).unbind(1)
    lengths, bounds = torch.ones(len(rows), dtype=torch.int64), {"lower": lower, "upper": upper}
    ref_logprobs = None if ref is None else torch.tensor(ref, dtype=torch.float64)
    batch = LossBatch(lengths, advantages, old, bounds, ref_logprobs=ref_logprobs)
    loss = IntervalLoss(ClipSettings(), ObjectiveConfig(dual_clip=dual_clip, reference_kl=reference_kl))
    return policy_objective(loss, new, batch, weights).loss.item()


@given(rows=tokens, dual_clip=st.sampled_from([None, 3.0, 10.0]))
def test_the_loss_equals_its_definition(rows, dual_clip):
    expected = 0.0
    for new, old, lower, upper, advantage, weight in rows:
        ratio = math.exp(new - old)
        loss = -min(ratio * advantage, min(max(ratio, lower), upper) * advantage)
        if dual_clip is not None and advantage < 0:
            loss = min(loss, -dual_clip * advantage)
        expected += weight * loss
    assert loss_of(rows, dual_clip) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_reference_penalty_is_k3():
    """E over π of k3 is Σ π log(π/π_ref), here summed exactly over a small vocabulary."""
    rows, ref = [(-1.0, -1.0, 0.8, 1.2, 0.0, 1.0)], [-1.7]
    assert loss_of(rows, ref=ref, reference_kl=0.5) == pytest.approx(0.5 * (math.exp(-0.7) - 1 + 0.7))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 50, dtype=torch.float64, generator=generator)
    logp, logq = torch.log_softmax(logits, dim=1)
    torch.testing.assert_close((logp.exp() * k3(logp, logq)).sum(), (logp.exp() * (logp - logq)).sum())


def test_masks_and_penalties_equal_their_definitions():
    """The mask drops the second and the third completion of four; the fourth drifts too, with a positive advantage.

    Every other token has the highest entropies (`objective.top_entropy`).
    """
    drifts, negative = [0.1, 0.6, 0.9, 0.9], [-1.0, -1.0, -0.5, 2.0]
    lengths, generator = torch.tensor([3, 2, 4, 3]), torch.Generator().manual_seed(1)
    noise, old, ref = torch.randn(3, 12, dtype=torch.float64, generator=generator) * 0.1 - 1.0
    advantages, shifts = (
        torch.tensor(x, dtype=torch.float64).repeat_interleave(lengths) for x in (negative, drifts)
    )
    sampler, new, share = old + 0.2, old + 0.25 - shifts + noise + 1.0, torch.rand(12, dtype=torch.float64)
    importance = torch.tensor([1.0, 0.0, 0.5] * 4, dtype=torch.float64)
    bounds = {"lower": torch.full((12,), 0.8), "upper": torch.full((12,), 1.2)}
    chosen = torch.arange(12) % 2 == 0
    batch = LossBatch(lengths, advantages, old, bounds, importance, ref, None, sampler, chosen)
    terms = {"reference_kl": 0.3, "reference_kl_estimator": "unbiased", "drift_penalty": 0.7}
    options = ObjectiveConfig(dual_clip=None, off_policy_mask=0.4, **terms)
    found = policy_objective(IntervalLoss(ClipSettings(), options), new, batch, share)
    x = new.clone().requires_grad_()
    total, first = torch.zeros((), dtype=torch.float64), 0
    for length in lengths.tolist():
        span = range(first, first + length)
        first += length
        drift = sum((sampler[t] - new[t]).item() for t in span) / length
        for t in span:
            r, a, u = (x[t] - old[t]).exp(), advantages[t], (ref[t] - x[t]).exp()
            policy = -torch.min(r * a, r.clamp(0.8, 1.2) * a) * (not (a < 0 and drift > 0.4)) * chosen[t]
            penalty = 0.3 * r * (u - 1 - u.log()) + 0.7 * r.log() ** 2
            total = total + share[t] * importance[t] * (policy + penalty)
    (gradient,) = torch.autograd.grad(total, x)
    torch.testing.assert_close(found.loss, total.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(found.gradient, gradient, rtol=1e-12, atol=1e-15)
    dropped = off_policy_tokens(new, batch, 0.4)
    assert [part[0].item() for part in dropped.split(lengths.tolist())] == [False, True, True, False]
    assert not found.gradient_weights[dropped | ~chosen].any()


TOKEN_THEN_MEAN = [
    {"rule": "token-reject", "low": 0.5, "high": 3.0},
    {"rule": "sequence-reject", "low": 0.9, "high": 1.2},
]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        # The geometric means without the rejected tokens (4 and 0.1) are 1, √(1.1·0.9), and 0.8.
        (TOKEN_THEN_MEAN, [1, 1, 0, 1, 0, 1, 0, 0]),
        (
            [*TOKEN_THEN_MEAN, {"rule": "product-truncate", "high": 0.995}],
            [0.995, 0.995, 0, 0.99, 0, 0.99, 0, 0],
        ),
        # In the other order the means are ∛4, ∛(0.99·0.1) and 0.8.
        ([TOKEN_THEN_MEAN[1], TOKEN_THEN_MEAN[0]], [0] * 8),
        ([{"rule": "outlier-reject", "low": 0.2, "high": 5}, "token-truncate"], [1, 1, 2, 0, 0, 0, 0.8, 0.8]),
        (["token-k3-reject"], [1, 1, 0, 1, 0, 1, 0, 0]),
        (
            [{"rule": "sequence-k3-reject", "high": 0.5}, "sequence-truncate"],
            [0] * 3 + [0.099 ** (1 / 3)] * 3 + [0.8] * 2,
        ),
    ],
)
def test_a_list_of_rules_applies_in_order_to_the_kept_tokens(rules, expected):
    ratios = torch.tensor([1.0, 1.0, 4.0, 1.1, 0.1, 0.9, 0.8, 0.8], dtype=torch.float64)
    objective = resolve([{"objective": {"importance": rules}}]).objective
    sampler = torch.full_like(ratios, -9.0)
    weights = importance_weights(sampler + ratios.log(), sampler, torch.tensor([3, 3, 2]), objective)
    assert weights.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"importance": []}, "name a rule"),
        (
            {"importance": ["token-truncate", "product-truncate"]},
            "not both token-truncate and product-truncate",
        ),
        ({"importance": ["sequence-reject"], "importance_cap": 3.0}, "leave both out"),
        ({"importance": ["sequence-reject"], "old_logprobs": "sampler"}, "no effect with old_logprobs"),
        ({"importance": [{"rule": "sequence-reject", "low": 1.1, "high": 2}]}, "low ≤ 1 ≤ high"),
        ({"importance": [{"rule": "token-truncate", "low": 0.5}]}, r"importance\[0\] = .*no effect"),
        ({"importance": "bypass_pg_is"}, "set objective.old_logprobs to 'sampler'"),
        ({"importance": "decoupled_geo"}, "did you mean 'decoupled_geo_rs'"),
        ({"top_entropy": 1.0}, r"objective.top_entropy = 1.0: .*less than 1"),
        (
            {"entropy_target": 0.2, "entropy_bonus": 0.01},
            "entropy_bonus = 0.01 is a constant.*leave one of them out",
        ),
        ({"entropy_bonus_step": 0.01}, "entropy_bonus_step = 0.01 has no effect without entropy_target"),
        ({"reference_kl_estimator": "unbiased"}, "no effect with reference_kl = 0"),
    ],
)
def test_settings_without_effect_are_refused(objective, message):
    with pytest.raises(ConfigError, match=message):
        resolve([{"objective": objective}])


@pytest.mark.parametrize(
    ("method", "objective"), [("wapo", {"off_policy_mask": 0.5}), ("m2po", {"old_logprobs": "sampler"})]
)
def test_a_method_refuses_a_setting_that_cannot_act_on_it(method, objective):
    with pytest.raises(ConfigError, match=f"no effect with.*{method}|{method}.*no effect with"):
        resolve([{"bounds": {"method": method}, "objective": objective}])


def test_an_entropy_bonus_has_no_importance_weights():
    old, entropy = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([0.2, 1.5, 0.7])
    weights, bounds = (
        torch.tensor([0.5, 0.25, 0.25]),
        {"lower": torch.zeros(3), "upper": torch.full((3,), 2.0)},
    )
    batch = LossBatch(torch.tensor([2, 1]), torch.ones(3), old, bounds, torch.tensor([0.0, 2.0, 0.5]))
    loss = IntervalLoss(ClipSettings(), ObjectiveConfig(entropy_bonus=0.4))
    without, found = (
        policy_objective(loss, old, batch, weights),
        policy_objective(loss, old, batch, weights, entropy),
    )
    assert (found.loss - without.loss).item() == pytest.approx(-0.4 * (0.5 * 0.2 + 0.25 * 1.5 + 0.25 * 0.7))
    assert found.entropy_gradient.tolist() == pytest.approx([-0.2, -0.1, -0.1])
    assert torch.equal(found.gradient, without.gradient)


def test_the_coefficient_of_the_bonus_follows_the_entropy():
    """Steps of 0.25 up to 0.5, by hand; without a known entropy it stays."""
    objective = ObjectiveConfig(entropy_target=1.0, entropy_bonus_step=0.25, entropy_bonus_max=0.5)
    coefficient, found = 0.0, []
    for entropy in (0.9, 1.0, 0.5, 1.1, math.nan, 2.0, 2.0, 0.3):
        coefficient, bonus = next_entropy_bonus(objective, coefficient, entropy)
        found.append((coefficient, bonus))
    assert found == [
        (0.25, 0.25),
        (0.5, 0.5),
        (0.5, 0.5),
        (0.25, 0),
        (0.25, 0.25),
        (0, 0),
        (0, 0),
        (0.25, 0.25),
    ]


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.97])
def test_the_tokens_of_the_highest_entropy_are_those_above_the_quantile(share):
    """The quantile by torch interpolates between two tokens."""
    entropy = torch.rand(73, generator=torch.Generator().manual_seed(0))
    expected = entropy >= torch.quantile(entropy, 1 - share)
    assert torch.equal(entropy >= entropy_threshold(entropy, share), expected)


def test_aggregation_weights():
    """Three completions of 2, 1 and 4 tokens; the limit is 8."""
    expected = {
        "seq-mean-token-mean": [1 / 6, 1 / 3, 1 / 12], "token-mean": [1 / 7] * 3, "seq-sum-norm": [1 / 24] * 3
    }  # fmt: skip
    assert expected.keys() == AGGREGATIONS.keys()
    for name, weights in expected.items():
        torch.testing.assert_close(AGGREGATIONS[name](torch.tensor([2, 1, 4]), 8), torch.tensor(weights))


def test_by_default_the_loss_has_a_dual_clip_of_10_and_no_reference_penalty():
    """Ratio 15 at advantage −1 costs 10, at +1 gains the bound; the reference's log-probs cost nothing."""
    log_15 = math.log(15.0)
    rows = [(-5.0 + log_15, -5.0, 0.0, 12.0, -1.0, 1.0), (-5.0 + log_15, -5.0, 0.0, 12.0, 1.0, 0.5)]
    assert loss_of(rows, ref=[-5.0, -5.0]) == pytest.approx(10.0 - 0.5 * 12.0)


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
RULES = [*SINGLE_RULES]


def weights_by(rule: str, cap: float | None = 1.5, **more: Any) -> torch.Tensor | None:
    """Return the weights of the tokens of `RATIOS`."""
    sampler = torch.linspace(-3, -0.5, 9)
    ratios = torch.tensor([ratio for item in RATIOS for ratio in item])
    objective = ObjectiveConfig(importance=rule, importance_cap=cap, **more)
    lengths = torch.tensor([len(item) for item in RATIOS])
    return importance_weights(sampler + ratios.log(), sampler, lengths, objective)


@pytest.mark.parametrize("rule", sorted({*BY_HAND, *RULES}))
def test_weights_are_those_computed_by_hand(rule):
    more, expected = BY_HAND[rule]
    found = weights_by(rule.partition(" ")[0], **more)
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_without_a_cap_there_is_no_correction():
    assert weights_by("token-truncate", None) is None


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=20)
@given(rows=st.lists(st.tuples(float32, float32 | st.just(-math.inf)), min_size=2, max_size=6))
def test_weights_of_extreme_log_probs_are_limited(rule, rows):
    """A sampler that reports probability 0 for its own token, by rounding, gets the weight of the cap, or is masked."""
    trainer, sampler = torch.tensor(rows).unbind(1)
    objective = ObjectiveConfig(importance=rule)
    weights = importance_weights(trainer, sampler, torch.tensor([1, len(rows) - 1]), objective)
    assert weights is not None
    assert ((weights >= 0) & (weights <= 2)).all()
    if rule == "token-truncate":
        assert (weights > 0).all()


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ({"importance": "token-masked"}, "did you mean 'token-mask'"),
        ({"importance_floor": 0.5}, "importance_floor = 0.5"),
        ({"importance": "token-mask", "importance_cap": None}, "'token-mask' needs importance_cap"),
        ({"importance": "sequence-mask", "importance_floor": 1.2}, "[1.2, 2]"),
    ],
)
def test_settings_that_cannot_be_meant_are_one_line(layer, words):
    with pytest.raises(ConfigError) as raised:
        resolve([{"objective": layer}])
    assert "\n" not in str(raised.value)
    assert words in str(raised.value)
