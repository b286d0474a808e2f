"""The report on a terminal: what came out, the leaderboard, what to know, where the files are."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bandpo_cli.reports.sweep.result import Report
from bandpo_cli.reports.sweep.tables import half_width, relative, value_text


def print_report(console: Console, report: Report) -> None:
    """Print it."""
    console.print(Text.assemble((report.title, "bold"), f"  {report.about}"))
    console.print(Text(report.finding))
    console.print()
    console.print(leaderboard(report))
    for note in report.notes:
        console.print(Text.assemble(("note: ", "yellow"), note))
    for each in report.left_out:
        who = f"{each.arm}, seed {each.seed}: " if each.arm else ""
        console.print(Text.assemble(("left out: ", "yellow"), f"{each.run}: {who}{each.reason}"))
    console.print()
    for name in ("report.html", "report.md", "leaderboard.csv"):
        console.print(Text(relative(report.files[name])), soft_wrap=True)
    pictures = [name for name in report.files if name.endswith(".png")]
    console.print(Text(f"beside them: {', '.join(pictures)}", style="dim"))


def leaderboard(report: Report) -> Table:
    """Return the arms, the most accurate first, with half the width of each 95% interval."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("arm", overflow="fold")
    table.add_column("seeds", justify="right")
    shown = [figure for figure in report.figures if figure.compared or "/" not in figure.key]
    for figure in shown:
        table.add_column(figure.name, justify="right")
    for arm in report.arms:
        name = Text(arm.name)
        if arm.name == report.baseline:
            name.append("\nbaseline", style="dim")
        cells = [
            Text.assemble(value_text(figure, value), (f" {half}" if half else "", "dim"))
            for figure in shown
            for value in [arm.figures.get(figure.key)]
            for half in [half_width(figure, value)]
        ]
        table.add_row(name, str(len(arm.seeds)), *cells)
    return table
