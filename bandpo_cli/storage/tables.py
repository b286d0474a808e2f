"""Parquet tables of a run: completions of a step or an evaluation, tokens, and batches of skipped updates.

Parquet files contain data only; reading one runs no code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, get_args, get_type_hints

import numpy as np

from bandpo_cli.errors import UserError, first_line
from bandpo_cli.paths import check_regular_file
from bandpo_cli.storage.files import step_name, step_of, write_atomically
from bandpo_cli.types import Group

TOKEN_COLUMNS = ("old_logprob", "ratio", "lower", "upper", "advantage", "gradient_weight")
"""The columns of `tokens/step-000100.parquet`, one row per token, float32: the data of the clip map. Files of earlier
versions lack `gradient_weight`; it is read as NaN."""

MAX_BAD_BATCHES = 3
"""Largest number of batches of skipped updates to store: the first ones show the cause, and a run may skip for days."""

BAD_BATCHES = "bad_batches"
"""Subfolder of the run folder with the batches of skipped updates."""

BAD_BATCH_COLUMNS = {
    "old_logprobs": "log-probabilities that ratios are computed against: the trainer's or the sampler's",
    "new_logprobs": "under the weights that the update would have changed",
    "trainer_logprobs": "π_old as the trainer computes it",
    "sampler_logprobs": "π_old as the sampler reported it",
    "ref_logprobs": "under the reference model",
    "ratios": "π/π_old, the log ratio clamped to ±20",
    "lower": "ratio bound",
    "upper": "ratio bound",
    "importance": "π_old/π_sampler as truncated or masked by objective.importance, where it weights the loss",
    "advantages": "of the completion",
}
"""Columns with a list of float32 per completion, one number per token; null where they were not computed."""


_ROWS_PER_BLOCK = 4096
"""Completions that are converted at once; a block must stay below 2 GiB, half a million characters per completion."""


class SampleRow(TypedDict):
    """One completion, as a row of `samples/step-000010.parquet`."""

    source: str
    """The task or data set of the problem."""
    problem_id: str
    prompt: str
    reference: str
    """The reference answer."""
    grader: str
    extra: str
    """The other inputs of the grader, as JSON: with them the completion can be graded again."""
    text: str
    reward: float | None
    """Null where grading failed, and where every reward function reports that it does not apply."""
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
    """Its vote in maj@k; null where it has no readable answer."""
    accuracy: float
    verdict: str
    length: int | None
    """Sampled tokens; null for completions that were given as text."""
    finish_reason: str | None
    logprob_sum: float | None


class GradedCompletion(TypedDict):
    """What `SampleRow` and `EvalRow` have in common: a completion with its verdict, for people who read it."""

    label: str
    """The task, the data set or the evaluation set."""
    problem_id: str
    prompt: str
    reference: str
    text: str
    accuracy: float
    verdict: str
    reward: float | None
    """None in an evaluation, which has no rewards, where grading failed, and where no reward function applies."""
    length: int | None
    finish_reason: str | None


class BadCompletion(TypedDict):
    """One completion of a row of `bad_batches/step-000012-update-3.parquet`, without the `BAD_BATCH_COLUMNS`."""

    error: str
    """The value that was not finite; the same in each row."""
    problem_id: str
    prompt: str
    text: str
    reference: str
    """The reference answer."""
    reward: float | None
    verdict: str
    prompt_ids: list[int]
    token_ids: list[int]


def sample_rows(groups: Iterable[Group]) -> list[SampleRow]:
    """Return a row for each rollout of `groups`, in their order."""
    return [
        SampleRow(
            source=rollout.problem.source,
            problem_id=rollout.problem.id,
            prompt=rollout.prompt,
            reference=rollout.problem.answer,
            grader=rollout.problem.grader,
            extra=encode_extra(rollout.problem.extra),
            text=rollout.text,
            reward=rollout.grade.reward if rollout.grade.has_reward else None,
            accuracy=float(rollout.grade.correct),
            length=len(rollout.completion.token_ids),
            finish_reason=rollout.completion.finish_reason,
            verdict=rollout.grade.verdict,
            logprob_sum=sum(rollout.completion.logprobs),
        )
        for group in groups
        for rollout in group.rollouts_G
    ]


def reward_columns(groups: Iterable[Group]) -> dict[str, list[float | None]]:
    """Return the columns `reward/<name>`: the value of each of `task.rewards` before its weight, per rollout.

    A value is None where the grader failed, timed out, or does not apply.
    """
    components = [rollout.grade.components for group in groups for rollout in group.rollouts_G]
    names = components[0] if components else ()
    return {f"reward/{name}": [values[name] for values in components] for name in names}


def encode_extra(extra: Mapping[str, object]) -> str:
    """Return as JSON what a grader reads of a problem besides its answer."""
    return json.dumps(dict(extra), ensure_ascii=False)


def write_sample_table(
    path: Path, rows: Sequence[SampleRow], rewards: Mapping[str, Sequence[float | None]] | None = None
) -> Path:
    """Write the completions of a step; `rewards` are the further columns of `reward_columns`."""
    import pyarrow as pa

    table = pa.Table.from_pylist([dict(row) for row in rows], schema=_schema(SampleRow))
    for name, values in (rewards or {}).items():
        table = table.append_column(name, pa.array(values, type=pa.float64()))
    return _write(path, table)


def write_eval_table(path: Path, rows: Sequence[EvalRow]) -> Path:
    """Write the completions of an evaluation."""
    return _write(path, eval_table(rows))


def eval_table(rows: Sequence[EvalRow]) -> Any:
    """Return the completions of an evaluation as a pyarrow.Table, the same as from `Table.from_pylist`.

    pyarrow imports pandas (0.3 s) to convert Python objects, and needs only itself to read JSON.

    Raises:
        ValueError: a value does not have the type of its column, or a text is not valid Unicode.
    """
    import pyarrow as pa
    from pyarrow import json as arrow_json

    schema = _schema(EvalRow)
    blocks = []
    for start in range(0, len(rows), _ROWS_PER_BLOCK):
        lines = [json.dumps(row, ensure_ascii=False) for row in rows[start : start + _ROWS_PER_BLOCK]]
        data = "\n".join(lines).encode()
        parse = arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error")
        read = arrow_json.ReadOptions(block_size=len(data) + 1, use_threads=False)
        blocks.append(arrow_json.read_json(pa.BufferReader(data), read, parse))
    return pa.concat_tables(blocks) if rows else schema.empty_table()


def read_eval_table(path: Path) -> list[EvalRow]:
    """Return the rows of a file of `write_eval_table`. Raises UserError for a damaged file or other columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path, schema=_schema(EvalRow)).to_pylist()  # type: ignore[no-any-return]
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not readable as an evaluation's completions: {first_line(error)}") from None


