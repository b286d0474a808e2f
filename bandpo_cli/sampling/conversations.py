"""Conversations with tools or an environment: the turns of a model, and what is inserted between them.

The next turn of a conversation continues from the tokens so far and the tokens of what is inserted; no text is
tokenized a second time. With an engine that streams, no conversation waits for another. With transformers, which is
fast on large batches only, the conversations of a request have their turns together.

The seed of a turn depends on the seed of the problem, the sample and the turn. `sampling.max_tokens` limits all tokens
after the prompt, those that are inserted included.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import ConfigError
from bandpo_cli.grading.tools import EnvironmentPool, ToolPool, tool_schemas
from bandpo_cli.processes.ranks import SINGLE, Ranks
from bandpo_cli.sampling.prompt_encoding import PromptEncoder, end_of_turn_id
from bandpo_cli.sampling.sampler import Sampler, SampleRequest, SamplingParams, Turn
from bandpo_cli.sampling.tool_calls import read_message
from bandpo_cli.types import (
    FLOAT_TYPE,
    TOKEN_TYPE,
    Completion,
    Conversation,
    FinishReason,
    Insertion,
    Problem,
    derive_seed,
)

_COUNTS = ("calls", "failed_calls", "malformed_calls", "timed_out_calls", "truncated_results")
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
    counts: Counter[str] = field(default_factory=Counter)  # of calls, and of messages that were cut
    reward: float | str | None = None
    reason: FinishReason | None = None  # set where no further turn is sampled
    has_ended: bool = False

    def completion(self) -> Completion:
        counts = {name: self.counts[name] for name in _COUNTS}
        about = Conversation(tuple(self.messages), self.turns, reward=self.reward, **counts)
        values = self.token_ids, self.logprobs, self.reason or "length", self.version, self.entropies
        return Completion(*values, tuple(self.inserted), about)


@dataclass
class Conversations:
    """The tools or the environment of a task, with which `stream_completions` samples several turns.

    The limits are `task.max_turns`, `max_result_chars` and `max_turn_tokens`; `ranks` sample at the same time.
    """

    encoder: PromptEncoder
    pool: ToolPool
    max_turns: int
    max_chars: int
    ranks: Ranks = SINGLE
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError if the model's chat template has no place for the messages."""
        self.end, self.numbers = end_of_turn_id(self.encoder.tokenizer), count()
        self.has_environment = isinstance(self.pool, EnvironmentPool)
        self.schemas = tool_schemas(self.pool.tools, self.has_environment)
        self.encoder.check_turn()


def build_conversations(config: RunConfig, encoder: PromptEncoder, ranks: Ranks) -> Conversations:
    """Return the conversations of a task with tools or an environment. Workers start later."""
    task = config.task
    pool = (EnvironmentPool if task.environment else ToolPool)(task.functions, config.grading)
    return Conversations(encoder, pool, task.max_turns, task.max_result_chars, ranks, task.max_turn_tokens)


