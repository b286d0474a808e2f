"""Ratio intervals by probability: rows of a table, as JSON or CSV, and a plot with the limits of the simplex.

The rows need numpy only; matplotlib is imported for a plot.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bandpo_cli.bounds import RatioBounds, band_bounds
from bandpo_cli.bounds.band import find_divergence, saturation
from bandpo_cli.errors import UserError
from bandpo_cli.methods.settings import TrustRegionSettings, default_settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SMALLEST_P, _RATIO_FLOOR, _RATIO_CEILING = 1e-4, 1e-2, 1e3
_LEGEND_COLUMNS = 5
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
_SIMPLEX = "#f1f2f4"

_Curve = tuple[str, RatioBounds, dict[str, Any]]
"""Name, bounds and line of a method."""


class IntervalRow(NamedTuple):
    """Interval of one token under one method. The fields are the keys of `bandpo bounds --format json`.

    Attributes:
        divergence: divergence of the trust region, or the name of a method that has an interval: `clip`, `dppo kl`.
        delta: radius of the trust region; None for a method without one.
        prob_lower, prob_upper: smallest and largest allowed new probability, at most 1.
        lower_saturated: whether the new probability may be 0.
        upper_saturated: whether the new probability may be 1: the simplex, not the trust region, is the limit.
    """

    prob: float
    divergence: str
    delta: float | None
    lower: float
    upper: float
    prob_lower: float
    prob_upper: float
    lower_saturated: bool
    upper_saturated: bool


def band_rows(probs: Sequence[float], name: str, delta: float, max_ratio: float | None) -> list[IntervalRow]:
    """Return one row per probability in (0, 1], in the given order. Errors are those of `band_bounds`.

    Args:
        name: name of the divergence.
        delta: radius of the trust region.
        max_ratio: cap on the upper bounds; None for no cap.
    """
    divergence, bounds = find_divergence(name), band_bounds(np.log(probs), name, delta, max_ratio)
    rows = []
    for prob, low, high in zip(probs, *(end.tolist() for end in bounds), strict=True):
        vanishes, certain = saturation(divergence, prob, delta)
        certain &= not (max_ratio is not None and high == max_ratio and high * prob < 1.0)
        # Saturation starts at an exact probability, which exp of its rounded logarithm may miss.
        low, high = 0.0 if vanishes else low, 1.0 / prob if certain else high
        ends = low, high, prob * low, min(prob * high, 1.0)
        rows.append(IntervalRow(prob, name, delta, *ends, vanishes, certain))
    return rows


def method_rows(probs: Sequence[float], name: str) -> list[IntervalRow]:
    """Return one row per probability and interval of a method, which may be a custom one."""
    rows = []
    for label, delta, bounds in _peer_curves(name, probs):
        for prob, low, high in zip(probs, *(end.tolist() for end in bounds), strict=True):
            ends = low, high, prob * low, min(prob * high, 1.0)
            rows.append(IntervalRow(prob, label, delta, *ends, low <= 0.0, high * prob >= 1.0))
    return rows


def _peer_curves(
    name: str, probs: Sequence[float] | np.ndarray
) -> list[tuple[str, float | None, RatioBounds]]:
    """Return label, radius and bounds of each interval of a method, or of a custom function."""
    settings = default_settings(name)
    delta = settings.delta if isinstance(settings, TrustRegionSettings) else None
    curves = settings.interval_curves().items()
    return [(label, delta, bounds(np.log(probs))) for label, bounds in curves]


def as_json(rows: Sequence[Any]) -> str:
    """Return named tuples, such as `IntervalRow`, as JSON objects in full precision; infinity is null."""
    plain = [
        {key: None if value == np.inf else value for key, value in row._asdict().items()} for row in rows
    ]
    return json.dumps(plain, indent=1, allow_nan=False)


def as_csv(rows: Sequence[Any]) -> str:
    """Return the rows as CSV with a header line; a missing delta is an empty cell."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([(rows[0] if rows else IntervalRow)._fields, *rows])
    return out.getvalue().rstrip("\n")


