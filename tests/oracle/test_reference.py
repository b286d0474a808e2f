"""Checks of the reference implementation against independent values and code."""

from __future__ import annotations

import math

import pytest
import torch

from tests.oracle.reference import ReferenceTrainer
from tests.oracle.reference_bounds import GENERATORS, band, ratio_bounds

AT_008 = {
    "kl": (0.261695843479, 2.41055379376),
    "reverse-kl": (0.135680527438, 2.22811829954),
    "tv": (0.375, 1.625),
    "chi2": (0.241712455595, 1.75828754441),
    "neyman": (0.468898823699, 2.0311011763),
    "hellinger": (0.0490474798726, 2.98782752013),
    "le-cam": (0.166355765755, 2.3458393562),
    "js": (0.0, 4.0946982543),
}
"""Roots to 12 digits at p = 0.08 and δ = 0.05, by 40-digit arithmetic."""


@pytest.mark.parametrize("divergence", GENERATORS)
def test_bisection_finds_the_roots(divergence: str) -> None:
    assert band(GENERATORS[divergence], math.log(0.08), 0.05) == pytest.approx(AT_008[divergence], rel=1e-11)


def test_dcpo_bounds_by_hand() -> None:
    """At p = 0.8: ½ + ½√(1 − 4·0.16/0.8) = 0.72361 and ½ + ½√(1 + 4·0.2/0.8) = 1.20711 (arXiv 2509.02333)."""
    settings = {"method": "dcpo", "eps_low": 0.16, "eps_high": 0.2, "max_ratio": 10.0}
    assert ratio_bounds(settings, math.log(0.8)) == pytest.approx((0.723607, 1.207107), abs=1e-6)
    assert ratio_bounds(settings, math.log(1e-6)) == (0.5, 10.0)


def test_adamw_equals_torch() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    optim = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "max_grad_norm": 0.5,
             "warmup_steps": 0, "schedule": "constant", "updates": 1}  # fmt: skip
    trainer = ReferenceTrainer(model, {"steps": 3, "optim": optim}, exact_sampler=True)
    theirs = torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        trainer._adamw([parameter.grad.clone() for parameter in model.parameters()])  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        theirs.step()
    for ours, parameter in zip(trainer.masters, model.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.detach(), rtol=1e-12, atol=1e-14)