class Session:
    """The conversations of one call of `stream_completions`."""

    def __init__(self, about: Conversations, params: SamplingParams, sampler: Sampler) -> None:
        self._about, self._params, self._streams = about, params, sampler.streams
        # A sharded model gathers its weights on all ranks at once, also where a rank has no conversation left.
        self._ranks = about.ranks if sampler.shares_weights else SINGLE
        self._opened: deque[list[list[_Open]]] = deque()  # of each request, [P][n]
        self._sampled: dict[int, list[_Open]] = {}  # those of each request of the sampler, by its number
        self._waiting: dict[int, tuple[_Open, int]] = {}  # conversation and index of a call, by key
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
            if any(self._ranks.gather(bool(self._ready))):
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
            before, tokenizer = [*item.prompt_ids, *item.context], self._about.encoder.tokenizer
            message = read_message(tokenizer, completion.token_ids, before, self._about.schemas)
            item.messages.append(message)
            item.context.extend(completion.token_ids)
            for name in ("token_ids", "logprobs", "entropies"):
                getattr(item, name).extend(getattr(completion, name))
            is_cut, is_last = completion.finish_reason == "length", item.turns == self._about.max_turns
            # Otherwise the limit of a message has cut it, and the conversation continues.
            is_full = is_cut and len(item.context) >= self._params.max_tokens
            calls = [call["function"] for call in message.get("tool_calls", ())]
            continues = self._about.has_environment or (calls and not is_full and not is_last)
            if continues:
                item.counts["calls"] += len(calls) if self._about.schemas else 1
                item.counts["malformed_calls"] += sum(call["name"] is None for call in calls)
            if self._about.has_environment:
                item.answered += [] if is_full else [message]
                self._submit_step(item, is_end=is_full or is_last)
            elif continues:
                self._submit(item, [[call["name"], call["arguments"]] for call in calls])
            else:
                item.reason, item.has_ended = "length" if is_cut or calls else "stop", True

    def completed(self) -> Iterator[list[list[Completion]]]:
        """Yield the completions [P][n] of the first requests, as far as all their conversations have ended."""
        while self._opened and all(item.has_ended for item in chain.from_iterable(self._opened[0])):
            yield [[item.completion() for item in group] for group in self._opened.popleft()]

    def _open(self, problems_P: Sequence[Problem], request: SampleRequest) -> list[list[_Open]]:
        """Return the conversations [P][n] of a request, which may have fewer prompts than there are problems."""
        samples, numbers = range(self._params.samples), self._about.numbers
        pairs = zip(problems_P, request.prompts_P, strict=False)
        return [
            [_Open(problem, prompt, derive_seed(seed, "sample", place), next(numbers)) for place in samples]
            for seed, (problem, prompt) in enumerate(pairs, request.seed)
        ]

    def _requests_of(self, items: Sequence[_Open]) -> Iterator[SampleRequest]:
        """Yield the requests of the next turns: one for all together, or one for each."""
        for part in [[item] for item in items] if self._streams else [items]:
            self._sampled[next(self._numbers)] = [*part]
            seeds = [derive_seed(item.seed, "turn", item.turns) for item in part]
            most = self._about.max_tokens or self._params.max_tokens
            limits = [min(most, self._params.max_tokens - len(item.context)) for item in part]
            prompts = [[*item.prompt_ids, *item.context] for item in part]
            yield SampleRequest(prompts, 0, [*map(Turn, seeds, limits)])

    def _submit_step(self, item: _Open, is_end: bool) -> None:
        """Submit a step of the environment to the workers; `is_end` asks for the reward in any case."""
        self._submit(item, [[item.number, dict(item.problem.extra), item.answered, is_end]])

    def _submit(self, item: _Open, calls: Sequence[Sequence[Any]]) -> None:
        """Submit the calls of a turn to the workers."""
        item.replies = [None] * len(calls)
        batches = [[index] for index in range(len(calls))]
        keys = self._about.pool.submit(calls, [item.problem.id] * len(calls), batches)
        self._waiting |= {key: (item, index) for index, key in enumerate(keys)}

    def _take_replies(self, seconds: float) -> None:
        """Take the replies that are there, after waiting for one at most `seconds`."""
        for key, reply in self._about.pool.poll(seconds).items() if self._waiting else ():
            item, index = self._waiting.pop(key, (None, 0))
            if item is None:
                continue  # of a stream that ended early
            item.replies[index] = reply
            item.counts["failed_calls"] += int(reply["failed"])
            item.counts["timed_out_calls"] += reply.get("timed_out", False)
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
            # A message that a stop string or the limit of its tokens has ended lacks the token of its end.
            end = self._about.end
            if end is not None and item.context[-1] not in (end, *self._params.stop_ids):
                ids = (end, *ids)
        except ConfigError as error:  # a role that the template does not know; the batch is not lost for it
            item.counts["failed_calls"] += 1
            item.reward, item.reason, item.has_ended = str(error), "length", True
            return
        if len(item.context) + len(ids) < self._params.max_tokens:
            item.messages += messages
            is_long = [len(result["content"]) > self._about.max_chars for result in results]
            item.counts["truncated_results"] += sum(is_long)
            item.inserted.append(Insertion(len(item.token_ids), ids))
            item.context.extend(ids)
            self._ready.append(item)
        elif self._about.has_environment:
            self._submit_step(item, is_end=True)
        else:
            item.reason, item.has_ended = "length", True

    def _cut(self, text: str) -> str:
        """Return the result of a tool without what exceeds `task.max_result_chars`, and without lone surrogates."""
        text, most = text.encode(errors="replace").decode(), self._about.max_chars
        return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most:,} more characters)"
