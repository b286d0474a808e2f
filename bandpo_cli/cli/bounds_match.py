"""`bandpo bounds --match METHOD --at PROB`: the radius at which a Band is as wide as another method there."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bandpo_cli.bounds import ratio_bounds
from bandpo_cli.bounds.matching import matching_delta
from bandpo_cli.cli.bounds_input import names, probabilities
from bandpo_cli.errors import UserError
from bandpo_cli.registries import METHODS
from bandpo_cli.reports.interval_table import PEERS

MATCHABLE = tuple(name for name in PEERS if METHODS[name].bounded)


def print_matches(method: str | None, at: str | None, regions: Sequence[str], style: str) -> None:
    """Print the radius for each divergence, null or a reason where no Band is that wide."""
    if method is None or at is None:
        raise UserError("--match METHOD and --at PROB go together, as in: --match clip-higher --at 0.1")
    (method,) = names("--match", [method], MATCHABLE)
    if at == "-":
        raise UserError("--at: '-' is not a number; expected a probability in (0, 1)")
    prob = probabilities([at], None)[0]
    if prob == 1.0:
        raise UserError("--at 1: a certain token cannot gain, whatever the radius; allowed: 0 < p < 1")
    upper = float(ratio_bounds(PEERS[method])(np.log([prob])).upper[0])
    found = [
        {
            "divergence": name,
            "method": method,
            "prob": prob,
            "upper": upper,
            "delta": matching_delta(name, prob, upper),
        }
        for name in regions
    ]
    _PRINTERS[style](found)


def _print_table(found: list[dict[str, Any]]) -> None:
    first, console = found[0], Console(highlight=False)
    method, prob, upper = first["method"], first["prob"], first["upper"]
    console.print(f"{method} at p = {prob:g} has the upper bound {upper:.6g} (p → {prob * upper:.4g})\n")
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("Band")
    table.add_column("delta")
    for row in found:
        table.add_row(row["divergence"], _reason(row) if row["delta"] is None else f"{row['delta']:.9g}")
    console.print(table)


def _reason(row: dict[str, Any]) -> str:
    """Why no Band has that upper bound."""
    limit = 1.0 / row["prob"]
    if row["upper"] > limit:
        return f"none: a Band never passes the simplex, r ≤ 1/p = {limit:.6g}"
    return f"none: only an infinite radius lets a token become certain, r = 1/p = {limit:.6g}"


def _print_json(found: list[dict[str, Any]]) -> None:
    print(json.dumps(found, indent=1))


def _print_csv(found: list[dict[str, Any]]) -> None:
    writer = csv.DictWriter(sys.stdout, list(found[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)


_PRINTERS: dict[str, Callable[[list[dict[str, Any]]], None]] = {
    "table": _print_table,
    "json": _print_json,
    "csv": _print_csv,
}
