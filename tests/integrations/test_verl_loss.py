"""The policy loss `band` in verl's registry, compared with this package's loss on random padded batches.

Aggregation weights are float32 here, and verl adds 1e-8 to the length of a completion.
"""

import importlib
import math
import sys
from importlib.metadata import entry_points
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bandpo_cli.errors import ConfigError
from bandpo_cli.registries import DIVERGENCES
from bandpo_cli.training.metrics import clip_metrics
from tests.integrations.batches import SPREADS, Batch, assert_equal, ours, random_batch

COMPLETIONS = 12
ACTOR = {"strategy": "fsdp", "rollout_n": 4, "ppo_micro_batch_size_per_gpu": 1}
ALL = slice(None)

MODES = {"token-mean": "token-mean", "seq-mean-token-mean": "seq-mean-token-mean"}
MODES["seq-sum-norm"] = "seq-mean-token-sum-norm"
"""Our aggregations with verl's names; its two sums are compared in a test of their own."""


def padded_batch(seed: int, spread: float) -> Batch:
    """Return a random batch whose values of padding must have no effect."""
    batch = random_batch(seed, spread, COMPLETIONS)
    values = ((batch.old, 3.0), (batch.new, -500.0), (batch.advantages, 7.0))
    return Batch(*(tensor.masked_fill(~batch.mask, padding) for tensor, padding in values), batch.mask)


def importance(batch: Batch) -> torch.Tensor:
    """Return random importance weights, [B, T]."""
    generator = torch.Generator().manual_seed(9)
    return 2 * torch.rand(batch.old.shape, generator=generator, dtype=torch.float64)


def actor_config(verl_package: SimpleNamespace, dual_clip: float, **settings: Any) -> Any:
    """Return verl's ActorConfig with the settings of the loss."""
    loss = verl_package.band.BandPolicyLossConfig(**settings)
    return verl_package.config.FSDPActorConfig(**ACTOR, clip_ratio_c=dual_clip, policy_loss=loss)