def read_graded_completions(path: Path) -> list[GradedCompletion]:
    """Return the completions of a file of `write_sample_table` or `write_eval_table`, in their order.

    Raises:
        UserError: the file is missing, not a regular file, or damaged.
    """
    import pyarrow.parquet as pq

    check_regular_file(path, str(path))
    try:
        rows = pq.read_table(path).to_pylist()
        return [
            GradedCompletion(
                label=row["source"] if "source" in row else row["task"],
                problem_id=row["problem_id"],
                prompt=row["prompt"],
                reference=row["reference"],
                text=row["text"],
                accuracy=row["accuracy"],
                verdict=row["verdict"],
                reward=row.get("reward"),
                length=row["length"],
                finish_reason=row["finish_reason"],
            )
            for row in rows
        ]
    except Exception as error:  # noqa: BLE001 - pyarrow raises errors of any type for a damaged file
        raise UserError(f"{path}: not readable as a table of completions: {first_line(error)}") from None


def write_token_table(path: Path, columns: Mapping[str, Any]) -> Path:
    """Write the `TOKEN_COLUMNS` of `columns`: equally long sequences or NumPy arrays; infinities are allowed.

    Raises ValueError when a column is missing or unknown, or when lengths differ.
    """
    import pyarrow as pa

    if set(columns) != set(TOKEN_COLUMNS):
        raise ValueError(f"token columns must be {', '.join(TOKEN_COLUMNS)}; got {', '.join(columns)}")
    arrays = [pa.array(columns[name], type=pa.float32()) for name in TOKEN_COLUMNS]
    return _write(path, pa.Table.from_arrays(arrays, names=list(TOKEN_COLUMNS)))


