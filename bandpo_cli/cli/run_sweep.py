"""A sweep from its plan to the closing lines: the runs, the record at MLflow, what failed and how to go on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from bandpo_cli.cli.eval_views import clock
from bandpo_cli.cli.sweep_request import SweepRequest
from bandpo_cli.cli.sweep_views import arms_table, make_view, plan_table
from bandpo_cli.config.layers import read_layer, resolve
from bandpo_cli.config.run import EMBEDDED_MODEL, RunConfig
from bandpo_cli.errors import RunError
from bandpo_cli.sweeps.estimate import known_seconds, trial_seconds, wall_seconds
from bandpo_cli.sweeps.folder import PLAN, SweepFolder, SweepRun
from bandpo_cli.sweeps.pool import LocalPool, local_slots, usable_cores, visible_gpus
from bandpo_cli.sweeps.run import run_sweep
from bandpo_cli.sweeps.states import RunState
from bandpo_cli.tracking.environment import describe_environment
from bandpo_cli.tracking.mlflow_names import flat_params, run_tags
from bandpo_cli.tracking.store import Store, tracking_store, ui_command

if TYPE_CHECKING:
    from bandpo_cli.tracking.mlflow_mirror import MlflowMirror


def show_plan(request: SweepRequest, jobs: int | None, console: Console, runs_dir: Path) -> None:
    """Print the runs and how long they will take, and run none of them."""
    runs = [SweepRun(run.name, run.arm, run.seed) for run in request.runs]
    _state(
        console, runs, {run.name: run.config for run in request.runs}, runs, _slots(jobs, len(runs)), runs_dir
    )


def execute(folder: SweepFolder, jobs: int | None, console: Console, runs_dir: Path, dry_run: bool) -> None:
    """Run what is not whole, and say what came of it.

    Raises:
        RunError: some runs failed; the line says how to try them again.
    """
    configs = {run.name: resolve([read_layer(folder.plan_path(run.name))]) for run in folder.runs}
    left = [run for run in folder.runs if not folder.is_whole(run.name)]
    slots = _slots(jobs, len(left))
    console.print(f"[bold]sweep[/bold]  {folder.path}", highlight=False, soft_wrap=True)
    _state(console, folder.runs, configs, left, slots, runs_dir)
    if dry_run:
        return
    steps = {name: config.steps for name, config in configs.items()}
    latest: dict[str, RunState] = {}
    start = time.perf_counter()
    with _parent(folder, configs, runs_dir, console) as (parent, store):
        # Children keep their record where the sweep has its own, not in a file of the sweep's folder.
        pool = LocalPool(
            [{**slot, **({"MLFLOW_TRACKING_URI": store.uri} if store else {})} for slot in slots]
        )
        with make_view(console, folder.runs, len(slots)) as view:

            def watch(states: Mapping[str, RunState]) -> None:
                latest.update(states)
                view.show(states)

            flags = [] if parent is None else ["--set", f"tracking.parent={parent}"]
            try:
                failures = run_sweep(folder, pool, steps, watch, flags)
            except KeyboardInterrupt:
                whole = sum(folder.is_whole(run.name) for run in folder.runs)
                console.print(
                    f"stopped, {whole} of {len(folder.runs)} runs are whole; go on by: "
                    + resume_command(folder, runs_dir),
                    highlight=False,
                    soft_wrap=True,
                )
                raise
    console.print(arms_table(folder.runs, latest) if latest else "every run is whole already")
    whole = sum(folder.is_whole(run.name) for run in folder.runs)
    took = f" in {clock(time.perf_counter() - start)}" if left else ""
    console.print(f"{whole} of {len(folder.runs)} runs whole{took}", highlight=False)
    if store is not None:
        console.print(f"[bold]MLflow[/bold]  {ui_command(store.uri)}", highlight=False, soft_wrap=True)
    for name, why in failures.items():
        console.print(f"[red]failed[/red]  {name}: {why}", highlight=False, soft_wrap=True)
    if failures:
        raise RunError(
            f"{len(failures)} of {len(folder.runs)} runs failed; try them again: {resume_command(folder, runs_dir)}"
        )


def resume_command(folder: SweepFolder, runs_dir: Path) -> str:
    """Return what goes on with the sweep."""
    elsewhere = "" if runs_dir == Path("runs") else f" --runs-dir {runs_dir}"
    return f"bandpo sweep --resume {folder.name}{elsewhere}"


def _slots(jobs: int | None, runs: int) -> list[dict[str, str]]:
    gpus = visible_gpus(os.environ)
    cores = usable_cores()
    count = jobs or (len(gpus) if gpus else cores)
    return local_slots(max(1, min(count, runs)), cores, gpus, os.environ)


def _state(
    console: Console,
    runs: Sequence[SweepRun],
    configs: Mapping[str, RunConfig],
    left: Sequence[SweepRun],
    slots: Sequence[Mapping[str, str]],
    runs_dir: Path,
) -> None:
    """Print the table of runs and the estimate of the time."""
    console.print(plan_table(runs, {name: config.steps for name, config in configs.items()}), highlight=False)
    whole = len(runs) - len(left)
    console.print(
        f"{len(runs)} runs{f', {whole} of them whole' if whole else ''}, {len(slots)} at a time, "
        f"{slots[0]['OMP_NUM_THREADS']} threads each",
        highlight=False,
    )
    if not left:
        return
    first = configs[left[0].name]
    seconds = known_seconds(first, runs_dir)
    how = "by earlier runs"
    if seconds is None and first.model.path == EMBEDDED_MODEL:
        with console.status("a trial of three steps, for an estimate of the time …"):
            seconds = trial_seconds(first, {**os.environ, **slots[0]})
        how = "by a trial of three steps alone on the machine"
    if seconds is None:
        console.print(
            "no run of this shape is here to estimate the time by; the table will tell after the first steps"
        )
        return
    each = [seconds / first.steps * configs[run.name].steps for run in left]
    console.print(
        f"about {clock(wall_seconds(each, len(slots)))} in all, {clock(seconds)} a run ({how})",
        highlight=False,
    )


@contextmanager
def _parent(
    folder: SweepFolder, configs: Mapping[str, RunConfig], runs_dir: Path, console: Console
) -> Iterator[tuple[str | None, Store | None]]:
    """Open the sweep's own run at MLflow, which its runs are shown under, and close it with the way it ended."""
    tracking = next(iter(configs.values())).tracking
    if not tracking.mlflow:
        yield None, None
        return
    store = tracking_store(tracking, runs_dir)
    mirror = _connect(folder, store, console)
    status = "FAILED"
    try:
        yield None if mirror is None else mirror.run_id, store
        status = "FINISHED" if all(folder.is_whole(run.name) for run in folder.runs) else "FAILED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        if mirror is not None:
            _close(mirror, folder, status, console)


