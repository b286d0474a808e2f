"""Ratio intervals of single probabilities as rows, and the rows as JSON or CSV. Needs numpy, not torch."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bandpo_cli.bounds import band_bounds, ratio_bounds
from bandpo_cli.bounds.band import saturation
from bandpo_cli.bounds.divergences import find_divergence
from bandpo_cli.config.methods import (
    ClipHigherSettings,
    ClipSettings,
    DcpoSettings,
    MethodSettings,
    NoClipSettings,
)

PEERS: dict[str, MethodSettings] = {
    "clip": ClipSettings(),
    "clip-higher": ClipHigherSettings(),
    "dcpo": DcpoSettings(),
    "none": NoClipSettings(),
}
"""Methods without a divergence that an interval can be compared with, at their papers' settings."""


@dataclass(frozen=True)
class IntervalRow:
    """Interval of one token under one method. The fields are the keys of `bandpo bounds --format json`.

    Attributes:
        prob: probability of the token under π_old.
        divergence: divergence of the trust region, or the name of a method in `PEERS`.
        delta: radius of the trust region; None for a method in `PEERS`.
        lower: smallest allowed ratio.
        upper: largest allowed ratio.
        prob_lower: smallest allowed new probability.
        prob_upper: largest allowed new probability, at most 1.
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
    """Return one row per probability, in the given order.

    Args:
        probs: probabilities in (0, 1].
        name: name of the divergence.
        delta: radius of the trust region.
        max_ratio: cap on the upper bounds; None for no cap.

    Raises:
        ConfigError: the divergence or a number is not valid, as in `band_bounds`.
    """
    divergence, (lower, upper) = find_divergence(name), band_bounds(_logs(probs), name, delta, max_ratio)
    rows = []
    for prob, low, high in zip(probs, lower.tolist(), upper.tolist(), strict=True):
        vanishes, certain = saturation(divergence, prob, delta)
        capped = max_ratio is not None and high == max_ratio and high * prob < 1.0
        # Saturation starts at an exact probability, which exp of its rounded logarithm may miss.
        low, high = 0.0 if vanishes else low, 1.0 / prob if certain and not capped else high
        rows.append(_row(prob, name, delta, low, high, vanishes, certain and not capped))
    return rows


def method_rows(probs: Sequence[float], name: str) -> list[IntervalRow]:
    """Return one row per probability for a method in `PEERS`."""
    lower, upper = ratio_bounds(PEERS[name])(_logs(probs))
    return [
        _row(prob, name, None, low, high, low <= 0.0, high * prob >= 1.0)
        for prob, low, high in zip(probs, lower.tolist(), upper.tolist(), strict=True)
    ]


def _row(
    prob: float, name: str, delta: float | None, low: float, high: float, vanishes: bool, certain: bool
) -> IntervalRow:
    return IntervalRow(prob, name, delta, low, high, prob * low, min(prob * high, 1.0), vanishes, certain)


def _logs(probs: Sequence[float]) -> np.ndarray:
    return np.log(np.asarray(probs, dtype=np.float64))


def as_json(rows: Sequence[IntervalRow]) -> str:
    """Return a JSON list of objects with the keys of `IntervalRow`, in full precision; infinity is null."""
    plain = [{key: None if value == np.inf else value for key, value in asdict(row).items()} for row in rows]
    return json.dumps(plain, indent=1, allow_nan=False)


def as_csv(rows: Sequence[IntervalRow]) -> str:
    """Return the rows as CSV with a header line; a missing delta is an empty cell."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [field.name for field in fields(IntervalRow)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return out.getvalue().rstrip("\n")


def print_table(rows: Sequence[IntervalRow], max_ratio: float | None) -> None:
    """One block a method under its name; the columns line up and fit 80 characters."""
    console = Console(highlight=False)
    for number, ((name, delta), block) in enumerate(
        groupby(rows, key=lambda row: (row.divergence, row.delta))
    ):
        title = name if delta is None else f"{name}, delta {delta:g}"
        console.print(f"{'' if number == 0 else chr(10)}[bold]{escape(title)}[/bold]")
        console.print(_block(list(block), heading=number == 0))
    console.print(_footnote(rows, max_ratio), style="dim")


def _block(rows: Sequence[IntervalRow], heading: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=heading, header_style="dim")
    for name, width in (("p", 10), ("lower", 9), ("upper", 9)):
        table.add_column(name, justify="right", min_width=width, no_wrap=True)
    table.add_column("probability range", justify="center", min_width=19, no_wrap=True)
    table.add_column("Δp", justify="right", min_width=9, no_wrap=True)
    table.add_column("saturated", min_width=9, no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: IntervalRow) -> tuple[str, ...]:
    ends = [end for end, reached in (("0", row.lower_saturated), ("1/p", row.upper_saturated)) if reached]
    return (
        f"{row.prob:.4g}",
        f"{row.lower:.4g}",
        f"{row.upper:.4g}",
        f"{row.prob_lower:.3g} – {row.prob_upper:.3g}",
        f"+{row.prob_upper - row.prob:.3g}",
        " ".join(ends) or "·",
    )


def _footnote(rows: Sequence[IntervalRow], max_ratio: float | None) -> str:
    lines = ["lower, upper: π/π_old.  Δp: the most that p can gain."]
    if any(row.lower_saturated or row.upper_saturated for row in rows):
        lines.append("saturated: 0 = the token may vanish; 1/p = it may become certain.")
    lines.append(
        f"upper capped at {max_ratio:g}." if max_ratio else "No cap on upper (training caps it at 10)."
    )
    return "\n" + "\n".join(lines)
