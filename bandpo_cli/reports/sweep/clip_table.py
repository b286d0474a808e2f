"""Which tokens each arm clips: a cell for each arm and range of probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from bandpo_cli.reports import style
from bandpo_cli.reports.sweep.looks import TOP, Look
from bandpo_cli.reports.sweep.runs import RunRecord

_SMALLEST_SHARE = 1e-4  # below it a share of clipped tokens has the colour of none


def draw_clip_table(
    arms: Mapping[str, Sequence[RunRecord]], look: Mapping[str, Look], about: str
) -> Figure | None:
    """Draw the clipped share of the tokens by arm and bin of π_old, a cell each, with its number."""
    clipped = {
        name: _mean_over_runs([record.clipped_by_bin for record in runs]) for name, runs in arms.items()
    }
    names = [name for name in arms if clipped[name]]
    if not names:
        return None
    shares = _mean_over_runs([record.token_share for name in names for record in arms[name]])
    bins = sorted(shares, key=lambda name: float(name.split("_")[1]))
    values = np.array([[clipped[name].get(each, np.nan) for each in bins] for name in names])
    figure, (axes,) = style.new_figure(
        "Clipped tokens by their probability",
        f"{about} · share of a bin's tokens that a bound stops, mean over steps and seeds",
    )
    shown = np.where(values >= _SMALLEST_SHARE, values, _SMALLEST_SHARE)
    shade, norm = colormaps["Blues"], LogNorm(_SMALLEST_SHARE, 3.0)
    axes.imshow(np.where(np.isnan(values), np.nan, shown), cmap=shade, norm=norm, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        words = "–" if np.isnan(value) else f"{100 * value:.2g}%" if value < 0.995 else "100%"
        dark = not np.isnan(value) and float(np.mean(shade(norm(shown[row, column]))[:3])) < 0.57
        ink = "white" if dark else style.INK
        axes.text(column, row, words, ha="center", va="center", size=11, color=ink)
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    axes.set_yticks(range(len(names)), [look[name].name for name in names], color=style.INK)
    ends = [each.split("_")[1:] for each in bins]
    axes.set_xticks(
        range(len(bins)),
        [f"{low} – {high}\n{_share(shares[each])}" for each, (low, high) in zip(bins, ends, strict=True)],
    )
    axes.set_xlabel(
        "probability of the token under the old policy, and the bin's share of all tokens",
        size=11.5,
        color=style.INK,
        labelpad=8,
    )
    _fit_row_names(figure, axes, len(names))
    return figure


def _share(value: float) -> str:
    return f"{100 * value:.2g}% of all" if value < 0.995 else "100% of all"


def _fit_row_names(figure: Figure, axes: Axes, rows: int) -> None:
    """Make room for the names on the left, and no row taller than it needs."""
    figure.canvas.draw()
    widest = max(tick.get_window_extent().width for tick in axes.get_yticklabels()) / figure.bbox.width
    left = 0.03 + widest + 0.012
    height = min(TOP - 0.15, 0.22 * rows)
    axes.set_position((left, TOP - height, 0.975 - left, height))


def _mean_over_runs(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each key's mean over the runs that have it."""
    keys = dict.fromkeys(key for each in values for key in each)
    return {key: float(np.mean([each[key] for each in values if key in each])) for key in keys}
