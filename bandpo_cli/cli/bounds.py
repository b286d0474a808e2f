"""`bandpo bounds`: ratio intervals of single probabilities. Imports NumPy only where it computes, and never torch."""

from __future__ import annotations

import os
import sys
from collections import namedtuple
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, JustifyMethod
from rich.text import Text

from bandpo_cli.cli import options as opt
from bandpo_cli.cli.console import make_table
from bandpo_cli.custom_code import is_function_path
from bandpo_cli.errors import UserError
from bandpo_cli.methods import METHODS, method_name
from bandpo_cli.registries import DIVERGENCES

if TYPE_CHECKING:
    from bandpo_cli.reports.intervals_by_probability import IntervalRow

_PLOT_SUFFIXES = (".png", ".svg", ".pdf")

_COLUMNS: Mapping[str, tuple[int, JustifyMethod]] = {
    "p": (10, "right"), "lower": (9, "right"), "upper": (9, "right"), "probability range": (19, "center"),
    "Δp": (9, "right"), "saturated": (9, "left"),
}  # fmt: skip
"""The columns of the table of intervals: minimum width and alignment by heading."""

COMPARABLE = [
    name
    for name, entry in METHODS.items()
    if not entry.named_by_region and (entry.by_position or not entry.without_bounds)
]
"""Methods whose intervals are shown by name; the Band has the names of its divergences."""
MATCHABLE = [name for name in COMPARABLE if METHODS[name].bounded and not METHODS[name].trust_region]

_D_HELP = f"{DIVERGENCES.names_text()}; repeatable."
_COMPARE_HELP = f"Add {METHODS.names_text(COMPARABLE)}, or module:function; separated by commas."
_MATCH_HELP = f"Find the delta whose upper bound equals this method's: {METHODS.names_text(MATCHABLE)}."
_DIVERGENCE = opt.option(
    "NAME", "kl", ["--divergence", "-d"], opt.one_of(DIVERGENCES, several=True), help=_D_HELP
)
_COMPARE = opt.option("METHODS", complete=opt.one_of(COMPARABLE, several=True), help=_COMPARE_HELP)
_MATCH = opt.option("METHOD", help=_MATCH_HELP)


@opt.documented
def bounds(
    probs: Annotated[list[str] | None, opt.argument("PROB")] = None,
    divergence: Annotated[list[str] | None, _DIVERGENCE] = None,
    delta: Annotated[list[str] | None, opt.option("RADIUS", "0.05")] = None,
    compare: Annotated[list[str] | None, _COMPARE] = None,
    max_ratio: Annotated[float | None, opt.option(default="no cap; training uses 10")] = None,
    format_: Annotated[str, opt.choice("--format", "table", "json", "csv")] = "table",
    plot: Annotated[Path | None, opt.option("FILE")] = None,
    match: Annotated[str | None, _MATCH] = None,
    at: Annotated[str | None, opt.option("PROB")] = None,
) -> None:
    """Show the interval of probability ratios that each method allows a token.

    A token of probability p under the old policy may move anywhere between
    lower·p and upper·p while the divergence stays within delta. A clip of 0.2
    lets p gain at most 0.2·p however rare the token is; a Band lets rare tokens
    gain more. Saturated: the simplex, not the trust region, sets the limit.

    [bold]bandpo bounds 0.001 0.08 0.9[/bold]  the paper's Band, kl 0.05
    [bold]bandpo bounds 0.08 -d kl -d tv --delta 0.01 --delta 0.05[/bold]  all pairs
    [bold]bandpo bounds 0.08 --compare clip,clip-higher,dcpo[/bold]  fixed intervals
    [bold]bandpo bounds - --format csv < probs.txt[/bold]  many at once
    [bold]bandpo bounds -d kl -d tv --compare clip --plot bands.png[/bold]  a plot
    [bold]bandpo bounds --match clip-higher --at 0.1[/bold]  which delta is as wide?
    [bold]bandpo bounds 0.1 -d mine:f[/bold]  your own convex f(u), f(1) = 0, in mine.py
    [bold]bandpo bounds 0.1 --compare mine:bounds[/bold]  your own interval

    Args:
        probs: Probabilities in (0, 1]; - reads them from standard input, between
            spaces, commas or lines, with # comments.
        delta: Radius of the trust region, > 0; repeatable.
        max_ratio: Cap the Bands' upper bounds, > 1.
        plot: Plot ratio bounds and Δp against p: .png, .svg or .pdf. Needs no PROB.
        at: The probability at which to match.
    """
    from bandpo_cli.bounds.band import find_divergence
    from bandpo_cli.reports.intervals_by_probability import as_csv, as_json, band_rows, method_rows

    radii = [
        _number(word, "--delta", sys.float_info.max, "a radius; allowed: a finite number > 0, such as 0.05")
        for word in opt.split_commas(delta or ["0.05"])
    ]
    regions = opt.split_commas(divergence or ["kl"])
    for name in regions:
        find_divergence(name)  # raises for an unknown name
    peers = [*map(method_name, opt.split_commas(compare or []))]
    for name in peers:
        if name not in COMPARABLE and name in METHODS and (why := METHODS[name].without_bounds):
            allowed = ", ".join(COMPARABLE)
            raise UserError(f"--compare: {name} has no interval of ratios: {why}; allowed: {allowed}")
        if not is_function_path(name):
            opt.check_choice("--compare", name, COMPARABLE)
    if max_ratio is not None and not max_ratio > 1.0:
        raise UserError(f"--max-ratio: {max_ratio:g} is no cap on an upper bound; allowed: a number > 1")
    if match is not None or at is not None:
        if match is None or at is None or probs or plot or compare or delta:
            raise UserError(
                "--match computes a delta: give it with --at, and with no other options than --divergence and "
                "--format, as in: --match clip-higher --at 0.1"
            )
        _print_matches(opt.check_choice("--match", method_name(match), MATCHABLE), at, regions, format_)
        return
    if plot is not None:
        place = plot if plot.exists() else plot.parent
        if plot.suffix.lower() not in _PLOT_SUFFIXES or plot.is_dir() or not os.access(place, os.W_OK):
            allowed = f"a file that ends with {', '.join(_PLOT_SUFFIXES)} in a folder that exists"
            raise UserError(f"--plot {plot}: cannot be written; allowed: {allowed}")
    wanted = [value for word in probs or () for value in _probabilities(word)]
    if not wanted and plot is None:
        raise UserError("give probabilities in (0, 1], as in: bandpo bounds 0.001 0.08 0.9 (- to read them)")
    rows = [row for name in regions for radius in radii for row in band_rows(wanted, name, radius, max_ratio)]
    rows += [row for name in peers for row in method_rows(wanted, name)]
    if format_ != "table":
        print({"json": as_json, "csv": as_csv}[format_](rows))
    elif wanted:
        _print_intervals(rows, max_ratio)
    if plot is not None:
        from bandpo_cli.reports.intervals_by_probability import plot_intervals

        plot_intervals(plot, regions, radii, peers, max_ratio, wanted)
        typer.echo(f"wrote {plot}", err=True)


