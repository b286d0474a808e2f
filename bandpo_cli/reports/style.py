"""One look for every picture: quiet axes, colours that the colour-blind tell apart, no global state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from bandpo_cli.tracking.files import write_whole

INK, MUTED, GRID = "#1f2430", "#667085", "#e6e8ec"
BLUE, ORANGE, GREEN, RED, SKY, PURPLE = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7"
"""Okabe and Ito's palette (Color Universal Design, 2008)."""

CYCLE = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY)


def new_figure(title: str, subtitle: str, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure of 1600 × 1000 pixels with `panels` axes side by side, without pyplot."""
    figure = Figure(figsize=(10, 6.25), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(1, panels, left=0.095, right=0.975, bottom=0.11, top=0.80, wspace=0.27)
    figure.text(0.03, 0.945, title, size=16, weight="bold", color=INK)
    figure.text(0.03, 0.898, subtitle, size=11, color=MUTED)
    return figure, [quiet(figure.add_subplot(grid[0, index])) for index in range(panels)]


def quiet(axes: Axes) -> Axes:
    """Take the box and the tick marks away, leave a light grid behind the data."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.grid(axis="y", color=GRID, linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=MUTED, labelsize=10.5, length=0, pad=6)
    return axes


def label(axes: Axes, x: str, y: str) -> None:
    """Name both axes, units included."""
    axes.set_xlabel(x, size=11.5, color=INK, labelpad=8)
    axes.set_ylabel(y, size=11.5, color=INK, labelpad=8)


def key(axes: Axes, columns: int = 4, marker_scale: float = 1.0) -> None:
    """Put the legend in a row above the axes, where it hides no data."""
    handles, names = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles,
            names,
            loc="lower left",
            bbox_to_anchor=(-0.02, 1.0),
            ncols=columns,
            frameon=False,
            fontsize=10.5,
            labelcolor=INK,
            handlelength=1.6,
            columnspacing=1.4,
            borderaxespad=0.1,
            markerscale=marker_scale,
        )


def steps_axis(axes: Axes, steps: Sequence[float]) -> None:
    """Let the x axis span the steps, whole numbers only, a single step in the middle."""
    low, high = min(steps), max(steps)
    pad = 0.02 * (high - low) if high > low else 1.0
    axes.set_xlim(low - pad, high + pad)
    if low == high:
        axes.set_xticks([low])
        return
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))


def percent(axes: Axes) -> None:
    """Write the shares on the y axis as percentages, with no more digits than they need."""
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.4g} %"))


def save(figure: Figure, path: Path) -> Path:
    """Write `figure` as PNG, whole or not at all."""
    return write_whole(path, lambda temporary: figure.savefig(temporary, format="png"))
