"""`bandpo import`: runs of another engine as run folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bandpo_cli.cli.options import RUNS, RunsDir, command_group

import_app = command_group(no_args_is_help=True)


@import_app.callback()
def import_() -> None:
    """Read runs of another engine into the runs folder."""


@import_app.command()
def verl(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="Folder of `bandpo export verl`.")],
    name: Annotated[
        str | None,
        typer.Option(help="Name of the run's folder.", show_default="the name of the job's folder"),
    ] = None,
    tracking_uri: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="MLflow server or store that the job wrote to.",
            show_default="$MLFLOW_TRACKING_URI, else tracking.uri of the settings, else mlflow.db in JOB",
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="ID", help="The MLflow run.", show_default="the last run with the job's name"),
    ] = None,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Read the MLflow run of a job that verl trained, and write it as a run folder.

    `bandpo report` then compares the run with other runs; runs of verl are variants of
    their own, engine=verl. Metrics with a different meaning in verl are left
    out: accuracy and entropy of training, pass@k.

    [bold]bandpo import verl job[/bold]  the run of job, to runs/job

    [bold]bandpo import verl job --name band-verl --tracking-uri http://127.0.0.1:5000[/bold]  from a server

    [bold]bandpo report runs/job runs/first[/bold]  both engines in one table
    """
    from bandpo_cli.cli.console import open_console, print_line
    from bandpo_cli.experiments import import_verl

    imported = import_verl(job, name=name, uri=tracking_uri, run_id=run, runs_dir=runs_dir)
    console = open_console()
    print_line(
        console, f"{imported.status}, step {imported.last_step:,} of {imported.steps:,}", str(imported.folder)
    )
    if imported.left_out:
        print_line(console, ", ".join(imported.left_out), "left out")
