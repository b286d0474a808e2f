"""`bandpo sync`: what MLflow lacks of runs, sent from their folders."""

from __future__ import annotations

from typing import Annotated

import typer

from bandpo_cli.cli.options import RUNS, RunsDir


def sync(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN...", help="Runs, by name or folder; a sweep stands for all of its runs."),
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Every run of --runs-dir, those of sweeps too.")
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
    """Send MLflow what it lacks of runs: after an outage, or of runs that were not tracked.

    Read from the run folders alone: params, tags, every metric of every step,
    files, how the run ended. What MLflow has is not sent again, so this can be
    done at any time and as often as one likes. A run that is still going on
    stays RUNNING.

    [bold]bandpo sync first[/bold]  the run in runs/first

    [bold]bandpo sync deltas --tracking-uri http://127.0.0.1:5000[/bold]  a sweep's runs, to a server

    [bold]bandpo sync --all[/bold]  every run; those with tracking.mlflow=false only by name
    """
    from rich.console import Console

    from bandpo_cli.cli.run_sync import choose_runs, run_sync

    run_sync(choose_runs(runs or [], all_, runs_dir), tracking_uri, Console())