def _probabilities(argument: str) -> list[float]:
    """Return the number in (0, 1] of an argument; for `-`, those of standard input, where `#` begins a comment."""
    if argument != "-":
        return [_number(argument, "PROB")]
    values = [
        _number(word, f"standard input, line {number}")
        for number, line in enumerate(sys.stdin, 1)
        for word in line.partition("#")[0].replace(",", " ").split()
    ]
    if not values:
        advice = "give numbers in (0, 1] separated by spaces, commas or lines"
        raise UserError(f"standard input: no probability in it; {advice}")
    return values


def _number(
    word: str, source: str, most: float = 1.0, expected: str = "a probability; allowed: 0 < p ≤ 1"
) -> float:
    """Return a number above 0 and not above `most`."""
    with suppress(ValueError):
        if 0.0 < (value := float(word)) <= most:
            return value
    raise UserError(f"{source}: '{word}' is not {expected}")


def _print_intervals(rows: Sequence[IntervalRow], max_ratio: float | None) -> None:
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
                " ".join(["0"] * row.lower_saturated + ["1/p"] * row.upper_saturated) or "·",
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


def _print_matches(method: str, at: str, regions: Sequence[str], style: str) -> None:
    """Print the radius for each divergence; null or a reason if no Band has that upper bound."""
    import numpy as np

    from bandpo_cli.bounds.intervals import matching_delta
    from bandpo_cli.methods.settings import default_settings
    from bandpo_cli.reports.intervals_by_probability import as_csv, as_json

    if (prob := _number(at, "--at")) == 1.0:
        raise UserError("--at 1: a certain token cannot gain, whatever the radius; allowed: 0 < p < 1")
    upper = float(default_settings(method).ratio_bounds()(np.log([prob])).upper[0])
    match = namedtuple("match", "divergence method prob upper delta")
    rows = [match(name, method, prob, upper, matching_delta(name, prob, upper)) for name in regions]
    if style != "table":
        print({"json": as_json, "csv": as_csv}[style](rows))
    else:
        console = Console(highlight=False)
        console.print(f"{method} at p = {prob:g} has the upper bound {upper:.6g} (p → {prob * upper:.4g})\n")
        limit = f"1/p = {1.0 / prob:.6g}"
        reason = f"no such delta: only an infinite radius allows the token to become certain, r = {limit}"
        if upper > 1.0 / prob:
            reason = f"none: a Band never passes the simplex, r ≤ {limit}"
        table = make_table("Band", "delta")
        for row in rows:
            table.add_row(row.divergence, reason if row.delta is None else f"{row.delta:.9g}")
        console.print(table)
