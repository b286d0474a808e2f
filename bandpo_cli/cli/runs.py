"""`bandpo runs`: one line per run."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from bandpo_cli.cli.completion import folder_of, one_of
from bandpo_cli.cli.options import RUNS, RunsDir, TableOrJson, choice
from bandpo_cli.registries import DATASETS, METHODS, generated_tasks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.text import Text

    from bandpo_cli.experiments.overview import RunOverview

STATUSES = ("running", "finished", "failed", "killed", "damaged")
_STYLES = {"RUNNING": "cyan", "FINISHED": "green", "FAILED": "red", "KILLED": "yellow", "DAMAGED": "red"}


def runs(
    patterns: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATTERN...",
            help="Names, with * and ?; a sweep stands for its runs.",
            show_default="all",
            autocompletion=folder_of("run", "sweep"),
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="Only runs of this method: clip, band, band-kl.",
            autocompletion=one_of(METHODS),
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="TASK",
            help="Only runs of this task.",
            autocompletion=one_of([*generated_tasks(), *DATASETS]),
        ),
    ] = None,
    status: Annotated[
        str | None,
        choice("--status", *STATUSES, metavar="STATUS", help=f"Only runs that are {', '.join(STATUSES)}."),
    ] = None,
    sort: Annotated[
        str,
        choice("--sort", "time", "name", "heldout", "accuracy", "entropy", "step", metavar="KEY"),
    ] = "time",
    format_: TableOrJson = "table",
    runs_dir: RunsDir = RUNS,
) -> None:
    """List runs: method, task, steps, status, held-out and training accuracy, entropy.

    Held-out is the mean of mean@n over the evaluation sets at the last
    evaluation; training is the accuracy of the completions of the last step.

    [bold]bandpo runs[/bold]  all runs, the latest last

    [bold]bandpo runs 'kl-*' deltas --sort heldout[/bold]  by name, and a sweep's; the best first

    [bold]bandpo runs --status running --format json[/bold]  in scripts
    """
    from bandpo_cli.experiments.overview import list_runs

    runs = list_runs(runs_dir, patterns or (), method=method, task=task, status=status, sort=sort)
    from bandpo_cli.cli.console import open_console, print_json

    if format_ == "json":
        print_json([asdict(run) | {"path": str(run.path)} for run in runs])
    else:
        _print_table(open_console(), runs)


def _print_table(console: Console, runs: Sequence[RunOverview]) -> None:
    from rich.text import Text

    from bandpo_cli.cli.console import make_table, print_line

    if not runs:
        print_line(console, "no runs")
        return
    wide = console.width >= 100
    headings = ["run", "method", "task", "status", ">steps", ">held-out", ">training", ">entropy"]
    table = make_table(*headings, *([">started"] if wide else []), gap=2 if wide else 1)
    table.columns[0].min_width, table.columns[3].no_wrap = 12, True
    for run in runs:
        status = run.status or "DAMAGED"
        cells = [Text(run.name), Text(run.method), Text(run.task), Text(status.lower(), _STYLES[status])]
        if run.status is not None:
            cells += [
                Text(f"{run.step:,}/{run.steps:,}"),
                _number(run.heldout),
                _number(run.accuracy),
                _number(run.entropy),
                Text(time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started_ms / 1000))),
            ]
        table.add_row(*cells[: len(table.columns)])
    console.print(table, highlight=False)
    for run in runs:
        if run.error is not None and run.status != "KILLED":
            print_line(console, run.error.splitlines()[0][:200], run.name, "yellow")


def _number(value: float | None) -> Text:
    from rich.text import Text

    return Text("" if value is None else f"{value:.3f}")
