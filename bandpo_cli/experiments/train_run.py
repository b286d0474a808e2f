"""Training runs: checks before loading, the record in the run folder, callbacks around the training loop.

The run folder is written first, MLflow and the other callbacks come after it. With several ranks all of them call these
functions; rank 0 alone writes the folder and has callbacks.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shlex
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bandpo_cli.callbacks import RunInfo, RunResult, StepReport, TrainCallback
from bandpo_cli.config.hardware import use_expandable_segments
from bandpo_cli.config.layers import to_yaml
from bandpo_cli.config.run import RunConfig
from bandpo_cli.config.sampling import resolve_engine
from bandpo_cli.config.task import DataTask
from bandpo_cli.custom_code import keep_code, user_code
from bandpo_cli.errors import (
    GraderFailedError,
    RunError,
    SignalExit,
    closed_at_end,
    redact_credentials,
    warn_on_failure,
)
from bandpo_cli.experiments.advice import AdviceCallback
from bandpo_cli.experiments.memory import check_memory, out_of_memory_errors
from bandpo_cli.experiments.overview import summary_fields
from bandpo_cli.experiments.preflight import callback_class, check_config, choose_run_name, run_warnings
from bandpo_cli.experiments.rank_group import (
    Dispatcher,
    check_ranks,
    check_same_on_all,
    connected_ranks,
    lost_rank_errors,
)
from bandpo_cli.experiments.stopping import stop_reason, stop_warnings
from bandpo_cli.grading.pool import GraderUse, failure_warnings
from bandpo_cli.paths import cached_commit
from bandpo_cli.rank_process import is_main_process, rank_count
from bandpo_cli.storage.environment import describe_environment
from bandpo_cli.storage.files import run_lock
from bandpo_cli.storage.run_folder import GRADER_ERRORS, RunFolder, timestamped
from bandpo_cli.tasks.question_answers import hub_ids
from bandpo_cli.tasks.task import Task
from bandpo_cli.tracking.outages import TrackerCallback
from bandpo_cli.types import RunStatus, status_of

if TYPE_CHECKING:
    from bandpo_cli.training.components import Components

TrainEvents = Dispatcher[RunInfo, StepReport, RunResult]
Stop = Callable[[], bool] | None

RESOLVED = "resolved"
"""The entry of env.json with what settings such as `auto` resolved to, which a resume uses again."""

log = logging.getLogger("bandpo_cli")


@dataclass(frozen=True)
class TrainPlan:
    """A training run that has been checked and not started: a new run, or by a subclass one that continues another.

    Attributes:
        first_step: the first step to train; 0 is the evaluation before training.
        warnings: what the user should know before the run starts, one line each.
    """

    config: RunConfig
    task: Task
    runs_dir: Path
    name: str
    warnings: Sequence[str]

    @property
    def first_step(self) -> int:
        return 0

    def recorded(self, loaded: RunConfig) -> RunConfig:
        """Return the content of config.yaml; `loaded` are the settings of `loaded_components`."""
        return loaded

    def fill(self, folder: RunFolder) -> Mapping[str, object]:
        """Write the first files of the new folder, and return further entries of env.json; called on rank 0."""
        return {}

    def load_state(self, folder: RunFolder, components: Components) -> None:
        """Load the state with which the run starts, if it is not the initial one."""


def plan_training(
    config: RunConfig, runs_dir: Path | str = "runs", name: str | None = None, ranks: int | None = None
) -> TrainPlan:
    """Check everything that can be checked without torch, and load the problems.

    Args:
        name: name of the run folder; None for method, task, seed and time.
        ranks: number of processes; None for those that torchrun has started, 1 without it.

    Raises:
        ConfigError: a setting cannot be used, or not with so many processes.
        UserError: the name is taken, or nothing can be written to `runs_dir`.
    """
    runs_dir = Path(runs_dir)
    task_name = re.sub(r"[^A-Za-z0-9_.+=-]+", "-", config.task.title)[:60]
    default = timestamped(f"{config.bounds.slug()}-{task_name}-s{config.seed}")
    name = choose_run_name(runs_dir, name, default)
    check_ranks(config, rank_count() if ranks is None else ranks)
    config, task = check_config(config)
    return TrainPlan(config, task, runs_dir, name, run_warnings(config, task))


def train(
    config: RunConfig | TrainPlan,
    runs_dir: Path | str = "runs",
    name: str | None = None,
    callbacks: Sequence[TrainCallback] = (),
    stop_requested: Stop = None,
) -> RunResult:
    """Train a policy, write the run folder, and mirror it to the trackers of `tracking.trackers`.

    In a script that torchrun has started, all processes train one policy together and must call this with the same
    settings.

    Args:
        config: the settings, or a plan of `plan_training`, which has its own `runs_dir` and `name`.
        name: name of the run folder; None for method, task, seed and time.
        callbacks: receive the events of `callbacks.Callback`, after the MLflow tracker. With several ranks
            those of rank 0 alone do, except callbacks whose `on_every_rank` is True.
        stop_requested: called between steps; once it returns True on any rank, the state is saved as a checkpoint and
            the run ends with status KILLED.

    Returns the folder, the status (FINISHED or KILLED) and the lines of metrics.jsonl, the same on every rank. A run
    that a criterion of `stop` has ended is FINISHED.

    Raises:
        UserError: a setting cannot be used, the model cannot be loaded, or the run needs more memory than its GPU has;
            nothing has been written.
        RunError: the device has not enough memory, the disk is full, an update is not finite, or (`GraderFailedError`)
            every answer of a step or an evaluation is a grader error. The record is closed and `end` has been called
            with status FAILED.
        LostRankError: the process of another rank has ended; a RunError.
    """
    plan = config if isinstance(config, TrainPlan) else plan_training(config, runs_dir, name)
    events = train_events(plan.config, callbacks)
    with (
        loaded_components(plan.config, plan.task, events) as (config, components),
        _new_folder(config, plan, components) as folder,
    ):
        with out_of_memory_errors(config):
            plan.load_state(folder, components)
        recorded = plan.recorded(config)
        return run_steps(recorded, folder, components, events, plan.first_step, stop_requested)


@contextmanager
def _new_folder(config: RunConfig, plan: TrainPlan, components: Components) -> Iterator[RunFolder]:
    """Create the run folder, and hold its lock; ranks other than 0 receive its path once it is complete.

    With config.yaml, which is written last, the folder is a run.
    """
    ranks, text = components.ranks, to_yaml(plan.recorded(config))
    check_same_on_all(ranks, text)
    if not ranks.is_main:
        yield RunFolder(ranks.gather(plan.runs_dir)[0])
        return
    folder = RunFolder.create(plan.runs_dir, plan.name)
    with run_lock(folder.path):
        keep_code(config.model_dump_json(), folder.path)
        folder.write_env({**plan.fill(folder), **run_environment(config, components)})
        folder.write_config(text)
        ranks.gather(folder.path)
        yield folder


def run_environment(config: RunConfig, components: Components) -> dict[str, Any]:
    """Return the content of env.json.

    Its entry `resolved` has what settings such as `auto` resolved to: `engine`, the sampling engine; `dtype` of the
    weights; `model`, the commit of a model on the hub, None for a folder; `data`, the commits of the data sets on the
    hub by id, without those that are not known.
    """
    policy, task, data = components.policy, config.task, {}
    if isinstance(task, DataTask):
        commits = {name: cached_commit(name, "dataset", task.revisions.get(name)) for name in hub_ids(task)}
        data = {name: commit for name, commit in commits.items() if commit is not None}
    engine = resolve_engine(config.sampling.engine, on_gpu=policy.device.type == "cuda")
    dtype = str(policy.dtype).removeprefix("torch.")
    resolved = {"engine": engine, "dtype": dtype, "model": policy.commit, "data": data}
    return {**describe_environment(sampler=components.sampler.describe()), RESOLVED: resolved}


def train_events(config: RunConfig, callbacks: Sequence[TrainCallback]) -> TrainEvents:
    """Return the dispatcher of a run: the trackers, `callbacks`, the custom ones, then the advice.

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
        return Dispatcher([*trackers, *callbacks, AdviceCallback(config)])
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
    from bandpo_cli.models.load import with_resolved_dtype

    config = with_resolved_dtype(config)
    with ExitStack() as stack:
        ranks = stack.enter_context(connected_ranks(config))
        config = check_memory(config, ranks, changeable=changeable, task=task)
        with out_of_memory_errors(config):
            from bandpo_cli.training.components import build_components

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


