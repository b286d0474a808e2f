"""Attributes of the registered methods, checked against the gradients of their losses."""

from __future__ import annotations

import pytest
import torch

from bandpo_cli.bounds.intervals import clip_state, ratio_bounds
from bandpo_cli.config.layers import resolve
from bandpo_cli.objective.loss import LossBatch, LossOutputs, policy_loss, policy_objective
from bandpo_cli.registries import METHODS

LENGTHS = torch.tensor([1, 2, 5, 9, 23] * 8)
TOKENS = int(LENGTHS.sum())


def inputs(spread: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (new log-probs, old log-probs, advantages) of random completions, [N] float64 each."""
    generator = torch.Generator().manual_seed(1)
    old = -8 * torch.rand(TOKENS, generator=generator, dtype=torch.float64) ** 3 - 1e-3
    new = old + spread * torch.randn(TOKENS, generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64).repeat_interleave(
        LENGTHS
    )
    return new.clamp(max=-1e-4), old, advantages


def objective(method: str, spread: float) -> LossOutputs:
    """Return loss and gradient of the method with its defaults, without dual clip."""
    config = resolve([{"bounds": {"method": method}, "objective": {"dual_clip": None}}])
    loss = policy_loss(config.bounds, config.objective)
    new, old, advantages = inputs(spread)
    columns = loss.prepare(old, advantages)
    weights = torch.full_like(new, 1 / TOKENS)
    return policy_objective(loss, new, LossBatch(LENGTHS, advantages, old, columns), weights)


@pytest.mark.parametrize("spread", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("method", [name for name, entry in METHODS.items() if entry.bounds is not None])
def test_the_gradient_is_zero_beyond_the_bounds_by_the_sign_of_the_advantage(
    method: str, spread: float
) -> None:
    """Clip-Cov removes further gradients."""
    out = objective(method, spread)
    _, old, advantages = inputs(spread)
    bounds = ratio_bounds(resolve([{"bounds": {"method": method}}]).bounds)(old)
    beyond = clip_state(out.ratios, *bounds, advantages).active
    if METHODS[method].differs_at_ratio_one:
        assert ((out.gradient == 0) | ~beyond).all()
        assert ((out.gradient == 0) & ~beyond).sum() <= 1  # 0.02% of the tokens, at least one
    else:
        assert torch.equal(out.gradient == 0, beyond)


@pytest.mark.parametrize("method", [name for name, entry in METHODS.items() if entry.bounds is None])
def test_methods_without_bounds_have_no_interval_of_single_ratios(method: str) -> None:
    """Two tokens with about the same old probability, ratio and sign are treated alike, or none loses its gradient."""
    out = objective(method, 0.1)
    new, old, advantages = inputs(0.1)
    zero = out.gradient == 0
    if not zero.any():
        return
    ratios = (new - old).exp()
    kept = ratios[~zero & (advantages > 0)]
    assert (kept > ratios[zero & (advantages > 0)].min()).any()


@pytest.mark.parametrize("method", METHODS)
def test_the_methods_that_differ_at_ratio_one_are_named(method: str) -> None:
    """The policy gradient, −advantage/N, is that of every other method: with one update per batch they are one run."""
    found, plain = objective(method, 0.0).gradient, objective("none", 0.0).gradient
    differs = not torch.allclose(found, plain, rtol=1e-6, atol=1e-12)
    assert differs == METHODS[method].differs_at_ratio_one
    torch.testing.assert_close(plain, -inputs(0.0)[2] / TOKENS)


def test_methods_of_papers_name_them() -> None:
    assert [name for name, entry in METHODS.items() if not entry.paper] == [
        name for name, entry in METHODS.items() if entry.control
    ]
    assert [name for name, entry in METHODS.items() if entry.control] == ["none"]
