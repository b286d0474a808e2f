"""How arms are told apart in the pictures, and the list of them beside the axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bandpo_cli.reports import style

TOP = 0.86
"""Upper end of the axes, as a share of the picture: there is no legend between them and the heading."""

_COLORS = (*style.CYCLE, "#7f4f24", style.INK)
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.4, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
_LONGEST_NAME = 30


@dataclass(frozen=True)
class Look:
    """How an arm is drawn and named, in every picture alike."""

    name: str
    color: str
    dash: Any
    width: float


def looks(names: Sequence[str], baseline: str | None) -> dict[str, Look]:
    """Return a look for each arm: colours, then colours with another dash; the baseline muted."""
    others = [name for name in names if name != baseline]
    found = {
        name: Look(
            literal(short(name)),
            _COLORS[index % len(_COLORS)],
            _DASHES[(index + index // len(_COLORS)) % len(_DASHES)],
            2.2,
        )
        for index, name in enumerate(others)
    }
    if baseline is not None:
        found[baseline] = Look(f"{literal(short(baseline))} (baseline)", style.MUTED, "-", 2.8)
    return found


def side_key(figure: Figure, axes: Axes, ends: Mapping[str, float], look: Mapping[str, Look]) -> None:
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
        labelcolor=style.INK,
        handlelength=2.4,
        labelspacing=0.75,
    )
    width = legend.get_window_extent().width / figure.bbox.width
    box = axes.get_position()
    axes.set_position((box.x0, box.y0, 0.985 - width - 0.02 - box.x0, TOP - box.y0))


def short(name: str) -> str:
    """Return a name that fits beside the picture: a long one keeps both ends, where names differ."""
    if len(name) <= _LONGEST_NAME:
        return name
    half = (_LONGEST_NAME - 1) // 2
    return f"{name[:half]}…{name[-half:]}"


def literal(text: str) -> str:
    """Return a text that matplotlib draws as it is: a pair of dollars would be read as mathematics."""
    return " ".join(text.split()).replace("$", r"\$")
