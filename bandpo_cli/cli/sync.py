"""`bandpo sync`: send MLflow what it lacks of runs, from their folders."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

from bandpo_cli.cli.completion import folder_of
from bandpo_cli.cli.options import RUNS, RunsDir, argument, documented, option


@documented
def sync(
    runs: Annotated[list[str] | None, argument("RUN...", complete=folder_of("run", "sweep"))] = None,
    all_: Annotated[bool, option(flags=["--all"])] = False,
    tracking_uri: Annotated[str | None, option("URI", "where the run was tracked, or would be")] = None,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Send to MLflow all data of runs that it does not have, for example after an outage.

    Reads the run folders only: params, tags, every metric of every step, files,
    how the run ended. Data that MLflow already has are not sent again, so you
    can repeat the command at any time. A run that is still being written stays RUNNING.

    [bold]bandpo sync first[/bold]  the run in runs/first

    [bold]bandpo sync deltas --tracking-uri http://127.0.0.1:5000[/bold]  a sweep's runs, to a server

    [bold]bandpo sync --all[/bold]  every run; those with tracking.mlflow=false only by name

    Args:
        runs: Runs, by name or folder; a sweep stands for all of its runs.
        all_: Send every run in --runs-dir, including the runs of sweeps.
        tracking_uri: MLflow server or store.
    """
    from bandpo_cli.cli.console import open_console
    from bandpo_cli.cli.sync_view import SyncView
    from bandpo_cli.experiments import sync as sync_runs

    with closing(SyncView(open_console())) as view:
        sync_runs(runs or [], all_runs=all_, uri=tracking_uri, runs_dir=runs_dir, callbacks=[view])
