"""Fixtures of the tests of reports: no plots, or the figures in place of image files."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from bandpo_cli.reports import plot_style as style


@pytest.fixture
def without_plots(monkeypatch):
    """Skip plotting, which takes most of a report's time."""
    monkeypatch.setattr("bandpo_cli.reports.write_report.plot_all", lambda *_: {})


@pytest.fixture
def figures(monkeypatch):
    """Return the figures that are saved from now on, by file name. Their files are empty: rendering takes long."""
    saved = {}

    def save(figure: Figure, path: Path) -> Path:
        saved[path.name] = figure
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return path

    monkeypatch.setattr(style, "save", save)
    return saved
