"""`bandpo bounds`: ratio intervals of single probabilities. Does not import torch."""

from pathlib import Path
from typing import Annotated

import typer

from bandpo_cli.cli import options as opt
from bandpo_cli.cli.completion import one_of
from bandpo_cli.errors import UserError
from bandpo_cli.registries import DIVERGENCES, METHODS, MethodEntry, method_name


def _is_comparable(method: MethodEntry) -> bool:
    return method.bounds is not None and not method.named_by_region


def _is_matchable(method: MethodEntry) -> bool:
    return _is_comparable(method) and method.bounded and not method.trust_region


PEERS, MATCHABLE = (
    [name for name, method in METHODS.items() if suits(method)] for suits in (_is_comparable, _is_matchable)
)

_D_HELP = f"{DIVERGENCES.names_text()}; repeatable."
_DIVERGENCE = opt.option(
    "NAME", "kl", ["--divergence", "-d"], one_of(DIVERGENCES, several=True), help=_D_HELP
)
_COMPARE_HELP = f"Add {METHODS.names_text(_is_comparable)}, separated by commas."
_COMPARE = opt.option("METHODS", complete=one_of(PEERS, several=True), help=_COMPARE_HELP)
_MATCHABLE = METHODS.names_text(_is_matchable)
_MATCH = opt.option("METHOD", help=f"Find the delta whose upper bound equals this method's: {_MATCHABLE}.")


@opt.documented
def bounds(
    probs: Annotated[list[str] | None, opt.argument("PROB")] = None,
    file: Annotated[Path | None, opt.option("FILE", flags=["--file", "-f"])] = None,
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
    [bold]echo 0.1 0.2 | bandpo bounds - --format json[/bold]  in scripts
    [bold]bandpo bounds --file probs.txt --format csv[/bold]  many at once
    [bold]bandpo bounds -d kl -d tv --compare clip --plot bands.png[/bold]  a plot
    [bold]bandpo bounds --match clip-higher --at 0.1[/bold]  which delta is as wide?
    [bold]bandpo bounds 0.1 -d mine:f[/bold]  your own convex f(u), f(1) = 0, in mine.py

    Args:
        probs: Probabilities in (0, 1]; - reads them from standard input.
        file: Read probabilities from FILE: spaces, commas or lines; # comments.
        delta: Radius of the trust region, > 0; repeatable.
        max_ratio: Cap the Bands' upper bounds, > 1.
        plot: Plot ratio bounds and Δp against p: .png, .svg or .pdf. Needs no PROB.
        at: The probability at which to match.
    """
    from bandpo_cli.bounds.divergences import find_divergence
    from bandpo_cli.cli import bounds_view as view
    from bandpo_cli.reports.interval_table import as_csv, as_json, band_rows, method_rows

    radii = view.radii(delta or ["0.05"])
    regions = opt.split_commas(divergence or ["kl"])
    for name in regions:
        find_divergence(name)  # raises for an unknown name
    peers = [*map(method_name, opt.split_commas(compare or []))]
    for name in peers:
        if name in METHODS and (why := METHODS[name].without_bounds):
            raise UserError(
                f"--compare: {name} has no interval of ratios: {why}; allowed: {', '.join(PEERS)}"
            )
        opt.check_choice("--compare", name, PEERS)
    if max_ratio is not None and not max_ratio > 1.0:
        raise UserError(f"--max-ratio: {max_ratio:g} is no cap on an upper bound; allowed: a number > 1")
    if match is not None or at is not None:
        if match is None or at is None or probs or file or plot or compare or delta:
            raise UserError(
                "--match computes a delta: give it with --at, and with no other options than --divergence and "
                "--format, as in: --match clip-higher --at 0.1"
            )
        view.print_matches(opt.check_choice("--match", method_name(match), MATCHABLE), at, regions, format_)
        return
    if plot is not None:
        view.check_plot_file(plot)
    wanted = view.probabilities(probs or [], file)
    if not wanted and plot is None:
        raise UserError(
            "give probabilities in (0, 1], as in: bandpo bounds 0.001 0.08 0.9 (- or --file F to read them)"
        )

    rows = [row for name in regions for radius in radii for row in band_rows(wanted, name, radius, max_ratio)]
    rows += [row for name in peers for row in method_rows(wanted, name)]
    if format_ != "table":
        print({"json": as_json, "csv": as_csv}[format_](rows))
    elif wanted:
        view.print_intervals(rows, max_ratio)
    if plot is not None:
        from bandpo_cli.reports.interval_plot import plot_intervals

        plot_intervals(plot, regions, radii, peers, max_ratio, wanted)
        typer.echo(f"wrote {plot}", err=True)
