"""Plots of a report.

Metrics over steps with bands, accuracy against learning rate and against entropy, and a table of clipped tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator
from matplotlib.transforms import offset_copy
from numpy.typing import NDArray

from bandpo_cli.reports import style
from bandpo_cli.reports.comparison.report_metrics import percent_text
from bandpo_cli.reports.comparison.runs import VariantRunData, accuracy_of
from bandpo_cli.reports.comparison.selection import format_setting
from bandpo_cli.reports.comparison.statistics import interval_band
from bandpo_cli.reports.comparison.tuning import accuracy_by_learning_rate
from bandpo_cli.reports.comparison.variants import Report
from bandpo_cli.reports.run_plots import Series, smooth
from bandpo_cli.reports.style import (
    HEADER,
    HEIGHT,
    VariantStyle,
    escape_mathtext,
    side_legend,
    variant_styles,
)

Floats = NDArray[np.float64]
Variants = Mapping[str, Sequence[VariantRunData]]

MAX_VARIANTS_PLOTTED = 12
"""Lines of more variants cannot be distinguished: only the most accurate ones and the baseline are plotted."""

_MAX_RATE_TICKS = 8
"""Learning rates up to this number are the ticks of their axis."""

_SPREAD_POINTS = 24.0
"""Width, in points, over which the lines of the plot against the learning rate are spread, so that bars stay apart."""

_ROW_HEIGHT, _TICK_HEIGHT = 0.7, 0.94
"""Inches: height of a row of the table of clipped tokens where there are few, and of the texts below the table."""

_MIN_SHARE = 1e-4  # a smaller share of clipped tokens has the colour of 0


@dataclass(frozen=True)
class Curve:
    """Values of a variant at the S steps that all its R runs have.

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


def plot_all(arms: Variants, report: Report, out: Path) -> dict[str, Path]:
    """Plot into `out` what the runs of `arms` have data for, and the tuning of `report`.

    Line styles are assigned in the order of `arms`.

    Returns:
        The written files by the names of `tables.CAPTIONS`.
    """
    subtitle, sets = escape_mathtext(report.title), report.sets
    order = [arm.name for arm in report.arms]
    names = [name for name in order if name in order[:MAX_VARIANTS_PLOTTED] or name == report.baseline]
    styles = variant_styles([name for name in arms if name in names], report.baseline)
    plotted = {name: arms[name] for name in names}

    def accuracy(record: VariantRunData) -> Series:
        return accuracy_of(record, sets)

    ns = {record.sets[label].n for runs in arms.values() for record in runs for label in sets}
    over_sets = f", mean of {len(sets)} sets" if len(sets) > 1 else ""
    y_label = f"held-out accuracy, mean@{ns.pop() if len(ns) == 1 else 'n'}{over_sets}"
    entropy_texts = ("Entropy of the policy", subtitle, "entropy, nats per token")
    lines = accuracy_by_learning_rate(arms, sets)
    figures = {
        "accuracy": _plot_over_steps(
            plotted, styles, accuracy, ("Held-out accuracy", subtitle, y_label), True
        ),
        "accuracy_lr": plot_accuracy_lr(lines, subtitle, y_label),
        "entropy": _plot_over_steps(plotted, styles, entropy_of, entropy_texts, False),
        "accuracy_entropy": _plot_accuracy_entropy(
            plotted, styles, accuracy, report.accuracy_level, subtitle, y_label
        ),
        "clip_by_probability": _plot_clip_table(plotted, styles, subtitle),
    }
    if report.tuning is not None:
        figures["tuning_lr"] = plot_accuracy_lr(
            report.tuning.by_learning_rate(),
            escape_mathtext(report.tuning.sweep),
            "held-out accuracy" if report.tuning.metric == "accuracy" else "area under held-out accuracy",
            "Tuning: held-out accuracy against learning rate",
        )
    shown = {name: figure for name, figure in figures.items() if figure is not None}
    return {name: style.save(figure, out / f"{name}.png") for name, figure in shown.items()}


