"""Importance corrections compared with those of the installed verl (`rollout_corr_helper.py`) on random log-probs."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch

from bandpo_cli.config.run import ObjectiveConfig
from bandpo_cli.objective.importance import importance_weights
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
def verl() -> Iterator[ModuleType]:
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
    objective = ObjectiveConfig(importance=rule, **settings)  # type: ignore[arg-type]
    weights = importance_weights(sampler + ratios, sampler, LENGTHS, objective)
    assert weights is not None
    return padded(weights)


def theirs(verl: ModuleType, spread: float, level: str, threshold: str | float) -> torch.Tensor:
    """Return verl's importance weights, [S, longest]."""
    ratios = log_ratios(spread)
    weights, _ = verl.compute_rollout_correction_weights(
        padded(ratios), padded(torch.ones_like(ratios)), level, threshold
    )
    return torch.as_tensor(weights)


def kept(verl: ModuleType, spread: float, rule: str, threshold: str | float) -> torch.Tensor:
    """Return verl's rejection mask, [S, longest]."""
    ratios = log_ratios(spread)
    mask, _ = verl.compute_rollout_rejection_mask(
        padded(ratios), padded(torch.ones_like(ratios)), rule, threshold
    )
    return torch.as_tensor(mask)


@pytest.mark.parametrize("spread", [0.05, 0.5, 3.0])
def test_truncated_tokens(verl: ModuleType, spread: float) -> None:
    torch.testing.assert_close(
        ours("token-truncate", spread, importance_cap=1.5), theirs(verl, spread, "token", 1.5)
    )


@pytest.mark.parametrize("spread", [0.05, 0.5, 3.0])
def test_masked_tokens_are_those_of_icepop(verl: ModuleType, spread: float) -> None:
    weights = ours("token-mask", spread, importance_cap=1.5, importance_floor=0.7)
    torch.testing.assert_close(weights, theirs(verl, spread, "token", "0.7_1.5"))


@pytest.mark.parametrize("spread", [0.05, 0.5])
def test_the_completions_weight_to_the_power_of_its_length_is_that_of_verl(
    verl: ModuleType, spread: float
) -> None:
    """Its weight of a completion is the product of the ratios; the package's is their geometric mean."""
    weights = ours("sequence-truncate", spread, importance_cap=1e6) ** LENGTHS[:, None]
    torch.testing.assert_close(weights, theirs(verl, spread, "sequence", 1e30), rtol=1e-9, atol=0)


@pytest.mark.parametrize("spread", [0.05, 0.5, 3.0])
def test_masked_completions_are_those_of_verl(verl: ModuleType, spread: float) -> None:
    """verl's statistic is log(π_sampler/π_old), the inverse; the interval here is symmetric in the log."""
    mask = kept(verl, spread, "seq_mean_k1", f"{1 / 1.3}_1.3")
    weights = ours("sequence-mask", spread, importance_cap=1.3)
    assert torch.equal(weights > 0, mask > 0)
    if spread > 0.05:
        assert 0 < mask[:, 0].sum() < len(LENGTHS)


@pytest.mark.parametrize("spread", [0.05, 0.5, 3.0])
def test_completions_with_any_token_outside_are_those_of_verl(verl: ModuleType, spread: float) -> None:
    """The largest (log r)²/2 of a completion is at most (log c)²/2 where every r is in [1/c, c]."""
    limit = 2.0
    mask = kept(verl, spread, "seq_max_k2", torch.log(torch.tensor(limit)).square().item() / 2)
    assert torch.equal(ours("sequence-mask-any", spread, importance_cap=limit) > 0, mask > 0)
