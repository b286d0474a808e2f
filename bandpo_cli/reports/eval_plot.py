"""The picture of an evaluation: how many problems were solved how often."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bandpo_cli.evaluation.histogram import BINS, success_counts
from bandpo_cli.reports import style
from bandpo_cli.tracking.eval_folder import RECORD, read_record

_LABEL_CHARS, _SUBTITLE_CHARS = 24, 105  # what fits: three names beside each other, one line


def plot_success(folder: Path) -> Path:
    """Draw `plots/success.png` from the `eval.json` in `folder`: the share of problems by their share of right answers.

    Problems that were never or always solved have bars of their own at the two ends. Of more sets than there are
    colours the first ones are drawn.
    """
    every = read_record(folder / RECORD)["sets"]
    sets = dict(islice(every.items(), len(style.CYCLE)))
    figure, (axes,) = style.new_figure(
        "Problems by share of right completions",
        _cut(f"{_about(every, len(sets))} · {folder.resolve().name}", _SUBTITLE_CHARS),
    )
    places = np.arange(BINS + 2)
    width = 0.8 / len(sets)
    names: list[str] = []
    for index, (label, scores) in enumerate(sets.items()):
        counts = success_counts(next(iter(values.values())) for values in scores["by_problem"].values())
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
    style.percent(axes)
    style.label(axes, "share of a problem's completions that is right", "share of the problems")
    if len(sets) > 1:
        style.key(axes, columns=3)
    return style.save(figure, folder / "plots" / "success.png")


def _about(sets: Mapping[str, Mapping[str, Any]], shown: int) -> str:
    if len(sets) > 1:
        return f"{len(sets)} sets" if shown == len(sets) else f"the first {shown} of {len(sets)} sets"
    ((label, scores),) = sets.items()
    return f"{scores['problems']:,} problem{'' if scores['problems'] == 1 else 's'} of {label}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
