"""The Band as prime-rl's custom loss, with copies of its two types: prime-rl is not on a package index."""

import math
from types import SimpleNamespace

import pytest
import torch

from bandpo_cli.errors import ConfigError
from tests.integrations import stand_ins
from tests.integrations.batches import Batch, assert_equal, ours


@pytest.fixture(scope="module")
def prime_rl():
    """Return `bandpo_cli.integrations.prime_rl` with copies of prime-rl's two types."""
    with stand_ins.integration("prime_rl", stand_ins.PRIME_RL) as module:
        yield module


def sequence(seed: int, spread: float, tokens: int = 50, weights: bool = False) -> SimpleNamespace:
    """Return a sequence of a prompt, whose sampling log-probs are 0, and a completion, whose mask has gaps."""
    generator = torch.Generator().manual_seed(seed)
    inference = -8 * torch.rand(tokens, generator=generator, dtype=torch.float64) ** 3 - 1e-3
    noise = torch.randn(tokens, generator=generator, dtype=torch.float64)
    trainer = (inference + spread * noise).clamp(max=-1e-4)
    mask = torch.rand(tokens, generator=generator) > 0.2
    mask[:7] = False
    inference[:7] = 0.0
    return SimpleNamespace(
        trainer_logprobs=trainer.requires_grad_(),
        inference_logprobs=inference,
        ref_logprobs=None,
        advantages=torch.randn(tokens, generator=generator, dtype=torch.float64),
        loss_mask=mask,
        loss_weights=torch.rand(tokens, generator=generator, dtype=torch.float64) if weights else None,
    )


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("bounds", stand_ins.BANDS)
def test_loss_and_gradient_are_those_of_the_runner(prime_rl, bounds, spread, weights):
    given = sequence(2, spread, weights=weights)
    found = prime_rl.band_loss(prime_rl.LossInputs(**vars(given)), **bounds)
    (gradient,) = torch.autograd.grad(found.loss, given.trainer_logprobs)

    bounds = {"method": "band", **bounds}
    names = ("inference_logprobs", "trainer_logprobs", "advantages", "loss_mask")
    batch = Batch(*(getattr(given, name).detach()[None] for name in names))
    expected = ours(batch, bounds, given.loss_weights[None] if weights else torch.ones_like(batch.old))
    assert_equal(f"prime-rl {bounds}, {spread}", expected.outputs, found.loss, gradient[None], batch.mask)
    for name, tokens in (("upper", expected.clipped.at_upper), ("lower", expected.clipped.at_lower)):
        assert found.metrics[f"band/{name}_fraction"].item() == pytest.approx(tokens.double().mean().item())
    if spread == 2.0:
        assert expected.clipped.at_upper.any()
        assert expected.clipped.at_lower.any()


def test_values_outside_the_mask_have_no_effect(prime_rl):
    """Not even those of which a ratio, a bound or a product would be infinite or NaN."""
    given = sequence(3, 0.3, weights=True)
    outside = ~given.loss_mask
    clean = prime_rl.band_loss(prime_rl.LossInputs(**vars(given)))
    hostile = {"inference_logprobs": -math.inf, "advantages": math.nan, "loss_weights": math.inf}
    for name, value in hostile.items():
        setattr(given, name, getattr(given, name).masked_fill(outside, value))
    logprobs = given.trainer_logprobs.detach().masked_fill(outside, 5.0).requires_grad_()
    given.trainer_logprobs = logprobs
    dirty = prime_rl.band_loss(prime_rl.LossInputs(**vars(given)))
    assert torch.equal(dirty.loss, clean.loss)
    (gradient,) = torch.autograd.grad(dirty.loss, logprobs)
    assert (gradient[outside] == 0).all()
    assert torch.isfinite(gradient).all()
    assert dirty.metrics == clean.metrics


def test_an_empty_mask_gives_a_loss_of_0_with_a_gradient(prime_rl):
    given = sequence(4, 0.3)
    given.loss_mask = torch.zeros_like(given.loss_mask)
    found = prime_rl.band_loss(prime_rl.LossInputs(**vars(given)))
    (gradient,) = torch.autograd.grad(found.loss, given.trainer_logprobs)
    assert found.loss.item() == 0.0
    assert (gradient == 0).all()
    assert found.metrics["band/upper_fraction"].item() == 0.0


def test_invalid_kwargs_are_refused(prime_rl):
    inputs = prime_rl.LossInputs(**vars(sequence(5, 0.3)))
    with pytest.raises(ConfigError, match="delta must be a finite number > 0"):
        prime_rl.band_loss(inputs, delta=-1.0)
    with pytest.raises(ConfigError, match="did you mean 'hellinger'"):
        prime_rl.band_loss(inputs, divergence="helinger")
