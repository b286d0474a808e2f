"""The few values that travel between the rooms. No torch here: a sampler in another process sends these too.

Suffixes name a dimension: `_P` problem, `_G` completion of a group, `_T` token.
"""

# MERGED: The grades that graders give.
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

FinishReason = Literal["stop", "length"]
"""`stop`: the model ended its answer itself; `length`: it was cut at the token limit."""


@dataclass(frozen=True)
class Message:
    """One turn of a chat: `role` is system, user or assistant."""

    role: str
    content: str


Prompt = str | tuple[Message, ...]
"""Plain text goes before the model as it is; chat messages go through the tokenizer's chat template first."""


@dataclass(frozen=True)
class Problem:
    """One question with what its grader needs.

    Attributes:
        id: stable across runs and machines; also what splits held-out problems from training ones.
        prompt: what is put before the model.
        answer: the reference that the grader reads (a target number, a LaTeX answer, ...).
        source: the task or data set that it came from.
        grader: who judges answers to it: a known name (`config.data.GRADERS`) or `module:function`.
        extra: whatever else the grader needs; JSON-like values, since graders may run in another process.
    """

    id: str
    prompt: Prompt
    answer: str
    source: str
    grader: str
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """One sampled answer, as tokens.

    Attributes:
        token_ids: the sampled tokens, the end-of-sequence token included when it was sampled.
        logprobs: log π(token) in nats under the *sampling* distribution (temperature applied), one a token.
        finish_reason: why sampling ended.
        policy_version: the number of optimizer steps behind the weights that sampled it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int


@dataclass(frozen=True)
class Grade:
    """A verdict on one completion.

    Attributes:
        reward: what the advantage is computed from. A grader gives 1 for right, 0 for wrong, or a part of it; the
            `reward` settings turn that into the reward that is trained on.
        correct: what accuracy counts.
        verdict: one short word for the record: `correct`, `wrong`, `malformed`, ...; `timeout` and `grader-error`
            say that there was no verdict, and are counted apart.
    """

    reward: float
    correct: bool
    verdict: str


Grader = Callable[[Sequence[Problem], Sequence[str]], list[Grade]]
"""Judges texts [N], each as an answer to its problem [N]."""


@dataclass(frozen=True)
class Rollout:
    """A completion of a problem with its verdict; `prompt` is the text that the model was given."""

    problem: Problem
    prompt: str
    prompt_ids: tuple[int, ...]
    completion: Completion
    text: str
    grade: Grade


@dataclass(frozen=True)
class Group:
    """All rollouts of one problem: the unit that group-relative advantages are computed in."""

    problem: Problem
    rollouts_G: tuple[Rollout, ...]


RunStatus = Literal["FINISHED", "FAILED", "KILLED"]
"""How a run ended, in MLflow's words. KILLED: stopped from outside, by Ctrl-C or a signal."""


def status_of(error: BaseException | None) -> RunStatus:
    """Return how a run ended that left its loop by `error`, None for one that reached its end.

    Ctrl-C and an exit asked for by a signal handler (SystemExit) are KILLED, any other exception is FAILED.
    """
    if error is None:
        return "FINISHED"
    return "KILLED" if isinstance(error, KeyboardInterrupt | SystemExit) else "FAILED"


CORRECT = Grade(1.0, correct=True, verdict="correct")
WRONG = Grade(0.0, correct=False, verdict="wrong")
MALFORMED = Grade(0.0, correct=False, verdict="malformed")
TIMEOUT = Grade(0.0, correct=False, verdict="timeout")
GRADER_ERROR = Grade(0.0, correct=False, verdict="grader-error")

UNGRADED_VERDICTS = frozenset({TIMEOUT.verdict, GRADER_ERROR.verdict})
"""Verdicts that say nothing about the answer."""


@dataclass(frozen=True)
class StepReport:
    """One training step as callbacks receive it.

    Attributes:
        step: its number; 0 is the evaluation before training.
        record: its line in metrics.jsonl.
        sample: one graded completion of the step; None at step 0.
    """

    step: int
    record: dict[str, float]
    sample: Rollout | None


@dataclass(frozen=True)
class RunInfo:
    """A training run at its start, as callbacks receive it.

    Attributes:
        folder: the run folder.
        config: all settings, nested, with JSON values.
        env: the contents of env.json.
        steps: number of training steps of the complete run.
        first_step: the first step that this call trains; 0 for a new run.
        notes: remarks of the loaded components, one line each.
        parent: id of the MLflow run that this run is shown under.
    """

    folder: Path
    config: Mapping[str, Any]
    env: Mapping[str, Any]
    steps: int
    first_step: int
    notes: tuple[str, ...]
    parent: str | None


@dataclass(frozen=True)
class RunResult:
    """The end of a training run.

    Attributes:
        folder: the run folder.
        status: how the run ended.
        records: the lines of metrics.jsonl.
        error: the exception that ended the run; None when it finished or was stopped by request.
    """

    folder: Path
    status: RunStatus
    records: list[dict[str, Any]]
    error: BaseException | None = None

    @property
    def name(self) -> str:
        """Name of the run: the last part of its folder."""
        return self.folder.name


Info = TypeVar("Info", contravariant=True)
Report = TypeVar("Report", contravariant=True)
Result = TypeVar("Result", contravariant=True)


class Callback(Protocol[Info, Report, Result]):
    """Observer of an experiment.

    Order of calls: `phase("load")`; `start`; then for each step any number of `phase` calls and one `step`;
    `phase("close")`; `end`. `end` is called exactly once if `start` was called, also when the experiment fails. All
    calls come from the thread that runs the experiment. An exception raised by a callback ends the experiment.
    """

    def start(self, info: Info) -> None:
        """Receive what the experiment is about; its folder exists."""

    def phase(self, name: str) -> None:
        """Receive the name of the work that begins: `load`, `sample`, `grade`, `update`, `eval`, `close`, ..."""

    def step(self, report: Report) -> None:
        """Receive one step, after its results are on disk."""

    def end(self, result: Result) -> None:
        """Receive the result, after it is on disk."""


class CallbackBase:
    """Four empty methods, for callbacks that need only some of them."""

    def start(self, info: Any) -> None:
        """Do nothing."""

    def phase(self, name: str) -> None:
        """Do nothing."""

    def step(self, report: Any) -> None:
        """Do nothing."""

    def end(self, result: Any) -> None:
        """Do nothing."""


TrainCallback = Callback[RunInfo, StepReport, RunResult]
"""A callback of `train` and `resume`."""
