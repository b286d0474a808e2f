"""Plots of a training run and of an evaluation, made from their folders and written to `plots/*.png`."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from bandpo_cli.bounds.intervals import clip_state
from bandpo_cli.errors import plural
from bandpo_cli.evaluation.scores import success_axis, success_histogram
from bandpo_cli.metric_names import (
    HELDOUT_REWARD,
    LABELS,
    SCORE,
    STEP,
    Axis,
    has_nonbinary_rewards,
    probability_bins,
)
from bandpo_cli.reports import plot_style as style
from bandpo_cli.storage.files import step_of
from bandpo_cli.storage.run_folder import RECORD_FILE, RunFolder
from bandpo_cli.storage.run_record import iterate_evaluations, read_record
from bandpo_cli.storage.tables import read_token_table

Record = Mapping[str, Any]
Curve = dict[float, float]
"""Values of a metric by step, or by what the run had taken then, of the steps that have a value, ascending."""

Intervals = Mapping[str, Mapping[float, tuple[float, float]]]
"""Ends of the 95% interval over problems, by metric and place on the axis; only where there is one."""

MAX_POINTS = 5_000  # per kind of token; with more tokens only every second, third, ... is plotted
_LABEL_CHARS, _SUBTITLE_CHARS = 24, 105  # three legend names fit side by side, a subtitle fits on one line

_SETTING_SYMBOLS = {
    "divergence": "", "delta": "δ ", "delta_end": "to δ ", "eps_low": "ε₋ ", "eps_high": "ε₊ ", "eps": "ε ",
    "tau_positive": "τ₊ ", "tau_negative": "τ₋ ", "max_weight": "w ≤ ",
}  # fmt: skip

_HELDOUT_LINE: dict[str, Any] = {
    "marker": "o", "linestyle": "-", "linewidth": 2.2, "markersize": 6, "zorder": 3,
}  # fmt: skip

_PASS_MARKERS = ("s", "^", "D", "v", "P")  # one per k, since the pass@k lines of a task share its colour

_CLIP_LINES = {
    "clip/outside_fraction": style.MUTED_COLOR, "clip/active_fraction": style.TEXT_COLOR,
    "clip/upper_fraction": style.RED, "clip/lower_fraction": style.BLUE,
}  # fmt: skip


def plot_run(folder: Path, out: Path | None = None, suffix: str = ".png", axis: Axis = STEP) -> list[Path]:
    """Plot the metrics of the run in `folder` and return the files that were written; a plot without data is skipped.

    Args:
        out: folder of the plots; None for `plots/` in the run folder.
        suffix: `.png`, `.pdf` or `.svg`.
        axis: the x axis of the curves.

    Raises:
        UserError: `metrics.jsonl` or the record of an evaluation is damaged, or the run has no metric of the axis.
    """
    records, subtitle = RunFolder(folder).read_metrics(), run_subtitle(folder)
    amounts = axis.by_step(records, folder)
    intervals = {
        name: {amounts[step]: ends for step, ends in by_step.items() if step in amounts}
        for name, by_step in read_intervals(folder).items()
    }
    figures = {
        "reward": plot_reward(records, intervals, subtitle, axis),
        "accuracy": plot_accuracy(records, intervals, subtitle, axis),
        "entropy": plot_entropy(records, subtitle, axis),
        "clip": plot_clip(records, subtitle, axis),
        "clip_map": plot_clip_map(folder, subtitle),
    }
    out = out or folder / "plots"
    return [style.save(plot, out / f"{name}{suffix}") for name, plot in figures.items() if plot is not None]


def plot_success_histogram(folder: Path) -> Path:
    """Plot `plots/success.png` from the `eval.json` in `folder`: problems by their number of correct completions.

    The bars are the bins of `success_histogram`. With more sets than colours, only the first sets are plotted.
    """
    all_sets = read_record(folder / RECORD_FILE)["sets"]
    sets = dict(islice(all_sets.items(), len(style.CYCLE)))
    ((first, scores), *others) = sets.items()
    about = f"{plural(scores['problems'], 'problem')} of {first}"
    if others:
        about = f"{f'the first {len(sets)} of ' if len(sets) < len(all_sets) else ''}{len(all_sets)} sets"
    subtitle = f"{about} · {folder.resolve().name}"
    subtitle = subtitle if len(subtitle) <= _SUBTITLE_CHARS else f"{subtitle[: _SUBTITLE_CHARS - 1]}…"
    figure, (axes,) = style.new_figure("Problems by correct completions", subtitle)
    sizes = {size for scores in sets.values() for size in scores["completions_per_problem"]}
    n = sizes.pop() if len(sizes) == 1 else None
    width = 0.8 / len(sets)
    for index, (label, scores) in enumerate(sets.items()):
        problems = scores["by_problem"].values()
        names, counts = zip(*success_histogram([next(iter(p.values())) for p in problems], n), strict=True)
        places = np.arange(len(counts)) + (index - (len(sets) - 1) / 2) * width
        short = label if len(label) <= _LABEL_CHARS else f"{label[: _LABEL_CHARS - 1]}…"
        text = f"{short} ({scores['problems']:,})"
        axes.bar(places, np.array(counts) / len(problems), width, color=style.CYCLE[index], label=text)
        axes.set_xticks(range(len(names)), [name.replace(" ", "") for name in names])
        axes.set_xlim(-0.6, len(names) - 0.4)
    style.label(axes, success_axis(n), "share of the problems", percent=True)
    if others:
        style.legend(axes, columns=3)
    return style.save(figure, folder / "plots" / "success.png")


def read_intervals(folder: Path) -> Intervals:
    """Return the 95% intervals of a run's evaluations from `evals/step-*.json`; raise UserError if one is damaged."""
    intervals: dict[str, dict[float, tuple[float, float]]] = {}
    for row in iterate_evaluations(folder):
        if row["low"] is not None:
            ends = intervals.setdefault(f"eval/{row['set']}/{row['metric']}", {})
            ends[row["step"]] = row["low"], row["high"]
    return intervals


