"""Which tokens each arm clips: a cell for each arm and range of probability."""

# MERGED: The pictures of a report: arms over steps, accuracy against entropy, who clips which tokens.
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from bandpo_cli.reports import style
from bandpo_cli.reports.run_plots import Series, smooth
from bandpo_cli.reports.style import TOP, ArmStyle, arm_styles, escape_mathtext, side_legend
from bandpo_cli.reports.sweep.runs import ArmRunData
from bandpo_cli.reports.sweep.statistics import interval_band

_SMALLEST_SHARE = 1e-4  # below it a share of clipped tokens has the colour of none


def plot_clip_table(
    arms: Mapping[str, Sequence[ArmRunData]], look: Mapping[str, ArmStyle], about: str
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
        ink = "white" if dark else style.TEXT_COLOR
        axes.text(column, row, words, ha="center", va="center", size=11, color=ink)
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    axes.set_yticks(range(len(names)), [look[name].name for name in names], color=style.TEXT_COLOR)
    ends = [each.split("_")[1:] for each in bins]
    axes.set_xticks(
        range(len(bins)),
        [f"{low} – {high}\n{_share(shares[each])}" for each, (low, high) in zip(bins, ends, strict=True)],
    )
    axes.set_xlabel(
        "probability of the token under the old policy, and the bin's share of all tokens",
        size=11.5,
        color=style.TEXT_COLOR,
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


Floats = NDArray[np.float64]
Arms = Mapping[str, Sequence[ArmRunData]]

MAX_ARMS_PLOTTED = 12
"""More arms than this cannot be told apart in a picture; the first in accuracy are drawn, and the baseline."""


@dataclass(frozen=True)
class Curve:
    """An arm's values at the steps that all its runs have.

    Attributes:
        steps: [S].
        values_RS: [R, S].
    """

    steps: Floats
    values_RS: Floats

    @property
    def mean(self) -> Floats:
        """[S]."""
        return np.asarray(self.values_RS.mean(axis=0))


def common_curve(curves: Sequence[Series]) -> Curve | None:
    """Return the curves at their common steps; None where there are none."""
    steps = sorted(set.intersection(*(set(each[0]) for each in curves))) if curves else []
    if not steps:
        return None
    values = [[dict(zip(*each, strict=True))[step] for step in steps] for each in curves]
    return Curve(np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64))


def accuracy_of(record: ArmRunData, sets: Sequence[str]) -> Series:
    """Return mean@n over the steps at which all sets were evaluated, their plain mean."""
    curves = [dict(zip(record.sets[label].steps, record.sets[label].mean, strict=True)) for label in sets]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    return steps, [float(np.mean([curve[step] for curve in curves])) for step in steps]


def entropy_of(record: ArmRunData) -> Series:
    """Return the entropy over the steps, smoothed as in the run's own picture."""
    return record.entropy[0], smooth(record.entropy[1])[0] if record.entropy[1] else []


def plot_all(
    arms: Arms, order: Sequence[str], baseline: str | None, sets: Sequence[str], about: str, out: Path
) -> dict[str, Path]:
    """Draw what the runs have data for into `out`; return the files by name.

    Args:
        order: arm names, the most accurate first; those that are drawn have their looks by the order in `arms`.
    """
    about = escape_mathtext(about)
    drawn = [name for name in order if name in order[:MAX_ARMS_PLOTTED] or name == baseline]
    look = arm_styles([name for name in arms if name in drawn], baseline if baseline in arms else None)
    kept = {name: arms[name] for name in drawn}

    def accuracy(record: ArmRunData) -> Series:
        return accuracy_of(record, sets)

    ns = {record.sets[label].n for runs in arms.values() for record in runs for label in sets}
    what = f"mean@{ns.pop() if len(ns) == 1 else 'n'}{f', mean of {len(sets)} sets' if len(sets) > 1 else ''}"
    pictures: dict[str, Figure | None] = {
        "accuracy": _over_steps(
            kept, look, accuracy, ("Held-out accuracy", about, f"right answers, {what}"), percent=True
        ),
        "entropy": _over_steps(
            kept, look, entropy_of, ("Entropy of the policy", about, "entropy, nats a token"), percent=False
        ),
        "accuracy_entropy": _trajectories(kept, look, accuracy, about, f"right answers, {what}"),
        "clip_by_probability": plot_clip_table(kept, look, about),
    }
    return {
        name: style.save(figure, out / f"{name}.png")
        for name, figure in pictures.items()
        if figure is not None
    }


def _over_steps(
    arms: Arms,
    look: Mapping[str, ArmStyle],
    of_run: Callable[[ArmRunData], Series],
    words: tuple[str, str, str],
    percent: bool,
) -> Figure | None:
    """Draw a line an arm, with its band."""
    found = {name: common_curve([of_run(record) for record in runs]) for name, runs in arms.items()}
    curves = {name: curve for name, curve in found.items() if curve is not None}
    if not curves:
        return None
    title, about, y = words
    figure, (axes,) = style.new_figure(title, f"{about} · {_band_words(curves.values())}")
    few = len(curves) <= 4  # the edges of more bands would be a thicket
    for name, curve in curves.items():
        each, edges = look[name], interval_band(curve.values_RS)
        if edges is not None:
            low, high = np.clip(edges, 0, 1 if percent else None)
            axes.fill_between(
                curve.steps, low, high, color=each.color, alpha=0.12 if few else 0.09, linewidth=0
            )
            for edge in (low, high) if few else ():
                axes.plot(curve.steps, edge, color=each.color, alpha=0.45, linewidth=0.8)
        axes.plot(
            curve.steps,
            curve.mean,
            color=each.color,
            linestyle=each.dash,
            linewidth=each.width,
            marker="o" if len(curve.steps) <= 12 else None,
            markersize=5,
            zorder=3,
        )
    _fit(axes, list(curves.values()))
    style.steps_axis(axes, [step for curve in curves.values() for step in curve.steps])
    if percent:
        style.percent_axis(axes)
    style.label(axes, "step", y)
    side_legend(figure, axes, {name: float(curve.mean[-1]) for name, curve in curves.items()}, look)
    return figure


def _band_words(curves: Any) -> str:
    runs = {len(curve.values_RS) for curve in curves}
    words = [
        "95% t-interval over seeds" if max(runs) > 2 else "",
        "range of two seeds" if 2 in runs else "",
        "no band for one seed" if 1 in runs and max(runs) > 1 else "",
    ]
    return "band: " + ", ".join(filter(None, words)) if max(runs) > 1 else "one seed an arm, no band"


def _fit(axes: Axes, curves: Sequence[Curve]) -> None:
    """Let every run be in the picture; bands wider than that are cut off, or few seeds would flatten all lines."""
    low = min(float(curve.values_RS.min()) for curve in curves)
    high = max(float(curve.values_RS.max()) for curve in curves)
    pad = 0.25 * (high - low) or 0.05 * max(abs(high), 0.1)
    axes.set_ylim(max(0.0, low - pad), high + pad)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10]))


