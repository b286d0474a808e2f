"""Batches that could not be learnt from, kept for inspection: one Parquet file each, which runs no code when read."""

# MERGED: The Parquet tables of a run: completions of a step, completions of an evaluation, tokens.
# MERGED: The tokens that a run recorded for its clip maps, read back.
from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, get_args, get_type_hints

import numpy as np

from bandpo_cli.errors import UserError
from bandpo_cli.paths import check_regular_file
from bandpo_cli.storage.files import step_name, step_of, write_atomically
from bandpo_cli.types import Group

MAX_BAD_BATCHES = 3
"""So many batches of skipped updates are kept: the first tell why, and a run may skip for days."""

BAD_BATCH_COLUMNS = {
    "old_logprobs": "what ratios are taken to: the trainer's or the sampler's",
    "new_logprobs": "under the weights that the update would have moved",
    "trainer_logprobs": "π_old as the trainer computes it",
    "sampler_logprobs": "π_old as the sampler reported it",
    "ref_logprobs": "under the reference model",
    "ratios": "π/π_old, the log ratio clamped to ±20",
    "lower": "ratio bound",
    "upper": "ratio bound",
    "importance": "min(π_old/π_sampler, cap), where it weights the loss",
    "advantages": "of the completion",
}
"""Columns with a list of float32 a completion, one number a token; null where they were not computed."""


class BadCompletion(TypedDict):
    """One completion of the batch, as a row of `bad_batches/step-000012-update-3.parquet`, before its `NUMBERS`."""

    error: str
    """What was not finite; the same in each row."""
    problem_id: str
    prompt: str
    text: str
    reference: str
    """The reference answer."""
    reward: float
    verdict: str
    prompt_ids: list[int]
    token_ids: list[int]


def write_bad_batch(
    run: Path,
    step: int,
    update: int,
    rows: Sequence[BadCompletion],
    numbers: Mapping[str, Sequence[list[float] | None]],
) -> Path:
    """Write the batch of one update to the run's `bad_batches/`, whole or not at all; return the file.

    Args:
        numbers: each of `NUMBERS`, a list for each of `rows`; NaN and infinities stay what they are.

    Raises:
        OSError: the disk does not take it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([dict(row) for row in rows], schema=_schema())
    for name in BAD_BATCH_COLUMNS:
        table = table.append_column(name, pa.array(numbers[name], type=pa.list_(pa.float32())))
    return write_atomically(
        _folder(run) / f"{step_name(step)}-update-{update}.parquet",
        lambda temporary: pq.write_table(table, temporary, compression="zstd"),
    )


def count_bad_batches(run: Path) -> int:
    """Return how many bad batches the run has kept."""
    return len(list(_folder(run).glob("step-*.parquet")))


def _folder(run: Path) -> Path:
    return run / "bad_batches"


def _schema() -> Any:
    import pyarrow as pa

    kinds: dict[Any, Any] = {str: pa.string(), float: pa.float64(), list[int]: pa.list_(pa.int32())}
    return pa.schema([(name, kinds[hint]) for name, hint in get_type_hints(BadCompletion).items()])


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
            extra=encode_extra(rollout.problem.extra),
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


def encode_extra(extra: Mapping[str, object]) -> str:
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
        return pq.read_table(path, schema=_tables_schema(EvalRow)).to_pylist()  # type: ignore[no-any-return]
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


def _tables_schema(row: type) -> Any:
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

    return _write(path, pa.Table.from_pylist([dict(each) for each in rows], schema=_tables_schema(row)))


def _write(path: Path, table: Any) -> Path:
    import pyarrow.parquet as pq

    return write_atomically(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))


def read_token_tables(folder: Path) -> dict[str, np.ndarray]:
    """Return the `TOKEN_COLUMNS` of every recorded step of the run in `folder`, one after the other, float64.

    Raises:
        UserError: there are none, or a file is damaged.
    """
    import pyarrow.parquet as pq

    paths = [path for path in sorted((folder / "tokens").glob("step-*.parquet")) if step_of(path) is not None]
    if not paths:
        raise UserError(
            f"{folder}: no recorded tokens there (tokens/step-*.parquet); evaluated steps have them"
        )
    columns: dict[str, list[np.ndarray]] = {name: [] for name in TOKEN_COLUMNS}
    for path in paths:
        check_regular_file(path, str(path))
        try:
            table = pq.read_table(path, columns=list(TOKEN_COLUMNS))
            for name in TOKEN_COLUMNS:
                columns[name].append(table[name].to_numpy().astype(np.float64))
        except Exception as error:  # noqa: BLE001 - of a damaged file pyarrow raises errors of any kind
            line = (str(error).splitlines() or [""])[0][:200]
            raise UserError(f"{path}: not readable as a table of tokens: {line}") from None
    return {name: np.concatenate(parts) for name, parts in columns.items()}