def plot_reward(
    records: Sequence[Record], intervals: Intervals, subtitle: str, axis: Axis = STEP
) -> Figure | None:
    """Plot the mean reward of training and, with its interval, of every evaluation set over the steps.

    None if rewards are just 0 and 1: their mean is the accuracy.
    """
    if not any(map(has_nonbinary_rewards, records)):
        return None
    train = series(records, "train/reward", axis)
    names = sorted(filter(HELDOUT_REWARD.fullmatch, {name for record in records for name in record}))
    curves = [series(records, name, axis) for name in names]
    figure, (axes,) = style.new_figure("Reward", subtitle)
    if train:
        _plot_smoothed(axes, train, LABELS["train/reward"].name, style.MUTED_COLOR)
    for name, curve, color in zip(names, curves, cycle(style.CYCLE), strict=False):
        _plot_interval(axes, curve, intervals.get(name, {}), color)
        label = f"held-out {style.legend_name(name.split('/', 1)[1].removesuffix('/reward'))}"
        axes.plot(list(curve), list(curve.values()), color=color, label=label, **_HELDOUT_LINE)
    _explain_interval(axes, "95% interval over problems")
    style.label(axes, axis.label, "mean reward")
    return _finish(figure, axis, [axes], [step for curve in (train, *curves) for step in curve])


def plot_accuracy(
    records: Sequence[Record], intervals: Intervals, subtitle: str, axis: Axis = STEP
) -> Figure | None:
    """Plot training accuracy and, for every evaluation set, mean@n with its interval and pass@k over the steps.

    The intervals of pass@k are not plotted: those of several k overlap.
    """
    train = series(records, "train/accuracy", axis)
    matches = filter(None, map(SCORE.fullmatch, {name for record in records for name in record}))
    names = sorted((match[1], match[2], int(match[3]), match[0]) for match in matches if match[3] != "n")
    curves = [series(records, name, axis) for *_, name in names]
    steps = [step for curve in (train, *curves) for step in curve]
    if not steps:
        return None
    figure, (axes,) = style.new_figure("Accuracy", subtitle)
    if train:
        _plot_smoothed(axes, train, LABELS["train/accuracy"].name, style.MUTED_COLOR)
    tasks = sorted({task for task, *_ in names})
    ks = sorted({count for _, measure, count, _ in names if measure == "pass"})
    for (task, measure, count, name), curve in zip(names, curves, strict=True):
        color = style.CYCLE[tasks.index(task) % len(style.CYCLE)]
        line = _HELDOUT_LINE
        if measure == "mean":
            _plot_interval(axes, curve, intervals.get(name, {}), color)
        else:
            marker = _PASS_MARKERS[ks.index(count) % len(_PASS_MARKERS)]
            line = {**_HELDOUT_LINE, "marker": marker, "linestyle": (0, (4, 2)), "linewidth": 1.6}
            line["markerfacecolor"] = "white"
        name = f"held-out {style.legend_name(task)} {measure}@{count}"
        axes.plot(list(curve), list(curve.values()), color=color, label=name, clip_on=False, **line)
    _explain_interval(axes, "mean: 95% interval over problems")
    axes.set_ylim(0, 1)
    style.label(axes, axis.label, "correct answers", percent=True)
    return _finish(figure, axis, [axes], steps)


