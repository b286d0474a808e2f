"""`bandpo report`: comparison of many runs."""

from pathlib import Path
from typing import Annotated

from bandpo_cli.cli.completion import folder_of
from bandpo_cli.cli.options import RUNS, RunsDir, TableOrJson, argument, documented, option


@documented
def report(
    paths: Annotated[list[Path], argument("PATH", complete=folder_of("sweep", "run"))],
    baseline: Annotated[str | None, option("VARIANT", "the sweep's")] = None,
    by: Annotated[list[str] | None, option("KEY,KEY", "all that differ, except the seed")] = None,
    out: Annotated[Path | None, option("DIR", "SWEEP/report, or report here")] = None,
    format_: TableOrJson = "table",
    runs_dir: RunsDir = RUNS,
) -> None:
    """Compare training runs: a leaderboard, differences with intervals over seeds, plots.

    Runs that differ only in their seed are one variant. Metrics are means over
    seeds with 95% intervals; variants are compared with the baseline seed by seed.
    All of it is computed from the run folders, and written as one HTML page,
    Markdown, CSV and PNG.

    [bold]bandpo report deltas[/bold]  the sweep in runs/deltas

    [bold]bandpo report runs/clip-* runs/kl-* --baseline clip[/bold]  any runs

    [bold]bandpo report runs --by bounds,optim.lr --out out/lr[/bold]  variants by these settings

    [bold]bandpo report deltas --format json[/bold]  in scripts

    Args:
        paths: A sweep's folder; or run folders, or a folder of runs.
        baseline: The variant that all other variants are compared with.
        by: Settings that define a variant, for example bounds,optim.lr; repeatable.
        out: Folder of the report.
    """
    from bandpo_cli.cli.console import open_console, print_json
    from bandpo_cli.reports.comparison import read_tuning, select_runs, write_report

    keys = [key.strip() for text in by or [] for key in text.split(",") if key.strip()]
    chosen = select_runs(paths, runs_dir, baseline, keys)
    folder = out or (Path() if chosen.sweep is None else chosen.sweep.path) / "report"
    tuning = read_tuning(chosen.sweep)
    written = write_report(chosen.runs, chosen.title, chosen.baseline, folder, chosen.notes, tuning)
    if format_ == "json":
        print_json(written.as_json())
    else:
        from bandpo_cli.cli.sweep_view import print_report

        print_report(open_console(), written)