def _trajectories(
    arms: Arms, look: Mapping[str, ArmStyle], accuracy: Callable[[ArmRunData], Series], about: str, y: str
) -> Figure | None:
    """Draw accuracy against entropy at the evaluated steps, the end marked."""
    paths: dict[str, tuple[Floats, Floats]] = {}
    for name, runs in arms.items():
        curve = common_curve([accuracy(record) for record in runs])
        entropy = common_curve([entropy_of(record) for record in runs])
        if curve is not None and entropy is not None:
            # The entropy recorded at a step is that of the policy after the step before.
            paths[name] = np.interp(curve.steps, entropy.steps - 1, entropy.mean), curve.mean
    if not paths:
        return None
    figure, (axes,) = style.new_figure(
        "Accuracy against entropy", f"{about} · each evaluation a dot, the end a large one; means over seeds"
    )
    for name, (x, values) in paths.items():
        each = look[name]
        axes.plot(
            x,
            values,
            color=each.color,
            linestyle=each.dash,
            linewidth=each.width * 0.8,
            marker="o",
            markersize=3.5,
        )
        axes.plot(
            x[-1:],
            values[-1:],
            color=each.color,
            marker="o",
            markersize=11,
            markeredgecolor="white",
            zorder=4,
        )
    axes.margins(0.06)
    axes.grid(axis="x", color=style.GRID_COLOR, linewidth=1)
    style.percent_axis(axes)
    style.label(axes, "entropy, nats a token", y)
    side_legend(figure, axes, {name: float(path[1][-1]) for name, path in paths.items()}, look)
    return figure