def plot_entropy(records: Sequence[Record], subtitle: str, axis: Axis = STEP) -> Figure | None:
    """Plot the entropy of the policy over the steps."""
    if not (curve := series(records, "train/entropy", axis)):
        return None
    figure, (axes,) = style.new_figure("Entropy of the policy", subtitle)
    meaning = "mean over the sampled tokens, under the policy that sampled them"
    _plot_smoothed(axes, curve, meaning, style.BLUE)
    axes.set_ylim(0, 1.08 * max(*curve.values(), 0.01))
    style.label(axes, axis.label, "entropy, nats per token")
    return _finish(figure, axis, [axes], list(curve))


def plot_clip(records: Sequence[Record], subtitle: str, axis: Axis = STEP) -> Figure | None:
    """Plot the clip fraction over the steps and, if recorded, per bin of probability."""
    all_lines = ((series(records, key, axis), LABELS[key].name, color) for key, color in _CLIP_LINES.items())
    if not (lines := [line for line in all_lines if line[0]]):
        return None
    bins = probability_bins({name for record in records for name in record if record[name] is not None})
    figure, panels = style.new_figure("Clip fraction", subtitle, panels=2 if bins else 1)
    for curve, text, color in lines:
        _plot_smoothed(panels[0], curve, text, color, show_values=False)
    style.label(panels[0], axis.label, "share of all tokens", percent=True)
    for index, (name, text) in enumerate(bins):
        bin_color = colormaps["viridis"](0.92 * (1 - index / max(len(bins) - 1, 1)))
        _plot_smoothed(panels[1], series(records, name, axis), f"p {text}", bin_color, show_values=False)
    if bins:
        style.label(panels[1], axis.label, "clip fraction of the tokens in that range of p", percent=True)
    for axes in panels:
        axes.set_ylim(bottom=0)
    return _finish(figure, axis, panels, list(lines[0][0]))


