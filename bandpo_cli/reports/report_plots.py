"""Plots of a report.

Metrics over steps with bands, accuracy against learning rate and against entropy, and a table of clip fractions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator
from matplotlib.transforms import offset_copy
from numpy.typing import NDArray

from bandpo_cli.metric_names import Axis
from bandpo_cli.reports import plot_style as style
from bandpo_cli.reports.compare_variants import Limits, Report, interval_band
from bandpo_cli.reports.run_plots import smooth
from bandpo_cli.reports.run_tables import RUN, RunTables, Score, at_axis, common_n, percent_text, scores_of
from bandpo_cli.reports.run_variants import format_setting
from bandpo_cli.reports.saturating_fit import SaturatingFit
from bandpo_cli.reports.tuned_settings import Lines, by_learning_rate

Floats = NDArray[np.float64]

Curves = Mapping[str, tuple[Floats, Floats]]
"""By variant: the S steps that all its R runs have, [S], and the values of the runs, [R, S]."""

MAX_VARIANTS_PLOTTED = 12
"""Lines of more variants cannot be distinguished: only the best ones and the baseline are plotted."""

_ENTROPY = "entropy, nats per token"
SHARE: Limits = (0.0, 1.0)
_LIMITS: Mapping[Score, Limits] = {"reward": (-np.inf, np.inf), "accuracy": SHARE}

_MAX_RATE_TICKS = 8  # learning rates up to this number are the ticks of their axis
_SPREAD_POINTS = 24.0  # width over which the lines of different methods at a learning rate are spread
_ROW_HEIGHT, _TICK_HEIGHT = 0.7, 0.94  # inches: a row of the table of clip fractions, the texts below it
_MIN_SHARE = 1e-4  # a smaller clip fraction has the colour of 0


def plot_all(tables: RunTables, report: Report, out: Path) -> dict[str, Path]:
    """Plot into `out` what the runs have data for, and the tuning; return the files by the names of `CAPTIONS`.

    Line styles are assigned in the order of the runs.
    """
    subtitle, sets = style.escape_mathtext(report.title), report.sets
    order = [variant.name for variant in report.variants]
    names = [name for name in order if name in order[:MAX_VARIANTS_PLOTTED] or name == report.baseline]
    every = tables.runs.index.unique("variant")
    styles = style.variant_styles([name for name in every if name in names], report.baseline)
    scores = scores_of(tables)
    amounts = None if tables.level is None else tables.steps["amount"]
    curves = {score: common_curves(tables.steps[score], names, amounts) for score in scores}
    by_run = tables.steps["entropy"].dropna().groupby(level=RUN, sort=False)
    entropies = by_run.transform(lambda values: smooth(values.tolist())[0]).reindex(tables.steps.index)
    by_step = common_curves(tables.steps["accuracy"], names), common_curves(entropies, names)
    entropy = common_curves(entropies, names, amounts)
    over = tables.axis, tables.level
    over_sets = f", mean of {len(sets)} sets" if len(sets) > 1 else ""
    y_labels = {
        "reward": f"held-out reward{over_sets}",
        "accuracy": f"held-out accuracy, mean@{common_n(tables.runs, sets)}{over_sets}",
    }
    figures: dict[str, Figure | None] = {}
    for score in scores:
        title, y_label = f"Held-out {score}", y_labels[score]
        figures[score] = _plot_over(over, curves[score], styles, title, subtitle, y_label, _LIMITS[score])
        rates = by_learning_rate(tables.runs, score)
        title += " against learning rate"
        figures[f"{score}_lr"] = plot_by_learning_rate(rates, title, subtitle, y_label, _LIMITS[score])
    title, y_label = "Entropy of the policy", y_labels["accuracy"]
    figures["entropy"] = _plot_over(over, entropy, styles, title, subtitle, _ENTROPY, (0, np.inf))
    against = *by_step, styles, report.accuracy_level, subtitle, y_label
    figures["accuracy_entropy"] = _plot_accuracy_entropy(*against)
    figures["clip_by_probability"] = _plot_clip_table(tables.bins, names, styles, subtitle)
    figures["accuracy_fit"] = _plot_fits(report.fits, styles, subtitle, tables.axis.label, y_label)
    if (tuning := report.tuning) is not None:
        score = scores[0] if tuning.metric == "area" else tuning.metric
        title, sweep = f"Tuning: held-out {score} against learning rate", style.escape_mathtext(tuning.sweep)
        label = f"{'area under ' if tuning.metric == 'area' else ''}held-out {score}"
        lines = tuning.by_learning_rate()
        figures["tuning_lr"] = plot_by_learning_rate(lines, title, sweep, label, _LIMITS[score])
    return {name: style.save(plot, out / f"{name}.png") for name, plot in figures.items() if plot is not None}


def plot_by_learning_rate(
    lines: Lines, title: str, subtitle: str, y_label: str, limits: Limits
) -> Figure | None:
    """Plot the final values against the learning rate, a line per method; None for fewer than two learning rates.

    `lines` have one value per seed, by name of the line and learning rate. Of more than `MAX_VARIANTS_PLOTTED` lines,
    those with the highest best mean are plotted. Values within the limits of a share are shown in percent.
    """
    if max((len(line) for line in lines.values()), default=0) < 2:
        return None
    means = {name: {rate: fmean(line[rate]) for rate in sorted(line)} for name, line in lines.items()}
    best = {name: max(line.values()) for name, line in means.items()}
    names = sorted(best, key=lambda name: -best[name])[:MAX_VARIANTS_PLOTTED]
    styles = style.variant_styles([name for name in lines if name in names], None)
    subtitle += " · means over seeds, a large dot for the best"
    if len(names) < len(lines):
        subtitle += f"; the {len(names)} best of {len(lines)} methods"
    figure, (axes,) = style.new_figure(title, subtitle)
    axes.set_xscale("log")
    shown: list[Floats] = []
    for index, (name, line) in enumerate(styles.items()):
        shift = _SPREAD_POINTS * (index / (len(styles) - 1) - 0.5) if len(styles) > 1 else 0.0
        place = {"transform": offset_copy(axes.transData, figure, x=shift, units="points")}
        bar: dict[str, Any] = {"alpha": 0.25, "linewidth": 6, "solid_capstyle": "butt", **place}
        for rate in means[name]:
            values_R1 = np.array(lines[name][rate], dtype=np.float64)[:, np.newaxis]
            edges = interval_band(values_R1)
            shown.append(values_R1 if edges is None else np.clip(edges, *limits))
            axes.plot([rate, rate], [shown[-1].min(), shown[-1].max()], color=line["color"], **bar)
        dots: dict[str, Any] = {"clip_on": False, **place}  # a dot at an accuracy of 0 is not cut off
        axes.plot(*zip(*means[name].items(), strict=True), marker="o", markersize=5, zorder=3, **line, **dots)
        best_rate = max(means[name], key=means[name].__getitem__)
        axes.plot(best_rate, best[name], color=line["color"], **style.LARGE_DOT, **dots)
    _fit_y_axis(axes, shown, limits)
    all_rates = sorted({rate for name in names for rate in lines[name]})
    axes.set_xlim(all_rates[0] / 1.5, all_rates[-1] * 1.5)
    if len(all_rates) <= _MAX_RATE_TICKS:
        axes.set_xticks(all_rates, [format_setting(rate) for rate in all_rates])
        axes.xaxis.set_minor_locator(NullLocator())
    style.label(axes, "learning rate", y_label, percent=limits == SHARE)
    seeds = {len(accuracies) for name in names for accuracies in lines[name].values()}
    style.side_legend(figure, axes, {name: best[name] for name in names}, styles, _describe_bands(seeds))
    return figure


def common_curves(
    values: pd.Series[float], names: Sequence[str], amounts: pd.Series[float] | None = None
) -> Curves:
    """Return the curves of each variant at the steps that all its runs have, without variants that have none.

    On another axis, runs are not at the same place at a step: the places are the means over the runs at these steps,
    within the range of all runs, and the values of a run are linear between its own places.

    Args:
        values: values with the index variant, seed and step.
        amounts: what each run has taken on the axis, with the same index; None for steps.
    """
    curves = {}
    for name in names:
        table = values.xs(name, level="variant").unstack("seed").sort_index().dropna()
        if not len(table):
            continue
        steps = table.index.to_numpy(float)
        if amounts is None:
            curves[name] = steps, table.to_numpy().T
            continue
        places = amounts.xs(name, level="variant").unstack("seed").loc[table.index]
        grid = np.unique(places.mean(axis=1).clip(places.iloc[0].max(), places.iloc[-1].min()))
        curves[name] = grid, np.array([at_axis(table[seed], places[seed], grid) for seed in table])
    return curves


def _plot_over(
    over: tuple[Axis, float | None],
    curves: Curves,
    styles: style.LineStyles,
    title: str,
    subtitle: str,
    y_label: str,
    limits: Limits,
) -> Figure | None:
    """Plot one line per variant with its band; values within the limits of a share are shown in percent.

    `over` is the axis, and the place on it at which runs are compared, which is marked; None for none.
    """
    if not curves:
        return None
    bands = _describe_bands({len(values_RS) for _, values_RS in curves.values()})
    subtitle += "" if bands else " · one seed per variant, no interval"
    figure, (axes,) = style.new_figure(title, subtitle)
    shown = [values_RS for _, values_RS in curves.values()]
    for name, (steps, values_RS) in curves.items():
        color, edges = styles[name]["color"], interval_band(values_RS)
        if edges is not None:
            low, high = np.clip(edges, *limits)
            shown += [low, high]
            alpha = 0.12 if len(curves) <= 2 else 0.07
            axes.fill_between(steps, low, high, color=color, alpha=alpha, linewidth=0)
            for edge in (low, high) if len(curves) <= 4 else ():  # the edges of more bands are unreadable
                axes.plot(steps, edge, color=color, alpha=0.45, linewidth=0.8)
        marker = "o" if len(steps) <= 12 else None
        axes.plot(steps, values_RS.mean(axis=0), marker=marker, markersize=5, zorder=3, **styles[name])
    _fit_y_axis(axes, shown, limits)
    (axis, level), places = over, [place for grid, _ in curves.values() for place in grid]
    style.amount_axis(axes, axis, places)
    if level is not None:
        dashes: dict[str, Any] = {"linewidth": 1.2, "linestyle": (0, (4, 3)), "zorder": 1}
        axes.axvline(level, color=style.MUTED_COLOR, **dashes)
    style.label(axes, axis.label, y_label, percent=limits == SHARE)
    final_values = {name: float(values_RS[:, -1].mean()) for name, (_, values_RS) in curves.items()}
    style.side_legend(figure, axes, final_values, styles, bands)
    return figure


def _plot_fits(
    fits: Sequence[SaturatingFit], styles: style.LineStyles, subtitle: str, x_label: str, y_label: str
) -> Figure | None:
    """Plot the fitted curves over the mean accuracies, and the intervals of the identified asymptotes."""
    fits = [fit for fit in fits if fit.curve and fit.variant in styles]
    if not fits:
        return None
    subtitle += " · dots: means over seeds, hollow before the fit; bands: asymptotes, where identified"
    figure, (axes,) = style.new_figure("Saturating fits of held-out accuracy", subtitle)
    for fit in fits:
        line = styles[fit.variant]
        dots: dict[str, Any] = {"color": line["color"], "marker": "o", "markersize": 5, "linestyle": "none"}
        early = len(fit.observed) - fit.evaluations
        axes.plot(*zip(*fit.observed[:early], strict=True), markerfacecolor="white", **dots)
        axes.plot(*zip(*fit.observed[early:], strict=True), alpha=0.5, **dots)
        axes.plot(*zip(*fit.curve, strict=True), zorder=3, **line)
        if fit.asymptote is not None and not fit.unidentified:
            axes.axhspan(fit.asymptote.low, fit.asymptote.high, color=line["color"], alpha=0.1, linewidth=0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10]))
    style.label(axes, x_label, y_label, percent=True)
    style.side_legend(figure, axes, {fit.variant: fit.curve[-1][1] for fit in fits}, styles)
    return figure


def _plot_accuracy_entropy(
    accuracy: Curves,
    entropy: Curves,
    styles: style.LineStyles,
    level: float | None,
    subtitle: str,
    y_label: str,
) -> Figure | None:
    """Plot accuracy against entropy at the evaluated steps, with the last step and `level` marked."""
    if not (names := [name for name in accuracy if name in entropy]):
        return None
    subtitle += " · one dot per evaluation, a large dot for the last evaluation; means over seeds"
    figure, (axes,) = style.new_figure("Held-out accuracy against entropy", subtitle)
    final_values = {}
    for name in names:
        (steps, accuracies_RS), (entropy_steps, entropies_RS) = accuracy[name], entropy[name]
        # The entropy recorded at a step is the entropy of the policy after the previous step.
        entropies = np.interp(steps, entropy_steps - 1, entropies_RS.mean(axis=0))
        accuracies = accuracies_RS.mean(axis=0)
        thin = {**styles[name], "linewidth": styles[name]["linewidth"] * 0.8}
        axes.plot(entropies, accuracies, marker="o", markersize=3.5, **thin)
        axes.plot(entropies[-1:], accuracies[-1:], color=thin["color"], **style.LARGE_DOT)
        final_values[name] = float(accuracies[-1])
    if level is not None:
        axes.axhline(level, color=style.MUTED_COLOR, linewidth=0.8, zorder=1)
        text, across = f"entropies compared at {percent_text(level)}", axes.get_yaxis_transform()
        place: dict[str, Any] = {"xytext": (0, 3), "textcoords": "offset points", "ha": "right", "size": 10.5}
        axes.annotate(text, (1, level), xycoords=across, color=style.MUTED_COLOR, **place)
    axes.margins(0.06)
    axes.grid(axis="x", color=style.GRID_COLOR, linewidth=1)
    style.label(axes, _ENTROPY, y_label, percent=True)
    style.side_legend(figure, axes, final_values, styles)
    return figure


def _plot_clip_table(
    table: pd.DataFrame, variants: Sequence[str], styles: style.LineStyles, subtitle: str
) -> Figure | None:
    """Plot the clip fraction as a table of variants and bins of π_old; None without data."""
    clipped = table.dropna().groupby(["variant", "bin"])["clipped"].agg(fmean).unstack()
    if not (names := [name for name in variants if name in clipped.index]):
        return None
    token_shares = (
        table[table["variant"].isin(names)].dropna(subset="tokens").groupby("bin")["tokens"].agg(fmean)
    )
    bins = sorted(token_shares.index, key=lambda text: float(text.split()[0]))
    values = clipped.reindex(index=names, columns=bins).to_numpy()
    subtitle += " · clip fraction of the tokens of each bin, mean over steps and seeds"
    height = min(style.HEIGHT, style.HEADER + _ROW_HEIGHT * len(names) + _TICK_HEIGHT)
    figure, (axes,) = style.new_figure("Clip fraction by probability", subtitle, height=height)
    shares = np.where(values < _MIN_SHARE, _MIN_SHARE, values)
    colormap, norm = colormaps["Blues"], LogNorm(_MIN_SHARE, 3.0)
    axes.imshow(shares, cmap=colormap, norm=norm, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        text = "–" if np.isnan(value) else _share_text(value)
        dark = not np.isnan(value) and float(np.mean(colormap(norm(shares[row, column]))[:3])) < 0.57
        color = "white" if dark else style.TEXT_COLOR
        axes.text(column, row, text, ha="center", va="center", size=11, color=color)
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    axes.set_yticks(range(len(names)), [styles[name]["label"] for name in names], color=style.TEXT_COLOR)
    axes.set_xticks(range(len(bins)), [f"{key}\n{_share_text(token_shares[key])} of all" for key in bins])
    style.label(axes, "probability of the token under the old policy, and the bin's share of all tokens", "")
    # The left edge of the axes fits the row names; above are the titles, below the names of the bins.
    figure.canvas.draw()
    widest = max(tick.get_window_extent().width for tick in axes.get_yticklabels()) / figure.bbox.width
    left = 0.03 + widest + 0.012
    axes.set_position(
        (left, _TICK_HEIGHT / height, 0.975 - left, (height - style.HEADER - _TICK_HEIGHT) / height)
    )
    return figure


def _share_text(share: float) -> str:
    return f"{100 * share:.2g}%" if share < 0.995 else "100%"


def _describe_bands(runs: Collection[int]) -> str:
    """Return what the bands of curves over these numbers of runs show, a line for each kind; '' for no band."""
    if max(runs) == 1:
        return ""
    texts = {3: "95% interval over seeds", 2: "range of two seeds", 1: "none for one seed"}
    kinds = {min(number, 3) for number in runs}
    return "\n".join(text for kind, text in texts.items() if kind in kinds)


def _fit_y_axis(axes: Axes, shown: Sequence[Floats], limits: Limits) -> None:
    """Set the y limits to the values of all runs and the ends of all bands, with some space."""
    low, high = min(float(values.min()) for values in shown), max(float(values.max()) for values in shown)
    pad = 0.06 * (high - low) or 0.05 * max(abs(high), 0.1)
    axes.set_ylim(max(limits[0], low - pad), high + pad)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10]))
