"""A training run from its plan to its end: build the components, open the folder, train, close.

The run folder is written first, the trackers and the other callbacks come after it. With several ranks all of them call
these functions; rank 0 alone writes the folder and has callbacks.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bandpo_cli.callbacks import RunInfo, RunResult, StepReport, TrainCallback
from bandpo_cli.config.batch_and_sampling import resolve_engine, use_expandable_segments
from bandpo_cli.config.layers import CHOSEN_AT_START, Settings, as_layers, copy_values, resolve, to_yaml
from bandpo_cli.config.run import RunConfig, with_dtype
from bandpo_cli.config.task import DataTask
from bandpo_cli.errors import GraderFailedError, RunError, closed_at_end, exits_as_errors, log, user_code
from bandpo_cli.experiments.memory_check import OnEstimate, check_memory, out_of_memory_errors
from bandpo_cli.experiments.monitor import Dispatcher, StepMonitor
from bandpo_cli.experiments.plan import Plan, callback_class, new_run_layers, plan_training
from bandpo_cli.experiments.record import close_record, copy_parent, cut_back, load_state
from bandpo_cli.experiments.resume_and_fork import CHANGEABLE_SETTINGS, RESOLVED, locked_resume, plan_fork
from bandpo_cli.grading.pool import failure_warnings
from bandpo_cli.paths import cached_commit, given_path
from bandpo_cli.processes.ranks import Ranks, connected_ranks, is_gpu, is_main_process, lost_rank_errors
from bandpo_cli.storage.files import run_lock
from bandpo_cli.storage.run_folder import GRADER_ERRORS, RunFolder
from bandpo_cli.storage.run_record import describe_environment, keep_code
from bandpo_cli.tasks.question_answers import hub_ids
from bandpo_cli.tasks.task import Task
from bandpo_cli.tracking.outages import TrackerCallback
from bandpo_cli.types import RunStatus, status_of

if TYPE_CHECKING:
    from bandpo_cli.training.build import Components

TrainEvents = Dispatcher[RunInfo, StepReport, RunResult]
Stop = Callable[[], bool] | None


def train(
    config: Settings,
    runs_dir: Path | str = "runs",
    name: str | None = None,
    callbacks: Sequence[TrainCallback] = (),
    stop_requested: Stop = None,
) -> RunResult:
    """Train a policy, write the run folder, and mirror it to the trackers of `tracking.trackers`.

    `config` is a `RunConfig`, or a dictionary, which gets the defaults of the command line. In a script that torchrun
    has started, all processes train one policy together and must call this with the same settings. `name` is the name
    of the run folder, None for method, task, seed and time. For `callbacks`, `stop_requested`, the result and the
    errors see `run_plan`.
    """
    config = resolve(new_run_layers(as_layers(config), given_path(runs_dir)))
    return run_plan(plan_training(config, runs_dir, name), callbacks, stop_requested)


def resume(
    run: str,
    runs_dir: Path | str = "runs",
    settings: Settings = (),
    callbacks: Sequence[TrainCallback] = (),
    stop_requested: Stop = None,
) -> RunResult:
    """Continue a training run, named or by its folder, from its last complete checkpoint.

    Steps after the checkpoint are removed once the model and its state are loaded, not before. `settings` changes some
    of `CHANGEABLE_SETTINGS`; `{"steps": n}` trains further. The rest is as for `train`.

    Raises UserError if the run is complete or imported from verl, its record is damaged, or a setting was given that
    cannot change.
    """
    with locked_resume(run, runs_dir, settings) as plan:
        return run_plan(plan, callbacks, stop_requested)


def fork(
    run: str,
    runs_dir: Path | str = "runs",
    settings: Settings = (),
    name: str | None = None,
    callbacks: Sequence[TrainCallback] = (),
    stop_requested: Stop = None,
) -> RunResult:
    """Train a new run that continues a checkpoint of another run.

    `run` is RUN or RUN@STEP. RUN is a name in `runs_dir` or a folder, and means its last complete checkpoint.
    `settings` changes the settings of RUN. The rest is as for `train`.

    Raises UserError if there is no such checkpoint, or a setting cannot be used or cannot be changed.
    """
    return run_plan(plan_fork(run, settings, runs_dir, name), callbacks, stop_requested)


@exits_as_errors()
def run_plan(plan: Plan, callbacks: Sequence[TrainCallback] = (), stop_requested: Stop = None) -> RunResult:
    """Train the run of a plan.

    Args:
        callbacks: receive the events of `callbacks.Callback`, after the trackers. With several ranks those of rank 0
            alone do, except callbacks whose `on_every_rank` is True.
        stop_requested: called between steps; once it returns True on any rank, the state is saved as a checkpoint and
            the run ends with status KILLED.

    Returns the folder, the status (FINISHED or KILLED) and the lines of metrics.jsonl, the same on every rank. A run
    that a criterion of `stop` or a callback has ended is FINISHED.

    Raises:
        UserError: a setting cannot be used, the model or the checkpoint cannot be loaded, or the run needs more memory
            than its GPU has; nothing has been written.
        RunError: the device has not enough memory, the disk is full, an update is not finite, or (`GraderFailedError`)
            every answer of a step or an evaluation is a grader error. The record is closed and `end` has been called
            with status FAILED.
        LostRankError: the process of another rank has ended; a RunError.
    """
    with ExitStack() as stack:
        events, config, components = start_run(plan, callbacks, stack)
        folder, first = open_folder(plan, config, components, stack), plan.first_step
        result = RunResult(folder.path, "FINISHED", [])
        try:
            with exits_as_errors():
                # A rank other than 0 has no contents of env.json.
                env = (folder.path / "env.json").read_text(encoding="utf-8") if is_main_process() else "{}"
                notes = () if components is None else tuple(components.notes)
                about = config.steps, first, notes, config.tracking.parent
                events.start(RunInfo(folder.path, config.model_dump(mode="json"), json.loads(env), *about))
                if components is not None:
                    result = train_steps(config, folder, components, events, first, stop_requested)
        except BaseException as error:
            result = replace(result, status=status_of(error), error=error)
            raise
        finally:
            result = close_record(config, folder, events, result)
        return result if components is None else components.ranks.gather(result)[0]


def start_run(
    plan: Plan, callbacks: Sequence[TrainCallback], stack: ExitStack, on_estimate: OnEstimate | None = None
) -> tuple[TrainEvents, RunConfig, Components | None]:
    """Do all that the run of a plan does before its folder is written; a dry run calls this and ends.

    Returns the dispatcher of trackers, `callbacks` and custom ones (on other ranks those for every rank), the settings
    for config.yaml, and the components, with the state of the checkpoint that the run continues, until `stack` closes
    them; None instead of them if all steps are done. `on_estimate` is as for `check_memory`.
    """
    config, is_main = plan.config, is_main_process()
    given = callbacks if isinstance(callbacks, Sequence) else [callbacks]
    chosen = [callback for callback in given if is_main or getattr(callback, "on_every_rank", False)]
    for name in config.tracking.callbacks:
        cls = callback_class(name)
        if is_main or getattr(cls, "on_every_rank", False):
            with user_code(f"tracking.callbacks = '{name}'", cls):
                chosen.append(cls())
    trackers = [TrackerCallback(name, config.tracking) for name in config.tracking.names] if is_main else []
    events: TrainEvents = Dispatcher([*trackers, *chosen])
    if plan.task is None:
        return events, config, None
    changeable = CHANGEABLE_SETTINGS if plan.is_resume else None
    loaded, components = load_components(plan.pinned, plan.task, events, stack, changeable, on_estimate)
    config = copy_values(config, loaded, CHOSEN_AT_START)
    if components.ranks.size > 1:
        components.ranks.check_same(repr(config), str(plan.step))
    if plan.step >= 0:  # a new run has the initial weights
        load_state(plan, config, components)
    return events, config, components


def load_components(
    config: RunConfig,
    task: Task,
    events: TrainEvents,
    stack: ExitStack,
    changeable: Sequence[str] | None = None,
    on_estimate: OnEstimate | None = None,
) -> tuple[RunConfig, Components]:
    """Load model, sampler, grader and optimizer on all ranks; `stack` closes them and warns of grader errors.

    Returns the settings that they have on this machine, too. The last arguments are as for `check_memory`.
    """
    config, ranks = start_process(config, task, events, stack, True, changeable, on_estimate)
    with out_of_memory_errors(config):
        from bandpo_cli.training.build import build_components

        components = build_components(config, task, ranks)
    stack.enter_context(closed_at_end("the sampling engine or a grader", components.close))
    stack.push(partial(_warn_of_grader_errors, components))
    return config, components


def start_process(
    config: RunConfig,
    task: Task,
    events: Dispatcher[Any, Any, Any],
    stack: ExitStack,
    training: bool = True,
    changeable: Sequence[str] | None = None,
    on_estimate: OnEstimate | None = None,
) -> tuple[RunConfig, Ranks]:
    """Begin the phase `load`: choose kernels, connect the ranks until `stack` closes, and check the memory.

    Returns the settings with the values of `CHOSEN_AT_START` on this machine, too. The last arguments are as for
    `check_memory`.
    """
    events.phase("load")
    use_expandable_segments(config.sampling.max_lag > 0 and config.sampling.engine_process)
    from bandpo_cli.models.load import deterministic_kernels

    config = with_dtype(config, is_gpu(config.model.device))
    if config.deterministic:
        stack.enter_context(deterministic_kernels(config, training))
    ranks = stack.enter_context(connected_ranks(config.model.device, config.tracking.stall_after))
    return check_memory(config, ranks, training, changeable, task, on_estimate), ranks


def _warn_of_grader_errors(
    components: Components, kind: type[BaseException] | None, error: BaseException | None, trace: object
) -> None:
    """Log the grader errors of all ranks on rank 0, or after an `error` each rank's own.

    After an error the other ranks may never get here. The error of a grader that always failed reports what the
    warnings would.
    """
    uses = [components.grader.uses]
    if error is None:
        uses = components.ranks.gather(dict(uses[0]))
    if not isinstance(error, GraderFailedError) and (error is not None or components.ranks.is_main):
        for line in failure_warnings(uses):
            log.warning("%s", line)


def open_folder(plan: Plan, config: RunConfig, components: Components | None, stack: ExitStack) -> RunFolder:
    """Open the folder of a plan for writing, once all that the run needs has been loaded.

    The folder of a new run is created, with the record and the checkpoint of the parent of a fork. With config.yaml,
    which is written last, the folder is a run. A folder of a resume is cut back to the step of its checkpoint. Rank 0
    holds the lock of a new folder, until `stack` closes; the caller holds the lock of a resume.

    Args:
        config: the settings for config.yaml.
        components: None for a resume of a run whose steps are all done.
    """
    folder = plan.folder
    if components is None:
        if is_main_process():
            cut_back(folder, config, plan.step, describe_environment())
        return folder
    if components.ranks.is_main:
        env = run_environment(plan.pinned, components)
        if plan.is_resume:
            cut_back(folder, config, plan.step, env)
        else:
            folder = RunFolder.create(folder.path.parent, folder.name)
            stack.enter_context(run_lock(folder.path))
            keep_code(plan.pinned.model_dump_json(), folder.path)
            parent = {} if plan.fork is None else copy_parent(plan.fork, folder)
            folder.write_env({**parent, **env})
            folder.write_config(to_yaml(config))
    return components.ranks.gather(folder)[0]


def run_environment(config: RunConfig, components: Components) -> dict[str, Any]:
    """Return the content of env.json. Its entry `resolved` has what settings such as `auto` resolved to.

    `model` there is the commit of a model on the hub, None for a folder; `data` has the known commits of the data sets
    on the hub by id.
    """
    policy, task, data = components.policy, config.task, {}
    if isinstance(task, DataTask):
        commits = {name: cached_commit(name, "dataset", task.revisions.get(name)) for name in hub_ids(task)}
        data = {name: commit for name, commit in commits.items() if commit is not None}
    on_gpu, dtype = policy.device.type == "cuda", str(policy.dtype).removeprefix("torch.")
    engine = resolve_engine(config.sampling.engine, on_gpu)
    resolved = {"engine": engine, "dtype": dtype, "model": policy.commit, "data": data}
    return {**describe_environment(sampler=components.sampler.describe()), RESOLVED: resolved}


def train_steps(
    config: RunConfig, folder: RunFolder, components: Components, events: TrainEvents, first: int, stop: Stop
) -> RunResult:
    """Train from step `first` to the last one, or until a criterion, a callback or a request ends the run."""
    # Imported before MLflow's thread starts: two threads that import delay each other.
    from bandpo_cli.training import loop

    is_main, last = components.ranks.is_main, first - 1
    if is_main:
        components.grader.error_folder = folder.path / GRADER_ERRORS
    monitor = StepMonitor(config, folder.read_metrics() if is_main and first > 0 else (), stop)
    with out_of_memory_errors(config), disk_errors(folder), lost_rank_errors():
        steps = loop.train(config, components, folder, events.phase, first, monitor.is_over)
        try:
            for report in steps:
                last = report.step
                events.step(report)
                monitor.requested = next(iter(report.stop_reasons), None)
                for line in monitor.add(report) if is_main else ():
                    log.warning("%s", line)
        except BaseException as error:
            steps.throw(error)  # an error of a callback; the loop may be writing a checkpoint
            raise
        # Only rank 0 knows the criteria, and a callback of another rank may have ended the run.
        reasons = components.ranks.gather(monitor.reason)
    reason = next(filter(None, reasons), None)
    if reason is not None and is_main:
        log.warning("the run ends after step %d of %d: %s", last, config.steps, reason)
    status: RunStatus = "KILLED" if last < config.steps and reason is None else "FINISHED"
    return RunResult(folder.path, status, [], stopped_by=reason)


@contextmanager
def disk_errors(folder: RunFolder) -> Iterator[None]:
    """Raise RunError with one line in place of the system's error where the disk accepts no more data."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
            raise
        raise RunError(f"{folder.path} cannot be written to: {os.strerror(error.errno)}") from error
