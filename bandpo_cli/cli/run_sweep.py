"""A sweep from its plan to the closing lines: the runs, the record at MLflow, what failed and how to go on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bandpo_cli.cli.eval_views import format_duration
from bandpo_cli.cli.lines import print_line
from bandpo_cli.cli.sweep_request import SweepRequest
from bandpo_cli.cli.sweep_tracking import sweep_mlflow_run
from bandpo_cli.cli.sweep_views import arms_table, make_sweep_view, plan_table
from bandpo_cli.config.layers import read_layer, resolve
from bandpo_cli.config.run import EMBEDDED_MODEL, RunConfig
from bandpo_cli.errors import RunError, UserError
from bandpo_cli.sweeps.estimate import seconds_from_earlier_runs, seconds_from_trial, total_seconds
from bandpo_cli.sweeps.folder import SweepFolder, SweepRun
from bandpo_cli.sweeps.pool import LocalPool, Pool, slot_environments, usable_cores, visible_gpus
from bandpo_cli.sweeps.scheduler import RunState, run_sweep
from bandpo_cli.tracking.store import tracking_store, ui_command


@dataclass(frozen=True)
class Executor:
    """Where runs are executed: `executor` by name, the cluster's address for Ray, and how many at a time."""

    executor: str = "local"
    address: str | None = None
    jobs: int | None = None
    margin: float | None = None
    """Stop runs that lie this far behind another arm; None stops none."""


def show_plan(request: SweepRequest, place: Executor, console: Console, runs_dir: Path) -> None:
    """Print the runs and how long they will take, and run none of them."""
    runs = [SweepRun(run.name, run.arm, run.seed) for run in request.runs]
    with closing(_local_pool(place, len(runs), {})) as pool:
        print_plan(console, runs, {run.name: run.config for run in request.runs}, runs, pool, runs_dir)


def run_planned_sweep(folder: SweepFolder, place: Executor, console: Console, runs_dir: Path) -> None:
    """Run what is not whole, and say what came of it.

    Raises:
        RunError: some runs failed; the line says how to try them again.
    """
    configs = {run.name: resolve([read_layer(folder.plan_path(run.name))]) for run in folder.runs}
    given_up = folder.stopped()
    left = [run for run in folder.runs if not folder.is_finished(run.name) and run.name not in given_up]
    tracking = next(iter(configs.values())).tracking
    store = tracking_store(tracking, runs_dir) if tracking.mlflow else None
    # Runs keep their record where the sweep has its own, not in a file of the sweep's folder.
    variables = {} if store is None else {"MLFLOW_TRACKING_URI": store.uri}
    print_line(console, str(folder.path), "sweep")
    start = time.perf_counter()
    failures: dict[str, str] = {}
    with closing(_POOLS[place.executor](place, len(left), variables)) as pool:
        print_plan(console, folder.runs, configs, left, pool, runs_dir)
        if left:
            with sweep_mlflow_run(folder, store, console) as parent:
                flags = [] if parent.run_id is None else ["--set", f"tracking.parent={parent.run_id}"]
                failures = _run(folder, configs, pool, flags, place.margin, console, runs_dir)
                parent.leaderboard = _report(folder, console)
        else:
            _report(folder, console)
    whole = sum(folder.is_finished(run.name) for run in folder.runs)
    took = f" in {format_duration(time.perf_counter() - start)}" if left else ""
    console.print(f"{whole} of {len(folder.runs)} runs whole{took}", highlight=False)
    if store is not None:
        print_line(console, ui_command(store.uri), "MLflow")
    for name, why in folder.stopped().items():
        print_line(console, f"{name}: {why}", "stopped early", "yellow")
    for name, why in failures.items():
        print_line(console, f"{name}: {why}", "failed", "red")
    if failures:
        raise RunError(
            f"{len(failures)} of {len(folder.runs)} runs failed; try them again: {resume_command(folder, runs_dir)}"
        )


