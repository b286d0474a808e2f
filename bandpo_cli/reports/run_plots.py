"""Plots of a training run and of an evaluation, made from their folders and written to `plots/*.png`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bandpo_cli.errors import UserError
from bandpo_cli.evaluation.scores import success_axis, success_histogram
from bandpo_cli.reports import style
from bandpo_cli.reports.clip_map import plot_clip_map
from bandpo_cli.storage.eval_folder import RECORD_FILE, read_record
from bandpo_cli.storage.files import step_of
from bandpo_cli.storage.run_folder import read_metrics

Record = Mapping[str, Any]
Series = tuple[list[int], list[float]]
"""Steps and values of a metric, of the steps that have a value."""

Intervals = Mapping[str, Mapping[int, tuple[float, float]]]
"""Ends of the 95% interval over problems, by metric and step; only where there is one."""

_LABEL_CHARS, _SUBTITLE_CHARS = 24, 105  # three legend names fit side by side, a subtitle fits on one line

_SETTING_SYMBOLS = {
    "divergence": "",
    "delta": "δ ",
    "delta_end": "to δ ",
    "eps_low": "ε₋ ",
    "eps_high": "ε₊ ",
    "eps": "ε ",
    "tau_positive": "τ₊ ",
    "tau_negative": "τ₋ ",
    "max_weight": "w ≤ ",
}

_PASS_MARKERS = ("s", "^", "D", "v", "P")
"""One marker per k, since the pass@k lines of a task share its colour."""

_EVAL = re.compile(r"eval/(.+)/(mean|pass)_at_(\d+)")

_CLIP_LINES = (
    ("clip/outside_fraction", "outside the interval", style.MUTED_COLOR),
    ("clip/active_fraction", "clipped (zero gradient)", style.TEXT_COLOR),
    ("clip/upper_fraction", "clipped, positive advantage", style.RED),
    ("clip/lower_fraction", "clipped, negative advantage", style.BLUE),
)


def plot_run(folder: Path, out: Path | None = None, suffix: str = ".png") -> list[Path]:
    """Plot the metrics of the run in `folder` and return the files that were written.

    A plot without data is skipped.

    Args:
        folder: the run folder.
        out: folder of the plots; None for `plots/` in the run folder.
        suffix: `.png`, `.pdf` or `.svg`.

    Raises:
        UserError: `metrics.jsonl` or the record of an evaluation is damaged.
    """
    records = read_metrics(folder / "metrics.jsonl")
    subtitle = run_subtitle(folder)
    out = out or folder / "plots"
    plots = [
        plot_accuracy(records, read_intervals(folder), subtitle, out / f"accuracy{suffix}"),
        plot_entropy(records, subtitle, out / f"entropy{suffix}"),
        plot_clip(records, subtitle, out / f"clip{suffix}"),
        plot_clip_map(folder, subtitle, out / f"clip_map{suffix}"),
    ]
    return [path for path in plots if path is not None]


def plot_success_histogram(folder: Path) -> Path:
    """Plot `plots/success.png` from the `eval.json` in `folder`: problems by their number of correct completions.

    The bars are the bins of `success_histogram`. With more sets than colours, only the first sets are plotted.
    """
    all_sets = read_record(folder / RECORD_FILE)["sets"]
    sets = dict(islice(all_sets.items(), len(style.CYCLE)))
    figure, (axes,) = style.new_figure(
        "Problems by correct completions",
        _shorten(f"{_describe_sets(all_sets, len(sets))} · {folder.resolve().name}", _SUBTITLE_CHARS),
    )
    sizes = {size for scores in sets.values() for size in scores["completions_per_problem"]}
    n = sizes.pop() if len(sizes) == 1 else None
    width = 0.8 / len(sets)
    names: list[str] = []
    for index, (label, scores) in enumerate(sets.items()):
        shares = [next(iter(values.values())) for values in scores["by_problem"].values()]
        counts = success_histogram(shares, n)
        names = [name.replace(" ", "") for name, _ in counts]
        axes.bar(
            np.arange(len(counts)) + (index - (len(sets) - 1) / 2) * width,
            np.array([count for _, count in counts]) / len(scores["by_problem"]),
            width,
            color=style.CYCLE[index],
            label=f"{_shorten(label, _LABEL_CHARS)} ({scores['problems']:,})",
        )
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.6, len(names) - 0.4)
    style.percent_axis(axes)
    style.label(axes, success_axis(n), "share of the problems")
    if len(sets) > 1:
        style.legend(axes, columns=3)
    return style.save(figure, folder / "plots" / "success.png")


def read_intervals(folder: Path) -> Intervals:
    """Return the 95% intervals of the evaluations of the run in `folder`, from `evals/step-*.json`.

    Raises:
        UserError: one of these files is damaged.
    """
    intervals: dict[str, dict[int, tuple[float, float]]] = {}
    for path in sorted((folder / "evals").glob("step-*.json")):
        step = step_of(path)
        if step is None:
            continue
        sets = read_record(path)["sets"]
        try:
            ends = {
                f"eval/{label}/{name}": (value["low"], value["high"])
                for label, scores in sets.items()
                for name, value in scores["figures"].items()
            }
        except (AttributeError, KeyError, TypeError):
            raise UserError(
                f"{path}: this is not the record of an evaluation: a metric has no interval"
            ) from None
        for metric, (low, high) in ends.items():
            if low is not None:
                intervals.setdefault(metric, {})[step] = (low, high)
    return intervals


def plot_accuracy(records: Sequence[Record], intervals: Intervals, subtitle: str, path: Path) -> Path | None:
    """Plot training accuracy and, for every evaluation set, mean@n with its interval and pass@k over the steps.

    The intervals of pass@k are not plotted: those of several k overlap.

    Returns:
        The path of the plot; None without data.
    """
    train = series(records, "train/accuracy")
    names = sorted({name for record in records for name in record if _EVAL.fullmatch(name)}, key=_eval_parts)
    evaluations = [(name, series(records, name)) for name in names]
    steps = [step for _, points in [("", train), *evaluations] for step in points[0]]
    if not steps:
        return None
    figure, (axes,) = style.new_figure("Accuracy", subtitle)
    if train[0]:
        _plot_smoothed(axes, train, "training accuracy", style.MUTED_COLOR)
    tasks = sorted({_eval_parts(name)[0] for name in names})
    ks = sorted({count for _, measure, count in map(_eval_parts, names) if measure == "pass"})
    for name, (eval_steps, values) in evaluations:
        task, measure, count = _eval_parts(name)
        marker = _PASS_MARKERS[ks.index(count) % len(_PASS_MARKERS)] if measure == "pass" else "o"
        line: dict[str, Any] = {"linestyle": "-", "linewidth": 2.2}
        if measure == "pass":
            line = {"linestyle": (0, (4, 2)), "linewidth": 1.6, "markerfacecolor": "white"}
        color = style.CYCLE[tasks.index(task) % len(style.CYCLE)]
        if measure == "mean":
            _plot_interval(axes, eval_steps, intervals.get(name, {}), color)
        label = f"held-out {style.escape_mathtext(style.shorten_middle(task))} {measure}@{count}"
        dots: dict[str, Any] = {"marker": marker, "markersize": 6, "clip_on": False, "zorder": 3}
        axes.plot(eval_steps, values, color=color, label=label, **line, **dots)
    if axes.collections:
        label = "mean: 95% interval over problems"
        axes.fill_between([], [], color=style.MUTED_COLOR, alpha=0.25, label=label)
    axes.set_ylim(0, 1)
    style.percent_axis(axes)
    style.label(axes, "step", "correct answers")
    return _finish(figure, [axes], steps, path)


def plot_entropy(records: Sequence[Record], subtitle: str, path: Path) -> Path | None:
    """Plot the entropy of the policy, in nats per token, over the steps; None without data."""
    points = series(records, "train/entropy")
    if not points[0]:
        return None
    figure, (axes,) = style.new_figure("Entropy of the policy", subtitle)
    _plot_smoothed(
        axes, points, "mean over the sampled tokens, under the policy that sampled them", style.BLUE
    )
    axes.set_ylim(0, 1.08 * max(*points[1], 0.01))
    style.label(axes, "step", "entropy, nats per token")
    return _finish(figure, [axes], points[0], path)


def plot_clip(records: Sequence[Record], subtitle: str, path: Path) -> Path | None:
    """Plot the share of clipped tokens over the steps and, if recorded, per bin of probability; None without data."""
    lines = [(series(records, name), text, color) for name, text, color in _CLIP_LINES]
    lines = [line for line in lines if line[0][0]]
    if not lines:
        return None
    bins = probability_bins({name for record in records for name in record if record[name] is not None})
    figure, panels = style.new_figure("Clipped tokens", subtitle, panels=2 if bins else 1)
    for points, text, color in lines:
        _plot_smoothed(panels[0], points, text, color, show_values=False)
    style.label(panels[0], "step", "share of all tokens")
    for index, (name, text) in enumerate(bins):
        bin_color = colormaps["viridis"](0.92 * (1 - index / max(len(bins) - 1, 1)))
        _plot_smoothed(panels[1], series(records, name), text, bin_color, show_values=False)
    if bins:
        style.label(panels[1], "step", "clipped share of the tokens in that range of p")
    for axes in panels:
        axes.set_ylim(bottom=0)
        style.percent_axis(axes)
    return _finish(figure, panels, lines[0][0][0], path)


def run_subtitle(folder: Path) -> str:
    """Return name and method of a run, `a · band, kl, δ 0.05`; only the name if there is no readable config."""
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        bounds = dict(config["bounds"])
        words = [bounds["method"]]
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
        return folder.resolve().name
    words += [
        f"{_SETTING_SYMBOLS[name]}{value}"
        for name, value in bounds.items()
        if name in _SETTING_SYMBOLS and value is not None
    ]
    return f"{folder.resolve().name} · {', '.join(str(word) for word in words)}"


def series(records: Iterable[Record], name: str) -> Series:
    """Return the steps and values of the metric `name`, without the steps that have no value."""
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in points], [float(value) for _, value in points]


def smooth(values: Sequence[float]) -> tuple[list[float], int]:
    """Return the centred moving mean and the width of its window: 1/15 of the values, odd, at most 51.

    At both ends the window is cut off, so the mean there is over fewer values; no values are padded.
    """
    half = min(len(values) // 30, 25)
    totals = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    means = (totals[high] - totals[low]) / (high - low)
    return [float(mean) for mean in means], 2 * half + 1


def probability_bins(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return (name, label) of the metrics `clip/active_fraction/p_<low>_<high>` in `names`, sorted by probability."""
    pattern = re.compile(r"clip/active_fraction/p_([\d.e-]+)_([\d.e-]+)")
    matches = sorted(filter(None, map(pattern.fullmatch, names)), key=lambda match: float(match[1]))
    return [(match[0], f"p {match[1]} – {match[2]}") for match in matches]


