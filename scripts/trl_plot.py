"""Plot of docs/integrations.md: metrics of two runs of `examples/trl_band.py`, with the Band and without it.

python -m scripts.trl_plot band.json fixed.json [--out docs/images/trl_band.png]
"""

import argparse
import json
from pathlib import Path

import pandas as pd

from bandpo_cli.reports.plot_style import CYCLE, TEXT_COLOR, label, new_figure, save

LINES = ("Band, kl, δ = 0.05", "TRL's interval [0.8, 1.2]")
PANELS = {
    "mean reward": (("reward",), 1.0),
    "entropy, nats per token": (("entropy",), 1.0),
    "clip fraction, %": (("clip_ratio/high_mean", "clip_ratio/low_mean"), 100.0),
}
"""Label of each panel → metrics, whose sum it has, and the factor of its unit."""

WINDOW = 5
"""Batches over which a line is averaged; a batch has 32 prompts."""


def plot(histories: list[list[dict[str, float]]], path: Path) -> None:
    """Write the plot as PNG."""
    figure, panels = new_figure(
        "The Band in TRL's GRPOTrainer",
        f"shipped model on countdown, 8 updates per batch, one seed; mean of the last {WINDOW} batches",
        panels=len(PANELS),
        height=4.4,
    )
    for axes, (name, (metrics, factor)) in zip(panels, PANELS.items(), strict=True):
        for history, line, color in zip(histories, LINES, CYCLE, strict=False):
            frame = pd.DataFrame(history).set_index("batch")
            values = factor * frame[[*metrics]].sum(axis=1).rolling(WINDOW, min_periods=1).mean()
            axes.plot(values.index, values, color=color, label=line)
        label(axes, "batch", name)
    figure.subplots_adjust(top=0.80, bottom=0.16, left=0.075, wspace=0.42)
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="upper right",
        bbox_to_anchor=(0.99, 0.99),
        frameon=False,
        fontsize=10.5,
        labelcolor=TEXT_COLOR,
    )
    save(figure, path)


def main() -> None:
    """Parse the arguments and write the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("band", type=Path, help="file of --history of the run with the Band")
    parser.add_argument("without", type=Path, help="file of --history of the run --without-band")
    parser.add_argument("--out", type=Path, default=Path("docs/images/trl_band.png"))
    given = parser.parse_args()
    plot([json.loads(path.read_text(encoding="utf-8")) for path in (given.band, given.without)], given.out)


if __name__ == "__main__":
    main()
