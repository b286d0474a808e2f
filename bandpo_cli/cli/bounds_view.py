"""Input and output of `bandpo bounds`: probabilities and radii from text, tables of intervals and of matched radii."""

import csv
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import compress, groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, JustifyMethod
from rich.text import Text

from bandpo_cli.bounds import ratio_bounds
from bandpo_cli.bounds.intervals import matching_delta
from bandpo_cli.cli.console import make_table
from bandpo_cli.cli.options import split_commas
from bandpo_cli.errors import UserError, nearest
from bandpo_cli.paths import read_text
from bandpo_cli.reports.interval_table import PEERS, IntervalRow

_MAX_TEXT_BYTES = 2**28
"""Maximum size of a file of probabilities in bytes: some ten million of them."""

PLOT_SUFFIXES = (".png", ".svg", ".pdf")

_COLUMNS: Mapping[str, tuple[int, JustifyMethod]] = {
    "p": (10, "right"),
    "lower": (9, "right"),
    "upper": (9, "right"),
    "probability range": (19, "center"),
    "Δp": (9, "right"),
    "saturated": (9, "left"),
}
"""The columns of the table of intervals: minimum width and alignment by heading."""


def probabilities(words: Sequence[str], file: Path | None) -> list[float]:
    """Return numbers in (0, 1] from the arguments (`-` is standard input), then from `file`."""
    values: list[float] = []
    for word in words:
        values += _from_text(sys.stdin.read(), "standard input") if word == "-" else [_number(word, "PROB")]
    if file is not None:
        values += _from_text(read_text(file, f"--file {file}", _MAX_TEXT_BYTES), f"--file {file}")
    return values


def _from_text(text: str, source: str) -> list[float]:
    """Return numbers separated by white space or commas; `#` begins a comment."""
    values = [
        _number(word, f"{source}, line {number}")
        for number, line in enumerate(text.splitlines(), 1)
        for word in line.partition("#")[0].replace(",", " ").split()
    ]
    if not values:
        raise UserError(
            f"{source}: no probability in it; give numbers in (0, 1] separated by spaces, commas or lines"
        )
    return values


def radii(words: Iterable[str]) -> list[float]:
    """Return numbers > 0 from `--delta`, which may be repeated or hold several separated by commas."""
    expected = "a radius; allowed: a finite number > 0, such as 0.05"
    return [_number(word, "--delta", sys.float_info.max, expected) for word in split_commas(words)]


def _number(
    word: str, source: str, most: float = 1.0, expected: str = "a probability; allowed: 0 < p ≤ 1"
) -> float:
    """Return a number above 0 and not above `most`."""
    with suppress(ValueError):
        if 0.0 < (value := float(word)) <= most:
            return value
    raise UserError(f"{source}: '{word}' is not {expected}")


def check_plot_file(file: Path) -> None:
    """Raise UserError for a plot file that cannot be written, before anything is computed."""
    if file.suffix.lower() not in PLOT_SUFFIXES:
        raise UserError(
            f"--plot {file}: not an image format{nearest(file.suffix, PLOT_SUFFIXES)}; "
            f"allowed endings: {', '.join(PLOT_SUFFIXES)}"
        )
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UserError(f"--plot {file}: cannot be written; name a file in a folder that exists")


def print_intervals(rows: Sequence[IntervalRow], max_ratio: float | None) -> None:
    """Print one block per method under its name; the columns line up and fit 80 characters."""
    console = Console(highlight=False)
    blocks = groupby(rows, key=lambda row: (row.divergence, row.delta))
    for number, ((name, delta), block) in enumerate(blocks):
        table = make_table()
        table.header_style, table.show_header = "dim", number == 0
        for heading, (width, side) in _COLUMNS.items():
            table.add_column(heading, justify=side, min_width=width, no_wrap=True)
        for row in block:
            table.add_row(
                f"{row.prob:.4g}",
                f"{row.lower:.4g}",
                f"{row.upper:.4g}",
                f"{row.prob_lower:.3g} – {row.prob_upper:.3g}",
                f"+{row.prob_upper - row.prob:.3g}",
                " ".join(compress(("0", "1/p"), (row.lower_saturated, row.upper_saturated))) or "·",
            )
        if number > 0:
            console.print()
        console.print(Text(name if delta is None else f"{name}, delta {delta:g}", style="bold"))
        console.print(table)
    lines = ["\nlower, upper: π/π_old.  Δp: the most that p can gain."]
    if any(row.lower_saturated or row.upper_saturated for row in rows):
        lines.append("saturated: 0 = the token may vanish; 1/p = it may become certain.")
    cap = f"upper capped at {max_ratio:g}." if max_ratio else "No cap on upper (training caps it at 10)."
    console.print("\n".join([*lines, cap]), style="dim")


def print_matches(method: str, at: str, regions: Sequence[str], style: str) -> None:
    """Print the radius for each divergence; null or a reason if no Band has that upper bound."""
    if (prob := _number(at, "--at")) == 1.0:
        raise UserError("--at 1: a certain token cannot gain, whatever the radius; allowed: 0 < p < 1")
    upper = float(ratio_bounds(PEERS[method])(np.log([prob])).upper[0])
    common: dict[str, Any] = {"method": method, "prob": prob, "upper": upper}
    rows = [{"divergence": name, **common, "delta": matching_delta(name, prob, upper)} for name in regions]
    if style == "json":
        print(json.dumps(rows, indent=1))
    elif style == "csv":
        writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        console = Console(highlight=False)
        console.print(f"{method} at p = {prob:g} has the upper bound {upper:.6g} (p → {prob * upper:.4g})\n")
        limit = f"1/p = {1.0 / prob:.6g}"
        reason = f"no such delta: only an infinite radius allows the token to become certain, r = {limit}"
        if upper > 1.0 / prob:
            reason = f"none: a Band never passes the simplex, r ≤ {limit}"
        table = make_table("Band", "delta")
        for row in rows:
            table.add_row(row["divergence"], reason if row["delta"] is None else f"{row['delta']:.9g}")
        console.print(table)
