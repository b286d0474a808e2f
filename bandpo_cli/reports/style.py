"""One look for every picture: quiet axes, colours that the colour-blind tell apart, no global state."""

# MERGED: How arms are told apart in the pictures, and the list of them beside the axes.
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from bandpo_cli.storage.files import write_atomically

TEXT_COLOR, MUTED_COLOR, GRID_COLOR = "#1f2430", "#667085", "#e6e8ec"
BLUE, ORANGE, GREEN, RED, SKY, PURPLE = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7"
"""Okabe and Ito's palette (Color Universal Design, 2008)."""

CYCLE = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY)


def new_figure(title: str, subtitle: str, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure of 1600 × 1000 pixels with `panels` axes side by side, without pyplot."""
    figure = Figure(figsize=(10, 6.25), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(1, panels, left=0.095, right=0.975, bottom=0.11, top=0.80, wspace=0.27)
    figure.text(0.03, 0.945, title, size=16, weight="bold", color=TEXT_COLOR)
    figure.text(0.03, 0.898, subtitle, size=11, color=MUTED_COLOR)
    return figure, [clean_axes(figure.add_subplot(grid[0, index])) for index in range(panels)]


def clean_axes(axes: Axes) -> Axes:
    """Take the box and the tick marks away, leave a light grid behind the data."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED_COLOR)
    axes.grid(axis="y", color=GRID_COLOR, linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=MUTED_COLOR, labelsize=10.5, length=0, pad=6)
    return axes


def label(axes: Axes, x: str, y: str) -> None:
    """Name both axes, units included."""
    axes.set_xlabel(x, size=11.5, color=TEXT_COLOR, labelpad=8)
    axes.set_ylabel(y, size=11.5, color=TEXT_COLOR, labelpad=8)


def legend(axes: Axes, columns: int = 4, marker_scale: float = 1.0) -> None:
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
            labelcolor=TEXT_COLOR,
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


def percent_axis(axes: Axes) -> None:
    """Write the shares on the y axis as percentages, with no more digits than they need."""
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.4g} %"))


def save(figure: Figure, path: Path) -> Path:
    """Write `figure` as PNG, whole or not at all."""
    return write_atomically(path, lambda temporary: figure.savefig(temporary, format="png"))


TOP = 0.86
"""Upper end of the axes, as a share of the picture: there is no legend between them and the heading."""

_COLORS = (*CYCLE, "#7f4f24", TEXT_COLOR)
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.4, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
_LONGEST_NAME = 30


@dataclass(frozen=True)
class ArmStyle:
    """How an arm is drawn and named, in every picture alike."""

    name: str
    color: str
    dash: Any
    width: float


def arm_styles(names: Sequence[str], baseline: str | None) -> dict[str, ArmStyle]:
    """Return a look for each arm: colours, then colours with another dash; the baseline muted."""
    others = [name for name in names if name != baseline]
    found = {
        name: ArmStyle(
            escape_mathtext(shorten_middle(name)),
            _COLORS[index % len(_COLORS)],
            _DASHES[(index + index // len(_COLORS)) % len(_DASHES)],
            2.2,
        )
        for index, name in enumerate(others)
    }
    if baseline is not None:
        found[baseline] = ArmStyle(
            f"{escape_mathtext(shorten_middle(baseline))} (baseline)", MUTED_COLOR, "-", 2.8
        )
    return found


def side_legend(figure: Figure, axes: Axes, ends: Mapping[str, float], look: Mapping[str, ArmStyle]) -> None:
    """List the arms right of the axes, in the order in which their lines end."""
    names = sorted(ends, key=lambda name: -ends[name])
    handles = [
        Line2D([], [], color=look[name].color, linestyle=look[name].dash, linewidth=look[name].width)
        for name in names
    ]
    legend = figure.legend(
        handles,
        [look[name].name for name in names],
        loc="upper right",
        bbox_to_anchor=(0.985, TOP + 0.02),
        frameon=False,
        fontsize=10.5,
        labelcolor=TEXT_COLOR,
        handlelength=2.4,
        labelspacing=0.75,
    )
    width = legend.get_window_extent().width / figure.bbox.width
    box = axes.get_position()
    axes.set_position((box.x0, box.y0, 0.985 - width - 0.02 - box.x0, TOP - box.y0))


def shorten_middle(name: str) -> str:
    """Return a name that fits beside the picture: a long one keeps both ends, where names differ."""
    if len(name) <= _LONGEST_NAME:
        return name
    half = (_LONGEST_NAME - 1) // 2
    return f"{name[:half]}…{name[-half:]}"


def escape_mathtext(text: str) -> str:
    """Return a text that matplotlib draws as it is: a pair of dollars would be read as mathematics."""
    return " ".join(text.split()).replace("$", r"\$")
