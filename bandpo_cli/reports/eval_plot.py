"""The picture of an evaluation: how many problems were solved how often."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bandpo_cli.reports import style
from bandpo_cli.tracking.eval_folder import RECORD, read_record

BINS = 10


def plot_success(folder: Path) -> Path:
    """Draw `plots/success.png` from the `eval.json` in `folder`: the share of problems by their share of right answers.

    Problems that were never or always solved have bars of their own at the two ends.
    """
    record = read_record(folder / RECORD)
    sets = record["sets"]
    figure, (axes,) = style.new_figure(
        "Problems by share of right completions", f"{folder.resolve().name} · {_about(sets)}"
    )
    places = np.arange(BINS + 2)
    width = 0.8 / len(sets)
    for index, (label, scores) in enumerate(sets.items()):
        shares = np.array([next(iter(values.values())) for values in scores["by_problem"].values()])
        inner = shares[(shares > 0) & (shares < 1)]
        counts = [np.sum(shares == 0), *np.histogram(inner, bins=BINS, range=(0, 1))[0], np.sum(shares == 1)]
        axes.bar(
            places + (index - (len(sets) - 1) / 2) * width,
            np.array(counts) / len(shares),
            width,
            color=style.CYCLE[index % len(style.CYCLE)],
            label=label,
        )
    names = ["never", *(f"{bin_ / BINS:.1f}–{(bin_ + 1) / BINS:.1f}" for bin_ in range(BINS)), "always"]
    axes.set_xticks(places, names)
    style.percent(axes)
    style.label(axes, "share of a problem's completions that is right", "share of the problems")
    if len(sets) > 1:
        style.key(axes)
    return style.save(figure, folder / "plots" / "success.png")


def _about(sets: dict[str, dict[str, object]]) -> str:
    return ", ".join(f"{scores['problems']:,} problems of {label}" for label, scores in sets.items())