def run_steps(
    config: RunConfig, folder: RunFolder, components: Components, events: TrainEvents, first: int, stop: Stop
) -> RunResult:
    """Train from step `first` to the last, or until a criterion of `stop`; return the result of rank 0."""
    # Imported before MLflow's thread starts: two threads that import delay each other.
    from bandpo_cli.training import loop

    is_main = components.ranks.is_main
    recent = components.ranks.on_main(lambda: deque(folder.read_metrics(), maxlen=config.stop.steps))

    def is_stopped() -> bool:
        return stop_reason(config, recent) is not None or (stop is not None and stop())

    def train_steps() -> RunStatus:
        last = first - 1
        with out_of_memory_errors(config), _disk_errors(folder), lost_rank_errors():
            steps = loop.train(config, components, folder, events.phase, first, is_stopped)
            try:
                for report in steps:
                    last = report.step
                    events.step(report)
                    recent.append(report.record)
                    for line in stop_warnings(config, recent) if is_main else ():
                        log.warning("%s", line)
            except BaseException as error:
                steps.throw(error)  # an error of a callback; the loop may be writing a checkpoint
                raise
        reason = stop_reason(config, recent)
        if reason is not None and is_main:
            log.warning("the run ends after step %d of %d: %s", last, config.steps, reason)
        # Before the last step and without a reason, a stop was requested, perhaps of another rank.
        return "KILLED" if last < config.steps and reason is None else "FINISHED"

    if is_main:
        components.grader.error_folder = folder.path / GRADER_ERRORS
    result = record_run(config, folder, events, tuple(components.notes), first, train_steps)
    return components.ranks.gather(result)[0]


