"""Batches that could not be learnt from, kept for inspection: one Parquet file each, which runs no code when read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

from bandpo_cli.tracking.files import write_whole
from bandpo_cli.tracking.run_folder import step_name

KEPT_BATCHES = 3
"""So many batches of skipped updates are kept: the first tell why, and a run may skip for days."""

NUMBERS = {
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
    for name in NUMBERS:
        table = table.append_column(name, pa.array(numbers[name], type=pa.list_(pa.float32())))
    return write_whole(
        _folder(run) / f"{step_name(step)}-update-{update}.parquet",
        lambda temporary: pq.write_table(table, temporary, compression="zstd"),
    )


def kept_batches(run: Path) -> int:
    """Return how many bad batches the run has kept."""
    return len(list(_folder(run).glob("step-*.parquet")))


def _folder(run: Path) -> Path:
    return run / "bad_batches"


def _schema() -> Any:
    import pyarrow as pa

    kinds: dict[Any, Any] = {str: pa.string(), float: pa.float64(), list[int]: pa.list_(pa.int32())}
    return pa.schema([(name, kinds[hint]) for name, hint in get_type_hints(BadCompletion).items()])
