"""Accuracy of the Bands against 40-digit roots: 1e-6 in float32, 1e-12 in float64, for one token and large batches."""

import math
from collections.abc import Iterable

import mpmath as mp
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bandpo_cli.bounds import band_bounds
from bandpo_cli.bounds.band import find_divergence, saturation
from bandpo_cli.registries import DIVERGENCES
from tests.bounds.oracle import CHECK_VALUES, oracle, rounding_change

BATCH = 9_000  # enough for the tables to be used
LOGPS = st.one_of(st.floats(-80, -1e-9), st.floats(-9, 1.9).map(lambda x: max(-(10**x), -80.0)))
DELTAS = st.one_of(st.sampled_from([1e-4, 0.05, 2.0]), st.floats(-4, 0.301).map(lambda x: 10**x))


def check_tokens(x: torch.Tensor, indices: Iterable[int], name: str, delta: float, tolerance: float) -> None:
    """Require relative errors of at most `tolerance` plus eight times the change by one rounding of p."""
    bounds = band_bounds(x, name, delta)
    for index in indices:
        logp = x[index].double().item()
        expected = zip(bounds, oracle(name, logp, delta), rounding_change(name, logp, delta), strict=True)
        for found, want, rounding in expected:
            got = found[index].item()
            if want == 0 or torch.finfo(x.dtype).tiny <= want <= torch.finfo(x.dtype).max:
                assert abs(got - want) <= tolerance * want + 8 * rounding * want, f"{got} for {want}"


@pytest.mark.parametrize("name", DIVERGENCES)
def test_bounds_equal_independently_computed_values(name):
    bounds = band_bounds([math.log(0.08)], name, 0.05)
    assert (bounds.lower[0], bounds.upper[0]) == pytest.approx(CHECK_VALUES[name], rel=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("name", DIVERGENCES)
@settings(max_examples=settings().max_examples // 8)
@given(logp=LOGPS, delta=DELTAS)
@example(logp=-80.0, delta=1e-4)
@example(logp=-1e-9, delta=2.0)
@example(logp=math.log(0.5), delta=0.05)
def test_one_token_has_the_reference_bounds(name, logp, delta):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        check_tokens(torch.tensor([logp], dtype=dtype), [0], name, delta, tolerance)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("name", "delta"), [("kl", 0.05), ("js", 0.05), ("kl", 1e-4), ("kl", 2.0)])
def test_a_large_batch_has_the_reference_bounds(name, delta):
    """Tables are used; the tokens are near p = 1, near p = 0, at p = ½ and on both sides of saturation."""
    random = np.random.default_rng(1)
    logps = -np.concatenate([10 ** random.uniform(-9, 1.9, BATCH - 4), [80.0, 1e-9, math.log(2), 1.0]])
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        indices = [*range(0, BATCH, BATCH // 3), *range(BATCH - 4, BATCH)]
        check_tokens(torch.tensor(logps, dtype=dtype), indices, name, delta, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kl", "js"])
def test_tables_agree_with_the_direct_solution(name):
    """The comparison is dense enough to check each piece of a table, the kink included."""
    logps = -np.exp(np.linspace(math.log(1e-9), math.log(80), 40_000))
    for delta in (0.003, 0.4):
        batch = band_bounds(logps, name, delta)
        alone = [band_bounds(part, name, delta) for part in np.array_split(logps, 20)]
        for side in (0, 1):
            direct = np.concatenate([bounds[side] for bounds in alone])
            # Smaller bounds change more by one rounding of p, which the tests against the reference allow for.
            checked = direct > 1e-3
            np.testing.assert_allclose(batch[side][checked], direct[checked], rtol=3e-12)


def test_small_lower_bounds_of_kl_have_full_precision():
    """exp(−δ/p) down to the smallest normal numbers, where an exponent of 745 needs 15 digits."""
    for p in (0.0012, 0.0006, 0.000072):
        logp = math.log(p)
        want = oracle("kl", logp, 0.05)[0]
        for count in (1, BATCH):
            got = band_bounds(torch.full((count,), logp, dtype=torch.float64), "kl", 0.05).lower[0].item()
            assert abs(got - want) <= 1e-12 * want


@pytest.mark.parametrize("name", DIVERGENCES)
def test_saturation_is_where_the_bounds_reach_the_ends_of_the_simplex(name):
    """Ratio 0, and the certain token at ratio 1/p."""
    for prob, delta in ((1e-3, 0.3), (1e-3, 1.5), (0.08, 0.3), (0.08, 1.5), (0.97, 0.3), (0.97, 1.5)):
        lower, upper = oracle(name, math.log(prob), delta)
        ends = lower == 0, upper == 1 / mp.exp(mp.mpf(math.log(prob)))
        assert saturation(find_divergence(name), prob, delta) == ends, (prob, delta)
    assert saturation(find_divergence(name), 1.0, 1e-3)[1]


@pytest.mark.parametrize("delta", [1e-4, 0.05, 1.0])
def test_many_float32_tokens_have_the_kl_bounds_of_float64(delta):
    logp = -40.0 * torch.rand(20_000, generator=torch.Generator().manual_seed(0)) ** 3
    for found, exact in zip(
        band_bounds(logp, "kl", delta), band_bounds(logp.double(), "kl", delta), strict=True
    ):
        large = exact > 1e-30
        assert ((found.double() - exact).abs() / exact)[large].max() <= 1e-6
