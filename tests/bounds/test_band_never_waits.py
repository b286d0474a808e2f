"""On an accelerator nothing makes the host wait. The meta device has no values: whoever asks for one fails."""

from __future__ import annotations

import pytest
import torch

from bandpo_cli.bounds import band_bounds, ratio_bounds
from bandpo_cli.config.methods import BandSettings, ClipSettings, DcpoSettings, NoClipSettings, Relax
from bandpo_cli.registries import DIVERGENCES


def test_the_meta_device_catches_a_host_that_asks() -> None:
    x = torch.empty(5, device="meta")
    for ask in (lambda: bool((x < 0).all()), lambda: x.max().item(), lambda: x.tolist()):
        with pytest.raises((RuntimeError, NotImplementedError)):
            ask()


@pytest.mark.parametrize("count", [5, 100_000])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_bands(name: str, count: int) -> None:
    lower, upper = band_bounds(torch.empty(count, device="meta"), name, 0.07, max_ratio=10.0)
    assert lower.device.type == upper.device.type == "meta"
    assert lower.shape == upper.shape == (count,)


@pytest.mark.parametrize(
    "config", [BandSettings(relax=Relax()), ClipSettings(), DcpoSettings(), NoClipSettings()]
)
def test_methods(config: BandSettings) -> None:
    assert ratio_bounds(config)(torch.empty(7, 3, device="meta")).lower.shape == (7, 3)


@pytest.mark.parametrize("name", ["reverse-kl", "js", "kl"])
def test_the_accelerators_way_gives_the_same_bounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host may not ask, the solver runs all its steps: on a CPU that can be compared."""
    x = -torch.logspace(-9, 1.8, 40_000, dtype=torch.float64)
    usual = band_bounds(x, name, 0.05)
    for module in ("arrays", "solver"):
        monkeypatch.setattr(f"bandpo_cli.bounds.{module}.is_on_host", lambda x: False)
    for a, b in zip(usual, band_bounds(x, name, 0.05), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
