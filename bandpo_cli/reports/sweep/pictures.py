"""The pictures of a report: arms over steps, accuracy against entropy, who clips which tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from bandpo_cli.reports import style
from bandpo_cli.reports.run_plots import Series, smooth
from bandpo_cli.reports.sweep.clip_table import draw_clip_table
from bandpo_cli.reports.sweep.looks import Look, literal, looks, side_key
from bandpo_cli.reports.sweep.runs import RunRecord
from bandpo_cli.reports.sweep.statistics import band

Floats = NDArray[np.float64]
Arms = Mapping[str, Sequence[RunRecord]]

MOST_DRAWN = 12
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


def accuracy_of(record: RunRecord, sets: Sequence[str]) -> Series:
    """Return mean@n over the steps at which all sets were evaluated, their plain mean."""
    curves = [dict(zip(record.sets[label].steps, record.sets[label].mean, strict=True)) for label in sets]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    return steps, [float(np.mean([curve[step] for curve in curves])) for step in steps]


def entropy_of(record: RunRecord) -> Series:
    """Return the entropy over the steps, smoothed as in the run's own picture."""
    return record.entropy[0], smooth(record.entropy[1])[0] if record.entropy[1] else []


def draw_all(
    arms: Arms, order: Sequence[str], baseline: str | None, sets: Sequence[str], about: str, out: Path
) -> dict[str, Path]:
    """Draw what the runs have data for into `out`; return the files by name.

    Args:
        order: arm names, the most accurate first; those that are drawn have their looks by the order in `arms`.
    """
    about = literal(about)
    drawn = [name for name in order if name in order[:MOST_DRAWN] or name == baseline]
    look = looks([name for name in arms if name in drawn], baseline if baseline in arms else None)
    kept = {name: arms[name] for name in drawn}

    def accuracy(record: RunRecord) -> Series:
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
        "clip_by_probability": draw_clip_table(kept, look, about),
    }
    return {
        name: style.save(figure, out / f"{name}.png")
        for name, figure in pictures.items()
        if figure is not None
    }


def _over_steps(
    arms: Arms,
    look: Mapping[str, Look],
    of_run: Callable[[RunRecord], Series],
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
        each, edges = look[name], band(curve.values_RS)
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
        style.percent(axes)
    style.label(axes, "step", y)
    side_key(figure, axes, {name: float(curve.mean[-1]) for name, curve in curves.items()}, look)
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
    arms: Arms, look: Mapping[str, Look], accuracy: Callable[[RunRecord], Series], about: str, y: str
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
    axes.grid(axis="x", color=style.GRID, linewidth=1)
    style.percent(axes)
    style.label(axes, "entropy, nats a token", y)
    side_key(figure, axes, {name: float(path[1][-1]) for name, path in paths.items()}, look)
    return figure
