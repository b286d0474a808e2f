"""Batches of graded completions: grading in a thread, and of stored completions. Imports no torch: scoring a file needs
no model."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from bandpo_cli.grading.answers import voted_answer
from bandpo_cli.storage.eval_folder import PartKey
from bandpo_cli.storage.tables import EvalRow, encode_extra
from bandpo_cli.tasks.completions import StoredProblem
from bandpo_cli.types import Grade, Grader, Problem

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Batch:
    """The graded completions of consecutive problems of one evaluation set.

    Attributes:
        key: index of the set and of the batch's first problem in it.
        label: name of the set.
    """

    key: PartKey
    label: str
    rows: list[EvalRow]


def regrade_batches(
    grade: Grader,
    sets: Mapping[str, Sequence[StoredProblem]],
    batch_size: int,
    done: Container[PartKey] = (),
) -> Iterator[Batch]:
    """Grade stored completions again and yield them in batches.

    Args:
        grade: grades texts [N], each as an answer to its problem [N].
        sets: stored problems with their completions, by label of the set.
        batch_size: approximate number of completions per batch; the completions of a problem are never split.
        done: keys of batches to skip.
    """
    for index, (label, stored_P) in enumerate(sets.items()):
        widest = max(len(stored.completions_G) for stored in stored_P)
        for start, chunk in chunks(stored_P, batch_size // widest):
            key = PartKey(index, start)
            if key in done:
                continue
            pairs = [(stored.problem, completion) for stored in chunk for completion in stored.completions_G]
            grades = grade([problem for problem, _ in pairs], [completion.text for _, completion in pairs])
            rows = [
                eval_row(
                    label,
                    problem,
                    prompt=str(problem.prompt),
                    text=completion.text,
                    grade=completion_grade,
                    length=completion.length,
                    finish_reason=completion.finish_reason,
                    logprob_sum=completion.logprob_sum,
                )
                for (problem, completion), completion_grade in zip(pairs, grades, strict=True)
            ]
            yield Batch(key, label, rows)


def chunks(items: Sequence[_Item], size: int) -> Iterator[tuple[int, Sequence[_Item]]]:
    """Yield `items` in chunks of `size` (at least 1), each with the index of its first item."""
    size = max(1, size)
    for start in range(0, len(items), size):
        yield start, items[start : start + size]


def eval_row(
    label: str,
    problem: Problem,
    *,
    prompt: str,
    text: str,
    grade: Grade,
    length: int | None,
    finish_reason: str | None,
    logprob_sum: float | None,
) -> EvalRow:
    """Return the stored row of a completion.

    Args:
        label: name of the evaluation set.
        prompt: the prompt as text.
        length: number of sampled tokens; None if unknown.
        logprob_sum: log-probability of the completion in nats; None if unknown.
    """
    return EvalRow(
        task=label,
        problem_id=problem.id,
        prompt=prompt,
        reference=problem.answer,
        grader=problem.grader,
        extra=encode_extra(problem.extra),
        text=text,
        answer=voted_answer(text, problem.grader),
        accuracy=float(grade.correct),
        verdict=grade.verdict,
        length=length,
        finish_reason=finish_reason,
        logprob_sum=logprob_sum,
    )


class BackgroundGrading:
    """One thread that grades batches in the order in which they are submitted; a context manager.

    Where its body ends with an exception, Ctrl-C included, the batches that wait are dropped and the one in work is
    cancelled.
    """

    def __init__(self, grade: Grader, cancel: Callable[[], None]) -> None:
        """Set the functions; the thread starts with the first batch.

        Args:
            grade: grades texts [N], each as an answer to its problem [N]; called in the thread.
            cancel: makes a running call of `grade` end soon with an exception.
        """
        self._grade, self._cancel = grade, cancel
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grading")

    def submit(self, problems: Sequence[Problem], texts: Sequence[str]) -> Future[list[Grade]]:
        """Return the future grades of the texts; its `result` raises what grading raised."""
        return self._executor.submit(self._grade, problems, texts)

    def __enter__(self) -> BackgroundGrading:
        """Return the object."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the thread, after cancelling its work if the body failed."""
        if error is not None:
            self._cancel()
        self._executor.shutdown(wait=True, cancel_futures=error is not None)
