"""Bounds of each method against values computed by hand, and the radius that matches another method."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bandpo_cli.bounds import band_bounds, ratio_bounds
from bandpo_cli.bounds.intervals import matching_delta
from bandpo_cli.config.methods import (
    BandSettings,
    ClipHigherSettings,
    ClipSettings,
    DcpoSettings,
    MethodSettings,
    NoClipSettings,
    Relax,
)
from bandpo_cli.errors import ConfigError
from bandpo_cli.registries import DIVERGENCES, METHODS

LOGP = torch.tensor([0.001, 0.08, 0.9], dtype=torch.float64).log()


@pytest.mark.parametrize("method", METHODS)
def test_each_method_has_bounds_or_says_why_not(method: str) -> None:
    settings, entry = MethodSettings.classes()[method](), METHODS[method]
    if entry.bounds is None:
        with pytest.raises(ConfigError, match=f"{method} has no interval of ratios: {entry.without_bounds}"):
            ratio_bounds(settings)
        return
    assert not entry.without_bounds
    lower, upper = ratio_bounds(settings)(LOGP)
    assert lower.shape == LOGP.shape
    assert ((lower <= 1) & (upper >= 1)).all()
    certain_to_be_finite = ratio_bounds(settings)(torch.tensor([-1e4])).upper.isfinite().item()
    assert entry.bounded == certain_to_be_finite


def test_bounds_of_clip_clip_higher_and_none() -> None:
    for config, wanted in (
        (ClipSettings(), (0.8, 1.2)),
        (ClipHigherSettings(), (0.8, 1.28)),
        (NoClipSettings(), (0, math.inf)),
    ):
        lower, upper = ratio_bounds(config)(LOGP)
        assert lower.tolist() == [wanted[0]] * 3
        assert upper.tolist() == [wanted[1]] * 3


def test_bounds_of_dcpo() -> None:
    lower, upper = ratio_bounds(DcpoSettings())(LOGP)
    assert lower.tolist() == pytest.approx([0.5, 0.5, 0.5 + 0.5 * math.sqrt(1 - 0.64 / 0.9)])
    assert upper.tolist() == pytest.approx(
        [10.0, 0.5 + 0.5 * math.sqrt(11.0), 0.5 + 0.5 * math.sqrt(1 + 0.8 / 0.9)]
    )
    unknown = ratio_bounds(DcpoSettings())(torch.tensor([math.nan]))
    assert (unknown.lower.item(), unknown.upper.item()) == (1.0, 1.0)


def test_bounds_of_band_and_its_relaxation() -> None:
    plain = ratio_bounds(BandSettings(divergence="tv", delta=0.1))(LOGP)
    assert plain.upper.tolist() == pytest.approx([10.0, 2.25, 1 / 0.9])
    assert plain.lower.tolist() == pytest.approx([0.0, 0.0, 1 - 0.1 / 0.9])
    relaxed = ratio_bounds(BandSettings(divergence="tv", delta=0.1, relax=Relax()))(LOGP)
    assert relaxed.upper.tolist() == pytest.approx([10.0, 2.25, 1.28])
    assert relaxed.lower.tolist() == pytest.approx([0.0, 0.0, 0.8])


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("prob", [1e-9, 0.1, 0.7])
def test_the_matching_radius_gives_the_upper_bound(name: str, prob: float) -> None:
    delta = matching_delta(name, prob, 1.28)
    assert delta is not None
    assert band_bounds(np.log([prob]), name, delta).upper[0] == pytest.approx(1.28, rel=1e-7)


def test_upper_bounds_that_no_band_matches() -> None:
    assert matching_delta("tv", 0.9, 1.2) is None  # beyond the simplex
    assert matching_delta("kl", 0.5, 2.0) is None  # needs an infinite radius
    assert matching_delta("tv", 0.5, 2.0) == pytest.approx(0.5)
    for prob, upper in ((1.0, 1.2), (0.0, 1.2), (0.1, 1.0), (0.1, math.nan)):
        with pytest.raises(ConfigError):
            matching_delta("kl", prob, upper)


@pytest.mark.parametrize(
    ("cap", "band", "dcpo"),
    [
        (3.0, [3.0, 2.25], [3.0, 0.5 + 0.5 * math.sqrt(11.0)]),
        (20.0, [20.0, 2.25], [0.5 + 0.5 * math.sqrt(801.0), 0.5 + 0.5 * math.sqrt(11.0)]),
        (None, [101.0, 2.25], [0.5 + 0.5 * math.sqrt(801.0), 0.5 + 0.5 * math.sqrt(11.0)]),
    ],
)
def test_max_ratio_caps_the_upper_bound(cap: float | None, band: list[float], dcpo: list[float]) -> None:
    """At p = 0.001 and 0.08: 1 + 0.1/p, and ½ + ½√(1 + 0.8/p)."""
    upper = ratio_bounds(BandSettings(divergence="tv", delta=0.1, max_ratio=cap))(LOGP[:2]).upper
    assert upper.tolist() == pytest.approx(band)
    upper = ratio_bounds(DcpoSettings(max_ratio=cap))(LOGP[:2]).upper
    assert upper.tolist() == pytest.approx(dcpo)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "config",
    [BandSettings(relax=Relax()), ClipSettings(), ClipHigherSettings(), DcpoSettings()],
    ids=lambda c: c.method,
)
def test_log_probs_of_half_precision_have_the_bounds_of_float64_rounded_to_float32(
    config: MethodSettings, dtype: torch.dtype
) -> None:
    """A bound of 1.2 is 1.203 in bfloat16, and 1/p has two digits there."""
    half = torch.tensor([-7.0, -2.5, -0.1, -1e-3]).to(dtype)
    for got, exact in zip(ratio_bounds(config)(half), ratio_bounds(config)(half.double()), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, exact.float(), rtol=3e-7, atol=0)
