"""Evaluation of a policy: sample and grade completions batch by batch, for training and for `bandpo eval` alike.

The engine receives all batches, and a thread grades the completions of one while the next ones are sampled. Engine and
tokenizer are called from the thread of the caller alone.

With several ranks, each of them samples and grades its share of the problems of every batch. The completions of a
problem depend neither on the number of ranks nor on the size of the batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass

from bandpo_cli.config.run import EvaluationConfig, RewardConfig
from bandpo_cli.evaluation.batches import BackgroundGrading, Batch, chunks, eval_row
from bandpo_cli.ranks import SINGLE, Ranks
from bandpo_cli.sampling.rollouts import (
    EncodedPrompt,
    PromptEncoder,
    decode_completions,
    graded_groups,
    problem_per_completion,
    stream_completions,
)
from bandpo_cli.sampling.sampler import Sampler, SampleRequest, SamplingParams
from bandpo_cli.seeds import derive_seed
from bandpo_cli.storage.eval_folder import PartKey
from bandpo_cli.types import Completion, Grade, Grader, Problem

MAX_UNGRADED_BATCHES = 2
"""Batches that are sampled and not graded yet; before a further one is sampled, the caller waits for a grade. It bounds
the memory, and what an interrupted evaluation loses."""


@dataclass(frozen=True)
class _Sampled:
    """This rank's share of a batch, whose completions are being graded."""

    planned: _Planned
    completions_PG: Sequence[Sequence[Completion]]
    texts: Sequence[str]
    grades: Future[list[Grade]]


@dataclass(frozen=True)
class _Planned:
    """This rank's share of a batch that is to be sampled."""

    key: PartKey
    label: str
    problems: Sequence[Problem]
    prompts: Sequence[EncodedPrompt]
    seed: int

    @property
    def request(self) -> SampleRequest:
        return SampleRequest([prompt.token_ids for prompt in self.prompts], self.seed)


def sample_batches(
    sampler: Sampler,
    encoder: PromptEncoder,
    grade: Grader,
    sets: Mapping[str, Sequence[Problem]],
    params: SamplingParams,
    batch_size: int,
    seed: int,
    version: int,
    done: Container[PartKey] = (),
    cancel: Callable[[], None] = lambda: None,
    ranks: Ranks = SINGLE,
) -> Iterator[Batch]:
    """Sample and grade `params.samples` completions per problem and yield them in batches.

    The completions of a problem depend on the run's seed, the label of its set and its place in the set, not on which
    batches were `done` before. Rewards are not scaled or shaped as in training.

    With several ranks, all of them must iterate together with equal arguments; each of them gets the complete batches.

    Args:
        grade: grades texts [N], each as an answer to its problem [N]; called in another thread.
        sets: problems by label of the evaluation set.
        batch_size: approximate number of completions per batch; the completions of a problem are never split.
        seed: the run's seed, from which the seeds of the batches are derived.
        version: version of the policy's weights that the sampler must run.
        done: keys of batches to skip.
        cancel: makes a running call of `grade` end soon; called if the iteration ends early.
        ranks: the processes that sample and grade a share of each batch.

    Raises:
        StaleEngineError: the sampler does not run the weights of `version`.
    """
    planned: deque[_Planned] = deque()

    def requests() -> Iterator[SampleRequest]:
        for batch in _plan(encoder, sets, batch_size // params.samples, seed, done, ranks):
            planned.append(batch)
            yield batch.request

    ungraded: deque[_Sampled] = deque()
    with (
        BackgroundGrading(grade, cancel) as grading,
        closing(stream_completions(sampler, requests(), params, version)) as stream,
    ):
        for completions_PG in stream:
            batch = planned.popleft()
            texts = decode_completions(encoder.tokenizer, completions_PG)
            grades = grading.submit(problem_per_completion(batch.problems, completions_PG), texts)
            ungraded.append(_Sampled(batch, completions_PG, texts, grades))
            while ungraded and (len(ungraded) > MAX_UNGRADED_BATCHES or _is_graded(ungraded[0], ranks)):
                yield _gathered(ungraded.popleft(), params.max_tokens, ranks)
        while ungraded:
            yield _gathered(ungraded.popleft(), params.max_tokens, ranks)


def _plan(
    encoder: PromptEncoder,
    sets: Mapping[str, Sequence[Problem]],
    problems_per_batch: int,
    seed: int,
    done: Container[PartKey],
    ranks: Ranks,
) -> Iterator[_Planned]:
    """Yield this rank's share of each batch that is not `done`, in order; it may have no problems."""
    for index, (label, problems_P) in enumerate(sets.items()):
        set_seed = derive_seed(seed, "eval", label)
        for start, chunk in chunks(problems_P, problems_per_batch):
            key = PartKey(index, start)
            if key not in done:
                problems, first = ranks.share(chunk), start + ranks.share_start(len(chunk))
                # A sampler gives the prompt after the first the next seed, and so on: a seed per problem of the set.
                yield _Planned(key, label, problems, encoder.encode(problems), set_seed + first)


def _is_graded(sampled: _Sampled, ranks: Ranks) -> bool:
    """Return whether the grades can be taken without waiting; False with several ranks.

    Their grades are gathered. Sampling may communicate as well, so the order of both must not depend on time.
    """
    return ranks.size == 1 and sampled.grades.done()


def _gathered(sampled: _Sampled, max_tokens: int, ranks: Ranks) -> Batch:
    """Wait for the grades of a batch, and return it complete, on every rank."""
    batch = sampled.planned
    groups = graded_groups(
        batch.problems,
        batch.prompts,
        sampled.completions_PG,
        sampled.texts,
        sampled.grades.result(),
        RewardConfig(),
        max_tokens,
    )
    rows = [
        eval_row(
            batch.label,
            rollout.problem,
            prompt=rollout.prompt,
            text=rollout.text,
            grade=rollout.grade,
            length=len(rollout.completion.token_ids),
            finish_reason=rollout.completion.finish_reason,
            logprob_sum=sum(rollout.completion.logprobs),
        )
        for group in groups
        for rollout in group.rollouts_G
    ]
    return Batch(batch.key, batch.label, ranks.gather_all(rows))


def is_evaluation_due(config: EvaluationConfig, step: int, last_step: int) -> bool:
    """Return whether `step` ends with an evaluation: step 0 (before training), every `every` steps, and the last."""
    return config.every > 0 and (step % config.every == 0 or step == last_step)
