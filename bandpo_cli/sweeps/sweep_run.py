"""Sweeps: runs of a plan in separate processes, their parent run at MLflow, and the report."""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bandpo_cli.callbacks import Callback, Dispatcher
from bandpo_cli.config.layers import read_layer, resolve
from bandpo_cli.config.run import RunConfig, TrackingConfig, check_ranks
from bandpo_cli.config.sweep import SweepConfig
from bandpo_cli.custom_code import code_first_in
from bandpo_cli.datasets import BUNDLED_MODELS
from bandpo_cli.errors import ConfigError, UserError, first_line, plural, unknown_choice
from bandpo_cli.experiments.preflight import choose_run_name
from bandpo_cli.paths import user_path
from bandpo_cli.processes import watch
from bandpo_cli.storage.environment import describe_environment, usable_cores
from bandpo_cli.storage.files import run_lock
from bandpo_cli.storage.run_folder import shell_command, timestamped
from bandpo_cli.storage.run_record import is_finished
from bandpo_cli.storage.sweep_folder import PLAN_FILE, SweepFolder, SweepRun
from bandpo_cli.sweeps.pool import LocalPool, Pool, RayPool, slot_environments, visible_gpus
from bandpo_cli.sweeps.scheduler import (
    RunState,
    rank_flags,
    run_sweep,
    seconds_from_earlier_runs,
    seconds_from_trial,
    total_seconds,
)
from bandpo_cli.sweeps.sweep_plan import SweepPlan, request_from_config
from bandpo_cli.tracking.mlflow_store import MLFLOW, Store, tracking_store, ui_text
from bandpo_cli.tracking.outages import short_error
from bandpo_cli.tracking.sender import RunSender
from bandpo_cli.tracking.trackers import Point, finite_metrics

if TYPE_CHECKING:
    from bandpo_cli.reports.compare_variants import Report


log = logging.getLogger("bandpo_cli")

EXECUTORS = ("local", "ray")

NOTE_HEADING = (
    "Means over seeds and 95% intervals of the finished runs; more in the artifact `report/report.html`."
)
"""The first line of the description of a sweep's MLflow run; a description with another one is the user's."""


@contextmanager
def sweep_mlflow_run(
    folder: SweepFolder, store: Store | None, report: Callable[[], Report | None]
) -> Iterator[str | None]:
    """Open the sweep's MLflow run, and close it with its status and the leaderboard of the report.

    `report` returns, at the end, the report over the sweep's runs. Yields the parent of the sweep's runs; None without
    MLflow, or where MLflow did not accept it.
    """
    parent: str | None = None
    sender = None if store is None else RunSender(MLFLOW, folder.path, store)
    if sender is not None and store is not None:
        try:
            tracker = sender.open_sweep(store.experiment, _about_sweep(folder), describe_environment())
            parent = tracker.remote_id.rpartition("/")[2]
            if address := sender.address():
                log.info("%s", address)
        except Exception as error:  # noqa: BLE001 - whatever MLflow raises, the runs continue without it
            log.warning(
                "%s did not accept the sweep (%s); its runs have no parent", sender.place, short_error(error)
            )
    status = "FAILED"
    try:
        yield parent
        if all(is_finished(folder.path / run.name) for run in folder.runs):
            status = "FINISHED"
    except (KeyboardInterrupt, SystemExit):
        status = "KILLED"
        raise
    finally:
        if parent is not None and sender is not None and store is not None:
            try:
                _send_report(sender, store.experiment, folder, status, report())
            except Exception as error:  # noqa: BLE001 - whatever MLflow raises, the runs are on the disk
                log.warning("MLflow did not accept the sweep's end (%s)", short_error(error))


def _sweep_means(report: Report | None) -> dict[str, float]:
    """Return the means of a report as metrics `sweep/<variant>/<column>`."""
    variants = [] if report is None else report.variants
    return {
        f"sweep/{variant.name}/{key}": estimate.mean
        for variant in variants
        for key, estimate in variant.metrics.items()
    }


def _report_files(folder: SweepFolder) -> list[Path]:
    return [folder.path / PLAN_FILE, *sorted((folder.path / "report").glob("*"))]


def _about_sweep(folder: SweepFolder) -> dict[str, Any]:
    """Return the params of a sweep at its trackers."""
    variants = sorted({run.variant for run in folder.runs})
    return {"variants": variants, "runs": len(folder.runs), "baseline": folder.baseline}


