"""Importance corrections compared with those of the installed verl (`rollout_corr_helper.py`) on random log-probs."""

import math
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch

from bandpo_cli.config.run import ObjectiveConfig
from bandpo_cli.methods.importance_correction import importance_weights
from tests.integrations.stand_ins import partial_package

ANNOTATIONS = {
    "verl.protocol": "DataProto",
    "verl.trainer.config.algorithm": "RolloutCorrectionConfig",
    "verl.workers.config.actor": "PolicyLossConfig",
}
"""Modules of verl that need ray and more, and the class that annotations of the functions take from each."""

FOLDERS = (
    "verl", "verl.utils", "verl.trainer", "verl.trainer.ppo", "verl.trainer.config", "verl.workers",
    "verl.workers.config",
)  # fmt: skip


@pytest.fixture(scope="module")
def verl():
    """Return verl's module of corrections, imported without the packages that only verl's trainer needs."""
    pytest.importorskip("tensordict")
    with partial_package("verl", FOLDERS, {name: {cls: object} for name, cls in ANNOTATIONS.items()}):
        yield import_module("verl.trainer.ppo.rollout_corr_helper")


LENGTHS = torch.tensor([1, 2, 3, 5, 8, 13, 21, 34])


def log_ratios(spread: float) -> torch.Tensor:
    """Return log(π_old/π_sampler) of random tokens, [N] float64; a completion has a shift of its own."""
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(int(LENGTHS.sum()), generator=generator, dtype=torch.float64)
    shifts = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64).repeat_interleave(LENGTHS)
    return spread * (noise + 0.7 * shifts)


def padded(values: torch.Tensor) -> torch.Tensor:
    """Return [N] values as [S, longest], 0 beyond a completion's end."""
    return torch.nn.utils.rnn.pad_sequence(torch.split(values, LENGTHS.tolist()), batch_first=True)


def ours(rule: str, spread: float, **settings: Any) -> torch.Tensor:
    """Return the package's weights, [S, longest]."""
    ratios = log_ratios(spread)
    sampler = torch.full_like(ratios, -40.0)
    objective = ObjectiveConfig(importance=rule, **settings)
    weights = importance_weights(sampler + ratios, sampler, LENGTHS, objective)
    assert weights is not None
    return padded(weights)


def theirs(verl: ModuleType, function: str, rule: str, threshold: str | float, spread: float) -> torch.Tensor:
    """Return verl's importance weights or its rejection mask, [S, longest]."""
    ratios = log_ratios(spread)
    compute = getattr(verl, f"compute_rollout_{function}")
    return torch.as_tensor(compute(padded(ratios), padded(torch.ones_like(ratios)), rule, threshold)[0])


@pytest.mark.parametrize("spread", [0.05, 0.5])
def test_the_completions_weight_to_the_power_of_its_length_is_that_of_verl(verl, spread):
    """Its weight of a completion is the product of the ratios; the package's is their geometric mean."""
    weights = ours("sequence-truncate", spread, importance_cap=1e6) ** LENGTHS[:, None]
    expected = theirs(verl, "correction_weights", "sequence", 1e30, spread)
    torch.testing.assert_close(weights, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("spread", [0.05, 0.5, 3.0])
@pytest.mark.parametrize(
    ("rule", "cap", "statistic", "threshold"),
    [
        # verl's statistic is log(π_sampler/π_old), the inverse; the interval here is symmetric in the log.
        ("sequence-mask", 1.3, "seq_mean_k1", f"{1 / 1.3}_1.3"),
        # The largest (log r)²/2 of a completion is at most (log c)²/2 where every r is in [1/c, c].
        ("sequence-mask-any", 2.0, "seq_max_k2", math.log(2.0) ** 2 / 2),
    ],
)
def test_masked_completions(verl, rule, cap, statistic, threshold, spread):
    kept = theirs(verl, "rejection_mask", statistic, threshold, spread) > 0
    assert torch.equal(ours(rule, spread, importance_cap=cap) > 0, kept)
    if spread == 0.5:
        assert 0 < kept[:, 0].sum() < len(LENGTHS)


PRESETS = {
    "decoupled_token_is": ("token", 2.0, None, None),
    "decoupled_seq_is": ("sequence", 2.0, None, None),
    "decoupled_token_icepop": ("token", "0.5_5.0", None, None),
    "decoupled_seq_is_rs": ("sequence", 2.0, "seq_sum_k1", "0.5_2.0"),
    "decoupled_geo_rs": (None, 2.0, "seq_mean_k1", "0.999_1.001"),
    "decoupled_geo_rs_seq_tis": ("sequence", 2.0, "seq_mean_k1", "0.999_1.001"),
    "decoupled_geo_rs_token_tis": ("token", 2.0, "seq_mean_k1", "0.999_1.001"),
    "decoupled_k3_rs": (None, 2.0, "seq_mean_k3", 0.01),
    "decoupled_k3_rs_seq_tis": ("sequence", 2.0, "seq_mean_k3", 0.01),
    "decoupled_k3_rs_token_tis": ("token", 2.0, "seq_mean_k3", 0.01),
}
"""verl's `rollout_is`, `rollout_is_threshold`, `rollout_rs` and `rollout_rs_threshold` of each preset."""


@pytest.mark.parametrize("spread", [1e-3, 0.05, 0.5, 3.0])
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_of_verl(verl, preset, spread):
    """The weights are verl's where its rejection keeps the token, and 1 for a preset that only rejects."""
    config = getattr(import_module("verl.trainer.config.algorithm"), "RolloutCorrectionConfig", object)
    if config is not object:  # the complete package is installed
        chosen = getattr(config, preset)()
        names = ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")
        assert tuple(getattr(chosen, name) for name in names) == PRESETS[preset]
    weight, weight_limit, rejection, rejection_limit = PRESETS[preset]
    expected = padded(torch.ones_like(log_ratios(spread)))
    if weight is not None:
        expected = theirs(verl, "correction_weights", weight, weight_limit, spread)
    if rejection is not None and rejection_limit is not None:
        expected = expected * theirs(verl, "rejection_mask", rejection, rejection_limit, spread)
    found = ours(preset, spread)
    difference = ((found - expected).abs() / expected.clamp(min=1e-6)).max().item()
    print(f"{preset}, {spread}: largest relative difference {difference:.1e}")
    assert difference < 1e-6