def read_token_table(path: Path) -> dict[str, np.ndarray]:
    """Return the `TOKEN_COLUMNS` of a file of `write_token_table`, float64 [T].

    Raises:
        UserError: the file is missing, not a regular file, or damaged.
    """
    import pyarrow.parquet as pq

    check_regular_file(path, str(path))
    try:
        table = pq.read_table(path)
        optional = {"gradient_weight": np.full(len(table), np.nan)}
        present = [name for name in TOKEN_COLUMNS if name in table.column_names or name not in optional]
        return optional | {name: table[name].to_numpy().astype(np.float64) for name in present}
    except Exception as error:  # noqa: BLE001 - pyarrow raises errors of any type for a damaged file
        raise UserError(f"{path}: not readable as a table of tokens: {first_line(error)}") from None


def read_token_tables(folder: Path) -> dict[str, np.ndarray]:
    """Return the `TOKEN_COLUMNS` of all recorded steps of the run in `folder`, concatenated, float64 [T].

    Raises:
        UserError: the run has no token tables, or a file is damaged.
    """
    paths = [path for path in sorted((folder / "tokens").glob("step-*.parquet")) if step_of(path) is not None]
    if not paths:
        raise UserError(
            f"{folder}: no recorded tokens there (tokens/step-*.parquet); evaluated steps have them"
        )
    tables = [read_token_table(path) for path in paths]
    return {name: np.concatenate([table[name] for table in tables]) for name in TOKEN_COLUMNS}


def write_bad_batch(
    run: Path,
    step: int,
    update: int,
    rows: Sequence[BadCompletion],
    numbers: Mapping[str, Sequence[list[float] | None]],
) -> Path:
    """Write the batch of a skipped update to the run's `bad_batches/`, atomically; return the file.

    Args:
        numbers: for each of `BAD_BATCH_COLUMNS` a list with one entry per row of `rows`; NaN and infinities are
            stored unchanged.

    Raises:
        OSError: the disk is full or does not accept the file.
    """
    import pyarrow as pa

    table = pa.Table.from_pylist([dict(row) for row in rows], schema=_schema(BadCompletion))
    for name in BAD_BATCH_COLUMNS:
        table = table.append_column(name, pa.array(numbers[name], type=pa.list_(pa.float32())))
    return _write(run / BAD_BATCHES / f"{step_name(step)}-update-{update}.parquet", table)


def count_bad_batches(run: Path) -> int:
    """Return the number of bad batches that the run has stored."""
    return len(list((run / BAD_BATCHES).glob("step-*.parquet")))


def _schema(row: type) -> Any:
    """Return the Parquet schema of a row type. It is fixed, so that the file of an empty step has the same columns."""
    import pyarrow as pa

    types: dict[Any, Any] = {
        str: pa.string(),
        float: pa.float64(),
        int: pa.int32(),
        list[int]: pa.list_(pa.int32()),
    }

    def column_type(hint: Any) -> Any:
        return types[hint if hint in types else next(kind for kind in get_args(hint) if kind in types)]

    return pa.schema([(name, column_type(hint)) for name, hint in get_type_hints(row).items()])


def _write(path: Path, table: Any) -> Path:
    import pyarrow.parquet as pq

    return write_atomically(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))