def plot_accuracy_lr(
    lines: Mapping[str, Mapping[float, Sequence[float]]],
    subtitle: str,
    y_label: str,
    title: str = "Held-out accuracy against learning rate",
) -> Figure | None:
    """Plot the final accuracy against the learning rate, a line per method; None for fewer than two learning rates.

    Args:
        lines: accuracies by name of the line and learning rate, one value per seed. With more than
            `MAX_VARIANTS_PLOTTED` lines, those with the highest best mean are plotted.
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
    names = sorted(best, key=lambda name: -best[name])[:MAX_VARIANTS_PLOTTED]
    styles = variant_styles([name for name in lines if name in names], None)
    seeds = {len(accuracies) for name in names for accuracies in lines[name].values()}
    subtitle += " · means over seeds, a large dot for the best"
    if len(names) < len(lines):
        subtitle += f"; the {len(names)} most accurate of {len(lines)} methods"
    figure, (axes,) = style.new_figure(title, subtitle)
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
            bar: dict[str, Any] = {"alpha": 0.25, "linewidth": 6, "solid_capstyle": "butt"}
            ends = [low_high.min(), low_high.max()]
            axes.plot([rate, rate], ends, color=line.color, transform=place, **bar)
        # Dots at an accuracy of 0 are not cut off.
        dots: dict[str, Any] = {"transform": place, "clip_on": False}
        values = list(means[name].values())
        axes.plot(rates, values, marker="o", markersize=5, zorder=3, **line.line, **dots)
        best_rate = max(rates, key=lambda rate: means[name][rate])
        axes.plot(best_rate, best[name], color=line.color, **style.LARGE_DOT, **dots)
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


def entropy_of(record: VariantRunData) -> Series:
    """Return the entropy over the steps, smoothed as in the plot of a single run."""
    return record.entropy[0], smooth(record.entropy[1])[0] if record.entropy[1] else []


def _plot_over_steps(
    arms: Variants,
    styles: Mapping[str, VariantStyle],
    series_of: Callable[[VariantRunData], Series],
    texts: tuple[str, str, str],
    percent: bool,
) -> Figure | None:
    """Plot one line per variant with its band; the legend says what the bands are.

    Args:
        arms: the runs of each variant.
        styles: the line style of each variant.
        series_of: returns the series of a run.
        texts: title, subtitle and label of the y axis.
        percent: whether the values are shares in [0, 1], shown in percent.
    """
    common = {name: common_curve([series_of(record) for record in runs]) for name, runs in arms.items()}
    curves = {name: curve for name, curve in common.items() if curve is not None}
    if not curves:
        return None
    title, subtitle, y_label = texts
    bands = _describe_bands({len(curve.values_RS) for curve in curves.values()})
    figure, (axes,) = style.new_figure(
        title, subtitle if bands else f"{subtitle} · one seed per variant, no interval"
    )
    show_edges = len(curves) <= 4  # the edges of more bands are unreadable
    shown = [curve.values_RS for curve in curves.values()]
    for name, curve in curves.items():
        line, edges = styles[name], interval_band(curve.values_RS)
        if edges is not None:
            low, high = np.clip(edges, 0, 1 if percent else None)
            shown += [low, high]
            alpha = 0.12 if len(curves) <= 2 else 0.07
            axes.fill_between(curve.steps, low, high, color=line.color, alpha=alpha, linewidth=0)
            for edge in (low, high) if show_edges else ():
                axes.plot(curve.steps, edge, color=line.color, alpha=0.45, linewidth=0.8)
        marker = "o" if len(curve.steps) <= 12 else None
        axes.plot(curve.steps, curve.mean, marker=marker, markersize=5, zorder=3, **line.line)
    _fit_y_axis(axes, shown)
    style.steps_axis(axes, [step for curve in curves.values() for step in curve.steps])
    if percent:
        style.percent_axis(axes)
    style.label(axes, "step", y_label)
    final_values = {name: float(curve.mean[-1]) for name, curve in curves.items()}
    side_legend(figure, axes, final_values, styles, bands)
    return figure


def _plot_accuracy_entropy(
    arms: Variants,
    styles: Mapping[str, VariantStyle],
    accuracy: Callable[[VariantRunData], Series],
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
            # The entropy recorded at a step is the entropy of the policy after the previous step.
            paths[name] = np.interp(curve.steps, entropy.steps - 1, entropy.mean), curve.mean
    if not paths:
        return None
    figure, (axes,) = style.new_figure(
        "Held-out accuracy against entropy",
        f"{subtitle} · one dot per evaluation, a large dot for the last evaluation; means over seeds",
    )
    for name, (entropies, accuracies) in paths.items():
        line = styles[name]
        thin = {**line.line, "linewidth": line.width * 0.8}
        axes.plot(entropies, accuracies, marker="o", markersize=3.5, **thin)
        axes.plot(entropies[-1:], accuracies[-1:], color=line.color, **style.LARGE_DOT)
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


def _plot_clip_table(arms: Variants, styles: Mapping[str, VariantStyle], subtitle: str) -> Figure | None:
    """Plot the clipped share of the tokens as a table of variants and bins of π_old; None without data."""
    clipped = {name: _mean_by_key([record.clipped_by_bin for record in runs]) for name, runs in arms.items()}
    names = [name for name in arms if clipped[name]]
    if not names:
        return None
    token_shares = _mean_by_key([record.token_share for name in names for record in arms[name]])
    bins = sorted(token_shares, key=lambda name: float(name.split("_")[1]))
    values = np.array([[clipped[name].get(key, np.nan) for key in bins] for name in names])
    figure, (axes,) = style.new_figure(
        "Clipped tokens by probability",
        f"{subtitle} · clipped share of the tokens of each bin, mean over steps and seeds",
        height=min(HEIGHT, HEADER + _ROW_HEIGHT * len(names) + _TICK_HEIGHT),
    )
    shares = np.where(values >= _MIN_SHARE, values, _MIN_SHARE)
    colormap, norm = colormaps["Blues"], LogNorm(_MIN_SHARE, 3.0)
    axes.imshow(np.where(np.isnan(values), np.nan, shares), cmap=colormap, norm=norm, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        text = "–" if np.isnan(value) else _share_text(value)
        dark = not np.isnan(value) and float(np.mean(colormap(norm(shares[row, column]))[:3])) < 0.57
        color = "white" if dark else style.TEXT_COLOR
        axes.text(column, row, text, ha="center", va="center", size=11, color=color)
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    axes.set_yticks(range(len(names)), [styles[name].name for name in names], color=style.TEXT_COLOR)
    ranges = [" – ".join(key.split("_")[1:]) for key in bins]
    texts = [
        f"{range_}\n{_share_text(token_shares[key])} of all" for key, range_ in zip(bins, ranges, strict=True)
    ]
    axes.set_xticks(range(len(bins)), texts)
    style.label(axes, "probability of the token under the old policy, and the bin's share of all tokens", "")
    # The left edge of the axes fits the row names; above are the titles, below the names of the bins.
    figure.canvas.draw()
    widest = max(tick.get_window_extent().width for tick in axes.get_yticklabels()) / figure.bbox.width
    left, height = 0.03 + widest + 0.012, figure.get_figheight()
    axes.set_position((left, _TICK_HEIGHT / height, 0.975 - left, (height - HEADER - _TICK_HEIGHT) / height))
    return figure


def _mean_by_key(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each key over the runs that have it."""
    keys = dict.fromkeys(key for run in values for key in run)
    return {key: float(np.mean([run[key] for run in values if key in run])) for key in keys}


def _share_text(share: float) -> str:
    return f"{100 * share:.2g}%" if share < 0.995 else "100%"


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
    low, high = min(float(values.min()) for values in shown), max(float(values.max()) for values in shown)
    pad = 0.06 * (high - low) or 0.05 * max(abs(high), 0.1)
    axes.set_ylim(max(0.0, low - pad), high + pad)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10]))
