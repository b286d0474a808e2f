"""Sweeps: runs of a plan in separate processes, their parent run at MLflow, and the report."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bandpo_cli.callbacks import Callback
from bandpo_cli.config.layers import read_layer, resolve
from bandpo_cli.config.run import RunConfig, TrackingConfig, check_ranks
from bandpo_cli.custom_code import code_first_in
from bandpo_cli.errors import ConfigError, UserError, first_line, log, plural, unknown_choice
from bandpo_cli.experiments.monitor import Dispatcher
from bandpo_cli.experiments.plan import choose_run_name
from bandpo_cli.metric_names import AXES, STEP, Axis
from bandpo_cli.paths import given_path
from bandpo_cli.processes import watch
from bandpo_cli.storage.files import run_lock
from bandpo_cli.storage.run_folder import shell_command, timestamped
from bandpo_cli.storage.run_record import describe_environment, is_finished, usable_cores
from bandpo_cli.storage.sweep_folder import PLAN_FILE, SweepFolder, SweepRun
from bandpo_cli.sweeps.scheduler import (
    LocalPool,
    Pool,
    RayPool,
    RunState,
    rank_flags,
    run_sweep,
    slot_environments,
    visible_gpus,
)
from bandpo_cli.sweeps.sweep_plan import SweepConfig, SweepPlan, plan_from_config
from bandpo_cli.tracking.mlflow_store import MLFLOW, Store, tracking_store, ui_text
from bandpo_cli.tracking.outages import short_error
from bandpo_cli.tracking.sender import RunSender
from bandpo_cli.tracking.trackers import Point, finite_metrics
from bandpo_cli.types import status_of

if TYPE_CHECKING:
    from bandpo_cli.reports.compare_variants import Report


EXECUTORS = ("local", "ray")

NOTE_HEADING = (
    "Means over seeds and 95% intervals of the finished runs; more in the artifact `report/report.html`."
)
"""The first line of the description of a sweep's MLflow run; a description with another one is the user's."""


def open_mlflow_run(folder: SweepFolder, store: Store) -> tuple[RunSender | None, str | None]:
    """Open the sweep's MLflow run; return its sender, and the id that is the parent of the sweep's runs.

    Both are None where MLflow did not accept the sweep: its runs continue without it.
    """
    sender = RunSender(MLFLOW, folder.path, store)
    try:
        tracker = sender.open_sweep(store.experiment, _about_sweep(folder), describe_environment())
        if address := sender.address():
            log.info("%s", address)
        return sender, tracker.remote_id.rpartition("/")[2]
    except Exception as error:  # noqa: BLE001 - whatever MLflow raises
        log.warning(
            "%s did not accept the sweep (%s); its runs have no parent", sender.place, short_error(error)
        )
        return None, None


def _about_sweep(folder: SweepFolder) -> dict[str, Any]:
    """Return the params of a sweep at its trackers."""
    variants = sorted({run.variant for run in folder.runs})
    return {"variants": variants, "runs": len(folder.runs), "baseline": folder.baseline}


def send_report(
    sender: RunSender, project: str, folder: SweepFolder, status: str, report: Report | None
) -> None:
    """Send a tracker the status of the sweep, and the leaderboard of the report as metrics and as text."""
    metrics, text = dict[str, float](), ""
    if report is not None:
        from bandpo_cli.reports.write_report import render

        for variant in report.variants:
            metrics |= {f"sweep/{variant.name}/{name}": value.mean for name, value in variant.metrics.items()}
        text = f"{NOTE_HEADING}\n\n{render('leaderboard.md', report)}"
    point = Point(_count_finished(folder), int(time.time() * 1000), finite_metrics(metrics))
    files = [folder.path / PLAN_FILE, *sorted((folder.path / "report").glob("*"))]
    sender.send_sweep(project, _about_sweep(folder), point, status, files, text)


def _count_finished(folder: SweepFolder) -> int:
    return sum(is_finished(folder.path / run.name) for run in folder.runs)


@dataclass(frozen=True)
class Executor:
    """The place where runs are executed. Raises ConfigError if it is unknown or not installed, or options do not fit.

    Attributes:
        address: address of a Ray cluster; None for a local cluster that ends with the sweep.
        jobs: runs at a time; None for the number in a resumed plan, else for as many as there are GPUs for, or cores
            where there is no GPU.
        stop_margin: stop a run half-way or later whose held-out accuracy is this far below another variant's.
        gpus_per_run: GPUs, or processes without a GPU, of each run; None for one, or for the number in a resumed plan.
    """

    name: str = "local"
    address: str | None = None
    jobs: int | None = None
    stop_margin: float | None = None
    gpus_per_run: int | None = None

    def __post_init__(self) -> None:
        if self.name not in EXECUTORS:
            raise ConfigError(f"--executor {self.name}: {unknown_choice(self.name, EXECUTORS)}")
        if self.address is not None and self.name != "ray":
            raise ConfigError(f"--ray-address {self.address}: goes with --executor ray")
        if self.name == "ray" and find_spec("ray") is None:
            raise ConfigError('--executor ray: Ray is not installed; pip install "bandpo[ray]"')
        if self.stop_margin is not None and not 0 < self.stop_margin < 1:
            margin = f"--stop-behind {self.stop_margin:g}"
            raise ConfigError(f"{margin}: a difference of accuracies, between 0 and 1, as in 0.1")
        gpus = visible_gpus(os.environ) if self.name == "local" and self.ranks > 1 else []
        if gpus and len(gpus) < self.ranks:
            raise ConfigError(f"--gpus-per-run {self.ranks}: this machine has {plural(len(gpus), 'GPU')}")

    @property
    def ranks(self) -> int:
        """Processes of each run."""
        return self.gpus_per_run or 1


@dataclass(frozen=True)
class SweepInfo:
    """A sweep at its start, as callbacks receive it: the settings of the runs by name, and the runs that are to be
    executed.

    Attributes:
        slots: runs at a time.
        threads: CPU threads per process of a run.
        ranks: processes of a run, each with a GPU of its own where there are GPUs.
        forked_at: the step after which every run begins; 0 for runs from the start.
    """

    folder: Path | None
    runs: Sequence[SweepRun]
    configs: Mapping[str, RunConfig]
    pending: Sequence[SweepRun]
    slots: int
    threads: int
    ranks: int = 1
    forked_at: int = 0


States = Mapping[str, RunState]
"""The state of each run, by name."""


@dataclass(frozen=True)
class SweepResult:
    """The end of a sweep.

    Attributes:
        finished: number of finished runs, those of earlier calls included.
        failures, stopped: why a run failed or was stopped early, by name.
        report: the report over all finished runs; None where there is nothing to report on (`report_error`).
        mlflow: as in `EvalResult`.
        error: the exception that ended the sweep early, KeyboardInterrupt for example.
    """

    folder: Path
    runs: int
    finished: int
    failures: Mapping[str, str]
    stopped: Mapping[str, str]
    report: Report | None = None
    report_error: str | None = None
    mlflow: str | None = None
    error: BaseException | None = None


SweepCallback = Callback[SweepInfo, States, SweepResult]
"""A callback of `sweep`."""
SweepEvents = Dispatcher[SweepInfo, States, SweepResult]


def sweep(
    plan: SweepPlan | SweepConfig | Mapping[str, Any] | str,
    *,
    executor: Executor | None = None,
    runs_dir: Path | str = "runs",
    name: str | None = None,
    callbacks: Sequence[SweepCallback] = (),
    x: str = "step",
) -> SweepResult:
    """Execute the runs of a sweep that are not finished, each as a process, and write the report.

    A run that fails stops no other and raises nothing: see `SweepResult.failures`.

    Args:
        plan: a plan of `plan_sweep`, the settings of a new sweep, or the name of a sweep to resume.
        executor: where the runs are executed; None for this machine.
        name: name of a new sweep's folder; None for `sweep-` and the time.
        callbacks: receive the events of `callbacks.Callback`; `step` has the states of all runs about once per second.
        x: the axis of the report (`metric_names.AXES`): variants are compared at equal steps, tokens, flops or seconds.

    Raises UserError if a setting cannot be used, the name is taken, there is no such sweep, or another process writes
    to it. KeyboardInterrupt and SystemExit stop the running processes first; the sweep can be resumed.
    """
    runs_dir, executor = given_path(runs_dir), executor or Executor()
    if isinstance(plan, Mapping):
        plan = SweepConfig(**plan)
    if isinstance(plan, SweepConfig):
        plan = plan_from_config(plan, [], runs_dir)
    if isinstance(plan, str):
        folder = SweepFolder.open(runs_dir, plan)
        if executor.gpus_per_run is None:
            executor = replace(executor, gpus_per_run=folder.gpus_per_run)
        executor = replace(executor, jobs=executor.jobs or folder.jobs)
    else:
        _check_run_ranks(plan.runs.values(), executor)
        name = choose_run_name(runs_dir, name, timestamped("sweep"))
        about = ({"gpus_per_run": executor.ranks} if executor.ranks > 1 else {}) | {**plan.about}
        about |= {} if executor.jobs is None else {"jobs": executor.jobs}
        folder = SweepFolder.create(runs_dir, name, plan.runs, plan.baseline, about)
    with run_lock(folder.path):
        return _run_pending(folder, executor, runs_dir, Dispatcher(callbacks), AXES[x])


def dry_run_info(plan: SweepPlan, executor: Executor) -> SweepInfo:
    """Return what `start` would receive for a new sweep on this machine."""
    configs = {run.name: config for run, config in plan.runs.items()}
    _check_run_ranks(configs.values(), executor)
    with closing(_open_pool(executor, len(configs), {}, local=True)) as pool:
        about = pool.slots, pool.threads, executor.ranks, _fork_step(plan.about.get("fork"))
        return SweepInfo(None, [*plan.runs], configs, [*plan.runs], *about)


def _fork_step(fork: str | None) -> int:
    """Return the step of a checkpoint PATH@STEP; 0 for None."""
    return 0 if fork is None else int(fork.rpartition("@")[2])


def _check_run_ranks(configs: Iterable[RunConfig], executor: Executor) -> None:
    """Raise ConfigError where one of the runs cannot be divided among the processes of a run."""
    for config in configs:
        try:
            check_ranks(config, executor.ranks)
        except ConfigError as error:
            raise ConfigError(f"--gpus-per-run {executor.ranks}: {error}") from None


def _run_pending(
    folder: SweepFolder, executor: Executor, runs_dir: Path, events: SweepEvents, axis: Axis
) -> SweepResult:
    """Execute the runs that are neither finished nor stopped early, then write the report and call `end`."""
    configs = {run.name: resolve([read_layer(folder.plan_path(run.name))]) for run in folder.runs}
    pending = folder.pending()
    _check_run_ranks((configs[run.name] for run in pending), executor)
    tracking = next(iter(configs.values())).tracking
    watch.stall_after = tracking.stall_after
    store = tracking_store(tracking, runs_dir) if tracking.with_mlflow else None
    # Runs are tracked where the sweep is, not in a file of the sweep's folder.
    variables = {} if store is None else {"MLFLOW_TRACKING_URI": store.uri}
    if any((folder.path / "plans").glob("*.py")):
        variables |= code_first_in(folder.path / "plans")
    failures: dict[str, str] = {}
    report, report_error, sender = None, None, None
    error: BaseException | None = None
    with closing(_open_pool(executor, len(pending), variables)) as pool:
        try:
            about = pool.slots, pool.threads, executor.ranks, _fork_step(folder.fork)
            events.start(SweepInfo(folder.path, folder.runs, configs, pending, *about))
            if pending:
                flags = rank_flags(executor.ranks)
                if store is not None:
                    events.phase("tracking")
                    sender, parent = open_mlflow_run(folder, store)
                    flags += [] if parent is None else ["--set", f"tracking.parent={parent}"]
                events.phase("run")
                steps = {name: config.steps for name, config in configs.items()}
                failures = run_sweep(folder, pool, steps, events.step, flags, executor.stop_margin)
            events.phase("report")
            report, report_error = _write_report(folder, runs_dir, axis)
        except BaseException as raised:
            error = raised
            raise
        finally:
            if pending:
                _send_to_trackers(folder, tracking, sender, report, error)
            mlflow = None if store is None else ui_text(folder.path, store)
            counts = len(folder.runs), _count_finished(folder), failures, folder.stopped()
            result = SweepResult(folder.path, *counts, report, report_error, mlflow, error)
            events.end(result)
    return result


def _write_report(folder: SweepFolder, runs_dir: Path, axis: Axis = STEP) -> tuple[Report | None, str | None]:
    """Write the report over the finished runs and return it, or why there is none."""
    try:
        from bandpo_cli.reports.run_variants import read_sweep
        from bandpo_cli.reports.write_report import write_report

        return write_report(read_sweep(folder.path), folder.path / "report", axis=axis), None
    except UserError as no_report:
        return None, str(no_report)
    except Exception as failure:  # noqa: BLE001 - the runs are on the disk
        again = shell_command("report", folder.path, runs_dir)
        return None, f"{type(failure).__name__}: {first_line(failure)}; write it again: {again}"


def _send_to_trackers(
    folder: SweepFolder,
    config: TrackingConfig,
    mlflow: RunSender | None,
    report: Report | None,
    error: BaseException | None,
) -> None:
    """Send the end of the sweep to MLflow, and if there was no `error` to the other trackers; log their errors."""
    has_failed = error is None and _count_finished(folder) < len(folder.runs)
    status = "FAILED" if has_failed else status_of(error)
    trackers = [] if mlflow is None else [("MLflow", "the sweep's end")]
    trackers += [
        (name, "the report of the sweep") for name in config.names if name != MLFLOW and error is None
    ]
    for name, what in trackers:
        try:
            sender = mlflow if mlflow is not None and name == "MLflow" else RunSender(name, folder.path)
            send_report(sender, config.experiment, folder, status, report)
        except Exception as failure:  # noqa: BLE001 - whatever a tracker raises, the runs are on the disk
            log.warning("%s did not accept %s (%s)", name, what, short_error(failure))


def _open_pool(executor: Executor, runs: int, variables: Mapping[str, str], local: bool = False) -> Pool:
    """Return the pool that executes `runs` runs, with these environment variables, on this machine or with Ray."""
    if executor.name == "ray" and not local:
        return RayPool(executor.address, executor.jobs, variables, executor.ranks)
    gpus, cores = visible_gpus(os.environ), usable_cores()
    jobs = executor.jobs or (len(gpus) or cores) // executor.ranks
    slots = slot_environments(max(1, min(jobs, runs)), cores, gpus, os.environ, executor.ranks)
    return LocalPool([{**slot, **variables} for slot in slots])
