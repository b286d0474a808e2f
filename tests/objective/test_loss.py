"""The objective against a plain-Python rendering of its definition, its gradient against what "active" means."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bandpo_cli.objective.advantages import group_advantages
from bandpo_cli.objective.aggregation import AGGREGATIONS
from bandpo_cli.objective.clip_figures import clip_counts, clip_fractions
from bandpo_cli.objective.loss import LossInputs, clipped_objective, k3

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
def test_loss_is_the_definition(rows: list[tuple[float, ...]], dual_clip: float | None) -> None:
    loss = clipped_objective(inputs_of(rows), dual_clip).loss.item()
    assert loss == pytest.approx(expected_loss(rows, dual_clip), rel=1e-9, abs=1e-12)


@given(rows=tokens)
def test_active_tokens_are_those_without_gradient(rows: list[tuple[float, ...]]) -> None:
    """`clip/active_fraction` promises: the clamp binds and the gradient is zero."""
    inputs = inputs_of(rows)
    out = clipped_objective(inputs, dual_clip=None)
    (gradient,) = torch.autograd.grad(out.loss, inputs.logprobs)
    counts = clip_counts(out.ratios, inputs.lower, inputs.upper, inputs.advantages, inputs.old_logprobs)
    moved = inputs.advantages != 0
    assert counts["active"] == ((gradient == 0) & moved).sum()
    assert counts["active"] == counts["upper"] + counts["lower"]
    assert counts["active"] <= counts["outside"]


def test_gradient_is_that_of_policy_gradient_on_policy() -> None:
    """At π = π_old the objective's gradient is −weight·advantage, whatever the bounds."""
    inputs = inputs_of([(-1.0, -1.0, 0.9, 1.1, 2.0, 0.5), (-3.0, -3.0, 0.0, 1.0, -1.0, 0.25)])
    (gradient,) = torch.autograd.grad(clipped_objective(inputs).loss, inputs.logprobs)
    torch.testing.assert_close(gradient, torch.tensor([-1.0, 0.25], dtype=torch.float64))


def test_an_exploding_ratio_stays_finite() -> None:
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
    """Three completions of 2, 1 and 4 tokens, at most 8."""
    lengths = torch.tensor([2, 1, 4])
    weights = AGGREGATIONS[name](lengths, 8).repeat_interleave(lengths)
    torch.testing.assert_close(weights, torch.tensor(expected))


def test_advantages_by_hand() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    centred = group_advantages(rewards, normalize_std=False)
    torch.testing.assert_close(centred, torch.tensor([[0.5, -0.5, -0.5, 0.5], [0.0] * 4]))
    normalized = group_advantages(rewards)
    torch.testing.assert_close(
        normalized[0], torch.tensor([0.5, -0.5, -0.5, 0.5]) / (1 / math.sqrt(3) + 1e-6)
    )
    assert torch.equal(normalized[1], torch.zeros(4))


def test_clip_figures_by_probability() -> None:
    """One token in each of three bins, only the rarest clipped."""
    old = torch.tensor([0.0005, 0.09, 0.95], dtype=torch.float64).log()
    counts = clip_counts(
        ratios=torch.tensor([3.0, 1.5, 0.5]),
        lower=torch.tensor([0.0, 0.8, 0.8]),
        upper=torch.tensor([2.0, 1.6, 1.05]),
        advantages=torch.tensor([1.0, 1.0, 1.0]),
        old_logprobs=old,
    )
    figures = clip_fractions(counts)
    assert figures["clip/active_fraction"] == pytest.approx(1 / 3)
    assert figures["clip/upper_fraction"] == pytest.approx(1 / 3)
    assert figures["clip/lower_fraction"] == 0.0
    assert figures["clip/outside_fraction"] == pytest.approx(2 / 3)
    assert figures["clip/active_fraction/p_0_0.001"] == 1.0
    assert figures["clip/active_fraction/p_0.01_0.1"] == 0.0
    assert figures["clip/token_share/p_0.9_1"] == pytest.approx(1 / 3)
    assert "clip/active_fraction/p_0.1_0.5" not in figures