def theirs(
    verl_package: SimpleNamespace,
    batch: Batch,
    mode: str,
    config: Any,
    corrected: bool = False,
    rows: slice = ALL,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Return the loss, the gradient [B, T] and the metrics of the function in verl's registry."""
    logprobs = batch.new[rows].clone().requires_grad_()
    loss, metrics = verl_package.algos.get_policy_loss_fn("band")(
        old_log_prob=batch.old[rows],
        log_prob=logprobs,
        advantages=batch.advantages[rows],
        response_mask=batch.mask[rows],
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=importance(batch)[rows] if corrected else None,
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient, metrics


@pytest.mark.parametrize(
    ("divergence", "aggregation", "spread"),
    [
        *product(DIVERGENCES, ["token-mean"], SPREADS),
        *product(["kl"], ["seq-mean-token-mean", "seq-sum-norm"], SPREADS),
    ],
)
def test_every_divergence(verl_package, divergence, aggregation, spread):
    settings = {"divergence": divergence, "delta": 0.05, "max_ratio": 10.0}
    config = actor_config(verl_package, 3.0, **settings)
    batch = padded_batch(0, SPREADS[spread])
    loss, gradient, _ = theirs(verl_package, batch, MODES[aggregation], config)
    found = ours(batch, {"method": "band", **settings}, aggregation, 3.0).outputs
    assert_equal(f"{divergence}, {aggregation}, {spread}", found, loss, gradient, batch.mask)


@pytest.mark.parametrize("corrected", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize(
    "settings",
    [
        {"delta": 0.3, "max_ratio": None},
        {"delta": 0.01, "max_ratio": 1.05},
        {"delta": 0.02, "max_ratio": 10.0, "relax": {"eps_low": 0.2, "eps_high": 0.28}},
    ],
    ids=["no cap", "low cap", "relaxed"],
)
def test_cap_relaxation_and_importance_weights(verl_package, settings, corrected):
    relax = {f"relax_{name}": value for name, value in settings.get("relax", {}).items()}
    plain = {name: value for name, value in settings.items() if name != "relax"}
    config, batch = actor_config(verl_package, 1e9, **plain, **relax), padded_batch(0, SPREADS["apart"])
    loss, gradient, _ = theirs(verl_package, batch, "token-mean", config, corrected)
    correction = importance(batch) if corrected else None
    found = ours(batch, {"method": "band", **settings}, "token-mean", correction=correction).outputs
    assert_equal(f"{settings}", found, loss, gradient, batch.mask)


def test_two_micro_batches_add_up_to_one(verl_package):
    """verl passes the counts of the complete update in `global_batch_info`; two GPUs average what each of them sums."""
    batch = padded_batch(1, SPREADS["apart"])
    for mode in (*MODES.values(), "token-sum", "seq-mean-token-sum"):
        config = actor_config(verl_package, 3.0, delta=0.05)
        tokens = int(batch.mask.sum())
        counts = {"batch_num_tokens": tokens, "global_batch_size": COMPLETIONS, "loss_scale_factor": 64}
        config.global_batch_info.update(dp_size=2, **counts)
        parts = (slice(0, 5), slice(5, None))
        losses = [theirs(verl_package, batch, mode, config, rows=rows)[0] for rows in parts]
        config.global_batch_info.update(dp_size=1)
        complete = theirs(verl_package, batch, mode, config)[0]
        torch.testing.assert_close(sum(losses) / 2, complete)


@pytest.mark.parametrize("dual_clip", [3.0, 1.2])
def test_a_fixed_interval_has_the_loss_and_metrics_of_vanilla(verl_package, dual_clip):
    """The relaxation of a Band of radius 1e-12 is the fixed interval, so verl's own loss is the reference."""
    batch = padded_batch(2, SPREADS["far"])
    config = actor_config(verl_package, dual_clip, delta=1e-12, relax_eps_low=0.2, relax_eps_high=0.28)
    limits = {"clip_ratio_c": dual_clip, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    fixed = verl_package.config.FSDPActorConfig(**ACTOR, **limits)
    arguments = {
        "old_log_prob": batch.old.masked_fill(~batch.mask, 0.0),
        "log_prob": batch.new.masked_fill(~batch.mask, 0.0),
        "advantages": batch.advantages,
        "response_mask": batch.mask,
    }
    vanilla, vanilla_metrics = verl_package.algos.get_policy_loss_fn("vanilla")(**arguments, config=fixed)
    loss, metrics = verl_package.algos.get_policy_loss_fn("band")(**arguments, config=config)
    torch.testing.assert_close(loss, vanilla)
    assert vanilla_metrics["actor/pg_clipfrac"] > 0
    assert vanilla_metrics["actor/pg_clipfrac_lower"] > 0
    assert {key: metrics[key] for key in vanilla_metrics} == pytest.approx(vanilla_metrics, rel=1e-6)


def test_shares_of_clipped_tokens_are_those_of_a_run_here(verl_package):
    batch = padded_batch(3, SPREADS["apart"])
    config = actor_config(verl_package, 10.0, delta=0.05)
    _, _, metrics = theirs(verl_package, batch, "token-mean", config)
    found = ours(batch, {"method": "band", "delta": 0.05}, "token-mean", dual_clip=10.0)
    old, new = batch.old[batch.mask], batch.new[batch.mask]
    expected = clip_metrics(found.clipped, old)
    for name in ("upper", "lower", "outside"):
        share = expected[f"clip/{name}_fraction"]
        assert metrics[f"actor/band_{name}_fraction"] == pytest.approx(share, rel=1e-5)
        assert share > 0
    assert metrics["actor/ppo_kl"] == pytest.approx((old - new).mean().item(), rel=1e-5)
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())


def test_float_masks_and_infinite_padding(verl_package):
    """verl's older trainer has masks of 0 and 1; a NaN or infinity at padding must not reach the loss."""
    batch = padded_batch(4, SPREADS["near"])
    config = actor_config(verl_package, 3.0, delta=0.05)
    expected = theirs(verl_package, batch, "token-mean", config)
    logprobs = batch.new.masked_fill(~batch.mask, -torch.inf).requires_grad_()
    inputs = (batch.old.masked_fill(~batch.mask, torch.nan), logprobs, batch.advantages, batch.mask.float())
    loss, _ = verl_package.band.band_policy_loss(*inputs, config=config)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected[0])
    torch.testing.assert_close(logprobs.grad[batch.mask], expected[1][batch.mask])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"delta": 0.0}, "delta"),
        ({"divergence": "kll"}, "kl"),
        ({"max_ratio": 0.5}, "max_ratio"),
        ({"relax_eps_low": 0.2}, "relax_eps_high"),
        ({"relax_eps_low": 2.0, "relax_eps_high": 0.2}, "relax_eps_low"),
    ],
)
def test_settings_without_a_band_are_refused(verl_package, wrong, message):
    with pytest.raises(ConfigError, match=message):
        verl_package.band.BandPolicyLossConfig(**wrong)


def test_verl_registers_the_loss(verl_package, monkeypatch):
    """By the entry point of the installed package while verl is imported, and by VERL_USE_EXTERNAL_MODULES."""
    if any(entry_point.name == "bandpo" for entry_point in entry_points(group="verl.plugins")):
        assert verl_package.registered_by_verl
    import_utils = importlib.import_module("verl.utils.import_utils")
    monkeypatch.delitem(verl_package.algos.POLICY_LOSS_REGISTRY, "band")
    monkeypatch.delitem(sys.modules, "bandpo_cli.integrations.verl")
    import_utils.import_external_libs(["bandpo_cli.integrations.verl"])
    assert "band" in verl_package.algos.POLICY_LOSS_REGISTRY
