"""Saturation: the trust region contains an end of the simplex, ratio 0 or the certain token at ratio 1/p."""

from __future__ import annotations

import math

import mpmath as mp
import pytest

from bandpo_cli.bounds.band import saturation
from bandpo_cli.bounds.divergences import find_divergence
from bandpo_cli.registries import DIVERGENCES
from tests.bounds.oracle import oracle


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("prob", [1e-3, 0.08, 0.97])
@pytest.mark.parametrize("delta", [0.3, 1.5])
def test_saturation_is_where_the_bounds_reach_the_ends(name: str, prob: float, delta: float) -> None:
    """The reference bounds have 40 digits."""
    lower, upper = oracle(name, math.log(prob), delta)
    ends = lower == 0, upper == 1 / mp.exp(mp.mpf(math.log(prob)))
    assert saturation(find_divergence(name), prob, delta) == ends


def test_a_certain_token_saturates_at_the_simplex() -> None:
    for name in DIVERGENCES:
        assert saturation(find_divergence(name), 1.0, 1e-3)[1], name
