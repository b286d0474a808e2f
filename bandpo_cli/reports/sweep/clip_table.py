"""Plot of the clipped share of the tokens by arm and probability of the token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from bandpo_cli.reports import style
from bandpo_cli.reports.style import HEADER, HEIGHT, ArmStyle
from bandpo_cli.reports.sweep.runs import ArmRunData

_ROW_HEIGHT, _TICK_HEIGHT = 0.7, 0.94
"""Inches: height of a row of the table of clipped tokens where there are few, and of the texts below the table."""

_MIN_SHARE = 1e-4  # a smaller share of clipped tokens has the colour of 0


def plot_clip_table(
    arms: Mapping[str, Sequence[ArmRunData]], styles: Mapping[str, ArmStyle], subtitle: str
) -> Figure | None:
    """Plot the clipped share of the tokens as a table of arms and bins of π_old; None without data."""
    clipped = {
        name: _mean_over_runs([record.clipped_by_bin for record in runs]) for name, runs in arms.items()
    }
    names = [name for name in arms if clipped[name]]
    if not names:
        return None
    token_shares = _mean_over_runs([record.token_share for name in names for record in arms[name]])
    bins = sorted(token_shares, key=lambda name: float(name.split("_")[1]))
    values = np.array([[clipped[name].get(each, np.nan) for each in bins] for name in names])
    figure, (axes,) = style.new_figure(
        "Clipped tokens by probability",
        f"{subtitle} · clipped share of the tokens of each bin, mean over steps and seeds",
        height=min(HEIGHT, HEADER + _ROW_HEIGHT * len(names) + _TICK_HEIGHT),
    )
    shares = np.where(values >= _MIN_SHARE, values, _MIN_SHARE)
    colormap, norm = colormaps["Blues"], LogNorm(_MIN_SHARE, 3.0)
    axes.imshow(np.where(np.isnan(values), np.nan, shares), cmap=colormap, norm=norm, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        text = "–" if np.isnan(value) else f"{100 * value:.2g}%" if value < 0.995 else "100%"
        dark = not np.isnan(value) and float(np.mean(colormap(norm(shares[row, column]))[:3])) < 0.57
        color = "white" if dark else style.TEXT_COLOR
        axes.text(column, row, text, ha="center", va="center", size=11, color=color)
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    axes.set_yticks(range(len(names)), [styles[name].name for name in names], color=style.TEXT_COLOR)
    ends = [each.split("_")[1:] for each in bins]
    axes.set_xticks(
        range(len(bins)),
        [
            f"{low} – {high}\n{_share_text(token_shares[each])}"
            for each, (low, high) in zip(bins, ends, strict=True)
        ],
    )
    axes.set_xlabel(
        "probability of the token under the old policy, and the bin's share of all tokens",
        size=11.5,
        color=style.TEXT_COLOR,
        labelpad=8,
    )
    _fit_row_names(figure, axes)
    return figure


def _share_text(value: float) -> str:
    return f"{100 * value:.2g}% of all" if value < 0.995 else "100% of all"


def _fit_row_names(figure: Figure, axes: Axes) -> None:
    """Move the left edge of the axes to fit the row names; above are the titles, below the names of the bins."""
    figure.canvas.draw()
    widest = max(tick.get_window_extent().width for tick in axes.get_yticklabels()) / figure.bbox.width
    left = 0.03 + widest + 0.012
    height = figure.get_figheight()
    axes.set_position((left, _TICK_HEIGHT / height, 0.975 - left, (height - HEADER - _TICK_HEIGHT) / height))


def _mean_over_runs(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each key over the runs that have it."""
    keys = dict.fromkeys(key for each in values for key in each)
    return {key: float(np.mean([each[key] for each in values if key in each])) for key in keys}