def _describe_sets(sets: Mapping[str, Mapping[str, Any]], plotted: int) -> str:
    if len(sets) > 1:
        return f"{len(sets)} sets" if plotted == len(sets) else f"the first {plotted} of {len(sets)} sets"
    ((label, scores),) = sets.items()
    return f"{scores['problems']:,} problem{'' if scores['problems'] == 1 else 's'} of {label}"


def _shorten(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def _eval_parts(name: str) -> tuple[str, str, int]:
    """Return (task, "mean" or "pass", n or k) of an evaluation metric's name."""
    match = _EVAL.fullmatch(name)
    assert match is not None
    return match[1], match[2], int(match[3])


def _plot_smoothed(axes: Axes, points: Series, name: str, color: Any, show_values: bool = True) -> None:
    """Plot the smoothed curve, behind it the values in a pale colour; a single value is a dot."""
    steps, values = points
    means, width = smooth(values)
    if show_values and width > 1:
        axes.plot(steps, values, color=color, alpha=0.22, linewidth=1)
    marker = "o" if len(steps) == 1 else None
    line: dict[str, Any] = {"linewidth": 2.2, "solid_capstyle": "round", "marker": marker}
    axes.plot(steps, means, color=color, label=name, **line)


def _plot_interval(
    axes: Axes, steps: Sequence[int], ends: Mapping[int, tuple[float, float]], color: str
) -> None:
    """Shade the interval at the `steps` that have one; the interval of a single step is a line."""
    known = [step for step in steps if step in ends]
    low, high = [ends[step][0] for step in known], [ends[step][1] for step in known]
    if len(known) == 1:
        axes.vlines(known, low, high, color=color, alpha=0.5, linewidth=1.4)
    elif known:
        axes.fill_between(known, low, high, color=color, alpha=0.14, linewidth=0)


def _finish(figure: Figure, panels: Sequence[Axes], steps: Sequence[int], path: Path) -> Path:
    """Add the step axis and a legend to every panel and save the figure."""
    for axes in panels:
        style.steps_axis(axes, steps)
    style.fit_legends(figure, panels)
    return style.save(figure, path)
