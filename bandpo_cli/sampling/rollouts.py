"""Rollouts: completions of one turn or of a conversation with tools or an environment, and graded groups.

The next turn of a conversation continues from the tokens so far and the tokens of what is inserted; no text is
tokenized a second time. With an engine that streams, no conversation waits for another. With transformers, which is
fast on large batches only, the conversations of a request have their turns together.

The seed of a turn depends on the seed of the problem, the sample and the turn. `sampling.max_tokens` limits all tokens
after the prompt, those that are inserted included.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any

from transformers import PreTrainedTokenizerBase

from bandpo_cli.config.run import RunConfig
from bandpo_cli.config.sampling import RewardConfig
from bandpo_cli.errors import ConfigError
from bandpo_cli.grading.tools import EnvironmentPool, ToolPool, as_problem, tool_schemas
from bandpo_cli.grading.workers import default_workers
from bandpo_cli.objective.advantages import shaped_rewards
from bandpo_cli.processes.ranks import SINGLE, Ranks, rank_count
from bandpo_cli.sampling.prompt_encoding import EncodedPrompt, PromptEncoder
from bandpo_cli.sampling.sampler import Sampler, SampleRequest, SamplingParams, StaleEngineError, Turn
from bandpo_cli.sampling.tool_calls import read_message
from bandpo_cli.types import (
    ENVIRONMENT_REWARD,
    FLOAT_TYPE,
    MESSAGES,
    TOKEN_TYPE,
    Completion,
    Conversation,
    FinishReason,
    Grade,
    Group,
    Insertion,
    Problem,
    Rollout,
    derive_seed,
)

POLL_S = 0.1
"""Longest wait for the workers while nothing is being sampled, in seconds; then they are polled again."""


@dataclass
class _Open:
    """A conversation that is being sampled. `context` has all tokens after the prompt."""

    problem: Problem
    prompt_ids: Sequence[int]
    seed: int
    number: int
    version: int = 0
    context: array[int] = field(default_factory=lambda: array(TOKEN_TYPE))
    token_ids: array[int] = field(default_factory=lambda: array(TOKEN_TYPE))
    logprobs: array[float] = field(default_factory=lambda: array(FLOAT_TYPE))
    entropies: array[float] = field(default_factory=lambda: array(FLOAT_TYPE))
    inserted: list[Insertion] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    answered: list[dict[str, Any]] = field(default_factory=list)  # the messages that an environment answers
    replies: list[Any] = field(default_factory=list)  # one per call of the turn; None until it is there
    turns: int = 0
    calls: int = 0
    failed: int = 0
    malformed: int = 0
    timed_out: int = 0
    truncated: int = 0
    reward: float | str | None = None
    reason: FinishReason | None = None  # set where no further turn is sampled
    has_ended: bool = False

    def completion(self) -> Completion:
        limits = self.malformed, self.timed_out, self.truncated
        about = Conversation(tuple(self.messages), self.turns, self.calls, self.failed, self.reward, *limits)
        values = self.token_ids, self.logprobs, self.reason or "length", self.version, self.entropies
        return Completion(*values, tuple(self.inserted), about)


class Conversations:
    """The tools or the environment of a task, with which `stream_completions` samples several turns.

    Args:
        encoder: renders and tokenizes what is inserted.
        pool: the workers.
        max_turns: `task.max_turns`.
        max_chars: `task.max_result_chars`.
        ranks: the processes that sample at the same time.

    Raises:
        ConfigError: the model's chat template has no place for the messages.
    """

    def __init__(
        self, encoder: PromptEncoder, pool: ToolPool, max_turns: int, max_chars: int, ranks: Ranks = SINGLE
    ) -> None:
        self.encoder, self.pool, self.max_turns, self.max_chars = encoder, pool, max_turns, max_chars
        self.ranks, self.numbers = ranks, count()
        self.has_environment = isinstance(pool, EnvironmentPool)
        self.schemas = tool_schemas(pool.tools, self.has_environment)
        encoder.check_turn()


def build_conversations(config: RunConfig, encoder: PromptEncoder, ranks: Ranks) -> Conversations | None:
    """Return the conversations of a task with tools or an environment; None for another task. Workers start later."""
    task, grading = config.task, config.grading
    if not task.functions:
        return None
    size, calls = grading.workers or default_workers(), max(1, grading.concurrency // rank_count())
    pool = (EnvironmentPool if task.environment else ToolPool)(task.functions, grading, size, calls)
    return Conversations(encoder, pool, task.max_turns, task.max_result_chars, ranks)


def stream_completions(
    sampler: Sampler,
    requests: Iterable[tuple[Sequence[Problem], SampleRequest]],
    params: SamplingParams,
    version: int,
    conversations: Conversations | None = None,
) -> Generator[list[list[Completion]], None, None]:
    """Yield the completions [P][n] of each request in order, sampled at the same time if the sampler can.

    Args:
        requests: each with its problems [P].
        conversations: samples several turns per completion; None for one.

    Raises:
        StaleEngineError: the engine has other weights than those after `version` optimizer updates.
        RunError: the system refuses to start a worker of the conversations.
    """
    session = None if conversations is None else _Session(conversations, params, sampler)
    source: Iterable[SampleRequest | None] = (request for _, request in requests)
    if session is not None:
        source = session.requests(iter(requests))
    with closing(sampler.sample_stream(source, params, in_order=session is None)) as stream:
        for number, completions_PG in stream:
            others = {item.policy_version for group in completions_PG for item in group} - {version}
            if others:
                raise StaleEngineError(
                    f"the engine sampled from the weights of update {min(others)}, the policy is at {version}"
                )
            if session is None:
                yield completions_PG
            else:
                session.add_turns(number, [completion for (completion,) in completions_PG])
                yield from session.completed()
    if session is not None:
        yield from session.completed()  # those that have ended with a reply and not with a turn


class _Session:
    """The conversations of one call of `stream_completions`."""

    def __init__(self, about: Conversations, params: SamplingParams, sampler: Sampler) -> None:
        self._about, self._params, self._streams = about, params, sampler.streams
        # A sharded model gathers its weights on all ranks at once, also where a rank has no conversation left.
        self._ranks = about.ranks if sampler.shares_weights else SINGLE
        self._opened: deque[list[list[_Open]]] = deque()  # of each request, [P][n]
        self._sampled: dict[int, list[_Open]] = {}  # those of each request of the sampler, by its number
        self._waiting: dict[
            int, tuple[_Open, int]
        ] = {}  # conversation and index of a call, by its key in the pool
        self._ready: list[_Open] = []
        self._numbers = count()

    def requests(
        self, more: Iterator[tuple[Sequence[Problem], SampleRequest]]
    ) -> Iterator[SampleRequest | None]:
        """Yield the requests of the sampler: of new conversations, and of turns that follow a reply."""
        while True:
            is_idle = not self._sampled and not self._ready
            self._take_replies(POLL_S if is_idle else 0.0)
            while self._waiting and not self._streams:
                self._take_replies(POLL_S)
            if self._ranks.any(bool(self._ready)):
                turns, self._ready = self._ready, []
                yield from self._requests_of(turns)
            elif (request := next(more, None)) is not None:
                self._opened.append(self._open(*request))
                yield from self._requests_of([*chain.from_iterable(self._opened[-1])])
            elif self._sampled:
                yield None
            elif not self._waiting:
                return

    def add_turns(self, number: int, completions: Sequence[Completion]) -> None:
        """Add a turn to each conversation of a request, and begin the calls that follow from it."""
        for item, completion in zip(self._sampled.pop(number), completions, strict=True):
            item.version, item.turns = completion.policy_version, item.turns + 1
            before = [*item.prompt_ids, *item.context]
            message = read_message(
                self._about.encoder.tokenizer, completion.token_ids, before, self._about.schemas
            )
            item.messages.append(message)
            item.context.extend(completion.token_ids)
            for name in ("token_ids", "logprobs", "entropies"):
                getattr(item, name).extend(getattr(completion, name))
            is_cut, is_last = completion.finish_reason == "length", item.turns == self._about.max_turns
            calls = [call["function"] for call in message.get("tool_calls", ())]
            if self._about.has_environment:
                item.answered += [] if is_cut else [message]
                item.calls += len(calls) if self._about.schemas else 1
                item.malformed += sum(call["name"] is None for call in calls)
                self._submit(item, [self._step_of(item, is_end=is_cut or is_last)])
            elif calls and not is_cut and not is_last:
                item.calls += len(calls)
                item.malformed += sum(call["name"] is None for call in calls)
                self._submit(item, [[call["name"], call["arguments"]] for call in calls])
            else:
                item.reason, item.has_ended = "length" if is_cut or calls else "stop", True

    def completed(self) -> Iterator[list[list[Completion]]]:
        """Yield the completions [P][n] of the first requests, as far as all their conversations have ended."""
        while self._opened and all(item.has_ended for item in chain.from_iterable(self._opened[0])):
            yield [[item.completion() for item in group] for group in self._opened.popleft()]

    def _open(self, problems_P: Sequence[Problem], request: SampleRequest) -> list[list[_Open]]:
        """Return the conversations [P][n] of a request, which may have fewer prompts than there are problems."""
        samples = range(self._params.samples)
        return [
            [
                _Open(
                    problem,
                    prompt,
                    derive_seed(request.seed + place, "sample", sample),
                    next(self._about.numbers),
                )
                for sample in samples
            ]
            for place, (problem, prompt) in enumerate(zip(problems_P, request.prompts_P, strict=False))
        ]

    def _requests_of(self, items: Sequence[_Open]) -> Iterator[SampleRequest]:
        """Yield the requests of the next turns: one for all together, or one for each."""
        for part in [[item] for item in items] if self._streams else [items]:
            self._sampled[next(self._numbers)] = [*part]
            most = self._params.max_tokens
            turns = [
                Turn(derive_seed(item.seed, "turn", item.turns), most - len(item.context)) for item in part
            ]
            yield SampleRequest([[*item.prompt_ids, *item.context] for item in part], 0, turns)

    def _step_of(self, item: _Open, is_end: bool) -> list[Any]:
        """Return the arguments of a step of the environment; `is_end` asks for the reward in any case."""
        return [item.number, as_problem(item.problem), item.answered, is_end]

    def _submit(self, item: _Open, calls: Sequence[Sequence[Any]]) -> None:
        """Submit the calls of a turn to the workers."""
        item.replies = [None] * len(calls)
        batches = [[index] for index in range(len(calls))]
        keys = self._about.pool.submit(calls, [item.problem.id] * len(calls), batches)
        self._waiting |= {key: (item, index) for index, key in enumerate(keys)}

    def _take_replies(self, seconds: float) -> None:
        """Take the replies that are there, after waiting for one at most `seconds`."""
        for key, reply in self._about.pool.poll(seconds).items() if self._waiting else ():
            if (place := self._waiting.pop(key, None)) is None:
                continue  # of a call of `stream` that ended early
            item, index = place
            item.replies[index] = reply
            item.failed += int(reply["failed"])
            item.timed_out += reply.get("timed_out", False)
            if None not in item.replies:
                self._continue(item)

    def _continue(self, item: _Open) -> None:
        """Insert the replies to a turn, or end the conversation."""
        if self._about.has_environment:
            (reply,) = item.replies
            if reply["messages"] is None:
                item.reward, item.has_ended = reply["reward"], True
                item.reason = "stop" if reply["is_over"] else "length"
                return
            results = reply["messages"]
        else:
            names = [call["function"]["name"] for call in item.messages[-1]["tool_calls"]]
            pairs = zip(map(str, names), item.replies, strict=True)
            results = [{"role": "tool", "name": name, "content": result["content"]} for name, result in pairs]
        messages = [
            {key: self._cut(value) if isinstance(value, str) else value for key, value in result.items()}
            for result in results
        ]
        try:
            ids = self._about.encoder.turn_ids(messages)
        except ConfigError as error:  # a role that the template does not know; the batch is not lost for it
            item.reward, item.failed = str(error), item.failed + 1
            item.reason, item.has_ended = "length", True
            return
        if len(item.context) + len(ids) < self._params.max_tokens:
            item.messages += messages
            item.truncated += sum(len(result["content"]) > self._about.max_chars for result in results)
            item.inserted.append(Insertion(len(item.token_ids), ids))
            item.context.extend(ids)
            self._ready.append(item)
        elif self._about.has_environment:
            self._submit(item, [self._step_of(item, is_end=True)])
        else:
            item.reason, item.has_ended = "length", True

    def _cut(self, text: str) -> str:
        """Return the result of a tool without what exceeds `task.max_result_chars`, and without lone surrogates."""
        text, most = text.encode(errors="replace").decode(), self._about.max_chars
        return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most:,} more characters)"


def decode_completions(
    tokenizer: PreTrainedTokenizerBase, completions_PG: Sequence[Sequence[Completion]]
) -> list[str]:
    """Return the text of each completion, [P·G], without special tokens; of a conversation, that of the last turn."""
    ids = [list(completion.last_turn_ids) for group in completions_PG for completion in group]
    # transformers decodes no sequences as one empty sequence
    return [*tokenizer.batch_decode(ids, skip_special_tokens=True)] if ids else []


def problem_per_completion(
    problems_P: Sequence[Problem], completions_PG: Sequence[Sequence[Completion]]
) -> list[Problem]:
    """Return the problem of each completion, [P·G], with the turns of a conversation in `extra`, for its grader."""
    pairs = zip(problems_P, completions_PG, strict=True)
    return [with_turns(problem, completion) for problem, group in pairs for completion in group]


def with_turns(problem: Problem, completion: Completion) -> Problem:
    """Return the problem with the messages of a conversation, and the reward of its environment, in `extra`."""
    if (turns := completion.conversation) is None:
        return problem
    reward = {} if turns.reward is None else {ENVIRONMENT_REWARD: turns.reward}
    return replace(problem, extra={**problem.extra, MESSAGES: turns.messages, **reward})


def graded_groups(
    problems_P: Sequence[Problem],
    prompts_P: Sequence[EncodedPrompt],
    completions_PG: Sequence[Sequence[Completion]],
    texts: Sequence[str],
    grades: Sequence[Grade],
    reward: RewardConfig,
    max_tokens: int,
) -> list[Group]:
    """Return one group per problem with the graded completions and their shaped rewards.

    Args:
        texts, grades: of all completions, [P·G].
        reward: range of the reward and penalty for long completions.
        max_tokens: maximum tokens per completion, from which the penalty for long completions counts.
    """
    lengths = [len(completion.token_ids) for completions in completions_PG for completion in completions]
    graded = zip(texts, grades, shaped_rewards(grades, lengths, max_tokens, reward), strict=True)
    groups = []
    for problem, prompt, completions in zip(problems_P, prompts_P, completions_PG, strict=True):
        rollouts = []
        for completion, (text, grade, shaped) in zip(completions, graded, strict=False):
            about = prompt.text, prompt.token_ids, completion, text, replace(grade, reward=shaped)
            rollouts.append(Rollout(with_turns(problem, completion), *about))
        groups.append(Group(problem, tuple(rollouts)))
    return groups