def record_run(
    config: RunConfig,
    folder: RunFolder,
    events: TrainEvents,
    notes: tuple[str, ...],
    first_step: int,
    train_steps: Callable[[], RunStatus],
) -> RunResult:
    """Call `start` of the callbacks and `train_steps`; however it ends, write plots and summary.json, then call `end`.

    A rank other than 0 writes nothing and has no records.
    """
    is_main = is_main_process()
    env = json.loads((folder.path / "env.json").read_text(encoding="utf-8")) if is_main else {}
    status: RunStatus = "FAILED"
    error: BaseException | None = None
    records: list[dict[str, Any]] = []
    try:
        about = config.steps, first_step, notes, config.tracking.parent
        events.start(RunInfo(folder.path, config.model_dump(mode="json"), env, *about))
        status = train_steps()
    except BaseException as raised:
        error, status = raised, status_of(raised)
        raise
    finally:
        try:
            events.phase("close")
            if is_main:
                records = folder.read_metrics()
                _close_record(config, folder, RunResult(folder.path, status, records, error))
        except Exception as failure:  # such as a full disk; an error that ended the run is the one to report
            if error is None:
                error, status = failure, "FAILED"
                raise
            with warn_on_failure("the summary and the plots cannot be written"):
                raise
        finally:
            result = RunResult(folder.path, status, records, error)
            with nullcontext() if error is None else warn_on_failure("the end of the run was not reported"):
                events.end(result)
    return result


@contextmanager
def _disk_errors(folder: RunFolder) -> Iterator[None]:
    """Raise RunError with one line in place of the system's error where the disk accepts no more data."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
            raise
        raise RunError(f"{folder.path} cannot be written to: {os.strerror(error.errno)}") from error


def _close_record(config: RunConfig, folder: RunFolder, result: RunResult) -> None:
    """Write the plots, then summary.json: status FINISHED there means that the run folder is complete."""
    from bandpo_cli.reports.run_plots import plot_run

    status, records, error = result.status, result.records, result.error
    scores = (
        {key: record[key] for key in record if key == "step" or key.startswith("eval/")} for record in records
    )
    evaluations = [record for record in scores if len(record) > 1]
    stopped_by = stop_reason(config, records) if status == "FINISHED" else None
    message = "stopped by request" if status == "KILLED" else None
    if error is not None:
        message = str(error) if isinstance(error, SignalExit) else f"{type(error).__name__}: {error}"
        message = redact_credentials(message)
    try:
        if records:
            plot_run(folder.path)
    except (KeyboardInterrupt, SystemExit):
        with suppress(OSError):  # it is not empty
            (folder.path / "plots").rmdir()
        log.warning("the plots are incomplete; type bandpo plot %s", shlex.quote(str(folder.path)))
        raise
    finally:
        folder.write_summary(
            {
                "status": status,
                "error": message,
                "stopped_by": stopped_by,
                "steps": int(records[-1]["step"]) if records else 0,
                "of_steps": config.steps,
                "time/train_s": round(sum(record["time/step"] for record in records), 3),
                "first_eval": evaluations[0] if evaluations else None,
                "last_eval": evaluations[-1] if evaluations else None,
                "last_step": records[-1] if records else None,
                **summary_fields(folder.path),
            }
        )
