"""Plot two runs side by side: accuracy, entropy and clipped tokens over the steps, each row with one scale.

    python examples/plot_two_runs.py clip-s0 kl-s0 --runs-dir docs/results/pretrained/test

A name is looked up in the runs folder; a folder works as well. The tables are those of `bandpo_cli.results`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import pandas as pd

from bandpo_cli import results

matplotlib.use("Agg")  # writes files without a display
import matplotlib.pyplot as plt

LABELS = {
    "train/accuracy": "training accuracy",
    "train/entropy": "entropy [nats per token]",
    "clip/active_fraction": "clipped tokens",
}


def heldout(run: str, runs_dir: Path) -> pd.DataFrame:
    """Return the held-out mean@n and its 95% interval by step, the mean over the evaluation sets."""
    table = results.evaluations(run, runs_dir)
    means = table[table["metric"].str.startswith("mean_at_")]
    return means.groupby("step")[["value", "low", "high"]].mean()


def plot(runs: list[str], runs_dir: Path, out: Path) -> plt.Figure:
    """Write the plot, a column per run and a row per metric, and return its figure."""
    figure, axes = plt.subplots(
        len(LABELS),
        len(runs),
        sharex=True,
        sharey="row",
        squeeze=False,
        figsize=(5 * len(runs), 2.4 * len(LABELS)),
    )
    for column, run in zip(axes.T, runs, strict=True):
        metrics = results.metrics(run, runs_dir)
        column[0].set_title(run)
        for axis, (name, label) in zip(column, LABELS.items(), strict=True):
            axis.plot(metrics[name].dropna(), label=label)
            axis.grid(alpha=0.3)
        evaluated = heldout(run, runs_dir)
        if not evaluated.empty:
            column[0].plot(evaluated["value"], "o-", label="held-out mean@n")
            column[0].fill_between(evaluated.index, evaluated["low"], evaluated["high"], alpha=0.2)
            column[0].legend()
        column[-1].set_xlabel("step")
    for axis, label in zip(axes[:, 0], LABELS.values(), strict=True):
        axis.set_ylabel(label)
    figure.tight_layout()
    figure.savefig(out, dpi=150)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", help="two runs, or any number")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=Path("runs.png"))
    options = parser.parse_args()
    plot(options.runs, options.runs_dir, options.out)
    print(options.out)
