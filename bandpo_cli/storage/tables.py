"""Parquet tables of a run: completions of a step or an evaluation, values per token, and batches of skipped updates.

Parquet files contain data only; reading one runs no code.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from bandpo_cli.errors import UserError, first_line
from bandpo_cli.paths import check_regular_file
from bandpo_cli.storage.files import step_name, step_of, write_atomically
from bandpo_cli.types import MESSAGES, Grade, Group, Problem, Rollout

TOKEN_COLUMNS = ("old_logprob", "ratio", "lower", "upper", "advantage", "gradient_weight")
"""The columns of `tokens/step-000100.parquet`, one row per token, float32: the data of the clip map."""

BAD_BATCHES = "bad_batches"  # the subfolder of the run folder with the batches of skipped updates
MAX_BAD_BATCHES = 3  # that are stored: the first ones show the cause, and a run may skip updates for days

# Completions that are converted at once; a block must stay below 2 GiB, half a million characters per completion.
_ROWS_PER_BLOCK = 4096


class EvalRow(TypedDict):
    """One completion, as a row of an evaluation's `samples.parquet`."""

    task: str
    """The label of the evaluation set."""
    problem_id: str
    question: str
    """The question or the last message of the user, without the templates of the task and of the chat."""
    prompt: str
    reference: str
    grader: str
    extra: str
    text: str
    answer: str | None
    """Its vote in maj@k; null where it has no readable answer."""
    reward: float | None
    """The sum of weight times value with `task.rewards`; null where grading failed or no reward function applies."""
    accuracy: float
    verdict: str
    length: int | None
    """Sampled tokens; null for completions that were given as text."""
    finish_reason: str | None
    logprob_sum: float | None


_SAMPLE_COLUMNS = (
    "source", "problem_id", "question", "prompt", "reference", "grader", "extra", "text", "reward", "accuracy",
    "length", "finish_reason", "verdict", "logprob_sum",
)  # fmt: skip
_NUMBERS = {"reward": "float64", "accuracy": "float64", "length": "int32", "logprob_sum": "float64"}
"""The types of the columns that are not text."""

COMPLETION = (
    "label", "problem_id", "question", "prompt", "reference", "text", "accuracy", "verdict", "reward", "length",
    "finish_reason",
)  # fmt: skip
"""What the tables of steps and of evaluations have in common; the label is the task, the data or the evaluation set."""


def completion_row(
    problem: Problem, prompt: str, text: str, grade: Grade, length: int | None, finish_reason: str | None,
    logprob_sum: float | None,
) -> dict[str, Any]:  # fmt: skip
    """Return the columns that tables of steps and of evaluations share, described at `EvalRow`."""
    return {
        "problem_id": problem.id,
        "question": problem.label,
        "prompt": prompt,
        "reference": problem.answer,
        "grader": problem.grader,
        "extra": json.dumps(dict(problem.extra), ensure_ascii=False),
        "text": text,
        "reward": grade.reward if grade.has_reward else None,
        "accuracy": float(grade.correct),
        "length": length,
        "finish_reason": finish_reason,
        "verdict": grade.verdict,
        "logprob_sum": logprob_sum,
    }


def _rollout_row(rollout: Rollout) -> dict[str, Any]:
    """Return the row of a rollout in `write_sample_table`."""
    completion, grade = rollout.completion, rollout.grade
    numbers = len(completion.token_ids), completion.finish_reason, sum(completion.logprobs)
    row = completion_row(rollout.problem, rollout.prompt, rollout.text, grade, *numbers)
    return {
        "source": rollout.problem.source, **row,
        **{f"reward/{name}": value for name, value in grade.components.items()},
    }  # fmt: skip


def write_sample_table(path: Path, groups: Sequence[Group]) -> Path:
    """Write a row per rollout of `groups`, in their order.

    `source` is the task or data set of the problem, and `reference` the reference answer. `extra` has the other inputs
    of the grader, as JSON: with them the completion can be graded again. `question` has no template, unlike `prompt`.
    `reward` is null where grading failed, and where every reward function reports that it does not apply. `accuracy` is
    1 for a correct answer, 0 for any other. `length` counts the sampled tokens, the end-of-sequence token included;
    `logprob_sum` is log π(completion) in nats under the sampling distribution.

    The columns `reward/<name>` have the value of each of `task.rewards` before its weight; null where the grader
    failed, timed out, or does not apply.
    """
    import pyarrow as pa

    rows = [_rollout_row(rollout) for group in groups for rollout in group.rollouts_G]
    components = [name for name in (rows[0] if rows else ()) if name.startswith("reward/")]
    return _write(path, pa.Table.from_pylist(rows, _schema([*_SAMPLE_COLUMNS, *components])))


def write_eval_table(path: Path, rows: Sequence[EvalRow]) -> Path:
    """Write the completions of an evaluation."""
    return _write(path, eval_table(rows))


