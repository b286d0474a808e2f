"""Batches of graded rollouts: sampling for the current step, and for the `sampling.max_lag` steps after it.

Batches that are sampled ahead wait in a queue, `Components.ahead`. Step s begins with the weights after step s - 1,
which sample the batch of step s + max_lag; the first step of a run also samples those before it. Then the step trains
on its own batch, the oldest of the queue. The trainer's process samples before the update. With an engine process a
thread samples during the update; then the engine gets the new weights. Each of several ranks has such a thread, and
each gets the groups of all ranks.

A checkpoint has the queue: its batches are from earlier weights than those of the checkpoint, and cannot be sampled
again. Its file has what sampling and grading gave; problems and prompts follow from their place in the stream, texts
from the tokens.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerBase

from bandpo_cli.config.batch_and_sampling import RewardConfig
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import warn_on_failure
from bandpo_cli.evaluation.evaluate import background_grading, chunks
from bandpo_cli.grading.pool import graded_by, training_grader
from bandpo_cli.objective.advantages import has_reward_spread
from bandpo_cli.processes.ranks import Ranks
from bandpo_cli.sampling.prompt_encoding import EncodedPrompt, PromptEncoder
from bandpo_cli.sampling.rollouts import (
    decode_completions,
    graded_groups,
    problem_per_completion,
    stream_completions,
    with_coins,
)
from bandpo_cli.sampling.sampler import SampleRequest
from bandpo_cli.tasks.task import ProblemStream
from bandpo_cli.training.performance import StepTimer
from bandpo_cli.types import Completion, Conversation, Grade, Group, Insertion, Problem, derive_seed

if TYPE_CHECKING:
    from bandpo_cli.training.build import Components

_PER_TOKEN = ("token_ids", "logprobs", "entropies")
"""Values of a `Completion` per token, each a tensor in the file of the queue."""
_PER_BATCH = ("step", "version", "age", "position")
"""The first fields of `SampledGroups`, which the file of the queue has."""

STOP_S = 10.0
"""Longest wait for the thread after an error, in seconds: where another rank has ended, its exchange may never end."""


class BackgroundCall(threading.Thread):
    """A call in a thread; without a further thread (the system limits their number) `start` makes the call itself.

    Assign the object to a variable before `start`, because a signal may come while the thread starts.
    """

    def __init__(self, name: str, call: Callable[[], object], daemon: bool = False) -> None:
        super().__init__(name=name, daemon=daemon)
        self._call = call
        self._error: BaseException | None = None

    def start(self) -> None:
        """Start the call."""
        try:
            super().start()
        except RuntimeError:
            self.run()

    def run(self) -> None:
        """Make the call and keep its error, for the thread that trains."""
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001
            self._error = error

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the call, at most `timeout` seconds; return at once if no thread has started."""
        if self.ident is not None:
            super().join(timeout)

    def finish(self) -> None:
        """Wait for the end of the call and raise its error."""
        self.join()
        if self._error is not None:
            raise self._error


@dataclass(frozen=True)
class SampledGroups:
    """The graded rollouts of a step."""

    step: int
    version: int  # number of optimizer updates of the weights that sampled them
    age: int  # number of steps between these weights and those that the step starts from
    position: int  # of their first problem in the stream of training problems
    seconds: float  # that sampling took; 0 after a resume, for which they are not stored
    groups: Sequence[Group]  # those that the step trains on, `sampling.prompts` of them
    sampled: Sequence[Group]  # all, of consecutive problems, also those that dynamic sampling dropped

    @property
    def completions(self) -> list[Completion]:
        """All sampled completions in order."""
        return [rollout.completion for group in self.sampled for rollout in group.rollouts_G]

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(len(completion.token_ids) for completion in self.completions)


