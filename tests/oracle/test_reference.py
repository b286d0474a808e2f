"""Checks of the reference implementation against independent values and code."""

from __future__ import annotations

import math

import pytest
import torch

from tests.bounds.oracle import CHECK_VALUES
from tests.oracle.reference import ReferenceTrainer
from tests.oracle.reference_bounds import GENERATORS, band, ratio_bounds


@pytest.mark.parametrize("divergence", GENERATORS)
def test_bisection_finds_the_roots(divergence: str) -> None:
    assert band(GENERATORS[divergence], math.log(0.08), 0.05) == pytest.approx(
        CHECK_VALUES[divergence], rel=1e-11
    )


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
