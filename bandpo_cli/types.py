"""Values that the packages exchange: problems, completions, grades, rollouts, seeds and the status of a run.

No torch here: samplers and graders in other processes send these values too. Suffixes name a dimension: `_P` problem,
`_G` completion of a group, `_T` token.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

TOKEN_TYPE, FLOAT_TYPE = "i", "f"
"""Types of `array.array`: token ids are 32-bit integers; log-probs and entropies are float32, as in all engines."""

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
    """One question with the data of its grader."""

    id: str  # stable across runs and machines; it also decides whether the problem is held out
    prompt: Prompt  # the input of the model
    answer: str  # the reference that the grader reads (a target number, a LaTeX answer, ...)
    source: str  # the task or data set of the problem
    grader: str  # of its answers: a name in `registries.GRADERS` or the path of a custom function
    extra: Mapping[str, object] = field(default_factory=dict)  # JSON-like: graders may run in another process
    question: str = field(
        default="", compare=False
    )  # without the template of the task; "" without a template

    @property
    def label(self) -> str:
        """The question, or the last message of the user, by which a person recognizes the problem."""
        if self.question or isinstance(self.prompt, str):
            return self.question or str(self.prompt)
        return next((turn.content for turn in reversed(self.prompt) if turn.role == "user"), "")


def messages_of(prompt: Prompt) -> tuple[Message, ...]:
    """Return the chat messages of a prompt; a text is a message of the user."""
    return (Message("user", prompt),) if isinstance(prompt, str) else prompt


def joined_text(prompt: Prompt) -> str:
    """Return a prompt as text: its messages, with blank lines between them."""
    return "\n\n".join(message.content for message in messages_of(prompt))


class Insertion(NamedTuple):
    """Tokens that were not sampled, before the sampled token with the index `position` of a completion."""

    position: int
    token_ids: tuple[int, ...]


MESSAGES, ENVIRONMENT_REWARD = "messages", "environment_reward"
"""Keys of `Problem.extra` of a completion: the messages of its conversation, and the reward of its environment."""

COIN, ANSWER_GRADER = "coin", "answer_grader"
"""Keys of `Problem.extra` for controls: the side of the coin of a completion, and the grader of the answers."""


@dataclass(frozen=True)
class Conversation:
    """The turns of a completion in which tools or an environment have answered."""

    messages: tuple[Mapping[str, object], ...]  # after the prompt: `role`, `content`, perhaps `tool_calls`
    turns: int  # number of turns of the assistant
    calls: int  # number of tool calls, or of messages that an environment has answered
    failed_calls: int  # those of them with an error in place of a result
    reward: float | str | None = None  # of the environment; where it has failed, the error
    malformed_calls: int = 0  # calls that cannot be read, or that exceed a limit of `sampling.conversations`
    timed_out_calls: int = 0  # calls without a result within `grading.deadline`
    truncated_results: int = 0  # inserted messages that were longer than `task.max_result_chars`


@dataclass(frozen=True)
class Completion:
    """One sampled answer, as tokens. In a conversation it has the tokens of all turns of the assistant.

    Values per token are arrays: 4 bytes per token, without a Python object for each. Other sequences are converted.
    `inserted` are the tokens between the turns of a conversation (tool results, messages of an environment), which are
    context: they have no log-prob and are not trained. In order of their positions.
    """

    token_ids: array[int]  # the end-of-sequence token included when it was sampled
    logprobs: array[float]  # log π(token) in nats under the *sampling* distribution (temperature applied)
    finish_reason: FinishReason
    policy_version: int  # the number of optimizer steps of the weights that sampled it
    entropies: array[float] = field(
        default_factory=lambda: array(FLOAT_TYPE)
    )  # nats at temperature 1, or empty
    inserted: tuple[Insertion, ...] = ()
    conversation: Conversation | None = None  # the turns; None for a single one

    def __post_init__(self) -> None:
        """Convert sequences to arrays."""
        for name, kind in (("token_ids", TOKEN_TYPE), ("logprobs", FLOAT_TYPE), ("entropies", FLOAT_TYPE)):
            values = getattr(self, name)
            if not isinstance(values, array):
                object.__setattr__(self, name, array(kind, values))

    @property
    def marked_ids(self) -> array[int]:
        """All tokens in order; an inserted token is marked: it is stored as its complement `~id`, which is negative."""
        if not self.inserted:
            return self.token_ids
        marked, start = array(TOKEN_TYPE), 0
        for position, token_ids in self.inserted:
            marked += self.token_ids[start:position]
            marked.extend(~token for token in token_ids)
            start = position
        return marked + self.token_ids[start:]


@dataclass(frozen=True)
class Grade:
    """The grade of one completion.

    A grader returns the reward 1 for a correct answer, 0 for a wrong one, or a value between for partial credit; the
    `reward` settings map it to the reward of training. `has_reward` is False where grading failed, or where every
    reward function reports that it does not apply: the advantage is 0 and `reward` is in no mean.
    """

    reward: float  # the value that advantages are computed from
    correct: bool  # counted by accuracy
    verdict: str  # one short word: `correct`, `wrong`, `malformed`, ..., or one of `UNGRADED_VERDICTS`
    has_reward: bool = True
    components: Mapping[str, float | None] = field(
        default_factory=dict, hash=False
    )  # of `task.rewards`, unscaled
    failed: bool = False  # the grading of one of `task.rewards` failed, so that there is no sum


CORRECT = Grade(1.0, correct=True, verdict="correct")
WRONG = Grade(0.0, correct=False, verdict="wrong")
MALFORMED = Grade(0.0, correct=False, verdict="malformed")
TIMEOUT = Grade(0.0, correct=False, verdict="timeout", has_reward=False)
GRADER_ERROR = Grade(0.0, correct=False, verdict="grader-error", has_reward=False)
NOT_APPLICABLE = Grade(0.0, correct=False, verdict="not-applicable", has_reward=False)

UNGRADED_VERDICTS = frozenset({TIMEOUT.verdict, GRADER_ERROR.verdict, NOT_APPLICABLE.verdict})
"""Verdicts of answers that were not graded."""


def is_ungraded(grade: Grade) -> bool:
    """Return whether a completion has no reward because grading failed, and not because no reward function applies."""
    return grade.failed or (not grade.has_reward and grade.verdict in (TIMEOUT.verdict, GRADER_ERROR.verdict))


Grader = Callable[[Sequence[Problem], Sequence[str]], list[Grade]]
"""A function that grades texts [N], each as an answer to its problem [N]."""


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
"""The final status of a run, in MLflow's terms. KILLED: stopped by Ctrl-C or a signal. FINISHED: all steps are done, or
a criterion of `stop` has ended the run."""


def status_of(error: BaseException | None) -> RunStatus:
    """Return the status of a run whose loop raised `error`; None stands for a run that reached its end.

    Ctrl-C and the SystemExit of a signal handler are KILLED, any other exception is FAILED.
    """
    stopped = isinstance(error, KeyboardInterrupt | SystemExit)
    return "FINISHED" if error is None else "KILLED" if stopped else "FAILED"


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return a 63-bit seed that depends on the seed of the run and on its purpose, e.g. `("sample", step)`.

    Every random choice has a seed of its own, so that resuming a run restores no state of a generator.
    """
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
