"""Radius at which a Band clips as many recorded tokens as another method, checked against a scan of radii."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bandpo_cli.bounds import ratio_bounds
from bandpo_cli.bounds.intervals import RecordedTokens, clip_fraction, clip_state, match_clip_fraction
from bandpo_cli.config.methods import BandSettings, ClipSettings, NoClipSettings
from bandpo_cli.errors import ConfigError, UserError
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.storage.tables import TOKEN_COLUMNS, read_token_tables
from bandpo_cli.training.metrics import clip_metrics


def tokens(spread: float = 0.3, count: int = 2000) -> RecordedTokens:
    rng = np.random.default_rng(0)
    old = np.log(rng.beta(0.4, 0.4, count).clip(1e-6, 1 - 1e-6))
    ratios = np.minimum(np.exp(rng.normal(0, spread, count)), np.exp(-old))
    return RecordedTokens(old, ratios, rng.normal(size=count))


def test_the_clip_fraction_equals_the_metric_of_training() -> None:
    given = tokens()
    for config in (ClipSettings(), BandSettings(delta=0.01), NoClipSettings()):
        bounds = ratio_bounds(config)(torch.from_numpy(given.old_logprobs))
        state = clip_state(torch.from_numpy(given.ratios), *bounds, torch.from_numpy(given.advantages))
        metrics = clip_metrics(state, torch.from_numpy(given.old_logprobs))
        assert clip_fraction(config, given) == pytest.approx(metrics["clip/active_fraction"])


@pytest.mark.slow
@pytest.mark.parametrize("divergence", ["kl", "tv", "chi2", "js"])
def test_no_radius_of_a_fine_grid_is_closer(divergence: str) -> None:
    given, band = tokens(), BandSettings(divergence=divergence)
    found = match_clip_fraction(band, ClipSettings(), given)
    assert found.wanted == clip_fraction(ClipSettings(), given)
    assert found.reached == clip_fraction(BandSettings(divergence=divergence, delta=found.delta), given)
    grid = found.delta * np.geomspace(0.5, 2, 41)
    gaps = [
        abs(clip_fraction(BandSettings(divergence=divergence, delta=float(item)), given) - found.wanted)
        for item in grid
    ]
    assert abs(found.reached - found.wanted) <= min(gaps) + 1 / len(given.ratios)


def test_an_impossible_match_raises_config_error() -> None:
    with pytest.raises(ConfigError, match=r"clip clips none of the 2,000 recorded tokens"):
        match_clip_fraction(BandSettings(), ClipSettings(), tokens(spread=1e-3))
    # A ratio just above 1: the narrow interval clips it, and no Band of the searched radii does.
    free = RecordedTokens(np.full(10, np.log(0.1)), np.r_[np.full(9, 1.0), 1.0 + 1e-12], np.ones(10))
    with pytest.raises(ConfigError, match=r"no radius of kl clips .* it can clip between"):
        match_clip_fraction(BandSettings(), ClipSettings(eps_low=0.2, eps_high=1e-13), free)


def test_recorded_tokens_are_read_from_the_run_folder(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "a")
    with pytest.raises(UserError, match="no recorded tokens there"):
        read_token_tables(folder.path)
    columns = {name: np.arange(3, dtype=np.float32) for name in TOKEN_COLUMNS}
    folder.write_tokens(1, columns)
    folder.write_tokens(2, columns)
    read = read_token_tables(folder.path)
    assert read["ratio"].dtype == np.float64
    assert read["ratio"].tolist() == [0, 1, 2, 0, 1, 2]
    (folder.path / "tokens" / "step-000002.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match=r"step-000002\.parquet: not readable"):
        read_token_tables(folder.path)