def plot_clip_map(folder: Path, subtitle: str) -> Figure | None:
    """Plot ratio against old probability of the tokens in the last token table of a run, clipped tokens marked.

    No plot is made if none of the tokens fits on log axes.
    """
    if not (tables := sorted((folder / "tokens").glob("step-*.parquet"))):
        return None
    columns = read_token_table(tables[-1])
    columns["prob"] = np.exp(columns["old_logprob"])
    shown = (columns["prob"] > 0) & np.isfinite(columns["ratio"]) & (columns["ratio"] > 0)
    if not shown.any():
        return None
    names = ("prob", "ratio", "lower", "upper", "advantage", "gradient_weight")
    prob, ratio, lower, upper, advantage, weight = (columns[name][shown] for name in names)
    subtitle = f"{subtitle} · step {step_of(tables[-1])} · {len(prob):,} tokens"
    figure, (axes,) = style.new_figure("Clip map", subtitle)
    # The y axis shows 99.9% of the ratios, lower bounds from 0.1 on and upper bounds up to 20.
    lowest, highest = np.quantile(ratio, [0.0005, 0.9995])
    low = np.clip(min(lowest, np.min(lower[lower >= 0.1], initial=1.0)) / 1.25, 1e-3, 0.7)
    high = np.clip(max(highest, np.max(upper[upper <= 20], initial=1.0)) * 1.25, 1.4, 1e3)
    clipped = (weight == 0) & (advantage != 0)
    kinds = [(~clipped, "not clipped", style.MUTED_COLOR, 5, 0.40)]
    if (lower > 0).any() or np.isfinite(upper).any():  # other methods have no interval: no inside and outside
        clipped = clip_state(ratio, lower, upper, advantage).active
        outside = (ratio > upper) | (ratio < lower)
        kinds = [(~outside, "inside", style.MUTED_COLOR, 5, 0.40)]
        kinds.append((outside & ~clipped, "outside, not clipped", style.ORANGE, 9, 0.7))
        order = np.argsort(prob)
        inside = np.maximum(lower, low)[order], np.minimum(upper, high)[order]
        area: dict[str, Any] = {"color": style.SKY, "alpha": 0.20, "linewidth": 0}
        axes.fill_between(prob[order], *inside, label="allowed interval", **area)
        for bound in (lower[order], upper[order]):  # a bound beyond the axes gets no line at their edge
            visible = np.where((bound > low) & (bound < high), bound, np.nan)
            axes.plot(prob[order], visible, color=style.BLUE, linewidth=1.6, zorder=4)
    p = np.geomspace(prob.min() / 1.3, 1.0, 200)
    dashes: Any = (0, (4, 3))
    axes.plot(p, 1 / p, color=style.TEXT_COLOR, linewidth=1.2, linestyle=dashes, zorder=4, label="limit 1/p")
    axes.axhline(1.0, color=style.MUTED_COLOR, linewidth=0.8)
    for mask, text, color, size, alpha in [*kinds, (clipped, "clipped", style.RED, 9, 0.7)]:
        index = np.flatnonzero(mask)
        share = len(index) / len(mask)
        name = f"{text} ({f'{100 * share:.2g}' if share < 0.995 else f'{100 * share:.4g}'} %)"
        index = index[:: max(1, -(-len(index) // MAX_POINTS))]
        dots: dict[str, Any] = {"s": size, "color": color, "alpha": alpha, "linewidth": 0, "label": name}
        axes.scatter(prob[index], ratio[index], **dots)
    axes.set(xscale="log", yscale="log", xlim=(prob.min() / 1.3, 1.25), ylim=(low, high))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(style.PLAIN_NUMBERS)
    style.label(axes, "probability of the token under the old policy", "ratio, new / old probability")
    style.legend(axes, columns=3, markerscale=2.0)
    return figure


def run_subtitle(folder: Path) -> str:
    """Return name and method of a run, `a · band, kl, δ 0.05`; only the name if there is no readable config."""
    name = folder.resolve().name
    try:
        bounds = dict(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["bounds"])
        method = str(bounds["method"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
        return name
    words = [f"{_SETTING_SYMBOLS[key]}{value}" for key, value in bounds.items()
             if key in _SETTING_SYMBOLS and value is not None]  # fmt: skip
    return f"{name} · {', '.join([method, *words])}"


def series(records: Iterable[Record], name: str, axis: Axis = STEP) -> Curve:
    """Return the values of the metric `name` over the axis, without the steps that have no value."""
    return {record[axis.key]: float(record[name]) for record in records if record.get(name) is not None}


def smooth(values: Sequence[float]) -> tuple[list[float], int]:
    """Return the centred moving mean and the width of its window: 1/15 of the values, odd, at most 51.

    At both ends the window is cut off, so the mean there is over fewer values; no values are padded.
    """
    half = min(len(values) // 30, 25)
    totals = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    means: list[float] = ((totals[high] - totals[low]) / (high - low)).tolist()
    return means, 2 * half + 1


def _plot_smoothed(axes: Axes, curve: Curve, name: str, color: Any, show_values: bool = True) -> None:
    """Plot the smoothed curve, behind it the values in a pale colour; a single value is a dot."""
    steps, values = list(curve), list(curve.values())
    means, width = smooth(values)
    if show_values and width > 1:
        axes.plot(steps, values, color=color, alpha=0.22, linewidth=1)
    marker = "o" if len(steps) == 1 else None
    line: dict[str, Any] = {"linewidth": 2.2, "solid_capstyle": "round", "marker": marker}
    axes.plot(steps, means, color=color, label=name, **line)


def _plot_interval(
    axes: Axes, steps: Iterable[float], ends: Mapping[float, tuple[float, float]], color: str
) -> None:
    """Shade the interval at the `steps` that have one; the interval of a single step is a line."""
    known = [step for step in steps if step in ends]
    low, high = [ends[step][0] for step in known], [ends[step][1] for step in known]
    if len(known) == 1:
        axes.vlines(known, low, high, color=color, alpha=0.5, linewidth=1.4)
    elif known:
        axes.fill_between(known, low, high, color=color, alpha=0.14, linewidth=0)


def _explain_interval(axes: Axes, meaning: str) -> None:
    """Add an entry of the legend for the shaded intervals, if there are any."""
    if axes.collections:
        axes.fill_between([], [], color=style.MUTED_COLOR, alpha=0.25, label=meaning)


def _finish(figure: Figure, axis: Axis, panels: Sequence[Axes], amounts: Sequence[float]) -> Figure:
    """Add the x axis and a legend to every panel."""
    for axes in panels:
        style.amount_axis(axes, axis, amounts)
    style.fit_legends(figure, panels)
    return figure
