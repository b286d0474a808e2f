"""The picture of an evaluation: how many problems were solved how often."""

# MERGED: The pictures of one run, drawn from its folder alone: `plots/*.png`.
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

from bandpo_cli.evaluation.scores import BINS, success_histogram
from bandpo_cli.reports import style
from bandpo_cli.reports.clip_map import plot_clip_map
from bandpo_cli.storage.eval_folder import RECORD_FILE, read_record
from bandpo_cli.storage.run_folder import read_metrics

_LABEL_CHARS, _SUBTITLE_CHARS = 24, 105  # what fits: three names beside each other, one line


def plot_success_histogram(folder: Path) -> Path:
    """Draw `plots/success.png` from the `eval.json` in `folder`: the share of problems by their share of right answers.

    Problems that were never or always solved have bars of their own at the two ends. Of more sets than there are
    colours the first ones are drawn.
    """
    every = read_record(folder / RECORD_FILE)["sets"]
    sets = dict(islice(every.items(), len(style.CYCLE)))
    figure, (axes,) = style.new_figure(
        "Problems by share of right completions",
        _cut(f"{_about(every, len(sets))} · {folder.resolve().name}", _SUBTITLE_CHARS),
    )
    places = np.arange(BINS + 2)
    width = 0.8 / len(sets)
    names: list[str] = []
    for index, (label, scores) in enumerate(sets.items()):
        counts = success_histogram(next(iter(values.values())) for values in scores["by_problem"].values())
        names = [name.replace(" ", "") for name, _ in counts]
        axes.bar(
            places + (index - (len(sets) - 1) / 2) * width,
            np.array([count for _, count in counts]) / len(scores["by_problem"]),
            width,
            color=style.CYCLE[index],
            label=f"{_cut(label, _LABEL_CHARS)} ({scores['problems']:,})",
        )
    axes.set_xticks(places, names)
    axes.set_xlim(-0.6, BINS + 1.6)
    style.percent_axis(axes)
    style.label(axes, "share of a problem's completions that is right", "share of the problems")
    if len(sets) > 1:
        style.legend(axes, columns=3)
    return style.save(figure, folder / "plots" / "success.png")


def _about(sets: Mapping[str, Mapping[str, Any]], shown: int) -> str:
    if len(sets) > 1:
        return f"{len(sets)} sets" if shown == len(sets) else f"the first {shown} of {len(sets)} sets"
    ((label, scores),) = sets.items()
    return f"{scores['problems']:,} problem{'' if scores['problems'] == 1 else 's'} of {label}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


Record = Mapping[str, Any]
Series = tuple[list[int], list[float]]
"""Steps and values, of the steps that have one."""


def plot_run(folder: Path) -> list[Path]:
    """Draw what the run in `folder` has data for, return the files in `plots/`.

    A picture without data is left out. Raises UserError for a broken `metrics.jsonl`.
    """
    records = read_metrics(folder / "metrics.jsonl")
    about = run_subtitle(folder)
    drawn = [draw(records, about, folder / "plots") for draw in (plot_accuracy, plot_entropy, plot_clip)]
    drawn.append(plot_clip_map(folder, about))
    return [path for path in drawn if path is not None]


def run_subtitle(folder: Path) -> str:
    """Return the run's name and method in a line, `a · band, kl, δ 0.05`; the name alone without a config."""
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


_SETTING_SYMBOLS = {"divergence": "", "delta": "δ ", "eps_low": "ε₋ ", "eps_high": "ε₊ "}


def series(records: Iterable[Record], name: str) -> Series:
    """Return the steps and values of `name`, leaving out the steps without one."""
    found = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in found], [float(value) for _, value in found]


