"""The Band as a policy loss of the installed SkyRL, whose registry and reductions need few of its modules."""

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bandpo_cli.errors import ConfigError
from tests.integrations import stand_ins
from tests.integrations.batches import SPREADS, Batch, assert_equal, ours, random_batch

PACKAGES = ("skyrl", "skyrl.backends", "skyrl.backends.skyrl_train", "skyrl.backends.skyrl_train.utils")
REPLACED = {
    "skyrl.train": {"__path__": []},
    "skyrl.train.config": {"AlgorithmConfig": SimpleNamespace},
    "omegaconf": {"DictConfig": dict},
}
"""Modules that need vLLM and more, with the classes that annotations take from them."""


@pytest.fixture(scope="module")
def skyrl():
    """Return `bandpo_cli.integrations.skyrl` with the modules of the installed SkyRL that have its losses."""
    for package in ("ray", "jaxtyping", "loguru"):
        pytest.importorskip(package)
    with stand_ins.partial_package("skyrl", PACKAGES, REPLACED), stand_ins.integration("skyrl", {}) as module:
        yield module


@pytest.fixture
def registered(skyrl):
    """Return a function that registers the Band with settings, and returns what SkyRL's workers get."""

    def register(**settings: Any) -> Callable[..., Any]:
        skyrl.register(**settings)
        return skyrl.PolicyLossRegistry.get("band")

    yield register
    skyrl.PolicyLossRegistry.unregister("band")


def algorithm(importance_cap: float | None = None) -> SimpleNamespace:
    """Return SkyRL's settings; with a cap, importance ratios of the sampling engine truncated per token."""
    correction = SimpleNamespace(**dict.fromkeys([
        "sequence_tis_ratio_clip_high", "sequence_mask_metric", "geo_mask_low", "geo_mask_high", "product_mask_low",
        "product_mask_high", "outlier_token_is_threshold_low", "outlier_token_is_threshold_high",
        "token_mask_is_threshold_low", "token_mask_is_threshold_high",
    ]))  # fmt: skip
    correction.tis_ratio_type = "token" if importance_cap else None
    correction.token_tis_ratio_clip_high = importance_cap
    return SimpleNamespace(policy_loss_type="band", off_policy_correction=correction)


@pytest.mark.parametrize("cap", [None, 1.2])
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("bounds", stand_ins.BANDS)
def test_loss_and_gradient_are_those_of_the_runner(registered, bounds, spread, cap):
    loss_function, bounds = registered(**bounds), {"method": "band", **bounds}
    batch = random_batch(6, SPREADS[spread])
    # As SkyRL's `token_mean` scales the advantages.
    batch = Batch(batch.old, batch.new, batch.advantages / batch.mask.sum(), batch.mask)
    generator = torch.Generator().manual_seed(1)
    engine = batch.old + 0.3 * torch.randn(batch.old.shape, generator=generator, dtype=torch.float64)
    logprobs = batch.new.clone().requires_grad_()
    positional = logprobs, batch.old, batch.advantages, algorithm(cap)
    loss, metrics = loss_function(*positional, loss_mask=batch.mask.long(), rollout_logprobs=engine)
    (gradient,) = torch.autograd.grad(loss, logprobs)

    ones = torch.ones_like(batch.old)
    weights = ones if cap is None else (batch.old - engine).exp().clamp(max=cap)
    expected = ours(batch, bounds, weights)
    # SkyRL computes the importance ratios in float32, whatever the type of the log-probs.
    rtol = 1e-6 if cap is None else 1e-5
    assert_equal(f"SkyRL {bounds}, {spread}", expected.outputs, loss, gradient, batch.mask, rtol)
    clipped = expected.clipped
    for name, tokens in (("", clipped.active), ("_upper", clipped.at_upper), ("_lower", clipped.at_lower)):
        assert metrics[f"clip_ratio{name}"] == pytest.approx(tokens.double().mean().item(), rel=1e-6)
    assert ("tis_token_clip_high_ratio" in metrics) == (cap is not None)
    assert all(isinstance(value, float) for value in metrics.values())
    if spread == "far":
        assert clipped.at_upper.any()
        assert clipped.at_lower.any()


def test_without_a_mask_all_tokens_count(registered):
    batch = random_batch(7, 2.0)
    loss_function = registered()
    ones = torch.ones_like(batch.old)
    without = loss_function(batch.new, batch.old, batch.advantages, config=algorithm())
    with_ones = loss_function(batch.new, batch.old, batch.advantages, config=algorithm(), loss_mask=ones)
    assert without[0].item() == pytest.approx(with_ones[0].item())
    assert without[1] == pytest.approx(with_ones[1])


def test_invalid_settings_and_a_second_registration_are_refused(registered):
    with pytest.raises(ConfigError, match="max_ratio must be a number > 1"):
        registered(max_ratio=0.5)
    with pytest.raises(ConfigError, match="did you mean 'kl'"):
        registered(divergence="kll")
    registered()  # nothing was registered above
    with pytest.raises(ValueError, match="'band' already registered"):
        registered()


def test_the_registered_function_reaches_a_worker(registered):
    """SkyRL sends it with cloudpickle to processes that have bandpo_cli installed."""
    cloudpickle = importlib.import_module("cloudpickle")
    function = registered(divergence="tv", delta=0.2)
    copy = cloudpickle.loads(cloudpickle.dumps(function))
    assert copy.keywords == {"divergence": "tv", "delta": 0.2, "max_ratio": 10.0}
    batch = random_batch(8, 2.0)
    arguments = (batch.new, batch.old, batch.advantages, algorithm())
    assert copy(*arguments)[1] == function(*arguments)[1]
