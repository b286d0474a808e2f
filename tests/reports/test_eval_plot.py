"""The picture of an evaluation shows the counts that the table shows, and stays within its edges."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from unittest import mock

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from bandpo_cli.evaluation.scores import success_histogram
from bandpo_cli.reports import run_plots, style
from bandpo_cli.reports.run_plots import plot_success_histogram


def record(folder: Path, sets: dict[str, list[float]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        label: {
            "problems": len(shares),
            "by_problem": {
                str(index): {"mean_at_8": share, "pass_at_4": 1.0} for index, share in enumerate(shares)
            },
        }
        for label, shares in sets.items()
    }
    (folder / "eval.json").write_text(json.dumps({"sets": content}))
    return folder


@pytest.fixture
def figures() -> Iterator[list[Figure]]:
    """Collect the figures that are drawn."""
    drawn: list[Figure] = []
    new_figure = style.new_figure

    def keep(*arguments, **options):
        figure, axes = new_figure(*arguments, **options)
        drawn.append(figure)
        return figure, axes

    with mock.patch.object(run_plots.style, "new_figure", keep):
        yield drawn


def test_every_share_of_n_lies_in_the_bin_that_fractions_say() -> None:
    """All c of n up to 64, against exact arithmetic: 3 of 10 is in 0.3 – 0.4 though 3/10 is no binary number."""
    for n in range(1, 65):
        for c in range(n + 1):
            (name,) = [name for name, count in success_histogram([c / n]) if count]
            if c in (0, n):
                assert name == ("never" if c == 0 else "always")
            else:
                low = int(Fraction(c, n) * 10)
                assert name == f"{low / 10:.1f} – {(low + 1) / 10:.1f}"


def test_the_bars_are_the_counts(tmp_path: Path, figures: list[Figure]) -> None:
    shares = [0, 0, 0.125, 0.3, 0.5, 1, 1, 1]
    plot_success_histogram(record(tmp_path / "e", {"one": shares}))
    axes = figures[0].axes[0]
    heights = [bar.get_height() for bar in axes.containers[0]]
    assert heights == [count / len(shares) for _, count in success_histogram(shares)]
    assert heights == pytest.approx([2 / 8, 0, 1 / 8, 0, 1 / 8, 0, 1 / 8, 0, 0, 0, 0, 3 / 8])
    labels = [text.get_text() for text in axes.get_xticklabels()]
    assert (labels[0], labels[4], labels[-1]) == ("never", "0.3–0.4", "always")


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("short", ["countdown"]),
        ("x" * 200, ["a" * 60, "b" * 60, "c" * 60]),
        ("nine", [f"a-problem-set-of-some-kind-{index}" for index in range(9)]),
    ],
)
def test_nothing_is_cut_off(tmp_path: Path, figures: list[Figure], name: str, labels: list[str]) -> None:
    """Every text lies within the picture, and the key hides neither title nor bars."""
    path = plot_success_histogram(record(tmp_path / name, {label: [0, 0.5, 1] for label in labels}))
    assert imread(path).shape[:2] == (1000, 1600)
    figure = figures[0]
    figure.canvas.draw()
    width, height = figure.canvas.get_width_height()
    renderer = figure.canvas.get_renderer()
    for text in figure.texts:
        box = text.get_window_extent(renderer)
        assert 0 <= box.x0 < box.x1 <= width
        assert 0 <= box.y0 < box.y1 <= height
    legend = figure.axes[0].get_legend()
    assert (legend is None) == (len(labels) == 1)
    if legend:
        box = legend.get_window_extent(renderer)
        assert 0 <= box.x0 < box.x1 <= width
        assert box.y1 <= min(text.get_window_extent(renderer).y0 for text in figure.texts)
        assert box.y0 >= figure.axes[0].get_window_extent(renderer).y1 - 2
        assert len(legend.get_texts()) == min(len(labels), 6)
    if len(labels) > 6:
        assert "the first 6 of 9 sets" in figure.texts[1].get_text()
