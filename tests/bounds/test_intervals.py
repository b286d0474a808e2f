"""Bounds of each method against values computed by hand, and radii that match another method."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from bandpo_cli.bounds import band_bounds
from bandpo_cli.bounds.intervals import (
    RecordedTokens,
    clip_fraction,
    clip_state,
    match_clip_fraction,
    matching_delta,
)
from bandpo_cli.errors import ConfigError, UserError
from bandpo_cli.methods import METHODS
from bandpo_cli.methods.ratio_intervals import (
    ClipHigherSettings,
    ClipSettings,
    DcpoSettings,
    NoClipSettings,
    RipoSettings,
)
from bandpo_cli.methods.settings import BandSettings, MethodSettings, Relax
from bandpo_cli.registries import DIVERGENCES
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.storage.tables import TOKEN_COLUMNS, TokenValues, read_recorded_tokens, write_token_values
from bandpo_cli.training.metrics import clip_metrics

LOGP = torch.tensor([0.001, 0.08, 0.9], dtype=torch.float64).log()


@pytest.mark.parametrize("method", METHODS)
def test_each_method_has_a_paper_and_bounds_or_says_why_not(method):
    settings, entry = MethodSettings.classes()[method](), METHODS[method]
    assert entry.control == (not entry.paper) == (method == "none")
    if entry.without_bounds:
        with pytest.raises(ConfigError, match=f"{method} has no interval of ratios: {entry.without_bounds}"):
            settings.ratio_bounds()
        return
    assert not entry.without_bounds
    lower, upper = settings.ratio_bounds()(LOGP)
    assert lower.shape == LOGP.shape
    assert ((lower <= 1) & (upper >= 1)).all()
    certain_to_be_finite = settings.ratio_bounds()(torch.tensor([-1e4])).upper.isfinite().item()
    assert entry.bounded == certain_to_be_finite


def dcpo_upper(p: float) -> float:
    return 0.5 + 0.5 * math.sqrt(1 + 0.8 / p)


RIPO = [math.sqrt(0.05 / p) for p in (0.001, 0.08, 0.9)]
TV: dict[str, Any] = {"divergence": "tv", "delta": 0.1}
TV_LOWER, DCPO_LOWER = [0, 0, 1 - 0.1 / 0.9], [0.5, 0.5, 0.5 + 0.5 * math.sqrt(1 - 0.64 / 0.9)]


@pytest.mark.parametrize(
    ("config", "lower", "upper"),
    [
        (ClipSettings(), [0.8] * 3, [1.2] * 3),
        (ClipHigherSettings(), [0.8] * 3, [1.28] * 3),
        (NoClipSettings(), [0] * 3, [math.inf] * 3),
        (BandSettings(**TV), TV_LOWER, [10.0, 2.25, 1 / 0.9]),
        (BandSettings(**TV, max_ratio=3.0), TV_LOWER, [3.0, 2.25, 1 / 0.9]),
        (BandSettings(**TV, max_ratio=None), TV_LOWER, [101.0, 2.25, 1 / 0.9]),
        (BandSettings(**TV, relax=Relax()), [0, 0, 0.8], [10.0, 2.25, 1.28]),
        (DcpoSettings(), DCPO_LOWER, [10.0, dcpo_upper(0.08), dcpo_upper(0.9)]),
        (DcpoSettings(max_ratio=3.0), DCPO_LOWER, [3.0, dcpo_upper(0.08), dcpo_upper(0.9)]),
        (DcpoSettings(max_ratio=None), DCPO_LOWER, [dcpo_upper(0.001), dcpo_upper(0.08), dcpo_upper(0.9)]),
        (RipoSettings(), [0.5, 0.5, 1 - RIPO[2]], [1 + width for width in RIPO]),
        (
            RipoSettings(delta=0.2, min_ratio=0.1, max_ratio=3.0),
            [0.1, 0.1, 1 - 2 * RIPO[2]],
            [3, 1 + 2 * RIPO[1], 1 + 2 * RIPO[2]],
        ),
    ],
)
def test_bounds_are_those_computed_by_hand(config, lower, upper):
    found = config.ratio_bounds()(LOGP)
    assert found.lower.tolist() == pytest.approx(lower)
    assert found.upper.tolist() == pytest.approx(upper)
    if isinstance(config, DcpoSettings | RipoSettings):
        assert [*config.ratio_bounds()(torch.tensor(math.nan))] == [1.0, 1.0]
        certain, rounded = map(config.ratio_bounds(), torch.tensor([0.0, 0.25]))
        assert [*rounded] == [*certain], "a probability is at most 1"


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_matching_radius_gives_the_upper_bound(name):
    for prob in (1e-9, 0.1, 0.7):
        delta = matching_delta(name, prob, 1.28)
        assert delta is not None
        assert band_bounds(np.log([prob]), name, delta).upper[0] == pytest.approx(1.28, rel=1e-7)


def test_upper_bounds_that_no_band_matches():
    assert matching_delta("tv", 0.9, 1.2) is None  # beyond the simplex
    assert matching_delta("kl", 0.5, 2.0) is None  # needs an infinite radius
    assert matching_delta("tv", 0.5, 2.0) == pytest.approx(0.5)
    for prob, upper in ((1.0, 1.2), (0.0, 1.2), (0.1, 1.0), (0.1, math.nan)):
        with pytest.raises(ConfigError):
            matching_delta("kl", prob, upper)


@pytest.mark.parametrize(
    "config",
    [
        BandSettings(relax=Relax()),
        ClipSettings(),
        ClipHigherSettings(),
        DcpoSettings(),
        RipoSettings(),
        NoClipSettings(),
    ],
    ids=lambda config: config.method,
)
def test_bounds_of_half_precision_and_of_an_accelerator(config):
    """Those of float64, rounded to float32: a bound of 1.2 is 1.203 in bfloat16. No value is read from a device."""
    for dtype in (torch.bfloat16, torch.float16):
        half = torch.tensor([-7.0, -2.5, -0.1, -1e-3]).to(dtype)
        for got, exact in zip(config.ratio_bounds()(half), config.ratio_bounds()(half.double()), strict=True):
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, exact.float(), rtol=3e-7, atol=0)
    assert config.ratio_bounds()(torch.empty(7, 3, device="meta")).lower.shape == (7, 3)


def tokens(spread: float = 0.3, count: int = 2000) -> RecordedTokens:
    rng = np.random.default_rng(0)
    old = np.log(rng.beta(0.4, 0.4, count).clip(1e-6, 1 - 1e-6))
    ratios = np.minimum(np.exp(rng.normal(0, spread, count)), np.exp(-old))
    return RecordedTokens(old, ratios, rng.normal(size=count))


def test_the_clip_fraction_equals_the_metric_of_training():
    given = tokens()
    for config in (ClipSettings(), BandSettings(delta=0.01), NoClipSettings()):
        bounds = config.ratio_bounds()(torch.from_numpy(given.old_logprobs))
        state = clip_state(torch.from_numpy(given.ratios), *bounds, torch.from_numpy(given.advantages))
        metrics = clip_metrics(state, torch.from_numpy(given.old_logprobs))
        assert clip_fraction(config, given) == pytest.approx(metrics["clip/active_fraction"])


@pytest.mark.parametrize("divergence", ["kl", "tv"])
def test_no_radius_of_a_fine_grid_is_closer(divergence):
    given, band = tokens(), BandSettings(divergence=divergence)
    found = match_clip_fraction(band, ClipSettings(), given)
    assert found.wanted == clip_fraction(ClipSettings(), given)
    assert found.reached == clip_fraction(BandSettings(divergence=divergence, delta=found.delta), given)
    gaps = [
        abs(clip_fraction(BandSettings(divergence=divergence, delta=delta), given) - found.wanted)
        for delta in (found.delta * np.geomspace(0.5, 2, 41)).tolist()
    ]
    assert abs(found.reached - found.wanted) <= min(gaps) + 1 / len(given.ratios)


def test_an_impossible_match_raises_config_error():
    with pytest.raises(ConfigError, match=r"clip clips none of the 2,000 recorded tokens"):
        match_clip_fraction(BandSettings(), ClipSettings(), tokens(spread=1e-3))
    # A ratio just above 1: the narrow interval clips it, and no Band of the searched radii does.
    free = RecordedTokens(np.full(10, np.log(0.1)), np.r_[np.full(9, 1.0), 1.0 + 1e-12], np.ones(10))
    with pytest.raises(ConfigError, match=r"no radius of kl clips .* it can clip between"):
        match_clip_fraction(BandSettings(), ClipSettings(eps_low=0.2, eps_high=1e-13), free)


def test_recorded_tokens_are_read_from_the_run_folder(tmp_path):
    folder = RunFolder.create(tmp_path, "a")
    with pytest.raises(UserError, match="no recorded tokens there"):
        read_recorded_tokens(folder.path)
    columns = {name: np.arange(3, dtype=np.float32) for name in TOKEN_COLUMNS}
    for step in (1, 2):
        folder.write_tokens(step, columns)
    assert read_recorded_tokens(folder.path)["ratio"].tolist() == [0, 1, 2, 0, 1, 2]
    (folder.path / "tokens" / "step-000002.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match=r"step-000002\.parquet: not readable"):
        read_recorded_tokens(folder.path)
    nan, zeros = np.nan, np.zeros(3)
    values = TokenValues(
        np.array([2, 1]),
        np.array([1.0, nan]),
        ["a"],
        zeros.astype(np.int32),
        zeros,
        np.array([3.0, nan, 4.0]),
        *[zeros] * 5,
    )
    write_token_values(folder.path / "token_values" / "step-000003.parquet", values)
    assert read_recorded_tokens(folder.path)["ratio"].tolist() == [3], (
        "all that was trained, instead of tokens/"
    )