def smooth(values: Sequence[float]) -> tuple[list[float], int]:
    """Return the centred mean over a window of steps, and its width: an odd 1/15 of them, at most 51.

    At both ends the window is cut off, so the mean there is of fewer steps, not of invented ones.
    """
    half = min(len(values) // 30, 25)
    totals = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    means = (totals[high] - totals[low]) / (high - low)
    return [float(mean) for mean in means], 2 * half + 1


def _finish(figure: Figure, panels: Sequence[Axes], steps: Sequence[int], path: Path) -> Path:
    for axes in panels:
        style.steps_axis(axes, steps)
        entries = len(axes.get_legend_handles_labels()[0])
        style.legend(axes, columns=4 if entries <= 4 and len(panels) == 1 else (entries + 1) // 2)
    return style.save(figure, path)


def _line(axes: Axes, points: Series, name: str, color: Any, faint: bool = True) -> None:
    """Draw the smoothed curve, with the values themselves faint behind it; a lone value as a dot."""
    steps, values = points
    means, width = smooth(values)
    if faint and width > 1:
        axes.plot(steps, values, color=color, alpha=0.22, linewidth=1)
    axes.plot(
        steps,
        means,
        color=color,
        linewidth=2.2,
        solid_capstyle="round",
        marker="o" if len(steps) == 1 else None,
        label=name,
    )


def plot_accuracy(records: Sequence[Record], about: str, plots: Path) -> Path | None:
    """Draw training accuracy and every evaluation's mean@n and pass@k over the steps."""
    train = series(records, "train/accuracy")
    names = sorted({name for record in records for name in record if _EVAL.fullmatch(name)}, key=_eval_order)
    shown = [(name, series(records, name)) for name in names]
    steps = [step for _, points in [("", train), *shown] for step in points[0]]
    if not steps:
        return None
    figure, (axes,) = style.new_figure("Accuracy", about)
    if train[0]:
        _line(axes, train, "training, sampled answers", style.MUTED_COLOR)
    tasks = sorted({_eval_parts(name)[0] for name in names})
    ks = sorted({count for _, measure, count in map(_eval_parts, names) if measure == "pass"})
    for name, (at, values) in shown:
        task, measure, count = _eval_parts(name)
        mean = measure == "mean"
        axes.plot(
            at,
            values,
            color=style.CYCLE[tasks.index(task) % len(style.CYCLE)],
            linestyle="-" if mean else (0, (4, 2)),
            linewidth=2.2 if mean else 1.6,
            marker="o" if mean else _PASS_MARKERS[ks.index(count) % len(_PASS_MARKERS)],
            markersize=6,
            markerfacecolor=None if mean else "white",
            label=f"{task} {measure}@{count}",
            clip_on=False,
            zorder=3,
        )
    axes.set_ylim(0, 1)
    style.percent_axis(axes)
    style.label(axes, "step", "correct answers")
    return _finish(figure, [axes], steps, plots / "accuracy.png")


_PASS_MARKERS = ("s", "^", "D", "v", "P")
"""One a k, so that the lines of pass@k are told apart within a task's colour."""

_EVAL = re.compile(r"eval/(.+)/(mean|pass)_at_(\d+)")


def _eval_parts(name: str) -> tuple[str, str, int]:
    match = _EVAL.fullmatch(name)
    assert match is not None
    return match[1], match[2], int(match[3])


def _eval_order(name: str) -> tuple[str, str, int]:
    return _eval_parts(name)


def plot_entropy(records: Sequence[Record], about: str, plots: Path) -> Path | None:
    """Draw the entropy of the policy, in nats a token, over the steps."""
    points = series(records, "train/entropy")
    if not points[0]:
        return None
    figure, (axes,) = style.new_figure("Entropy of the policy", about)
    _line(axes, points, "mean of the sampled tokens, under the policy that sampled them", style.BLUE)
    axes.set_ylim(0, 1.08 * max(*points[1], 0.01))
    style.label(axes, "step", "entropy, nats a token")
    return _finish(figure, [axes], points[0], plots / "entropy.png")


_CLIP_LINES = (
    ("clip/outside_fraction", "outside the interval", style.MUTED_COLOR),
    ("clip/active_fraction", "active: gradient zero", style.TEXT_COLOR),
    ("clip/upper_fraction", "active at the upper bound", style.RED),
    ("clip/lower_fraction", "active at the lower bound", style.BLUE),
)


def plot_clip(records: Sequence[Record], about: str, plots: Path) -> Path | None:
    """Draw the share of clipped tokens over the steps and, where recorded, that of each range of probability."""
    lines = [(series(records, name), text, color) for name, text, color in _CLIP_LINES]
    lines = [line for line in lines if line[0][0]]
    if not lines:
        return None
    bins = probability_bins({name for record in records for name in record if record[name] is not None})
    figure, panels = style.new_figure("Clipped tokens", about, panels=2 if bins else 1)
    for points, text, color in lines:
        _line(panels[0], points, text, color, faint=False)
    style.label(panels[0], "step", "share of all tokens")
    for index, (name, text) in enumerate(bins):
        shade = colormaps["viridis"](0.92 * (1 - index / max(len(bins) - 1, 1)))
        _line(panels[1], series(records, name), text, shade, faint=False)
    if bins:
        style.label(panels[1], "step", "active, share of the tokens in that range of p")
    for axes in panels:
        axes.set_ylim(bottom=0)
        style.percent_axis(axes)
    return _finish(figure, panels, lines[0][0][0], plots / "clip.png")


def probability_bins(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the metrics `clip/active_fraction/p_<low>_<high>` among `names`, rare tokens first, with a text each."""
    found = [re.fullmatch(r"clip/active_fraction/p_([\d.e-]+)_([\d.e-]+)", name) for name in names]
    matches = sorted((match for match in found if match), key=lambda match: float(match[1]))
    return [(match[0], f"p {match[1]} – {match[2]}") for match in matches]
