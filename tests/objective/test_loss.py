"""The clipped objective against its definition in plain Python, and its gradient against the definition of "active"."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from bandpo_cli.objective.advantages import group_advantages
from bandpo_cli.objective.loss import (
    AGGREGATIONS,
    LossInputs,
    clip_counts,
    clip_metrics,
    clipped_objective,
    k3,
    truncated_importance,
)

log_prob = st.floats(-12.0, -1e-3)
advantage = st.just(0.0) | st.floats(0.01, 3.0) | st.floats(-3.0, -0.01)
tokens = st.lists(
    st.tuples(log_prob, log_prob, st.floats(0.0, 1.0), st.floats(1.0, 20.0), advantage, st.floats(0.01, 1.0)),
    min_size=1,
    max_size=12,
)


def inputs_of(rows: list[tuple[float, ...]], ref: list[float] | None = None) -> LossInputs:
    new, old, lower, upper, advantages, weights = torch.tensor(rows, dtype=torch.float64).unbind(1)
    ref_logprobs = None if ref is None else torch.tensor(ref, dtype=torch.float64)
    return LossInputs(new.clone().requires_grad_(), old, lower, upper, advantages, weights, ref_logprobs)


def expected_loss(rows: list[tuple[float, ...]], dual_clip: float | None) -> float:
    total = 0.0
    for new, old, lower, upper, advantage, weight in rows:
        ratio = math.exp(new - old)
        loss = -min(ratio * advantage, min(max(ratio, lower), upper) * advantage)
        if dual_clip is not None and advantage < 0:
            loss = min(loss, -dual_clip * advantage)
        total += weight * loss
    return total


@given(rows=tokens, dual_clip=st.sampled_from([None, 3.0, 10.0]))
def test_the_loss_equals_its_definition(rows: list[tuple[float, ...]], dual_clip: float | None) -> None:
    loss = clipped_objective(inputs_of(rows), dual_clip).loss.item()
    assert loss == pytest.approx(expected_loss(rows, dual_clip), rel=1e-9, abs=1e-12)


@given(rows=tokens)
def test_active_tokens_are_those_without_gradient(rows: list[tuple[float, ...]]) -> None:
    """A token counts in `clip/active_fraction` if the clamp binds, so that its gradient is zero."""
    inputs = inputs_of(rows)
    out = clipped_objective(inputs, dual_clip=None)
    (gradient,) = torch.autograd.grad(out.loss, inputs.logprobs)
    counts = clip_counts(out.ratios, inputs.lower, inputs.upper, inputs.advantages, inputs.old_logprobs)
    moved = inputs.advantages != 0
    assert counts["active"] == ((gradient == 0) & moved).sum()
    assert counts["active"] == counts["upper"] + counts["lower"]
    assert counts["active"] <= counts["outside"]


float32_log_prob = st.floats(-1e4, 0.0, width=32)
float32_advantage = st.floats(-1e6, 1e6, width=32)
extreme_tokens = st.lists(
    st.tuples(
        float32_log_prob,
        float32_log_prob | st.just(-math.inf),
        st.floats(0.0, 1.0, width=32),
        st.floats(1.0, 1e9, width=32) | st.just(math.inf),
        float32_advantage,
        st.floats(0.0, 1.0, width=32),
        float32_log_prob,
    ),
    min_size=1,
    max_size=8,
)


@given(
    rows=extreme_tokens,
    dual_clip=st.sampled_from([None, 3.0, 10.0]),
    reference_kl=st.sampled_from([0.0, 1e-3, 1.0]),
)
@example(rows=[(0.0, -math.inf, 0.0, math.inf, 1e6, 1.0, -1e4)], dual_clip=None, reference_kl=1.0)
@example(rows=[(0.0, -1e4, 0.0, math.inf, -1e6, 1.0, 0.0)], dual_clip=None, reference_kl=0.0)
@example(rows=[(-1e4, 0.0, 0.0, math.inf, 1e6, 0.0, 0.0)], dual_clip=10.0, reference_kl=1.0)
@example(rows=[(-1.0, -1.0, 1.0, 1.0, 0.0, 0.0, -1.0)] * 3, dual_clip=10.0, reference_kl=0.0)
def test_finite_inputs_give_a_finite_loss_and_gradient(
    rows: list[tuple[float, ...]], dual_clip: float | None, reference_kl: float
) -> None:
    """In float32: log-probs down to −1e4, an old one of −inf too, no upper bound, advantages of ±1e6, weights of 0."""
    columns = torch.tensor(rows, dtype=torch.float32).unbind(1)
    new = columns[0].clone().requires_grad_()
    inputs = LossInputs(new, *columns[1:6], ref_logprobs=columns[6])
    out = clipped_objective(inputs, dual_clip, reference_kl)
    (gradient,) = torch.autograd.grad(out.loss, new)
    assert torch.isfinite(out.loss)
    assert torch.isfinite(out.ratios).all()
    assert torch.isfinite(gradient).all()
    assert (gradient[(inputs.advantages == 0) & (reference_kl == 0)] == 0).all()
    assert torch.isfinite(k3(columns[0], columns[1])).all()


@given(rows=tokens, dual_clip=st.sampled_from([None, 3.0, 10.0]))
def test_the_float32_loss_is_accurate_to_rounding(
    rows: list[tuple[float, ...]], dual_clip: float | None
) -> None:
    """Compared with a float64 loop: each term to 2e-5, the rounding of a log ratio of up to 12 and its exp."""
    new, *rest = torch.tensor(rows, dtype=torch.float32).unbind(1)
    rounded = torch.stack([new, *rest], 1).double().tolist()
    expected = [expected_loss([row], dual_clip) for row in rounded]
    loss = clipped_objective(LossInputs(new, *rest), dual_clip).loss.item()
    assert loss == pytest.approx(sum(expected), abs=2e-5 * sum(map(abs, expected)) + 1e-30)


@given(own=float32_log_prob, sampled=float32_log_prob | st.just(-math.inf))
def test_importance_weights_are_between_zero_and_the_cap(own: float, sampled: float) -> None:
    """A sampler that reports probability 0 for its own token, by rounding, gets the weight of the cap."""
    (weight,) = truncated_importance(torch.tensor([own]), torch.tensor([sampled]), cap=2.0).tolist()
    assert 0.0 < weight <= 2.0
    assert weight == 2.0 or own < sampled + math.log(2.0) + 1e-3


def test_the_on_policy_gradient_is_the_policy_gradient() -> None:
    """At π = π_old the gradient is −weight·advantage for any bounds."""
    inputs = inputs_of([(-1.0, -1.0, 0.9, 1.1, 2.0, 0.5), (-3.0, -3.0, 0.0, 1.0, -1.0, 0.25)])
    (gradient,) = torch.autograd.grad(clipped_objective(inputs).loss, inputs.logprobs)
    torch.testing.assert_close(gradient, torch.tensor([-1.0, 0.25], dtype=torch.float64))


def test_a_very_large_ratio_stays_finite() -> None:
    inputs = inputs_of([(-1e-3, -90.0, 0.0, math.inf, -1.0, 1.0), (-90.0, -1e-3, 0.0, math.inf, 1.0, 1.0)])
    out = clipped_objective(inputs, dual_clip=10.0)
    assert out.loss.item() == pytest.approx(10.0)
    (gradient,) = torch.autograd.grad(out.loss, inputs.logprobs)
    assert torch.isfinite(gradient).all()


def test_reference_penalty_is_k3() -> None:
    rows, ref = [(-1.0, -1.0, 0.8, 1.2, 0.0, 1.0)], [-1.7]
    penalty = clipped_objective(inputs_of(rows, ref), reference_kl=0.5).loss.item()
    assert penalty == pytest.approx(0.5 * (math.exp(-0.7) - 1 + 0.7))


def test_k3_is_an_unbiased_estimate_of_kl() -> None:
    """E over π of k3 is Σ π log(π/π_ref), here summed exactly over a small vocabulary."""
    logp = torch.log_softmax(
        torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), 0
    )
    logq = torch.log_softmax(
        torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), 0
    )
    torch.testing.assert_close((logp.exp() * k3(logp, logq)).sum(), (logp.exp() * (logp - logq)).sum())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("seq-mean-token-mean", [1 / 6, 1 / 6, 1 / 3, 1 / 12, 1 / 12, 1 / 12, 1 / 12]),
        ("token-mean", [1 / 7] * 7),
        ("seq-sum-norm", [1 / 24] * 7),
    ],
)
def test_aggregation_weights(name: str, expected: list[float]) -> None:
    """Three completions of 2, 1 and 4 tokens; the limit is 8."""
    lengths = torch.tensor([2, 1, 4])
    weights = AGGREGATIONS[name](lengths, 8).repeat_interleave(lengths)
    torch.testing.assert_close(weights, torch.tensor(expected))


@given(lengths=st.lists(st.integers(1, 100_000), min_size=1, max_size=12), room=st.integers(0, 10))
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_aggregation_weights_are_finite_and_sum_to_their_definition(
    name: str, lengths: list[int], room: int
) -> None:
    """The weights of a mean sum to 1; those of seq-sum-norm to the mean length divided by the maximum."""
    lengths_S, longest = torch.tensor(lengths), max(lengths) + room
    weights = AGGREGATIONS[name](lengths_S, longest)
    assert torch.isfinite(weights).all()
    total = (weights.double() * lengths_S).sum().item()
    expected = sum(lengths) / len(lengths) / longest if name == "seq-sum-norm" else 1.0
    assert total == pytest.approx(expected, rel=1e-6)


# Not below the smallest normal number, where the rounding is not proportional to the rewards.
reward_values = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
groups_of_rewards = st.integers(2, 9).flatmap(
    lambda size: st.lists(st.lists(reward_values, min_size=size, max_size=size), min_size=1, max_size=4)
)


@given(rewards=groups_of_rewards, normalize_std=st.booleans())
def test_advantages_are_finite_and_equal_their_definition(
    rewards: list[list[float]], normalize_std: bool
) -> None:
    """Compared with a loop over float64 numbers, including groups of two and very large rewards."""
    found = group_advantages(torch.tensor(rewards, dtype=torch.float32), normalize_std)
    assert torch.isfinite(found).all()
    for row, values in zip(found.tolist(), rewards, strict=True):
        if len(set(values)) == 1:
            assert row == [0.0] * len(values)
            continue
        mean = statistics.fmean(values)
        rounding = 1e-6 * max(map(abs, values))
        std = statistics.stdev(values) if normalize_std else 1.0
        if normalize_std and std < 1e3 * rounding:
            continue  # float32 cannot represent the differences of such rewards well enough
        scale = std + 1e-6 if normalize_std else 1.0
        expected = [(value - mean) / scale for value in values]
        assert row == pytest.approx(expected, rel=3e-3, abs=3 * rounding / scale)


@pytest.mark.parametrize("size", [2, 3, 7, 12, 16])
@pytest.mark.parametrize("reward", [0.1, -0.7, 1 / 3, 1000.1])
def test_equal_rewards_give_advantages_of_exactly_zero(reward: float, size: int) -> None:
    """The float32 mean of seven rewards of 1000.1 is another number; over std + 1e-6 the advantage was −0.9."""
    rewards = torch.full((2, size), reward)
    for normalize_std in (True, False):
        assert torch.equal(group_advantages(rewards, normalize_std), torch.zeros(2, size))


def test_advantages_by_hand() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    centred = group_advantages(rewards, normalize_std=False)
    torch.testing.assert_close(centred, torch.tensor([[0.5, -0.5, -0.5, 0.5], [0.0] * 4]))
    normalized = group_advantages(rewards)
    torch.testing.assert_close(
        normalized[0], torch.tensor([0.5, -0.5, -0.5, 0.5]) / (1 / math.sqrt(3) + 1e-6)
    )
    assert torch.equal(normalized[1], torch.zeros(4))


def test_clip_metrics_by_probability() -> None:
    """One token in each of three bins; only the rarest is clipped."""
    old = torch.tensor([0.0005, 0.09, 0.95], dtype=torch.float64).log()
    counts = clip_counts(
        ratios=torch.tensor([3.0, 1.5, 0.5]),
        lower=torch.tensor([0.0, 0.8, 0.8]),
        upper=torch.tensor([2.0, 1.6, 1.05]),
        advantages=torch.tensor([1.0, 1.0, 1.0]),
        old_logprobs=old,
    )
    metrics = clip_metrics(counts)
    assert metrics["clip/active_fraction"] == pytest.approx(1 / 3)
    assert metrics["clip/upper_fraction"] == pytest.approx(1 / 3)
    assert metrics["clip/lower_fraction"] == 0.0
    assert metrics["clip/outside_fraction"] == pytest.approx(2 / 3)
    assert metrics["clip/active_fraction/p_0_0.001"] == 1.0
    assert metrics["clip/active_fraction/p_0.01_0.1"] == 0.0
    assert metrics["clip/token_share/p_0.9_1"] == pytest.approx(1 / 3)
    assert "clip/active_fraction/p_0.1_0.5" not in metrics