def _run(
    folder: SweepFolder,
    configs: Mapping[str, RunConfig],
    pool: Pool,
    flags: Sequence[str],
    margin: float | None,
    console: Console,
    runs_dir: Path,
) -> dict[str, str]:
    """Run the sweep under a view, and print its arms when it has ended; return why each failed run did."""
    latest: dict[str, RunState] = {}
    steps = {name: config.steps for name, config in configs.items()}
    try:
        with make_sweep_view(console, folder.runs, pool.slots) as view:

            def watch(states: Mapping[str, RunState]) -> None:
                latest.update(states)
                view.show(states)

            failures = run_sweep(folder, pool, steps, watch, flags, margin)
    except KeyboardInterrupt:
        whole = sum(folder.is_finished(run.name) for run in folder.runs)
        print_line(
            console,
            f"stopped, {whole} of {len(folder.runs)} runs are whole; go on by: "
            + resume_command(folder, runs_dir),
        )
        raise
    console.print(arms_table(folder.runs, latest))
    return failures


def _report(folder: SweepFolder, console: Console) -> dict[str, float]:
    """Write and print the report of what is whole and return its leaderboard; with nothing to report on, say why."""
    from bandpo_cli.reports.sweep import read_sweep, write_report
    from bandpo_cli.reports.sweep.tables import leaderboard_metrics
    from bandpo_cli.reports.sweep.terminal import print_report

    title, baseline, runs = read_sweep(folder.path)
    console.print()
    try:
        with console.status("writing the report …"):
            report = write_report(runs, title, baseline, folder.path / "report")
    except UserError as error:
        print_line(console, str(error), "no report:", "yellow")
        return {}
    print_report(console, report)
    console.print()
    return leaderboard_metrics(report)


def resume_command(folder: SweepFolder, runs_dir: Path) -> str:
    """Return what goes on with the sweep."""
    elsewhere = "" if runs_dir == Path("runs") else f" --runs-dir {runs_dir}"
    return f"bandpo sweep --resume {folder.name}{elsewhere}"


def _local_pool(place: Executor, runs: int, variables: Mapping[str, str]) -> Pool:
    gpus, cores = visible_gpus(os.environ), usable_cores()
    jobs = place.jobs or len(gpus) or cores
    slots = slot_environments(max(1, min(jobs, runs)), cores, gpus, os.environ)
    return LocalPool([{**slot, **variables} for slot in slots])


def _ray_pool(place: Executor, runs: int, variables: Mapping[str, str]) -> Pool:
    from bandpo_cli.sweeps.ray_pool import RayPool  # an extra, and seconds to import

    return RayPool(place.address, place.jobs, variables)


_POOLS: dict[str, Callable[[Executor, int, Mapping[str, str]], Pool]] = {
    "local": _local_pool,
    "ray": _ray_pool,
}
EXECUTORS = tuple(_POOLS)


def print_plan(
    console: Console,
    runs: Sequence[SweepRun],
    configs: Mapping[str, RunConfig],
    left: Sequence[SweepRun],
    pool: Pool,
    runs_dir: Path,
) -> None:
    """Print the table of runs and the estimate of the time."""
    console.print(plan_table(runs, {name: config.steps for name, config in configs.items()}), highlight=False)
    whole = len(runs) - len(left)
    console.print(
        f"{len(runs)} runs{f', {whole} of them whole' if whole else ''}, {pool.slots} at a time, "
        f"{pool.threads} thread{'' if pool.threads == 1 else 's'} each",
        highlight=False,
    )
    if not left:
        return
    first = configs[left[0].name]
    seconds = seconds_from_earlier_runs(first, runs_dir, pool.threads)
    how = "by earlier runs"
    if seconds is None and first.model.path == EMBEDDED_MODEL:
        with console.status("a trial of three steps, for an estimate of the time …"):
            seconds = seconds_from_trial(first, {**os.environ, "OMP_NUM_THREADS": str(pool.threads)})
        how = "by a trial of three steps alone on the machine"
    if seconds is None:
        console.print(
            "no run of this shape is here to estimate the time by; the table will tell after the first steps"
        )
        return
    each = [seconds / first.steps * configs[run.name].steps for run in left]
    console.print(
        f"about {format_duration(total_seconds(each, pool.slots))} in all, {format_duration(seconds)} a run ({how})",
        highlight=False,
    )