def eval_table(rows: Sequence[EvalRow]) -> Any:
    """Return the completions of an evaluation as a pyarrow.Table, the same as from `Table.from_pylist`.

    pyarrow imports pandas (0.3 s) to convert Python objects, and needs only itself to read JSON. Raises ValueError if a
    value does not have the type of its column, or a text is not valid Unicode.
    """
    import pyarrow as pa
    from pyarrow import json as arrow_json

    schema = _schema(EvalRow.__annotations__)
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
    with _reading(path, "completions of an evaluation", _schema(EvalRow.__annotations__)) as table:
        return table.to_pylist()  # type: ignore[no-any-return]


def read_table(path: Path) -> Any:
    """Return the pyarrow.Table in a file of completions. Raises UserError for a missing or damaged file."""
    with _reading(path, "completions") as table:
        return table


def read_graded_completions(path: Path) -> list[dict[str, Any]]:
    """Return the `COMPLETION` columns of a file of `write_sample_table` or `write_eval_table`, in their order.

    The text of a conversation has all of its turns. Raises UserError for a missing or damaged file.
    """
    with _reading(path, "completions") as table:
        rows = table.to_pylist()
        for row in rows:
            row["label"] = row["source"] if "source" in row else row["task"]
            extra = json.loads(row.get("extra") or "{}")
            if isinstance(extra, dict) and isinstance(messages := extra.get(MESSAGES), list):
                row["text"] = "\n".join(map(_turn, messages))
        return [{name: row[name] for name in COMPLETION} for row in rows]


def _turn(message: Mapping[str, Any]) -> str:
    """Return a message of a conversation as text: its author, its content and its calls of tools."""
    calls = [json.dumps(item.get("function"), ensure_ascii=False) for item in message.get("tool_calls", ())]
    content = "\n".join(filter(None, [message.get("content"), *calls]))
    return f"[{message.get('name') or message.get('role')}] {content}"


def write_token_table(path: Path, columns: Mapping[str, Any]) -> Path:
    """Write the `TOKEN_COLUMNS` of `columns`: equally long sequences or NumPy arrays; infinities are allowed."""
    import pyarrow as pa

    return _write(path, pa.table({name: pa.array(columns[name], pa.float32()) for name in TOKEN_COLUMNS}))


def read_token_table(path: Path) -> dict[str, np.ndarray]:
    """Return the `TOKEN_COLUMNS` of a file of `write_token_table`, float64 [T]. Raises UserError for a damaged file."""
    with _reading(path, "tokens") as table:
        return {name: table[name].to_numpy().astype(np.float64) for name in TOKEN_COLUMNS}


class TokenValues(NamedTuple):
    """Values per token of the S completions of a step, N tokens, flat and in the order of its sample table.

    Every token has the values of its own update. NaN marks a value that is not known or does not exist: the ratio of a
    token that was not trained on, the bounds of a method without an interval, the importance weight without a
    correction. Log-probs and entropies are in nats.
    """

    lengths: NDArray[np.int64]
    """[S], tokens per completion."""
    advantage: NDArray[np.float32]
    """[S]; 0 for a completion without a loss, NaN for one that the step did not train on."""
    texts: Sequence[str]
    """The text of each token of the vocabulary that occurs."""
    text_index: NDArray[np.int32]
    """[N], index of the token's text in `texts`."""
    old_logprob: NDArray[np.float32]
    """[N], log π_old(token), by the trainer where it measured it, else by the sampler."""
    ratio: NDArray[np.float32]
    """[N], π/π_old."""
    entropy: NDArray[np.float16]
    """[N], entropy of π_old at T=1."""
    lower: NDArray[np.float16]
    upper: NDArray[np.float16]
    """[N], the interval of ratios of the method; `upper` may be infinite."""
    importance: NDArray[np.float16]
    """[N], the weight of the token's loss by `objective.importance`."""
    clipped: NDArray[np.uint8]
    """[N], 1 for a token without gradient whose advantage is positive (the upper bound clips it), 2 for one whose
    advantage is negative (the lower bound), 0 for all other tokens."""


_HALF = dict.fromkeys(("entropy", "lower", "upper", "importance"), "float16")
_PER_TOKEN = {"old_logprob": "float32", "ratio": "float32", **_HALF, "clipped": "uint8"}
"""The attributes of `TokenValues` that are columns with a list of numbers per completion, and their types."""


def write_token_values(path: Path, values: TokenValues) -> Path:
    """Write a row per completion with `advantage`, the list `token` of texts, and a list of numbers per other value.

    A token takes at most 20 bytes: 17 for its numbers, and up to 3 for its number in the dictionary of texts.
    """
    import pyarrow as pa

    offsets = pa.array(np.concatenate([[0], np.cumsum(values.lengths)]), type=pa.int32())
    tokens = pa.DictionaryArray.from_arrays(values.text_index, pa.array(values.texts, type=pa.string()))
    lists = {"token": tokens, **{name: pa.array(getattr(values, name)) for name in _PER_TOKEN}}
    columns = {name: pa.ListArray.from_arrays(offsets, array) for name, array in lists.items()}
    floats = {f"{name}.list.element" for name in _PER_TOKEN if name not in ("importance", "clipped")}
    # The bytes of floats compress by a third if they are split; a dictionary of floats costs time and saves nothing.
    return _write(
        path,
        pa.table({"advantage": pa.array(values.advantage), **columns}),
        use_dictionary=["token.list.element", "importance.list.element", "clipped.list.element"],
        use_byte_stream_split=sorted(floats),
        dictionary_pagesize_limit=2**28,  # with the default of 1 MiB, a large vocabulary has no dictionary
    )


