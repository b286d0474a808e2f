"""Callbacks of experiments, and what they receive: the run at its start, each step, the result."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from bandpo_cli.errors import one_line
from bandpo_cli.types import Rollout, RunStatus


@dataclass(frozen=True)
class StepReport:
    """A training step, its line in metrics.jsonl and a graded completion; step 0 is the evaluation before."""

    step: int
    record: dict[str, float]
    sample: Rollout | None
    stop_reasons: list[str] = field(default_factory=list, compare=False)

    def stop(self, reason: str) -> None:
        """End the run after this step, with a checkpoint and the status FINISHED; call it while `step` is executed.

        `reason` becomes `stopped_by` in summary.json.
        """
        self.stop_reasons.append(one_line(reason))


@dataclass(frozen=True)
class RunInfo:
    """A training run at its start, as callbacks receive it."""

    folder: Path
    config: Mapping[str, Any]  # all settings, nested, with JSON values
    env: Mapping[str, Any]  # the contents of env.json
    steps: int  # number of training steps of the complete run
    first_step: int  # the first step that this call trains; 0 for a new run
    notes: tuple[str, ...]  # remarks of the loaded components, one line each
    parent: str | None  # id of the MLflow run that this run is shown under


@dataclass(frozen=True)
class RunResult:
    """The end of a training run, with the lines of metrics.jsonl.

    `error` is the exception that ended the run; None when it finished or was stopped by request. `stopped_by` is the
    criterion of `stop`, or the reason of a callback, that ended the run before its last step.
    """

    folder: Path
    status: RunStatus
    records: list[dict[str, Any]]
    error: BaseException | None = None
    stopped_by: str | None = None

    @property
    def name(self) -> str:
        """Name of the run: the last part of its folder."""
        return self.folder.name


Info = TypeVar("Info", contravariant=True)
Report = TypeVar("Report", contravariant=True)
Result = TypeVar("Result", contravariant=True)


class Callback(Generic[Info, Report, Result]):
    """Observer of an experiment; the methods of this class do nothing.

    Order of calls: `phase("load")`; `start`; then for each step any number of `phase` calls and one `step`;
    `phase("close")`; `end`. `end` is called exactly once if `start` was called, also when the experiment fails. All
    calls come from the thread that runs the experiment. An exception raised by a callback ends the experiment.
    """

    def start(self, info: Info) -> None:
        """Receive what the experiment is about; its folder exists."""

    def phase(self, name: str) -> None:
        """Receive the name of the work that begins: `load`, `sample`, `grade`, `update`, `eval`, `close`, ..."""

    def step(self, report: Report) -> None:
        """Receive one step, after its results are on disk; a thread may still be writing its checkpoint."""

    def end(self, result: Result) -> None:
        """Receive the result, after it is on disk."""


CallbackBase = Callback[Any, Any, Any]
"""A base class for callbacks of any experiment."""

TrainCallback = Callback[RunInfo, StepReport, RunResult]
"""A callback of `train` and `resume`."""