def _connect(folder: SweepFolder, store: Store, console: Console) -> MlflowMirror | None:
    from bandpo_cli.tracking.mlflow_mirror import MlflowMirror

    params = {
        "arms": sorted({run.arm for run in folder.runs}),
        "runs": len(folder.runs),
        "baseline": folder.baseline,
    }
    try:
        with console.status("opening the sweep at MLflow …"):
            mirror = MlflowMirror.connect(
                store, folder.path, folder.name, flat_params(params), run_tags(describe_environment())
            )
            mirror.reopen()
            return mirror
    except Exception as error:  # noqa: BLE001 - whatever MLflow raises, the runs can go on without it
        line = (str(error).strip().splitlines() or [""])[0][:200]
        console.print(
            f"[yellow]warning:[/yellow] MLflow at {store.uri} did not take the sweep ({type(error).__name__}: {line}); "
            "its runs are not shown under one",
            highlight=False,
            soft_wrap=True,
        )
        return None


def _close(mirror: MlflowMirror, folder: SweepFolder, status: str, console: Console) -> None:
    try:
        mirror.send_file(folder.path, folder.path / PLAN)
        mirror.close(status)
    except Exception as error:  # noqa: BLE001 - as above
        line = (str(error).strip().splitlines() or [""])[0][:200]
        console.print(
            f"[yellow]warning:[/yellow] MLflow did not take the sweep's end ({line})", highlight=False
        )
