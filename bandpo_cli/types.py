"""The few values that travel between the rooms. No torch here: a sampler in another process sends these too.

Suffixes name a dimension: `_P` problem, `_G` completion of a group, `_T` token.
"""

# MERGED: The grades that graders give.
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

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
