"""Losses with a value of the completion, under every rule of the importance correction: weights derived by hand.

A token that the correction masks has no part in the loss: no gradient, and no term in a mean or product of its
completion, as in verl, which removes such tokens from the response mask before the loss is computed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bandpo_cli.methods import METHODS
from bandpo_cli.methods.importance_correction import importance_weights
from bandpo_cli.methods.loss import LossBatch, PolicyLoss, sequence_index, sequence_sum
from bandpo_cli.objective.policy_objective import LossOutputs, policy_objective
from tests.objective.test_loss import RULES
from tests.objective.test_policy_losses import BY_HAND, Token, completions, tensors

COUPLED = ("gspo", "luspo", "gapo", "gmpo", "ctpo", "vaco", "topr", "vespo", "cppo")
"""The methods in which the weight of a token depends on the other tokens of its completion."""


def corrected(method: str, rule: str, spread: float, **options: Any) -> tuple[PolicyLoss, Tensor, LossBatch]:
    """Return a loss, log-probs and a batch with the importance weights of a rule, in float64; dual clip binds at 3."""
    options = {"dual_clip": 3.0, "importance": rule, "importance_cap": 1.6, **options}
    loss, new, batch = tensors({"method": method}, completions(spread=spread), **options)
    noise = 0.4 * torch.randn(len(new), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    weights = importance_weights(
        batch.old_logprobs, batch.old_logprobs - noise, batch.lengths, loss.objective
    )
    assert weights is not None
    return loss, new, replace(batch, importance_weights=weights)


def outputs(loss: PolicyLoss, new: Tensor, batch: LossBatch) -> tuple[LossOutputs, Tensor]:
    """Return the objective for random weights of the tokens, and the gradient that autograd has for its formula."""
    weights = torch.rand(len(new), generator=torch.Generator().manual_seed(4), dtype=torch.float64) + 0.1
    leaf = new.clone().requires_grad_()
    total = (weights * batch.importance_weights * loss.token_losses(leaf, batch)).sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    out = policy_objective(loss, new, batch, weights)
    assert out.loss.item() == pytest.approx(total.item(), rel=1e-12)
    scale = -weights * batch.importance_weights * batch.advantages
    torch.testing.assert_close(out.gradient_weights * scale, gradient, rtol=1e-12, atol=1e-15)
    return out, gradient


@pytest.mark.parametrize("spread", [0.02, 2.0])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", METHODS)
def test_the_gradient_weights_are_those_of_autograd(method, rule, spread):
    """Of every token, whatever its weight; the tokens that count as clipped are those without a gradient."""
    loss, new, batch = corrected(method, rule, spread)
    masked = batch.importance_weights == 0
    assert masked.any() == ("mask" in rule)
    assert not masked.all()
    out, gradient = outputs(loss, new, batch)
    torch.testing.assert_close(out.gradient, gradient, rtol=1e-12, atol=1e-15)
    assert (gradient[masked] == 0).all()
    trained = batch.advantages.where(~masked, 0.0)
    state = loss.clip_state(batch.columns, out.ratios, trained, out.gradient_weights)
    is_zero = (gradient == 0) & ~masked
    if not METHODS[method].without_bounds:  # the dual clip removes gradients too, and does not count
        is_zero &= ~((out.ratios > 3.0) & (batch.advantages < 0))
    assert torch.equal(state.active, is_zero) or method == "clip-cov"
    assert not state.active[masked].any()


@pytest.mark.parametrize("spread", [0.02, 2.0])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", COUPLED)
def test_weights_are_those_of_the_completion_without_its_masked_tokens(method, rule, spread):
    """CPPO's budget counts the change of a masked token; LUSPO's factor is the number of all tokens."""
    loss, new, batch = corrected(method, rule, spread)
    assert batch.importance_weights is not None
    out, _ = outputs(loss, new, batch)
    groups = completions(spread=spread)
    kept = torch.split(batch.importance_weights != 0, batch.lengths.tolist())
    expected = []
    for group, flags in zip(groups, kept, strict=True):
        rest: list[Token] = []
        for token, is_kept in zip(group, flags.tolist(), strict=True):
            if is_kept:
                rest.append(token)
        factor = len(group) / max(len(rest), 1) if method == "luspo" else 1.0
        for token, is_kept in zip(group, flags.tolist(), strict=True):
            if method != "cppo":
                token.completion = rest
            expected.append(factor * BY_HAND[method](token) if is_kept else 0.0)
    assert out.gradient_weights.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "cppo"])
def test_the_log_prob_of_a_masked_token_changes_nothing(method):
    loss, new, batch = corrected(method, "token-mask", 0.1)
    assert batch.importance_weights is not None
    out, _ = outputs(loss, new, batch)
    moved = torch.where(batch.importance_weights == 0, new - 3.0, new)
    other, _ = outputs(loss, moved, batch)
    torch.testing.assert_close(other.gradient, out.gradient, rtol=1e-12, atol=0)


class GeometricMean(PolicyLoss):
    """A custom loss whose gradient with respect to a token depends on the losses of the others: −a·exp(mean log r)."""

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        means = sequence_sum(logprobs - batch.old_logprobs, batch.lengths) / batch.lengths
        return -batch.advantages * means.exp()[sequence_index(batch.lengths, logprobs)]


def test_a_custom_loss_cannot_train_a_masked_token():
    plain, new, batch = corrected("none", "token-mask", 0.1)
    assert batch.importance_weights is not None
    loss = GeometricMean(plain.settings, plain.objective)
    out = policy_objective(loss, new, batch, torch.full_like(new, 0.1))
    masked = batch.importance_weights == 0
    assert (out.gradient[masked] == 0).all()
    assert (out.gradient_weights[masked] == 0).all()
    scale = -0.1 * batch.importance_weights * batch.advantages
    torch.testing.assert_close(out.gradient_weights * scale, out.gradient)
    assert (out.gradient[~masked] != 0).all()
