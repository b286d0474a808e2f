"""A training run from its plan to its end: build the components, open the folder, train, close.

The run folder is written first, the trackers and the other callbacks come after it. With several ranks all of them call
these functions; rank 0 alone writes the folder and has callbacks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bandpo_cli.callbacks import Dispatcher, RunInfo, RunResult, StepReport, TrainCallback
from bandpo_cli.config.hardware import use_expandable_segments
from bandpo_cli.config.run import RunConfig
from bandpo_cli.custom_code import exits_as_errors, user_code
from bandpo_cli.errors import GraderFailedError, closed_at_end
from bandpo_cli.experiments.memory_check import check_memory, out_of_memory_errors
from bandpo_cli.experiments.monitor import StepMonitor
from bandpo_cli.experiments.plan import CHANGEABLE_SETTINGS, Plan, as_loaded, plan_training
from bandpo_cli.experiments.preflight import callback_class
from bandpo_cli.experiments.record import RunRecord, disk_errors, opened_folder
from bandpo_cli.grading.pool import GraderUse, failure_warnings
from bandpo_cli.processes.ranks import connected_ranks, is_main_process, lost_rank_errors
from bandpo_cli.storage.run_folder import GRADER_ERRORS, RunFolder
from bandpo_cli.tasks.task import Task
from bandpo_cli.tracking.outages import TrackerCallback
from bandpo_cli.types import RunStatus

if TYPE_CHECKING:
    from bandpo_cli.training.build import Components

TrainEvents = Dispatcher[RunInfo, StepReport, RunResult]
Stop = Callable[[], bool] | None

log = logging.getLogger("bandpo_cli")


def train(
    config: RunConfig,
    runs_dir: Path | str = "runs",
    name: str | None = None,
    callbacks: Sequence[TrainCallback] = (),
    stop_requested: Stop = None,
) -> RunResult:
    """Train a policy, write the run folder, and mirror it to the trackers of `tracking.trackers`.

    In a script that torchrun has started, all processes train one policy together and must call this with the same
    settings.

    Args:
        name: name of the run folder; None for method, task, seed and time.
        callbacks, stop_requested: as for `run`.

    Returns and raises what `run` does.
    """
    return run(plan_training(config, runs_dir, name), callbacks, stop_requested)


@exits_as_errors()
def run(plan: Plan, callbacks: Sequence[TrainCallback] = (), stop_requested: Stop = None) -> RunResult:
    """Train the run of a plan.

    Args:
        callbacks: receive the events of `callbacks.Callback`, after the trackers. With several ranks those of rank 0
            alone do, except callbacks whose `on_every_rank` is True.
        stop_requested: called between steps; once it returns True on any rank, the state is saved as a checkpoint and
            the run ends with status KILLED.

    Returns the folder, the status (FINISHED or KILLED) and the lines of metrics.jsonl, the same on every rank. A run
    that a criterion of `stop` has ended is FINISHED.

    Raises:
        UserError: a setting cannot be used, the model or the checkpoint cannot be loaded, or the run needs more memory
            than its GPU has; nothing has been written.
        RunError: the device has not enough memory, the disk is full, an update is not finite, or (`GraderFailedError`)
            every answer of a step or an evaluation is a grader error. The record is closed and `end` has been called
            with status FAILED.
        LostRankError: the process of another rank has ended; a RunError.
    """
    events, first = train_events(plan.config, callbacks), plan.first_step
    if plan.task is None:  # all steps are done; what is left is the summary and the plots
        with (
            opened_folder(plan, plan.config, None) as folder,
            RunRecord(plan.config, folder, events, (), first) as record,
        ):
            record.status = "FINISHED"
        return record.result
    changeable = CHANGEABLE_SETTINGS if plan.start.is_resume else None
    with loaded_components(plan.pinned, plan.task, events, changeable) as (loaded, components):
        config, notes = as_loaded(plan.config, loaded), tuple(components.notes)
        with (
            opened_folder(plan, config, components) as folder,
            RunRecord(config, folder, events, notes, first) as record,
            exits_as_errors(),
        ):
            record.status = train_steps(config, folder, components, events, first, stop_requested)
        return components.ranks.gather(record.result)[0]


def train_steps(
    config: RunConfig, folder: RunFolder, components: Components, events: TrainEvents, first: int, stop: Stop
) -> RunStatus:
    """Train from step `first` to the last one, until a criterion of `stop`, or until a stop is requested."""
    # Imported before MLflow's thread starts: two threads that import delay each other.
    from bandpo_cli.training import loop

    is_main, last = components.ranks.is_main, first - 1
    if is_main:
        components.grader.error_folder = folder.path / GRADER_ERRORS
    monitor = StepMonitor(config, folder.read_metrics() if is_main else ())

    def ends() -> bool:
        return monitor.stop_reason is not None or (stop is not None and stop())

    with out_of_memory_errors(config), disk_errors(folder), lost_rank_errors():
        steps = loop.train(config, components, folder, events.phase, first, ends)
        try:
            for report in steps:
                last = report.step
                events.step(report)
                for line in monitor.add(report) if is_main else ():
                    log.warning("%s", line)
        except BaseException as error:
            steps.throw(error)  # an error of a callback; the loop may be writing a checkpoint
            raise
    if monitor.stop_reason is not None and is_main:
        log.warning("the run ends after step %d of %d: %s", last, config.steps, monitor.stop_reason)
    # Before the last step and without a reason, a stop was requested, perhaps of another rank.
    return "KILLED" if last < config.steps and monitor.stop_reason is None else "FINISHED"


def train_events(config: RunConfig, callbacks: Sequence[TrainCallback]) -> TrainEvents:
    """Return the dispatcher of a run: the trackers, `callbacks`, then the custom ones.

    On a rank other than 0 it has only the callbacks that receive the events of every rank.
    """
    is_main, custom = is_main_process(), []
    for name in config.tracking.callbacks:
        cls = callback_class(name)
        if is_main or getattr(cls, "on_every_rank", False):
            with user_code(f"tracking.callbacks = '{name}'", cls):
                custom.append(cls())
    callbacks = [*callbacks, *custom]
    if is_main:
        trackers = [TrackerCallback(name, config.tracking) for name in config.tracking.names]
        return Dispatcher([*trackers, *callbacks])
    return Dispatcher([callback for callback in callbacks if getattr(callback, "on_every_rank", False)])


@contextmanager
def loaded_components(
    config: RunConfig, task: Task, events: TrainEvents, changeable: Sequence[str] | None = None
) -> Iterator[tuple[RunConfig, Components]]:
    """Begin the phase `load`: connect the ranks, load model, sampler, grader and optimizer, and close them at the end.

    Yields the components and the settings that they have on this machine: the dtype that `auto` is, and vLLM's share of
    the GPU. After the block, rank 0 warns of the grader errors of all ranks; after an error in it, each rank of its
    own. `changeable` is as for `check_memory`.
    """
    events.phase("load")
    use_expandable_segments(config)
    from bandpo_cli.models.load import deterministic_kernels, with_resolved_dtype

    config = with_resolved_dtype(config)
    with ExitStack() as stack:
        stack.enter_context(deterministic_kernels(config))
        ranks = stack.enter_context(connected_ranks(config.model.device, config.tracking.stall_after))
        config = check_memory(config, ranks, changeable=changeable, task=task)
        with out_of_memory_errors(config):
            from bandpo_cli.training.build import build_components

            components = build_components(config, task, ranks)
        stack.enter_context(closed_at_end("the sampling engine or a grader", components.close))
        uses: Sequence[Mapping[str, GraderUse]] = ()
        try:
            yield config, components
        except BaseException as error:
            # The other ranks may never get here: this rank reports its own answers, and waits for none of them. The
            # error of a grader that always failed reports what the warnings would.
            if not isinstance(error, GraderFailedError):
                uses = [components.grader.uses()]
            raise
        else:
            of_ranks = ranks.gather(components.grader.uses())
            uses = of_ranks if ranks.is_main else ()
        finally:
            for line in failure_warnings(uses):
                log.warning("%s", line)