class RolloutBatches(AbstractContextManager["RolloutBatches"]):
    """The batches of a run in the order of its steps; a context manager, within which the run is trained.

    `wait` raises an error of the thread. If an exception ends the block, the engine is closed and grading is cancelled.
    """

    def __init__(self, config: RunConfig, components: Components) -> None:
        """All ranks must call this together."""
        self._config, self._components = config, components
        self._lag = config.sampling.max_lag
        self._in_thread = self._lag > 0 and config.sampling.engine_process
        self._thread_ranks = components.ranks.for_thread() if self._in_thread else components.ranks
        self._call: BackgroundCall | None = None
        self._failures: Counter[str] = Counter()

    def __exit__(self, *_: object) -> None:
        """After an error, close the engine and end the thread."""
        if self._call is not None:
            self._components.grader.cancel()
            if self._components.conversations is not None:
                self._components.conversations.pool.close()  # the thread's next call of the pool raises RunError
            with warn_on_failure("the sampling engine could not be closed"):
                self._components.sampler.close()
            self._call.join(STOP_S)

    def take(self, step: int, timer: StepTimer) -> SampledGroups:
        """Return the batch of a step, sampled ahead or now; without a thread, sample the batches ahead of it, too.

        Raise StaleEngineError if the engine has other weights than those of the last update. Raise GraderFailedError if
        every answer of a batch is a grader error; see `training_grader`.
        """
        components, ahead = self._components, self._components.ahead
        last = min(step if self._in_thread else step + self._lag, self._config.steps)
        for number in range(ahead[-1].step + 1 if ahead else step, last + 1):
            about = number - step, components.optimizer.update, timer, components.ranks
            ahead.append(self._sample(number, *about))
        batch = ahead.popleft()
        assert batch.step == step, "batches are taken in the order of the steps"
        return batch

    def take_part(self, step: int, start: int, count: int, timer: StepTimer) -> list[Group]:
        """Return `count` groups of a step from prompt number `start` on, with the random numbers of `take`."""
        seed = derive_seed(self._config.seed, "sample", step) + start
        optimizer, ranks = self._components.optimizer, self._components.ranks
        return self._sample_batch(seed, optimizer.update, timer, ranks, count)

    def start(self, step: int) -> None:
        """Start sampling ahead of a step, whose batch is taken, in a thread; do nothing without an engine process."""
        ahead, last = self._components.ahead, min(step + self._lag, self._config.steps)
        missing = range(ahead[-1].step + 1 if ahead else step + 1, last + 1)
        if not self._in_thread or not missing:
            return
        version = self._components.optimizer.update  # read here: it grows while the thread runs
        timer = StepTimer()  # callbacks are called from the thread that trains

        def sample() -> None:
            for number in missing:
                ahead.append(self._sample(number, number - step, version, timer, self._thread_ranks))

        self._call = BackgroundCall("rollouts", sample, daemon=True)
        self._call.start()

    def wait(self, timer: StepTimer) -> None:
        """Wait until the batches that were started are sampled and graded; they are then in `Components.ahead`.

        Raises:
            Exception: what sampling or grading raised; see `take`.
        """
        if (call := self._call) is None:
            return
        with timer.phase("sample"):
            call.join()
        self._call = None
        call.finish()

    def _sample(self, step: int, age: int, version: int, timer: StepTimer, ranks: Ranks) -> SampledGroups:
        """Sample and grade the rollouts of a step; `version` is the number of updates of the engine's weights.

        One batch of `sampling.prompts` groups; with dynamic sampling as many batches as it takes until that many groups
        have rewards that differ, at most `sampling.dynamic_batches`.
        """
        config, position = self._config, self._components.stream.position
        before = timer.seconds("sample") if age else 0.0  # a batch without an age is the first of its step
        wanted, dynamic = config.sampling.prompts, config.sampling.dynamic
        sampled: list[Group] = []
        for batch in range(config.sampling.dynamic_batches if dynamic else 1):
            seed = derive_seed(config.seed, "sample", step, *([batch] if batch else []))
            sampled += self._sample_batch(seed, version, timer, ranks, wanted)
            if not dynamic or sum(map(has_reward_spread, sampled)) >= wanted:
                break
        groups = select_groups(sampled, wanted, config.optim.updates) if dynamic else sampled
        seconds = timer.seconds("sample") - before
        return SampledGroups(step, version, age, position, seconds, groups, sampled)

    def _sample_batch(
        self, seed: int, version: int, timer: StepTimer, ranks: Ranks, count: int
    ) -> list[Group]:
        """Return the graded groups of the next `count` problems, those of all ranks."""
        config, components = self._config, self._components
        params, batch = components.params, components.stream.next(count)
        own = ranks.share(len(batch))
        problems, seed = batch[own], seed + own.start
        completions: list[list[Completion]] = []
        texts: list[str] = []
        rewards = config.task.rewards
        has_control = any(reward.is_control for reward in rewards or ())

        def answered(start: int, groups: Sequence[Sequence[Completion]]) -> list[Problem]:
            """Return the problem of each completion of the prompts from `start` on."""
            of_completions = problem_per_completion(problems[start : start + len(groups)], groups)
            if not has_control:
                return of_completions
            return with_coins(of_completions, params.samples, seed + start, config.grading.coin)

        early: list[list[Future[list[Grade]]]] = []  # grades of the parts, by reward
        with ExitStack() as stack:
            with timer.phase("sample"):
                prompts = components.encoder.encode(problems)
                parts: Iterable[tuple[int, Sequence[EncodedPrompt]]] = [(0, prompts)]
                # An engine process grades in the background in any case. The transformers engine does not stream:
                # smaller calls would change the last bits of its log-probs.
                streams = components.sampler.streams and not self._in_thread
                if config.grading.while_sampling and streams:
                    grading = background_grading(components.grader.begin, components.grader.cancel)
                    submit, early = stack.enter_context(grading), [[] for _ in rewards or [None]]
                    parts = chunks(prompts, config.grading.batch // params.samples)
                # The seed of a prompt is one above that of the prompt before it, as within one call of the sampler.
                requests = (
                    (problems[start:], SampleRequest([prompt.token_ids for prompt in part], seed + start))
                    for start, part in parts
                )
                about = components.sampler, requests, params, version, components.conversations
                with closing(stream_completions(*about)) as stream:
                    for part in stream:
                        of_part = answered(len(completions), part) if early else []
                        completions += part
                        texts += (part_texts := decode_completions(components.policy.tokenizer, part))
                        for reward, graded in zip(rewards or [None], early, strict=False):
                            graded.append(submit(graded_by(reward, of_part), part_texts))

            def early_grades(*_: object) -> list[Grade]:
                """Wait for the grades of all texts: at the first call those of the first reward, and so on."""
                return [grade for part in early.pop(0) for grade in part.result()]

            with timer.phase("grade"):
                settings = components.grader, rewards, ranks, self._failures
                grade = training_grader(*settings, early_grades if early else None)
                grades = grade(answered(0, completions), texts)
                shaping = config.reward, params.max_tokens
                groups = graded_groups(problems, prompts, completions, texts, grades, *shaping)
                return ranks.gather_all(groups)


def select_groups(sampled: Sequence[Group], wanted: int, updates: int) -> list[Group]:
    """Return the `wanted` groups of a step under dynamic sampling (DAPO, arXiv 2503.14476).

    These are the first groups whose rewards differ, filled up with the first zero-variance groups, which have no
    gradient but keep the size of each update: `wanted / updates` consecutive groups of the result. The updates have
    equal numbers of the groups with a gradient, up to 1, earlier updates more, and train on them first: without a
    gradient, AdamW would move the weights by its momentum alone. `sampled` has at least `wanted` groups.
    """
    kept = [group for group in sampled if has_reward_spread(group)][:wanted]
    fill = [group for group in sampled if not has_reward_spread(group)]
    remaining_kept, remaining_fill = iter(kept), iter(fill)
    ordered: list[Group] = []
    for number in range(updates):
        share = len(kept) // updates + (number < len(kept) % updates)
        ordered += islice(remaining_kept, share)
        ordered += islice(remaining_fill, wanted // updates - share)
    return ordered


def write_sampled(path: Path, batches: Sequence[SampledGroups]) -> None:
    """Write batches as a safetensors file: a tensor per value of the tokens, the rest as JSON in its metadata."""
    completions = [completion for batch in batches for completion in batch.completions]
    tensors = {name: np.concatenate([getattr(item, name) for item in completions]) for name in _PER_TOKEN}
    tensors["lengths"] = np.array([len(completion.token_ids) for completion in completions], np.int32)
    rollouts = [rollout for batch in batches for group in batch.sampled for rollout in group.rollouts_G]
    metadata = {
        "batches": [
            {
                **{name: getattr(batch, name) for name in _PER_BATCH},
                "trained": [indices[id(group)] for group in batch.groups],
                "group_sizes": [len(group.rollouts_G) for group in batch.sampled],
            }
            for batch in batches
            for indices in [{id(group): index for index, group in enumerate(batch.sampled)}]
        ],
        "finish_reasons": [completion.finish_reason for completion in completions],
        "grades": [[*vars(rollout.grade).values()] for rollout in rollouts],
        "inserted": [completion.inserted for completion in completions],
        "conversations": [
            None if item.conversation is None else vars(item.conversation) for item in completions
        ],
    }
    save_file(tensors, path, {"rollouts": json.dumps(metadata)})


def read_sampled(
    path: Path, stream: ProblemStream, encoder: PromptEncoder, tokenizer: PreTrainedTokenizerBase
) -> list[SampledGroups]:
    """Return the batches that `write_sampled` wrote, with their problems, prompts and texts.

    Raises:
        OSError, ValueError, LookupError, TypeError, SafetensorError: the file is damaged.
    """
    with safe_open(path, framework="np") as file:
        metadata = json.loads(file.metadata()["rollouts"])
        lengths = file.get_tensor("lengths").tolist()
        tokens, logprobs, entropies = (file.get_tensor(name).tolist() for name in _PER_TOKEN)
    spans = pairwise(accumulate(lengths, initial=0))
    columns = (metadata[name] for name in ("finish_reasons", "inserted", "conversations", "grades"))
    rows = zip(spans, *columns, strict=True)
    batches = []
    for about in metadata["batches"]:
        sizes, completions, grades = about["group_sizes"], [], []
        for (start, end), reason, inserted, turns, grade in islice(rows, sum(sizes)):
            conversation = Conversation(**turns | {"messages": tuple(turns["messages"])}) if turns else None
            between = tuple(Insertion(place, tuple(ids)) for place, ids in inserted)
            values = tokens[start:end], logprobs[start:end], reason, about["version"], entropies[start:end]
            completions.append(Completion(*values, between, conversation))
            grades.append(Grade(*grade))
        answers = iter(completions)
        completions_PG = [[*islice(answers, size)] for size in sizes]
        problems = stream.take(about["position"], len(sizes))
        texts = decode_completions(tokenizer, [completions])
        unshaped = RewardConfig(), 0  # the rewards are shaped already
        sampled = graded_groups(problems, encoder.encode(problems), completions_PG, texts, grades, *unshaped)
        groups = [sampled[index] for index in about["trained"]]
        step, version, age, position = (about[name] for name in _PER_BATCH)
        batches.append(SampledGroups(step, version, age, position, 0.0, groups, sampled))
    return batches
