"""The Parquet tables of a run: one of completions, one of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

from bandpo_cli.tracking.files import write_whole
from bandpo_cli.types import Group


class SampleRow(TypedDict):
    """One completion, as a row of `samples/step-000010.parquet`."""

    problem_id: str
    prompt: str
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


TOKEN_COLUMNS = ("old_logprob", "ratio", "lower", "upper", "advantage")
"""The columns of `tokens/step-000100.parquet`, one row a token, float32: what the clip map is drawn from."""


def sample_rows(groups: Iterable[Group]) -> list[SampleRow]:
    """Return a row for every rollout of `groups`, in their order."""
    return [
        SampleRow(
            problem_id=rollout.problem.id,
            prompt=rollout.prompt,
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


def write_sample_table(path: Path, rows: Sequence[SampleRow]) -> Path:
    """Write `rows` with a fixed schema, so that an empty step's file has the same columns."""
    import pyarrow as pa

    kinds: dict[type, Any] = {str: pa.string(), float: pa.float64(), int: pa.int32()}
    schema = pa.schema([(name, kinds[kind]) for name, kind in get_type_hints(SampleRow).items()])
    return _write(path, pa.Table.from_pylist([dict(row) for row in rows], schema=schema))


def write_token_table(path: Path, columns: Mapping[str, Any]) -> Path:
    """Write the `TOKEN_COLUMNS` of `columns`: equally long sequences or NumPy arrays, infinities allowed.

    Raises ValueError when a column is missing or unknown, or when lengths differ.
    """
    import pyarrow as pa

    if set(columns) != set(TOKEN_COLUMNS):
        raise ValueError(f"token columns must be {', '.join(TOKEN_COLUMNS)}; got {', '.join(columns)}")
    arrays = [pa.array(columns[name], type=pa.float32()) for name in TOKEN_COLUMNS]
    return _write(path, pa.Table.from_arrays(arrays, names=list(TOKEN_COLUMNS)))


def _write(path: Path, table: Any) -> Path:
    import pyarrow.parquet as pq

    return write_whole(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))
