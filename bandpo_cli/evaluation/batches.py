"""Graded completions in batches, and the judging of stored ones. No torch here: scoring a file needs no model."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from bandpo_cli.grading.answers import voted_answer
from bandpo_cli.storage.eval_folder import PartKey
from bandpo_cli.storage.tables import EvalRow, encode_extra
from bandpo_cli.tasks.completions import StoredProblem
from bandpo_cli.types import Grade, Grader, Problem

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Batch:
    """The graded completions of some problems of one set; `key` says which."""

    key: PartKey
    label: str
    rows: list[EvalRow]


def regrade_batches(
    grade: Grader,
    sets: Mapping[str, Sequence[StoredProblem]],
    batch_size: int,
    done: Container[PartKey] = (),
) -> Iterator[Batch]:
    """Judge stored completions anew, about `batch_size` at a time, a problem's never split."""
    for index, (label, stored_P) in enumerate(sets.items()):
        widest = max(len(stored.completions_G) for stored in stored_P)
        for start, part in chunks(stored_P, batch_size // widest):
            key = PartKey(index, start)
            if key in done:
                continue
            pairs = [(stored.problem, each) for stored in part for each in stored.completions_G]
            grades = grade([problem for problem, _ in pairs], [each.text for _, each in pairs])
            rows = [
                eval_row(
                    label,
                    problem,
                    str(problem.prompt),
                    each.text,
                    verdict,
                    each.length,
                    each.finish_reason,
                    each.logprob_sum,
                )
                for (problem, each), verdict in zip(pairs, grades, strict=True)
            ]
            yield Batch(key, label, rows)


def chunks(items: Sequence[_Item], size: int) -> Iterator[tuple[int, Sequence[_Item]]]:
    """Yield `items` in parts of `size`, 1 at least, each with the index of its first."""
    size = max(1, size)
    for start in range(0, len(items), size):
        yield start, items[start : start + size]


def eval_row(
    label: str,
    problem: Problem,
    prompt: str,
    text: str,
    grade: Grade,
    length: int | None,
    finish_reason: str | None,
    logprob_sum: float | None,
) -> EvalRow:
    """Return what is stored of a completion."""
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
