"""The Parquet tables of a run: completions of a step, completions of an evaluation, tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, get_args, get_type_hints

from bandpo_cli.errors import UserError
from bandpo_cli.tracking.files import write_whole
from bandpo_cli.types import Group


class SampleRow(TypedDict):
    """One completion, as a row of `samples/step-000010.parquet`."""

    source: str
    """The task or data set that the problem came from."""
    problem_id: str
    prompt: str
    reference: str
    """The reference answer."""
    grader: str
    extra: str
    """What else the grader read of the problem, as JSON: with it the completion can be judged anew."""
    text: str
    reward: float
    accuracy: float
    """1 for a correct answer, 0 for any other."""
    length: int
    """Sampled tokens, the end-of-sequence token included."""
    finish_reason: str
    verdict: str
    logprob_sum: float
    """log π(completion) in nats under the sampling distribution."""


class EvalRow(TypedDict):
    """One completion, as a row of an evaluation's `samples.parquet`."""

    task: str
    """The label of the evaluation set."""
    problem_id: str
    prompt: str
    reference: str
    grader: str
    extra: str
    text: str
    answer: str | None
    """What it votes for in maj@k; null where it has no answer that can be read."""
    accuracy: float
    verdict: str
    length: int | None
    """Sampled tokens; null for completions that came from elsewhere as text."""
    finish_reason: str | None
    logprob_sum: float | None


TOKEN_COLUMNS = ("old_logprob", "ratio", "lower", "upper", "advantage")
"""The columns of `tokens/step-000100.parquet`, one row a token, float32: what the clip map is drawn from."""


def sample_rows(groups: Iterable[Group]) -> list[SampleRow]:
    """Return a row for every rollout of `groups`, in their order."""
    return [
        SampleRow(
            source=rollout.problem.source,
            problem_id=rollout.problem.id,
            prompt=rollout.prompt,
            reference=rollout.problem.answer,
            grader=rollout.problem.grader,
            extra=extra_json(rollout.problem.extra),
            text=rollout.text,
            reward=rollout.grade.reward,
            accuracy=float(rollout.grade.correct),
            length=len(rollout.completion.token_ids),
            finish_reason=rollout.completion.finish_reason,
            verdict=rollout.grade.verdict,
            logprob_sum=sum(rollout.completion.logprobs),
        )
        for group in groups
        for rollout in group.rollouts_G
    ]


def extra_json(extra: Mapping[str, object]) -> str:
    """Write what a grader reads of a problem beside its answer."""
    return json.dumps(dict(extra), ensure_ascii=False)


def write_sample_table(path: Path, rows: Sequence[SampleRow]) -> Path:
    """Write the completions of a step."""
    return _write_rows(path, rows, SampleRow)


def write_eval_table(path: Path, rows: Sequence[EvalRow]) -> Path:
    """Write the completions of an evaluation."""
    return _write_rows(path, rows, EvalRow)


def read_eval_table(path: Path) -> list[EvalRow]:
    """Read what `write_eval_table` wrote. Raises UserError for a file that is damaged or of another kind."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path, schema=_schema(EvalRow)).to_pylist()  # type: ignore[no-any-return]
    except (pa.ArrowException, OSError) as error:
        line = (str(error).splitlines() or [""])[0][:200]
        raise UserError(f"{path}: not readable as an evaluation's completions: {line}") from None


def write_token_table(path: Path, columns: Mapping[str, Any]) -> Path:
    """Write the `TOKEN_COLUMNS` of `columns`: equally long sequences or NumPy arrays, infinities allowed.

    Raises ValueError when a column is missing or unknown, or when lengths differ.
    """
    import pyarrow as pa

    if set(columns) != set(TOKEN_COLUMNS):
        raise ValueError(f"token columns must be {', '.join(TOKEN_COLUMNS)}; got {', '.join(columns)}")
    arrays = [pa.array(columns[name], type=pa.float32()) for name in TOKEN_COLUMNS]
    return _write(path, pa.Table.from_arrays(arrays, names=list(TOKEN_COLUMNS)))


def _schema(row: type) -> Any:
    """Return the fixed schema of a kind of row, so that an empty step's file has the same columns."""
    import pyarrow as pa

    kinds: dict[Any, Any] = {str: pa.string(), float: pa.float64(), int: pa.int32()}
    return pa.schema(
        [
            (name, kinds[next(kind for kind in (get_args(hint) or (hint,)) if kind in kinds)])
            for name, hint in get_type_hints(row).items()
        ]
    )


def _write_rows(path: Path, rows: Sequence[Mapping[str, Any]], row: type) -> Path:
    import pyarrow as pa

    return _write(path, pa.Table.from_pylist([dict(each) for each in rows], schema=_schema(row)))


def _write(path: Path, table: Any) -> Path:
    import pyarrow.parquet as pq

    return write_whole(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))
