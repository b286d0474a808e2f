"""Batches of graded completions: grading in a thread, and of stored completions. Imports no torch: scoring a file needs
no model."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from bandpo_cli.grading.answers import voted_answer
from bandpo_cli.storage.eval_folder import PartKey
from bandpo_cli.storage.tables import EvalRow, encode_extra
from bandpo_cli.tasks.completions import StoredCompletion, StoredProblem
from bandpo_cli.types import Grade, Grader, Problem

_Item = TypeVar("_Item")

SubmitAnswers = Callable[[Sequence[Problem], Sequence[str]], Future[list[Grade]]]
"""Returns the future grades of texts [N], each as an answer to its problem [N]."""


BeginGrading = Callable[[Sequence[Problem], Sequence[str]], Callable[[], list[Grade]]]
"""Returns a function that returns the grades of texts [N], each as an answer to its problem [N]."""


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
    for index, (label, stored_P) in enumerate(sets.items()):
        widest = max(len(stored.completions_G) for stored in stored_P)
        for start, chunk in chunks(stored_P, batch_size // widest):
            if (key := PartKey(index, start)) in done:
                continue
            pairs = [(stored.problem, completion) for stored in chunk for completion in stored.completions_G]
            grades = grade([problem for problem, _ in pairs], [completion.text for _, completion in pairs])
            rows = [
                eval_row(label, problem, str(problem.prompt), completion, completion_grade)
                for (problem, completion), completion_grade in zip(pairs, grades, strict=True)
            ]
            yield Batch(key, label, rows)


def chunks(items: Sequence[_Item], size: int) -> Iterator[tuple[int, Sequence[_Item]]]:
    """Yield `items` in chunks of `size` (at least 1), each with the index of its first item."""
    size = max(1, size)
    for start in range(0, len(items), size):
        yield start, items[start : start + size]


def eval_row(
    label: str, problem: Problem, prompt: str, completion: StoredCompletion, grade: Grade
) -> EvalRow:
    """Return the stored row of a completion; `label` is the name of its evaluation set."""
    return EvalRow(
        task=label,
        problem_id=problem.id,
        prompt=prompt,
        reference=problem.answer,
        grader=problem.grader,
        extra=encode_extra(problem.extra),
        text=completion.text,
        answer=voted_answer(completion.text, problem.grader),
        reward=grade.reward if grade.has_reward else None,
        accuracy=float(grade.correct),
        verdict=grade.verdict,
        length=completion.length,
        finish_reason=completion.finish_reason,
        logprob_sum=completion.logprob_sum,
    )


@contextmanager
def background_grading(begin: BeginGrading, cancel: Callable[[], None]) -> Iterator[SubmitAnswers]:
    """Grade batches in one thread, in the order in which they are submitted; yield the function that submits one.

    If the block ends with an exception, Ctrl-C included, the waiting batches are dropped and the running one is
    cancelled.

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
