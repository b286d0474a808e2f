"""Plots of a report.

Metrics over steps with bands, accuracy against learning rate and against entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator
from matplotlib.transforms import offset_copy
from numpy.typing import NDArray

from bandpo_cli.reports import style
from bandpo_cli.reports.run_plots import Series, smooth
from bandpo_cli.reports.style import ArmStyle, arm_styles, escape_mathtext, side_legend
from bandpo_cli.reports.sweep.clip_table import plot_clip_table
from bandpo_cli.reports.sweep.equal_accuracy import percent_text
from bandpo_cli.reports.sweep.runs import ArmRunData, accuracy_of
from bandpo_cli.reports.sweep.selection import format_setting
from bandpo_cli.reports.sweep.statistics import interval_band
from bandpo_cli.reports.sweep.tuning import Tuning, accuracy_by_learning_rate

Floats = NDArray[np.float64]
Arms = Mapping[str, Sequence[ArmRunData]]

MAX_ARMS_PLOTTED = 12
"""Lines of more arms cannot be distinguished: only the most accurate ones and the baseline are plotted."""

_MAX_RATE_TICKS = 8
"""Learning rates up to this number are the ticks of their axis."""

_SPREAD_POINTS = 24.0
"""Width, in points, over which the lines of the plot against the learning rate are spread, so that bars stay apart."""


@dataclass(frozen=True)
class Curve:
    """Values of an arm at the S steps that all its R runs have.

    Attributes:
        steps: [S].
        values_RS: [R, S].
    """

    steps: Floats
    values_RS: Floats

    @property
    def mean(self) -> Floats:
        """Mean over the runs, [S]."""
        return np.asarray(self.values_RS.mean(axis=0))


def plot_all(
    arms: Arms,
    order: Sequence[str],
    baseline: str | None,
    sets: Sequence[str],
    level: float | None,
    subtitle: str,
    out: Path,
) -> dict[str, Path]:
    """Plot into `out` what the runs have data for.

    Args:
        arms: the runs of each arm; line styles are assigned in this order.
        order: names of the arms, highest accuracy first.
        baseline: name of the baseline; None for no comparison.
        sets: the evaluation sets whose mean is plotted.
        level: accuracy at which the entropies are compared; None for no such comparison.
        subtitle: first part of the line under each title.
        out: folder to write to.

    Returns:
        The written files by the names of `tables.CAPTIONS`.
    """
    subtitle = escape_mathtext(subtitle)
    names = [name for name in order if name in order[:MAX_ARMS_PLOTTED] or name == baseline]
    styles = arm_styles([name for name in arms if name in names], baseline if baseline in arms else None)
    plotted = {name: arms[name] for name in names}

    def accuracy(record: ArmRunData) -> Series:
        return accuracy_of(record, sets)

    ns = {record.sets[label].n for runs in arms.values() for record in runs for label in sets}
    mean_at_n = (
        f"mean@{ns.pop() if len(ns) == 1 else 'n'}{f', mean of {len(sets)} sets' if len(sets) > 1 else ''}"
    )
    figures: dict[str, Figure | None] = {
        "accuracy": _plot_over_steps(
            plotted,
            styles,
            accuracy,
            ("Held-out accuracy", subtitle, f"held-out accuracy, {mean_at_n}"),
            True,
        ),
        "accuracy_lr": plot_accuracy_lr(
            accuracy_by_learning_rate(arms, sets), subtitle, f"held-out accuracy, {mean_at_n}"
        ),
        "entropy": _plot_over_steps(
            plotted, styles, entropy_of, ("Entropy of the policy", subtitle, "entropy, nats per token"), False
        ),
        "accuracy_entropy": _plot_accuracy_entropy(
            plotted, styles, accuracy, level, subtitle, f"held-out accuracy, {mean_at_n}"
        ),
        "clip_by_probability": plot_clip_table(plotted, styles, subtitle),
    }
    return {
        name: style.save(figure, out / f"{name}.png")
        for name, figure in figures.items()
        if figure is not None
    }


def plot_tuning(tuning: Tuning, out: Path) -> dict[str, Path]:
    """Plot into `out` the metric that chose the settings against the learning rate; {} for one learning rate.

    Returns:
        The written file by its name in `tables.CAPTIONS`.
    """
    figure = plot_accuracy_lr(
        tuning.by_learning_rate(),
        escape_mathtext(tuning.sweep),
        "held-out accuracy" if tuning.metric == "accuracy" else "area under held-out accuracy",
        "Tuning: held-out accuracy against learning rate",
    )
    return {} if figure is None else {"tuning_lr": style.save(figure, out / "tuning_lr.png")}


def plot_accuracy_lr(
    lines: Mapping[str, Mapping[float, Sequence[float]]],
    subtitle: str,
    y_label: str,
    title: str = "Held-out accuracy against learning rate",
) -> Figure | None:
    """Plot the final accuracy against the learning rate, a line per method; None for fewer than two learning rates.

    Args:
        lines: accuracies by name of the line and learning rate, one value per seed. With more than `MAX_ARMS_PLOTTED`
            lines, those with the highest best mean are plotted.
        subtitle: first part of the line under the title.
        y_label: label of the y axis.
        title: title of the plot.
    """
    if max((len(line) for line in lines.values()), default=0) < 2:
        return None
    means = {
        name: {rate: float(np.mean(line[rate])) for rate in sorted(line)} for name, line in lines.items()
    }
    best = {name: max(line.values()) for name, line in means.items()}
    names = sorted(best, key=lambda name: -best[name])[:MAX_ARMS_PLOTTED]
    styles = arm_styles([name for name in lines if name in names], None)
    seeds = {len(accuracies) for name in names for accuracies in lines[name].values()}
    shown_lines = (
        f"; the {len(names)} most accurate of {len(lines)} methods" if len(names) < len(lines) else ""
    )
    figure, (axes,) = style.new_figure(
        title,
        f"{subtitle} · means over seeds, a large dot for the best{shown_lines}",
    )
    axes.set_xscale("log")
    shown = []
    for index, name in enumerate(styles):
        line, rates = styles[name], list(means[name])
        shift = _SPREAD_POINTS * (index / (len(styles) - 1) - 0.5) if len(styles) > 1 else 0.0
        place = offset_copy(axes.transData, figure, x=shift, units="points")
        for rate in rates:
            values_R = np.array(lines[name][rate], dtype=np.float64)
            edges = interval_band(values_R[:, np.newaxis])
            low_high = np.clip(edges, 0, 1).ravel() if edges is not None else values_R
            shown.append(low_high)
            axes.plot(
                [rate, rate],
                [low_high.min(), low_high.max()],
                color=line.color,
                alpha=0.25,
                linewidth=6,
                solid_capstyle="butt",
                transform=place,
            )
        axes.plot(
            rates,
            list(means[name].values()),
            color=line.color,
            linestyle=line.dash,
            linewidth=line.width,
            marker="o",
            markersize=5,
            zorder=3,
            clip_on=False,  # dots at an accuracy of 0
            transform=place,
        )
        axes.plot(
            max(rates, key=lambda rate: means[name][rate]),
            best[name],
            color=line.color,
            marker="o",
            markersize=11,
            markeredgecolor="white",
            zorder=4,
            clip_on=False,
            transform=place,
        )
    _fit_y_axis(axes, shown)
    all_rates = sorted({rate for name in names for rate in lines[name]})
    axes.set_xlim(all_rates[0] / 1.5, all_rates[-1] * 1.5)
    if len(all_rates) <= _MAX_RATE_TICKS:
        axes.set_xticks(all_rates, [format_setting(rate) for rate in all_rates])
        axes.xaxis.set_minor_locator(NullLocator())
    style.percent_axis(axes)
    style.label(axes, "learning rate", y_label)
    side_legend(figure, axes, {name: best[name] for name in names}, styles, _describe_bands(seeds))
    return figure


def common_curve(curves: Sequence[Series]) -> Curve | None:
    """Return the curves at their common steps; None if there are none."""
    by_step = [dict(zip(*curve, strict=True)) for curve in curves]
    steps = sorted(set.intersection(*map(set, by_step))) if curves else []
    if not steps:
        return None
    values = [[curve[step] for step in steps] for curve in by_step]
    return Curve(np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64))


def entropy_of(record: ArmRunData) -> Series:
    """Return the entropy over the steps, smoothed as in the plot of a single run."""
    return record.entropy[0], smooth(record.entropy[1])[0] if record.entropy[1] else []


def _plot_over_steps(
    arms: Arms,
    styles: Mapping[str, ArmStyle],
    series_of: Callable[[ArmRunData], Series],
    texts: tuple[str, str, str],
    percent: bool,
) -> Figure | None:
    """Plot one line per arm with its band; the legend says what the bands are.

    Args:
        arms: the runs of each arm.
        styles: the line style of each arm.
        series_of: returns the series of a run.
        texts: title, subtitle and label of the y axis.
        percent: whether the values are shares in [0, 1], shown in percent.
    """
    found = {name: common_curve([series_of(record) for record in runs]) for name, runs in arms.items()}
    curves = {name: curve for name, curve in found.items() if curve is not None}
    if not curves:
        return None
    title, subtitle, y_label = texts
    bands = _describe_bands({len(curve.values_RS) for curve in curves.values()})
    figure, (axes,) = style.new_figure(
        title, subtitle if bands else f"{subtitle} · one seed per arm, no interval"
    )
    show_edges = len(curves) <= 4  # the edges of more bands are unreadable
    shown = [curve.values_RS for curve in curves.values()]
    for name, curve in curves.items():
        line, edges = styles[name], interval_band(curve.values_RS)
        if edges is not None:
            low, high = np.clip(edges, 0, 1 if percent else None)
            shown += [low, high]
            axes.fill_between(
                curve.steps,
                low,
                high,
                color=line.color,
                alpha=0.12 if len(curves) <= 2 else 0.07,
                linewidth=0,
            )
            for edge in (low, high) if show_edges else ():
                axes.plot(curve.steps, edge, color=line.color, alpha=0.45, linewidth=0.8)
        axes.plot(
            curve.steps,
            curve.mean,
            color=line.color,
            linestyle=line.dash,
            linewidth=line.width,
            marker="o" if len(curve.steps) <= 12 else None,
            markersize=5,
            zorder=3,
        )
    _fit_y_axis(axes, shown)
    style.steps_axis(axes, [step for curve in curves.values() for step in curve.steps])
    if percent:
        style.percent_axis(axes)
    style.label(axes, "step", y_label)
    final_values = {name: float(curve.mean[-1]) for name, curve in curves.items()}
    side_legend(figure, axes, final_values, styles, bands)
    return figure


def _plot_accuracy_entropy(
    arms: Arms,
    styles: Mapping[str, ArmStyle],
    accuracy: Callable[[ArmRunData], Series],
    level: float | None,
    subtitle: str,
    y_label: str,
) -> Figure | None:
    """Plot accuracy against entropy at the evaluated steps, with the last step and `level` marked."""
    paths: dict[str, tuple[Floats, Floats]] = {}
    for name, runs in arms.items():
        curve = common_curve([accuracy(record) for record in runs])
        entropy = common_curve([entropy_of(record) for record in runs])
        if curve is not None and entropy is not None:
            # The entropy recorded at a step is that of the policy after the previous step.
            paths[name] = np.interp(curve.steps, entropy.steps - 1, entropy.mean), curve.mean
    if not paths:
        return None
    figure, (axes,) = style.new_figure(
        "Held-out accuracy against entropy",
        f"{subtitle} · one dot per evaluation, a large one for the last; means over seeds",
    )
    for name, (entropies, accuracies) in paths.items():
        line = styles[name]
        axes.plot(
            entropies,
            accuracies,
            color=line.color,
            linestyle=line.dash,
            linewidth=line.width * 0.8,
            marker="o",
            markersize=3.5,
        )
        axes.plot(
            entropies[-1:],
            accuracies[-1:],
            color=line.color,
            marker="o",
            markersize=11,
            markeredgecolor="white",
            zorder=4,
        )
    if level is not None:
        axes.axhline(level, color=style.MUTED_COLOR, linewidth=0.8, zorder=1)
        axes.annotate(
            f"entropies compared at {percent_text(level)}",
            (1, level),
            xycoords=axes.get_yaxis_transform(),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            size=10.5,
            color=style.MUTED_COLOR,
        )
    axes.margins(0.06)
    axes.grid(axis="x", color=style.GRID_COLOR, linewidth=1)
    style.percent_axis(axes)
    style.label(axes, "entropy, nats per token", y_label)
    side_legend(figure, axes, {name: float(path[1][-1]) for name, path in paths.items()}, styles)
    return figure


def _describe_bands(runs: Collection[int]) -> str:
    """Return what the bands of curves over these numbers of runs show, a line for each kind; '' for no band."""
    texts = [
        "95% interval over seeds" if max(runs) > 2 else "",
        "range of two seeds" if 2 in runs else "",
        "none for one seed" if 1 in runs and max(runs) > 1 else "",
    ]
    return "\n".join(filter(None, texts)) if max(runs) > 1 else ""


def _fit_y_axis(axes: Axes, shown: Sequence[Floats]) -> None:
    """Set the y limits to the values of all runs and the ends of all bands, with some space."""
    low, high = min(float(each.min()) for each in shown), max(float(each.max()) for each in shown)
    pad = 0.06 * (high - low) or 0.05 * max(abs(high), 0.1)
    axes.set_ylim(max(0.0, low - pad), high + pad)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10]))
