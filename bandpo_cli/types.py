"""Values that the packages exchange: problems, completions, grades, rollouts and the status of a run.

No torch here: samplers and graders in other processes send these values too. Suffixes name a dimension: `_P` problem,
`_G` completion of a group, `_T` token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]
"""`stop`: the model sampled an end token; `length`: the completion reached the token limit."""


@dataclass(frozen=True)
class Message:
    """One turn of a chat: `role` is system, user or assistant."""

    role: str
    content: str


Prompt = str | tuple[Message, ...]
"""Plain text is the model's input unchanged; chat messages are rendered by the tokenizer's chat template."""


@dataclass(frozen=True)
class Problem:
    """One question with the data of its grader.

    Attributes:
        id: stable across runs and machines; it also decides whether the problem is held out.
        prompt: the input of the model.
        answer: the reference that the grader reads (a target number, a LaTeX answer, ...).
        source: the task or data set of the problem.
        grader: the grader of its answers: a name in `registries.GRADERS` or `module:function`.
        extra: further data for the grader; JSON-like values, since graders may run in another process.
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
        logprobs: log π(token) in nats under the *sampling* distribution (temperature applied), one per token.
        finish_reason: the reason why sampling ended.
        policy_version: the number of optimizer steps of the weights that sampled it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int


@dataclass(frozen=True)
class Grade:
    """The grade of one completion.

    Attributes:
        reward: the value that advantages are computed from. A grader returns 1 for a correct answer, 0 for a wrong one,
            or a value between for partial credit; the `reward` settings map it to the reward of training.
        correct: counted by accuracy.
        verdict: one short word for the record: `correct`, `wrong`, `malformed`, ...; `timeout` and `grader-error`
            mean that the answer was not graded, and are counted separately.
    """

    reward: float
    correct: bool
    verdict: str


Grader = Callable[[Sequence[Problem], Sequence[str]], list[Grade]]
"""Grades texts [N], each as an answer to its problem [N]."""


@dataclass(frozen=True)
class Rollout:
    """A graded completion of a problem; `prompt` is the text input of the model."""

    problem: Problem
    prompt: str
    prompt_ids: tuple[int, ...]
    completion: Completion
    text: str
    grade: Grade


@dataclass(frozen=True)
class Group:
    """All rollouts of one problem: the unit in which group-relative advantages are computed."""

    problem: Problem
    rollouts_G: tuple[Rollout, ...]


RunStatus = Literal["FINISHED", "FAILED", "KILLED"]
"""The final status of a run, in MLflow's terms. KILLED: stopped by Ctrl-C or a signal."""


def status_of(error: BaseException | None) -> RunStatus:
    """Return the status of a run whose loop raised `error`; None stands for a run that reached its end.

    Ctrl-C and the SystemExit of a signal handler are KILLED, any other exception is FAILED.
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
"""Verdicts of answers that were not graded."""
