"""Evaluation of a policy: sample and grade completions batch by batch, for training and for `bandpo eval` alike.

The engine receives all batches, and a thread grades the completions of one while the next ones are sampled. Engine and
tokenizer are called from the thread of the caller alone.

With several ranks, each of them samples and grades its share of the problems of every batch. The completions of a
problem depend neither on the number of ranks nor on the size of the batches.
"""

from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial

from bandpo_cli.config.run import EvaluationConfig
from bandpo_cli.evaluation.batches import Batch, background_grading, chunks, eval_row
from bandpo_cli.processes.ranks import SINGLE, Ranks
from bandpo_cli.processes.watch import Wait
from bandpo_cli.sampling.prompt_encoding import EncodedPrompt, PromptEncoder
from bandpo_cli.sampling.rollouts import (
    Conversations,
    decode_completions,
    problem_per_completion,
    stream_completions,
    with_turns,
)
from bandpo_cli.sampling.sampler import Sampler, SampleRequest, SamplingParams
from bandpo_cli.seeds import derive_seed
from bandpo_cli.storage.eval_folder import PartKey
from bandpo_cli.tasks.completions import StoredCompletion
from bandpo_cli.types import Completion, Grade, Grader, Problem

MAX_UNGRADED_BATCHES = 2
"""Batches that are sampled and not graded yet; before a further one is sampled, the caller waits for a grade. It bounds
the memory, and what an interrupted evaluation loses."""

_Share = tuple[Batch, Sequence[Problem], Sequence[EncodedPrompt]]
"""A batch without rows, and this rank's problems of it with their prompts; there may be none."""


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
    conversations: Conversations | None = None,
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
        conversations: samples several turns per completion; None for one.

    Raises:
        StaleEngineError: the sampler does not run the weights of `version`.
    """
    requested: deque[_Share] = deque()
    sampled: deque[tuple[_Share, list[list[Completion]], list[str], Future[list[Grade]]]] = deque()

    def requests() -> Iterator[tuple[Sequence[Problem], SampleRequest]]:
        for index, (label, problems_P) in enumerate(sets.items()):
            set_seed = derive_seed(seed, "eval", label)
            for start, chunk in chunks(problems_P, batch_size // params.samples):
                if (key := PartKey(index, start)) not in done:
                    problems, first = ranks.share(chunk), start + ranks.share_start(len(chunk))
                    prompts = encoder.encode(problems)
                    requested.append((Batch(key, label, []), problems, prompts))
                    # A sampler gives the prompt after the first the next seed: a seed per problem of the set.
                    yield problems, SampleRequest([prompt.token_ids for prompt in prompts], set_seed + first)

    def next_batch() -> Batch:
        """Wait for the grades of the first sampled batch, and return it complete, on every rank."""
        (batch, problems, prompts), completions_PG, texts, grades = sampled.popleft()
        graded = zip(texts, grades.result(), strict=True)
        rows = []
        for problem, prompt, group in zip(problems, prompts, completions_PG, strict=True):
            for item, (text, grade) in zip(group, graded, strict=False):
                stored = StoredCompletion(text, len(item.token_ids), item.finish_reason, sum(item.logprobs))
                rows.append(eval_row(batch.label, with_turns(problem, item), prompt.text, stored, grade))
        return batch._replace(rows=ranks.gather_all(rows))

    with (
        Wait("the next completions of the evaluation", "it may only be slow", is_work=True),
        background_grading(partial(partial, grade), cancel) as submit,
        closing(stream_completions(sampler, requests(), params, version, conversations)) as stream,
    ):
        for completions_PG in stream:
            share = requested.popleft()
            texts = decode_completions(encoder.tokenizer, completions_PG)
            grades = submit(problem_per_completion(share[1], completions_PG), texts)
            sampled.append((share, completions_PG, texts, grades))
            # Several ranks gather the grades, and sampling may communicate, too: the order must not depend on time.
            while len(sampled) > MAX_UNGRADED_BATCHES or (
                ranks.size == 1 and sampled and sampled[0][-1].done()
            ):
                yield next_batch()
        while sampled:
            yield next_batch()


def is_evaluation_due(config: EvaluationConfig, step: int, last_step: int) -> bool:
    """Return whether `step` ends with an evaluation: step 0 (before training), every `every` steps, and the last."""
    return config.every > 0 and (step % config.every == 0 or step == last_step)