def _send_to_trackers(folder: SweepFolder, config: TrackingConfig, report: Report | None) -> None:
    """Send the report of the sweep to the trackers other than MLflow; an error is a warning."""
    status = "FINISHED" if all(is_finished(folder.path / run.name) for run in folder.runs) else "FAILED"
    for name in config.other_trackers:
        try:
            _send_report(RunSender(name, folder.path), config.experiment, folder, status, report)
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, the runs are on the disk
            log.warning("%s did not accept the report of the sweep (%s)", name, short_error(error))


def _send_report(
    sender: RunSender, project: str, folder: SweepFolder, status: str, report: Report | None
) -> None:
    from bandpo_cli.reports.write_report import render

    finished = sum(is_finished(folder.path / run.name) for run in folder.runs)
    point = Point(finished, int(time.time() * 1000), finite_metrics(_sweep_means(report)))
    text = "" if report is None else f"{NOTE_HEADING}\n\n{render('leaderboard.md', report)}"
    sender.send_sweep(project, _about_sweep(folder), point, status, _report_files(folder), text)


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
    """A sweep at its start, as callbacks receive it.

    Attributes:
        configs: their settings, by name of the run.
        pending: the runs that are to be executed.
        slots: runs at a time.
        threads: CPU threads per run, or per process of a run.
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
    request: SweepPlan | SweepConfig | str,
    *,
    executor: Executor | None = None,
    runs_dir: Path | str = "runs",
    name: str | None = None,
    callbacks: Sequence[SweepCallback] = (),
) -> SweepResult:
    """Execute the runs of a sweep that are not finished, each as a process, and write the report.

    A run that fails stops no other and raises nothing: see `SweepResult.failures`.

    Args:
        request: a plan of `plan_sweep`, the settings of a new sweep, or the name of a sweep to resume.
        executor: where the runs are executed; None for this machine.
        name: name of a new sweep's folder; None for `sweep-` and the time.
        callbacks: receive the events of `callbacks.Callback`; `step` has the states of all runs about once per second.

    Raises:
        UserError: a setting cannot be used, the name is taken, there is no such sweep, or another process writes to it.
        KeyboardInterrupt, SystemExit: after the running processes have been stopped; the sweep can be resumed.
    """
    runs_dir, executor = Path(runs_dir), executor or Executor()
    if isinstance(request, SweepConfig):
        request = request_from_config(request, [], runs_dir)
    if isinstance(request, str):
        folder = SweepFolder.open(runs_dir, request)
        if executor.gpus_per_run is None:
            executor = replace(executor, gpus_per_run=folder.gpus_per_run)
        executor = replace(executor, jobs=executor.jobs or folder.jobs)
    else:
        _check_run_ranks((run.config for run in request.runs), executor)
        name = choose_run_name(runs_dir, name, timestamped("sweep"))
        about = ({"gpus_per_run": executor.ranks} if executor.ranks > 1 else {}) | {**request.about}
        about |= {} if executor.jobs is None else {"jobs": executor.jobs}
        folder = SweepFolder.create(runs_dir, name, request.runs, request.baseline, about)
    with run_lock(folder.path):
        return _run_pending(folder, executor, runs_dir, Dispatcher(callbacks))


def dry_run_info(request: SweepPlan, executor: Executor) -> SweepInfo:
    """Return what `start` would receive for a new sweep on this machine."""
    configs = {run.name: run.config for run in request.runs}
    _check_run_ranks(configs.values(), executor)
    with closing(_open_pool(executor, len(configs), {}, local=True)) as pool:
        about = pool.slots, pool.threads, executor.ranks, _fork_step(request.about.get("fork"))
        return SweepInfo(None, request.runs, configs, request.runs, *about)


def estimate_time(
    info: SweepInfo, runs_dir: Path | str = "runs", on_trial: Callable[[], None] = lambda: None
) -> tuple[float, float, str] | None:
    """Estimate the time of the pending runs from earlier runs; without any, from a trial of the bundled model.

    Returns seconds in total, seconds of the first run and the method; None if no earlier run is similar. `on_trial` is
    called before the trial, three training steps in a process.
    """
    first = info.configs[info.pending[0].name]
    method = "by earlier runs"
    seconds = seconds_from_earlier_runs(first, Path(runs_dir), info.threads, info.ranks)
    if seconds is None:
        if first.model.path not in BUNDLED_MODELS:
            return None
        on_trial()
        variables = {**os.environ, "OMP_NUM_THREADS": str(info.threads)}
        seconds = seconds_from_trial(first, variables, info.ranks)
        method = "by a trial of three steps, without other runs on the machine"
    steps = (info.configs[run.name].steps - info.forked_at for run in info.pending)
    lengths = [seconds / first.steps * count for count in steps]
    return total_seconds(lengths, info.slots), lengths[0], method


def estimate_disk_space(info: SweepInfo, runs_dir: Path) -> tuple[int, int]:
    """Estimate the bytes of the checkpoints that the pending runs keep, and return them with the free bytes.

    A weight takes 12 bytes in a checkpoint, with the moments of AdamW; in 16 bits 14, with a master. Models on the hub
    count as 0, and so do runs with LoRA, whose checkpoints are small.
    """
    needed, sizes = 0, dict[str, int]()
    for config in (info.configs[run.name] for run in info.pending):
        settings, path = config.checkpoint, config.model.path
        if config.model.lora is None and path not in BUNDLED_MODELS:
            sizes[path] = sizes[path] if path in sizes else _count_weights(user_path(path))
            written = 1 + (config.steps - info.forked_at - 1) // (settings.every or config.steps)
            kept = written if settings.keep_last is None else settings.keep_last + settings.keep_best
            needed += sizes[path] * min(kept, written) * (14 if config.model.dtype == "bfloat16" else 12)
    existing = next(folder for folder in (runs_dir, *runs_dir.absolute().parents) if folder.exists())
    return needed, shutil.disk_usage(existing).free


def _count_weights(folder: Path) -> int:
    """Return the number of weights in a model folder; 0 if its files are not there or damaged."""
    from safetensors import SafetensorError, safe_open

    count = 0
    with suppress(SafetensorError, OSError):
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "np") as weights:
                names = weights.keys()
                count += sum(math.prod(weights.get_slice(name).get_shape()) for name in names)
    return count


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


def _run_pending(folder: SweepFolder, executor: Executor, runs_dir: Path, events: SweepEvents) -> SweepResult:
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
    report: Report | None = None
    report_error: str | None = None
    error: BaseException | None = None
    with closing(_open_pool(executor, len(pending), variables)) as pool:
        try:
            about = pool.slots, pool.threads, executor.ranks, _fork_step(folder.fork)
            events.start(SweepInfo(folder.path, folder.runs, configs, pending, *about))
            if pending and store is not None:
                events.phase("tracking")
            with sweep_mlflow_run(folder, store if pending else None, lambda: report) as parent:
                if pending:
                    flags = rank_flags(executor.ranks)
                    flags += [] if parent is None else ["--set", f"tracking.parent={parent}"]
                    steps = {name: config.steps for name, config in configs.items()}
                    events.phase("run")
                    failures = run_sweep(folder, pool, steps, events.step, flags, executor.stop_margin)
                events.phase("report")
                try:
                    from bandpo_cli.reports.run_variants import read_sweep
                    from bandpo_cli.reports.write_report import write_report

                    report = write_report(read_sweep(folder.path), folder.path / "report")
                except UserError as no_report:
                    report_error = str(no_report)
                except Exception as failure:  # noqa: BLE001 - the runs are on the disk
                    again = shell_command("report", folder.path, runs_dir)
                    report_error = f"{type(failure).__name__}: {first_line(failure)}; write it again: {again}"
            if pending:
                _send_to_trackers(folder, tracking, report)
        except BaseException as raised:
            error = raised
            raise
        finally:
            finished = sum(is_finished(folder.path / run.name) for run in folder.runs)
            counts = len(folder.runs), finished, failures, folder.stopped()
            mlflow = None if store is None else ui_text(folder.path, store)
            result = SweepResult(folder.path, *counts, report, report_error, mlflow, error)
            events.end(result)
    return result


def _open_pool(executor: Executor, runs: int, variables: Mapping[str, str], local: bool = False) -> Pool:
    """Return the pool that executes `runs` runs, with these environment variables, on this machine or with Ray."""
    if executor.name == "ray" and not local:
        return RayPool(executor.address, executor.jobs, variables, executor.ranks)
    gpus, cores = visible_gpus(os.environ), usable_cores()
    jobs = executor.jobs or (len(gpus) or cores) // executor.ranks
    slots = slot_environments(max(1, min(jobs, runs)), cores, gpus, os.environ, executor.ranks)
    return LocalPool([{**slot, **variables} for slot in slots])
