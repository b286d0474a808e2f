"""Fixtures of the tests of reports: no plots, or the figures that are saved."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from bandpo_cli.reports import style


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip plotting, which takes most of a report's time."""
    monkeypatch.setattr("bandpo_cli.reports.comparison.write.plot_all", lambda *_: {})


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """Return the figures that are saved from now on, by file name."""
    saved: dict[str, Figure] = {}
    save = style.save
    monkeypatch.setattr(
        style, "save", lambda figure, path: saved.update({path.name: figure}) or save(figure, path)
    )
    return saved
