"""Evaluation of a policy: sample and grade completions batch by batch, for training and for `bandpo eval` alike.

The engine receives all batches, and a thread grades the completions of one while the next ones are sampled. Engine and
tokenizer are called from the thread of the caller alone. Only sampling imports torch: stored completions are graded
without it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from bandpo_cli.grading.answers import voted_answer
from bandpo_cli.processes.ranks import SINGLE, Ranks
from bandpo_cli.processes.watch import Wait
from bandpo_cli.storage.run_folder import PartKey
from bandpo_cli.storage.tables import EvalRow, completion_row
from bandpo_cli.tasks.completions import StoredCompletion, StoredProblem
from bandpo_cli.types import Grade, Grader, Problem, derive_seed

if TYPE_CHECKING:
    from bandpo_cli.sampling.conversations import Conversations
    from bandpo_cli.sampling.prompt_encoding import EncodedPrompt, PromptEncoder
    from bandpo_cli.sampling.sampler import Sampler, SampleRequest, SamplingParams

_Item = TypeVar("_Item")

MAX_UNGRADED_BATCHES = 2
"""Batches that are sampled and not graded yet; before a further one is sampled, the caller waits for a grade. It bounds
the memory, and what an interrupted evaluation loses."""


class Batch(NamedTuple):
    """The graded completions of consecutive problems of the set `label`, with the indices of set and first problem."""

    key: PartKey
    label: str
    rows: list[EvalRow]


def regrade_batches(
    grade: Grader, sets: Mapping[str, Sequence[StoredProblem]], batch_size: int, done: Container[PartKey] = ()
) -> Iterator[Batch]:
    """Grade stored completions again, by label of their set, and yield them in batches; skip those of `done`.

    A batch has about `batch_size` completions; the completions of a problem are never split.
    """
    widest = max(len(stored.completions_G) for stored_P in sets.values() for stored in stored_P)
    for batch, chunk in _parts(sets, batch_size // widest, done):
        pairs = [(stored.problem, completion) for stored in chunk for completion in stored.completions_G]
        grades = grade([problem for problem, _ in pairs], [completion.text for _, completion in pairs])
        rows = [
            eval_row(batch.label, problem, str(problem.prompt), completion, completion_grade)
            for (problem, completion), completion_grade in zip(pairs, grades, strict=True)
        ]
        yield batch._replace(rows=rows)


def _parts(
    sets: Mapping[str, Sequence[_Item]], size: int, done: Container[PartKey]
) -> Iterator[tuple[Batch, Sequence[_Item]]]:
    """Yield batches without rows, and the problems of each, at most `size`; skip those of `done`."""
    for index, (label, items) in enumerate(sets.items()):
        for start, chunk in chunks(items, size):
            if (key := PartKey(index, start)) not in done:
                yield Batch(key, label, []), chunk


def chunks(items: Sequence[_Item], size: int) -> Iterator[tuple[int, Sequence[_Item]]]:
    """Yield `items` in chunks of `size` (at least 1), each with the index of its first item."""
    size = max(1, size)
    for start in range(0, len(items), size):
        yield start, items[start : start + size]


def eval_row(label: str, problem: Problem, prompt: str, stored: StoredCompletion, grade: Grade) -> EvalRow:
    """Return the stored row of a completion; `label` is the name of its evaluation set."""
    numbers = stored.length, stored.finish_reason, stored.logprob_sum
    row = completion_row(problem, prompt, stored.text, grade, *numbers)
    return cast("EvalRow", {"task": label, "answer": voted_answer(stored.text, problem.grader), **row})


@contextmanager
def background_grading(
    begin: Callable[[Sequence[Problem], Sequence[str]], Callable[[], list[Grade]]], cancel: Callable[[], None]
) -> Iterator[Callable[[Sequence[Problem], Sequence[str]], Future[list[Grade]]]]:
    """Grade batches in one thread, in the order in which they are submitted; yield the function that submits one.

    It takes texts [N] and their problems [N]. If the block ends with an exception, Ctrl-C included, the waiting batches
    are dropped and the running one is cancelled.

    Args:
        begin: called in the thread of the caller; the function that it returns is called in the other thread.
        cancel: makes a running call in that thread end soon with an exception.
    """
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grading")
    try:
        yield lambda problems, texts: executor.submit(begin(problems, texts))
    except BaseException:
        cancel()
        executor.shutdown(cancel_futures=True)
        raise
    executor.shutdown()


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

    With several ranks, all of them must iterate together with equal arguments. Each of them samples and grades its part
    of a batch and gets the complete batch.

    Args:
        grade: called in another thread.
        sets: problems by label of the evaluation set.
        batch_size: approximate number of completions per batch; the completions of a problem are never split.
        version: version of the policy's weights that the sampler must run.
        cancel: makes a running call of `grade` end soon; called if the iteration ends early.
        conversations: samples several turns per completion; None for one.

    Raises:
        StaleEngineError: the sampler does not run the weights of `version`.
    """
    from bandpo_cli.sampling.rollouts import decode_completions, problem_per_completion, stream_completions
    from bandpo_cli.sampling.sampler import SampleRequest

    # Batches without rows, with this rank's problems of them and their prompts; there may be none.
    requested: deque[tuple[Batch, Sequence[Problem], Sequence[EncodedPrompt]]] = deque()
    # Batches without rows, with a function from the grade to each row, and the grades.
    sampled: deque[tuple[Batch, list[partial[EvalRow]], Future[list[Grade]]]] = deque()

    def requests() -> Iterator[tuple[Sequence[Problem], SampleRequest]]:
        for batch, chunk in _parts(sets, batch_size // params.samples, done):
            own = ranks.share(len(chunk))
            problems, first = chunk[own], batch.key.start + own.start
            prompts = encoder.encode(problems)
            requested.append((batch, problems, prompts))
            # A sampler gives the prompt after the first the next seed: a seed per problem of the set.
            first_seed = derive_seed(seed, "eval", batch.label) + first
            yield problems, SampleRequest([prompt.token_ids for prompt in prompts], first_seed)

    def next_batch() -> Batch:
        """Wait for the grades of the first sampled batch, and return it complete, on every rank."""
        batch, rows, grades = sampled.popleft()
        own_rows = [row(grade) for row, grade in zip(rows, grades.result(), strict=True)]
        return batch._replace(rows=ranks.gather_all(own_rows))

    with (
        Wait("the next completions of the evaluation", "it may only be slow", is_work=True),
        background_grading(partial(partial, grade), cancel) as submit,
        closing(stream_completions(sampler, requests(), params, version, conversations)) as stream,
    ):
        for completions_PG in stream:
            batch, problems, prompts = requested.popleft()
            answered = problem_per_completion(problems, completions_PG)
            texts = decode_completions(encoder.tokenizer, completions_PG)
            grades = submit(answered, texts)
            shown = [item.text for item, group in zip(prompts, completions_PG, strict=True) for _ in group]
            rows = []
            values = zip(answered, shown, texts, chain.from_iterable(completions_PG), strict=True)
            for problem, prompt, text, item in values:
                stored = StoredCompletion(text, len(item.token_ids), item.finish_reason, sum(item.logprobs))
                rows.append(partial(eval_row, batch.label, problem, prompt, stored))
            sampled.append((batch, rows, grades))
            # Several ranks gather the grades, and sampling may communicate, too: the order must not depend on time.
            while len(sampled) > MAX_UNGRADED_BATCHES or (
                ranks.size == 1 and sampled and sampled[0][-1].done()
            ):
                yield next_batch()
        while sampled:
            yield next_batch()
