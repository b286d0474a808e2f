"""`bandpo sync`: send MLflow what it lacks of runs, from their folders."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from bandpo_cli.cli.completion import folder_of
from bandpo_cli.cli.options import RUNS, RunsDir
from bandpo_cli.errors import plural
from bandpo_cli.types import CallbackBase

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from bandpo_cli.experiments.sync_runs import SyncReport
    from bandpo_cli.tracking.sync import SyncResult

log = logging.getLogger("bandpo_cli")


def sync(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN...",
            help="Runs, by name or folder; a sweep stands for all of its runs.",
            autocompletion=folder_of("run", "sweep"),
        ),
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Send every run in --runs-dir, including the runs of sweeps.")
    ] = False,
    tracking_uri: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="MLflow server or store.",
            show_default="where the run was tracked, or would be",
        ),
    ] = None,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Send to MLflow all data of runs that it does not have, for example after an outage.

    Reads the run folders only: params, tags, every metric of every step, files,
    how the run ended. Data that MLflow already has are not sent again, so you
    can repeat the command at any time. A run that is still being written stays RUNNING.

    [bold]bandpo sync first[/bold]  the run in runs/first

    [bold]bandpo sync deltas --tracking-uri http://127.0.0.1:5000[/bold]  a sweep's runs, to a server

    [bold]bandpo sync --all[/bold]  every run; those with tracking.mlflow=false only by name
    """
    from bandpo_cli.cli.console import open_console
    from bandpo_cli.experiments import sync as sync_runs

    with closing(SyncView(open_console())) as view:
        sync_runs(runs or [], all_runs=all_, uri=tracking_uri, runs_dir=runs_dir, callbacks=[view])


class SyncView(CallbackBase):
    """Console view of a sync: one line per run."""

    def __init__(self, console: Console) -> None:
        from bandpo_cli.cli.console import Spinner

        self._console = console
        self._names: deque[str] = deque()
        self._spinner = Spinner(console)

    def start(self, info: Sequence[Path]) -> None:
        """Note the names of the runs."""
        self._names.extend(path.name for path in info)

    def phase(self, name: str) -> None:
        """Show a spinner with the run that is sent."""
        self._spinner.show(f"sending {self._names[0]} …")

    def step(self, report: SyncReport) -> None:
        """Print what was sent of a run, or why it was skipped; errors are printed at the end."""
        self.close()
        self._names.popleft()
        if report.skipped is not None:
            self._print(f"left out: {report.skipped}", report.name)
        if report.result is not None:
            self._print(_sync_text(report.result), report.name)
            if report.result.metrics.differing:
                log.warning(_conflict_text(report.result.metrics.differing))

    def close(self) -> None:
        """Remove the spinner."""
        self._spinner.show(None)

    def _print(self, line: str, heading: str) -> None:
        from bandpo_cli.cli.console import print_line

        print_line(self._console, line, heading)


def _sync_text(synced: SyncResult) -> str:
    """Return a line with what was sent and what MLflow had already."""
    metrics = synced.metrics
    sent = [
        _count(metrics.new, "metric value"),
        _count(synced.params, "param"),
        _count(synced.tags, "tag"),
        _count(synced.files, "file"),
        f"status {synced.status}" if synced.ended else "",
    ]
    there = [
        _count(metrics.there, "metric value"),
        _count(synced.files_there, "file"),
        "" if synced.ended else f"status {synced.status}",
    ]
    line = f"sent {', '.join(filter(None, sent)) or 'nothing'}"
    if any(there):
        line += f"; there already: {', '.join(filter(None, there))}"
    if synced.writing:
        line += "; still being written: its files and its status come later"
    return line


def _count(number: int, noun: str) -> str:
    """Return `1,024 files`; '' for none."""
    return plural(number, noun) if number else ""


def _conflict_text(number: int) -> str:
    """Return the warning about `number` values that differ at MLflow."""
    return (
        f"{_count(number, 'value')} at MLflow {'differs' if number == 1 else 'differ'} from the run folder's: steps "
        "that a resume did again were sent before, and MLflow changes no value"
    )
