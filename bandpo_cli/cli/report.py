"""`bandpo report`, and a report on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from rich.text import Text

from bandpo_cli.cli import options as opt
from bandpo_cli.cli.console import Console, make_table, open_console, print_json
from bandpo_cli.errors import UserError
from bandpo_cli.metric_names import AXES
from bandpo_cli.paths import path_exists, read_json_object, relative_to_cwd

if TYPE_CHECKING:
    from bandpo_cli.reports.compare_variants import Metric, Report

_WIDE = 110  # width of a terminal from which on a mean and its interval are on one line, in columns


@opt.documented
def report(
    paths: Annotated[list[Path], opt.argument("PATH", complete=opt.folder_of("sweep", "run"))],
    baseline: Annotated[str | None, opt.option("VARIANT", "the sweep's, else the first")] = None,
    by: Annotated[list[str] | None, opt.option("KEY,KEY", "all that differ, except the seed")] = None,
    out: Annotated[Path | None, opt.option("DIR", "SWEEP/report, or report here")] = None,
    margin: Annotated[float, opt.option("M")] = 0.02,
    x: opt.AxisName = "step",
    fit: Annotated[bool, opt.option()] = False,
    format_: opt.TableOrJson = "table",
    runs_dir: opt.RunsDir = opt.RUNS,
) -> None:
    """Compare training runs: a leaderboard, differences with intervals over seeds, plots.

    Runs that differ only in their seed are one variant. Metrics are means over
    seeds with 95% intervals; variants are compared with the baseline seed by seed.
    All of it is computed from the run folders, and written as one HTML page,
    Markdown, JSON, CSV and PNG.

    [bold]bandpo report deltas[/bold]  the sweep in runs/deltas
    [bold]bandpo report runs/clip-* runs/kl-* --baseline clip[/bold]  any runs
    [bold]bandpo report runs --by bounds,optim.lr --out out/lr[/bold]  variants by these settings
    [bold]bandpo report deltas --x tokens[/bold]  at an equal number of sampled tokens
    [bold]bandpo report deltas --format json[/bold]  in scripts

    Args:
        paths: A sweep's folder; or run folders, or a folder of runs.
        baseline: The variant that all other variants are compared with.
        by: Settings that define a variant, for example bounds,optim.lr; repeatable.
        out: Folder of the report.
        margin: Differences of accuracy within ±M can be found equivalent.
        fit: Also fit a saturating curve to the held-out accuracy of each variant.
    """
    from bandpo_cli.reports.run_variants import select_runs
    from bandpo_cli.reports.write_report import write_report

    chosen = select_runs(paths, runs_dir, baseline, [*filter(None, opt.split_commas(by or []))])
    folder = out or (Path() if chosen.sweep is None else chosen.sweep.path) / "report"
    if out is None and chosen.sweep is None and path_exists(folder / "report.json"):
        earlier = read_json_object(folder / "report.json")
        names = {run.get("run") for key in ("runs", "excluded") for run in earlier.get(key, ())}
        if names != {run.folder.name for run in chosen.runs}:
            raise UserError(f"{folder} has a report of other runs; give a folder for this one: --out DIR")
    written = write_report(chosen, folder, margin, AXES[x], fit)
    if format_ == "json":
        print_json(written.as_json())
    else:
        print_report(open_console(), written)


def print_report(console: Console, report: Report) -> None:
    """Print the report: finding, leaderboard, notes, files."""
    console.print_line(report.about, report.title)
    console.print_line(report.finding)
    console.print()
    separator = " " if console.width >= _WIDE else "\n"
    over_sets = [metric for metric in report.metrics if "/" not in metric.key]
    console.print(_report_table(report, over_sets, separator))
    if len(report.sets) > 1:
        console.print()
        by_set = [metric for metric in report.metrics if metric.key.startswith(("reward/", "accuracy/"))]
        console.print(_report_table(report, by_set, separator))
    for fit in report.fits:
        cells = zip(fit.HEADINGS, fit.cells, strict=True)
        console.print_line(f"{fit.variant}: " + "; ".join(map(" ".join, cells)), "fit:", "dim")
    for line in report.tuning.notes() if report.tuning is not None else ():
        console.print_line(line, "tuned:", "dim")
    console.print_warnings(report.notes, "note:")
    for run in report.excluded:
        variant_and_seed = f"{run.variant}, seed {run.seed}: " if run.variant else ""
        console.print_line(f"{run.run}: {variant_and_seed}{run.reason}", "excluded:", "yellow")
    console.print()
    for name in ("report.html", "report.md", "report.json", "leaderboard.csv"):
        console.print_line(str(relative_to_cwd(report.files[name])))
    console.print_line(", ".join(name for name in report.files if name.endswith(".png")), "plots:", "dim")


def _report_table(report: Report, metrics: Sequence[Metric], separator: str) -> Table:
    """Return one row per variant, highest accuracy first.

    A cell has the mean and, after `separator`, half the width of its 95% interval, or a range.
    """

    from bandpo_cli.reports.write_report import short_range_text, value_text

    def heading(metric: Metric) -> str:
        """Return the name on several short lines, such as `entropy`, `at 41%`, `accuracy`."""
        name = metric.name.replace(", ", ",\n").replace("held-out ", "held-out\n").replace("clip ", "clip\n")
        what, at, place = name.partition(" at ")
        return "\n".join([what, *f"at\u00a0{place}".split(" ")]) if at else name

    headings = [f">{heading(metric)}" for metric in metrics]
    table = make_table("variant", ">seeds", *headings, gap=1 if separator == "\n" else 2)
    for variant in report.variants:
        name = Text.assemble(variant.name, ("\nbaseline" if variant.name == report.baseline else "", "dim"))
        cells = []
        for metric in metrics:
            around = short_range_text(metric, variant)
            interval = (f"{separator}{around}" if around else "", "dim")
            cells.append(Text.assemble(value_text(metric, variant), interval))
        table.add_row(name, str(len(variant.seeds)), *cells)
    return table
