"""The report on a terminal: what came out, the leaderboard, what to know, where the files are."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bandpo_cli.reports.sweep.arms import Metric, Report
from bandpo_cli.reports.sweep.tables import _relative_to_cwd, half_width, value_text

_WIDE = 110
"""Columns of a terminal in which a mean and its interval stand on one line."""


def print_report(console: Console, report: Report) -> None:
    """Print it."""
    whole = not console.is_terminal  # in a file or a pipe a sentence is a line
    console.print(Text.assemble((report.title, "bold"), f"  {report.about}"), soft_wrap=whole)
    console.print(Text(report.finding), soft_wrap=whole)
    console.print()
    apart = " " if console.width >= _WIDE else "\n"
    console.print(_table(report, [figure for figure in report.figures if "/" not in figure.key], apart))
    if len(report.sets) > 1:
        console.print()
        by_set = [figure for figure in report.figures if figure.key.startswith("accuracy/")]
        console.print(_table(report, by_set, apart))
    for note in report.notes:
        console.print(Text.assemble(("note: ", "yellow"), note), soft_wrap=whole)
    for each in report.left_out:
        who = f"{each.arm}, seed {each.seed}: " if each.arm else ""
        console.print(
            Text.assemble(("left out: ", "yellow"), f"{each.run}: {who}{each.reason}"), soft_wrap=whole
        )
    console.print()
    for name in ("report.html", "report.md", "leaderboard.csv"):
        console.print(Text(_relative_to_cwd(report.files[name])), soft_wrap=True)
    pictures = [name for name in report.files if name.endswith(".png")]
    console.print(Text(f"beside them: {', '.join(pictures)}", style="dim"), soft_wrap=whole)


def _table(report: Report, figures: Sequence[Metric], apart: str) -> Table:
    """Return the arms, the most accurate first, with half the width of each 95% interval."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("arm", overflow="fold")
    table.add_column("seeds", justify="right", no_wrap=True)
    for figure in figures:
        table.add_column(figure.name.replace(", ", ",\n"), justify="right", no_wrap=True)
    for arm in report.arms:
        name = Text(arm.name)
        if arm.name == report.baseline:
            name.append("\nbaseline", style="dim")
        cells = [
            Text.assemble(value_text(figure, value), (f"{apart}{half}" if half else "", "dim"))
            for figure in figures
            for value in [arm.figures.get(figure.key)]
            for half in [half_width(figure, value)]
        ]
        table.add_row(name, str(len(arm.seeds)), *cells)
    return table