def plot_intervals(
    path: Path,
    divergences: Sequence[str],
    deltas: Sequence[float],
    peers: Sequence[str],
    max_ratio: float | None,
    marked: Sequence[float],
) -> None:
    """Plot the intervals of the given methods to `path`, as png, svg or pdf by its suffix.

    Args:
        divergences, deltas: a Band is plotted for each divergence and each radius.
        peers: names of methods, or custom functions.
        max_ratio: cap on the upper bounds of the Bands; None for no cap.
        marked: probabilities to mark with a dotted line; the first 12 are shown.

    Raises:
        UserError: the file cannot be written.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    from bandpo_cli.reports import plot_style as style

    p = 1.0 - np.geomspace(1.0 - _SMALLEST_P, 1e-4, 400)
    p = np.unique(np.concatenate([np.geomspace(min([_SMALLEST_P, *marked]), 1.0, 600), p[p > 0.5], [1.0]]))
    curves: list[_Curve] = []  # a colour per divergence, a dash per radius; peers are grey
    for color, name in zip(cycle(style.LINE_COLORS), divergences, strict=False):
        for dash, delta in zip(cycle(_DASHES), deltas, strict=False):
            line = {"color": color, "linestyle": dash, "linewidth": 1.9}
            curves.append((f"{name} δ={delta:g}", band_bounds(np.log(p), name, delta, max_ratio), line))
    for dash, name in zip(cycle(_DASHES[1:]), peers, strict=False):
        for number, (label, _, bounds) in enumerate(_peer_curves(name, p)):
            line = {"color": style.MUTED_COLOR, "linestyle": dash, "linewidth": 1.9}
            curves.append((label, bounds, line | {"alpha": 1 - 0.22 * number}))
    title = "Allowed ratio and probability change of a token"
    subtitle = "old probability p, new probability r·p; grey: outside the simplex"
    figure, (ratios, changes) = style.new_figure(title, subtitle, panels=2)
    _plot_curves(ratios, changes, p, curves)
    handles, labels = ratios.get_legend_handles_labels()
    further_rows = (len(labels) - 1) // _LEGEND_COLUMNS
    for axes in (ratios, changes):
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(p[0], 1.0)
        axes.xaxis.set_major_locator(LogLocator(numticks=6))
        axes.xaxis.set_major_formatter(style.PLAIN_NUMBERS)
        for prob in marked[:12]:
            axes.axvline(prob, color=style.MUTED_COLOR, linewidth=0.8, linestyle=":", zorder=0.5)
        box = axes.get_position()
        axes.set_position((box.x0, box.y0, box.width, box.height - 0.036 * further_rows))
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0.022, 0.885), "ncols": _LEGEND_COLUMNS}
    figure.legend(handles, labels, **place, **style.LEGEND)
    try:
        figure.savefig(path)
    except OSError as error:
        raise UserError(f"--plot {path}: cannot be written: {error.strerror or error}") from error


def _plot_curves(ratios: Axes, changes: Axes, p: np.ndarray, curves: Sequence[_Curve]) -> None:
    """Plot the bounds of the ratio, and the changes of the probability that they allow."""
    from matplotlib.ticker import NullLocator

    from bandpo_cli.reports import plot_style as style

    largest_gain = largest_loss = 0.02
    for name, bounds, line in curves:
        ratios.plot(p, np.clip(bounds.upper, None, 1e6), label=name, **line)
        ratios.plot(p, np.clip(bounds.lower, 1e-6, None), **line)
        gain, loss = p * (bounds.upper - 1.0), p * (1.0 - bounds.lower)
        changes.plot(p, np.clip(gain, None, 2.0), **line)
        changes.plot(p, -loss, **line)
        largest_gain = max(largest_gain, float(np.minimum(gain, 1.0 - p).max()))
        largest_loss = max(largest_loss, float(loss.max()))
    limit: dict[str, Any] = {"color": style.TEXT_COLOR, "linewidth": 0.9}
    ratios.fill_between(p, 1.0 / p, 1e7, color=_SIMPLEX, zorder=0)
    ratios.plot(p, 1.0 / p, label="simplex, r = 1/p", **limit)
    for end, beyond in ((1.0 - p, 2.0), (-p, -2.0)):
        changes.fill_between(p, end, beyond, color=_SIMPLEX, zorder=0)
        changes.plot(p, end, **limit)
    ratios.set_yscale("log")
    ratios.yaxis.set_minor_locator(NullLocator())
    ratios.yaxis.set_major_formatter(style.PLAIN_NUMBERS)
    ratios.set_ylim(_RATIO_FLOOR, _RATIO_CEILING)
    changes.set_ylim(-1.25 * largest_loss, 1.25 * largest_gain)
    for axes, unchanged, text in (
        (ratios, 1.0, "probability ratio r = π / π_old"),
        (changes, 0.0, "change of probability Δp = (r − 1)·p"),
    ):
        axes.axhline(unchanged, color=style.MUTED_COLOR, linewidth=0.8)
        style.label(axes, "old probability p", text)