def read_token_values(path: Path) -> TokenValues:
    """Return the content of a file of `write_token_values`. Raises UserError for a missing or damaged file."""
    with _reading(path, "values per token") as table:
        table = table.unify_dictionaries().combine_chunks()
        lists = {name: table[name].combine_chunks() for name in ("token", *_PER_TOKEN)}
        lengths = {name: column.value_lengths().to_numpy() for name, column in lists.items()}
        if any(not np.array_equal(of_column, lengths["token"]) for of_column in lengths.values()):
            raise ValueError("its columns have different numbers of tokens")
        tokens = lists.pop("token").flatten()
        return TokenValues(
            lengths["token"].astype(np.int64),
            table["advantage"].to_numpy().astype(np.float32),
            [*map(str, tokens.dictionary.to_pylist())],
            tokens.indices.to_numpy().astype(np.int32),
            **{name: lists[name].flatten().to_numpy().astype(kind) for name, kind in _PER_TOKEN.items()},
        )


def read_recorded_tokens(folder: Path) -> dict[str, np.ndarray]:
    """Return `old_logprob`, `ratio` and `advantage` of the recorded tokens of the run in `folder`, float64 [T].

    They are those of the steps with values per token (`token_values/`), or, in a run without, those of `tokens/`.
    Raises UserError if the run has neither, or a file is damaged.
    """
    recorded, evaluated = (
        [path for path in sorted((folder / name).glob("step-*.parquet")) if step_of(path) is not None]
        for name in ("token_values", "tokens")
    )
    names = ("old_logprob", "ratio", "advantage")
    tables = [
        [values.old_logprob, values.ratio, np.repeat(values.advantage, values.lengths)]
        for values in map(read_token_values, recorded)
    ] or [[table[name] for name in names] for table in map(read_token_table, evaluated)]
    if not tables:
        where = "evaluated steps have them (tokens/step-*.parquet)"
        raise UserError(f"{folder}: no recorded tokens there; {where}")
    columns = np.concatenate(tables, axis=1, dtype=np.float64)
    trained = ~np.isnan(columns).any(axis=0)
    return dict(zip(names, columns[:, trained], strict=True))


def write_bad_batch(
    run: Path,
    step: int,
    update: int,
    error: str,
    groups: Sequence[Group],
    numbers: Mapping[str, Sequence[list[float] | None]],
) -> Path:
    """Write the batch of a skipped update to the run's `bad_batches/`, atomically; return the file.

    `error` names the value that was not finite. `numbers` are further columns: a list with one entry per completion,
    float32 per token or None; NaN and infinities are stored unchanged. Raises OSError if the disk is full.
    """
    import pyarrow as pa

    ids = pa.list_(pa.int32())
    rows = [
        {
            "error": error,
            "prompt_ids": list(rollout.prompt_ids),
            "token_ids": list(rollout.completion.token_ids),
        }
        | _rollout_row(rollout)
        for group in groups
        for rollout in group.rollouts_G
    ]
    texts = _schema(("error", "problem_id", "prompt", "text", "reference", "reward", "verdict"))
    table = pa.Table.from_pylist(rows, pa.schema([*texts, ("prompt_ids", ids), ("token_ids", ids)]))
    for name, values in numbers.items():
        table = table.append_column(name, pa.array(values, pa.list_(pa.float32())))
    return _write(run / BAD_BATCHES / f"{step_name(step)}-update-{update}.parquet", table)


def _schema(names: Iterable[str]) -> Any:
    """Return the Parquet schema of columns of completions; the rewards of components are numbers, too."""
    import pyarrow as pa

    return pa.schema([(name, _NUMBERS.get(name.partition("/")[0], "string")) for name in names])


@contextmanager
def _reading(path: Path, content: str, schema: Any = None) -> Iterator[Any]:
    """Yield the table of a Parquet file. Raise UserError in one line where it, or reading its columns, fails."""
    import pyarrow.parquet as pq

    check_regular_file(path, str(path))
    try:
        yield pq.read_table(path, schema=schema)
    except Exception as error:  # noqa: BLE001 - pyarrow raises errors of any type for a damaged file
        raise UserError(f"{path}: not readable as a table of {content}: {first_line(error)}") from None


def _write(path: Path, table: Any, **options: Any) -> Path:
    import pyarrow.parquet as pq

    return write_atomically(path, lambda file: pq.write_table(table, file, compression="zstd", **options))
