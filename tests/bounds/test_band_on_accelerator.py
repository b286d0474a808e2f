"""Bounds on an accelerator without host synchronization. Reading a value from the meta device raises an error."""

from __future__ import annotations

import pytest
import torch

from bandpo_cli.bounds import band_bounds, ratio_bounds
from bandpo_cli.config.methods import (
    BandSettings,
    ClipSettings,
    DcpoSettings,
    MethodSettings,
    NoClipSettings,
    Relax,
)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("name", "count"), [("kl", 9000), ("tv", 5), ("kl", 5), ("js", 9000), ("js", 5)])
def test_bands_read_no_value(name: str, count: int) -> None:
    lower, upper = band_bounds(torch.empty(count, device="meta"), name, 0.07, max_ratio=10.0)
    assert lower.device.type == upper.device.type == "meta"
    assert lower.shape == upper.shape == (count,)


@pytest.mark.parametrize(
    "config", [BandSettings(relax=Relax()), ClipSettings(), DcpoSettings(), NoClipSettings()]
)
def test_methods_read_no_value(config: MethodSettings) -> None:
    assert ratio_bounds(config)(torch.empty(7, 3, device="meta")).lower.shape == (7, 3)


@pytest.mark.parametrize("name", ["js", "kl"])
def test_the_accelerator_path_gives_the_same_bounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator the solver runs all its steps; the test runs that path on the CPU."""
    x = -torch.logspace(-9, 1.8, 40_000, dtype=torch.float64)
    usual = band_bounds(x, name, 0.05)
    for module in ("arrays", "solver"):
        monkeypatch.setattr(f"bandpo_cli.bounds.{module}.is_on_host", lambda x: False)
    for a, b in zip(usual, band_bounds(x, name, 0.05), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
