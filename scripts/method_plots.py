"""Plots of docs/methods.md: the gradient weight of each method over the ratio, for both signs of the advantage.

    python -m scripts.method_plots [--out docs/images]

One figure per family of methods, with the default settings. The weights are those of the losses that training uses
(`policy_objective`), for completions of one token, so that the ratio of a completion is that of its token and
LUSPO is GSPO. Lines end at the ratio 1/π_old, where the new probability is 1.
"""

import argparse
import io
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from PIL import Image

from bandpo_cli.config.layers import resolve
from bandpo_cli.methods.loss import LossBatch, policy_loss
from bandpo_cli.objective.policy_objective import policy_objective
from bandpo_cli.reports.plot_style import CYCLE, MUTED_COLOR, TEXT_COLOR, clean_axes

FAMILIES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "intervals": [
        ("band", {"method": "band"}),
        ("clip", {"method": "clip"}),
        ("clip-higher", {"method": "clip-higher"}),
        ("dcpo", {"method": "dcpo"}),
        ("ripo", {"method": "ripo"}),
        ("atr", {"method": "atr"}),
        ("none", {"method": "none"}),
    ],
    "tokens": [
        ("dppo", {"method": "dppo"}),
        ("cppo, the first token", {"method": "cppo"}),
        ("cispo", {"method": "cispo"}),
        ("sapo", {"method": "sapo"}),
        ("ce-gppo", {"method": "ce-gppo"}),
        ("dgpo", {"method": "dgpo"}),
        ("bapo, at its start", {"method": "bapo"}),
        ("aspo", {"method": "aspo"}),
        ("wapo", {"method": "wapo"}),
        ("drpo", {"method": "drpo"}),
        ("drpo, ε = 0.15", {"method": "drpo", "eps": 0.15}),
    ],
    "completions": [
        ("gspo", {"method": "gspo"}),
        ("gapo, c = 1", {"method": "gapo"}),
        ("gmpo", {"method": "gmpo"}),
        ("ctpo, the first token", {"method": "ctpo"}),
        ("vaco, π_sampler = π_old", {"method": "vaco"}),
        ("topr", {"method": "topr"}),
        ("vespo", {"method": "vespo"}),
    ],
    "covariance": [
        ("clip-cov, a token that is not chosen", {"method": "clip-cov", "cov_low": 1e6, "cov_high": 2e6}),
        ("kl-cov, a penalized token", {"method": "kl-cov", "share": 1.0}),
    ],
}
"""Methods of each figure: title of the row and settings. The range and the share make all tokens alike."""

PROBABILITIES = (0.01, 0.1, 0.5, 0.9)
RATIOS = torch.logspace(-1, 1.3, 800, dtype=torch.float64)
Y_TICKS = (-1, 0, 1, 3, 10)


def gradient_weights(settings: dict[str, Any], probability: float, advantage: float) -> torch.Tensor:
    """Return the gradient weight at each of `RATIOS` [R]; NaN where the new probability would exceed 1."""
    config = resolve([{"bounds": settings}])
    loss = policy_loss(config.bounds, config.objective)
    old = torch.full_like(RATIOS, probability).log()
    ones = torch.ones_like(RATIOS)
    lengths = torch.ones(len(RATIOS), dtype=torch.int64)
    columns = loss.prepare(old, advantage * ones)
    new = (old + RATIOS.log()).clamp(max=0.0)
    batch = LossBatch(lengths, advantage * ones, old, columns, wrong_peers=ones)
    weights = policy_objective(loss, new, batch, ones).gradient_weights
    return torch.where(RATIOS * probability < 1, weights, torch.nan)


def draw(axes: Axes, settings: dict[str, Any], advantage: float) -> None:
    """Draw one line per probability of π_old; wide below narrow, so that equal lines are all visible."""
    for index, (probability, color) in enumerate(zip(PROBABILITIES, CYCLE, strict=False)):
        width = 4.2 - 0.95 * index
        weights = gradient_weights(settings, probability, advantage)
        axes.plot(RATIOS, weights, color=color, linewidth=width, label=f"π_old = {probability:g}")
    axes.axvline(1.0, color=MUTED_COLOR, linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=1.0, linscale=1.0)
    axes.set_xlim(0.1, 20)
    axes.set_ylim(-1.2, 14)
    axes.xaxis.set_major_locator(FixedLocator([0.1, 0.3, 1, 3, 10]))
    axes.yaxis.set_major_locator(FixedLocator(Y_TICKS))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.tick_params(labelsize=8.5, pad=3)


def plot_family(name: str, path: Path) -> None:
    """Write the figure of a family as PNG: a row per method, a column per sign of the advantage."""
    methods = FAMILIES[name]
    height = 0.95 + 1.62 * len(methods)
    figure = Figure(figsize=(7.5, height), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    top = 1 - 0.72 / height
    grid = figure.add_gridspec(
        len(methods), 2, left=0.07, right=0.985, bottom=0.5 / height, top=top, hspace=0.5, wspace=0.12
    )
    for row, (title, settings) in enumerate(methods):
        for column, advantage in enumerate((1.0, -1.0)):
            axes = clean_axes(figure.add_subplot(grid[row, column]))
            draw(axes, settings, advantage)
            sign = ">" if advantage > 0 else "<"
            axes.set_title(f"{title}, a {sign} 0", size=10, loc="left", color=TEXT_COLOR, pad=4)
            if row == len(methods) - 1:
                axes.set_xlabel("ratio π/π_old", size=9.5, color=TEXT_COLOR, labelpad=3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.text(0.02, 1 - 0.22 / height, "gradient weight", size=12, weight="bold", color=TEXT_COLOR)
    figure.legend(
        handles, labels, loc="upper right", ncols=4, frameon=False, fontsize=9, bbox_to_anchor=(0.99, 1.0)
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    Image.open(buffer).convert("RGB").quantize(64).save(path, optimize=True)  # a third of the size


def main() -> None:
    """Parse the arguments and write all figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    out = parser.parse_args().out
    for name in FAMILIES:
        plot_family(name, out / f"methods_{name}.png")


if __name__ == "__main__":
    main()
