"""Clip map: probability ratio against old probability of the tokens of a step, with clipped tokens marked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import NDArray

from bandpo_cli.bounds.intervals import clip_state
from bandpo_cli.reports import style
from bandpo_cli.storage.files import step_of
from bandpo_cli.storage.tables import read_token_table

Floats = NDArray[np.float64]

MAX_POINTS = 5_000
"""Maximum number of points per kind of token; with more tokens only every second, third, ... is plotted."""


@dataclass(frozen=True)
class ClipMapTokens:
    """The tokens of one step; every array has shape [T], one entry per token.

    Attributes:
        prob: probability under the policy that sampled the token.
        ratio: new probability / old probability at the update.
        lower, upper: bounds of the ratio; `upper` is infinite without a bound.
        advantage: advantage of the token; its sign decides which bound can clip.
        gradient_weight: factor of the token's gradient; NaN in tables of earlier versions.
    """

    prob: Floats
    ratio: Floats
    lower: Floats
    upper: Floats
    advantage: Floats
    gradient_weight: Floats

    @property
    def active(self) -> NDArray[np.bool_]:
        """Clipped: the method removes the token's gradient, dual clip apart.

        Tables of earlier versions have no gradient weights, and are of methods with bounds or without any clipping.
        """
        active: NDArray[np.bool_] = (self.gradient_weight == 0) & (self.advantage != 0)
        if self.has_bounds:
            active = clip_state(self.ratio, self.lower, self.upper, self.advantage).active
        return active

    @property
    def has_bounds(self) -> bool:
        """Whether the method is an interval of ratios; others have the bounds 0 and infinity."""
        return bool((self.lower > 0).any() or np.isfinite(self.upper).any())

    @property
    def outside(self) -> NDArray[np.bool_]:
        """Outside the interval, whatever the sign of the advantage."""
        return (self.ratio > self.upper) | (self.ratio < self.lower)


def plot_clip_map(folder: Path, subtitle: str, path: Path) -> Path | None:
    """Plot the last token table of the run in `folder` to the file `path`.

    Returns:
        The path of the plot; None if the run has no token table, or none of its tokens fits on log axes.
    """
    tables = sorted((folder / "tokens").glob("step-*.parquet"))
    tokens = read_clip_map_tokens(tables[-1]) if tables else None
    if tokens is None:
        return None
    subtitle = f"{subtitle} · step {step_of(tables[-1])} · {len(tokens.prob):,} tokens"
    figure, (axes,) = style.new_figure("Clip map", subtitle)
    low, high = _ratio_limits(tokens)
    if tokens.has_bounds:
        _plot_interval(axes, tokens, low, high)
    _plot_limit(axes, tokens)
    _plot_tokens(axes, tokens)
    axes.set(xscale="log", yscale="log", xlim=(tokens.prob.min() / 1.3, 1.25), ylim=(low, high))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(style.PLAIN_NUMBERS)
    style.label(axes, "probability of the token under the old policy", "ratio, new / old probability")
    style.legend(axes, columns=3, marker_scale=2.0)
    return style.save(figure, path)


def read_clip_map_tokens(path: Path) -> ClipMapTokens | None:
    """Return the tokens of a table, without those that have no place on log axes; None when none is left."""
    columns = read_token_table(path)
    prob = np.exp(columns["old_logprob"])
    shown = (prob > 0) & np.isfinite(columns["ratio"]) & (columns["ratio"] > 0)
    if not shown.any():
        return None
    names = ("ratio", "lower", "upper", "advantage", "gradient_weight")
    return ClipMapTokens(prob[shown], *(columns[name][shown] for name in names))


def _ratio_limits(tokens: ClipMapTokens) -> tuple[float, float]:
    """Return the limits of the y axis: 99.9% of the ratios, lower bounds from 0.1 on and upper bounds up to 20."""
    lowest, highest = np.quantile(tokens.ratio, [0.0005, 0.9995])
    highest = max(highest, np.max(tokens.upper[tokens.upper <= 20], initial=1.0))
    lowest = min(lowest, np.min(tokens.lower[tokens.lower >= 0.1], initial=1.0))
    return float(np.clip(lowest / 1.25, 1e-3, 0.7)), float(np.clip(highest * 1.25, 1.4, 1e3))


def _plot_interval(axes: Axes, tokens: ClipMapTokens, low: float, high: float) -> None:
    order = np.argsort(tokens.prob)
    prob, lower, upper = tokens.prob[order], tokens.lower[order], tokens.upper[order]
    inside = np.maximum(lower, low), np.minimum(upper, high)
    axes.fill_between(prob, *inside, color=style.SKY, alpha=0.20, linewidth=0, label="allowed interval")
    for bound in (lower, upper):  # a bound beyond the axes gets no line at their edge
        visible = np.where((bound > low) & (bound < high), bound, np.nan)
        axes.plot(prob, visible, color=style.BLUE, linewidth=1.6, zorder=4)


def _plot_limit(axes: Axes, tokens: ClipMapTokens) -> None:
    """Plot the largest possible ratio, 1/p, and the ratio 1."""
    limit = np.geomspace(tokens.prob.min() / 1.3, 1.0, 200)
    line: dict[str, Any] = {"color": style.TEXT_COLOR, "linewidth": 1.2, "linestyle": (0, (4, 3))}
    axes.plot(limit, 1 / limit, zorder=4, label="limit 1/p", **line)
    axes.axhline(1.0, color=style.MUTED_COLOR, linewidth=0.8)


def _plot_tokens(axes: Axes, tokens: ClipMapTokens) -> None:
    """Plot the tokens with a gradient first and the clipped ones on top, with the share of each kind.

    A method without bounds has no inside and outside.
    """
    active = tokens.active
    kinds = [(~active, "not clipped", style.MUTED_COLOR, 5, 0.40)]
    if tokens.has_bounds:
        kinds = [
            (~tokens.outside, "inside", style.MUTED_COLOR, 5, 0.40),
            (tokens.outside & ~active, "outside, not clipped", style.ORANGE, 9, 0.7),
        ]
    for mask, text, color, size, alpha in [*kinds, (active, "clipped (zero gradient)", style.RED, 9, 0.7)]:
        index = np.flatnonzero(mask)
        share = len(index) / len(mask)
        name = f"{text} ({f'{100 * share:.2g}' if share < 0.995 else f'{100 * share:.4g}'} %)"
        index = index[:: max(1, -(-len(index) // MAX_POINTS))]
        dots: dict[str, Any] = {"s": size, "color": color, "alpha": alpha, "linewidth": 0, "label": name}
        axes.scatter(tokens.prob[index], tokens.ratio[index], **dots)
