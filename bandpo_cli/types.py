"""The few values that travel between the rooms. No torch here: a sampler in another process sends these too.

Suffixes name a dimension: `_P` problem, `_G` completion of a group, `_T` token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]
"""`stop`: the model ended its answer itself; `length`: it was cut at the token limit."""


@dataclass(frozen=True)
class Problem:
    """One question with what its grader needs.

    Attributes:
        id: stable across runs and machines; also what splits held-out problems from training ones.
        prompt: the text put before the model, already in the task's format.
        answer: the reference that the task's grader reads (a target number, a LaTeX answer, ...).
        source: the task or data set that it came from.
        extra: whatever else the grader needs.
    """

    id: str
    prompt: str
    answer: str
    source: str
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
        reward: what the advantage is computed from.
        correct: what accuracy counts.
        verdict: one short word for the record: `correct`, `wrong`, `malformed`, ...
    """

    reward: float
    correct: bool
    verdict: str


@dataclass(frozen=True)
class Rollout:
    """A completion of a problem with its verdict."""

    problem: Problem
    prompt_ids: tuple[int, ...]
    completion: Completion
    text: str
    grade: Grade


@dataclass(frozen=True)
class Group:
    """All rollouts of one problem: the unit that group-relative advantages are computed in."""

    problem: Problem
    rollouts_G: tuple[Rollout, ...]
