"""Parquet tables of a run: completions of a step or an evaluation, values per token, and batches of skipped updates.

Parquet files contain data only; reading one runs no code.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from bandpo_cli.errors import UserError, first_line
from bandpo_cli.paths import check_regular_file
from bandpo_cli.storage.files import step_name, step_of, write_atomically
from bandpo_cli.types import MESSAGES, Group

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


COMPLETION = (
    "label", "problem_id", "question", "prompt", "reference", "text", "accuracy", "verdict", "reward", "length",
    "finish_reason",
)  # fmt: skip
"""What the tables of steps and of evaluations have in common; the label is the task, the data or the evaluation set."""


def encode_extra(extra: Mapping[str, object]) -> str:
    """Return as JSON what a grader reads of a problem besides its answer."""
    return json.dumps(dict(extra), ensure_ascii=False)


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

    grades = [rollout.grade for group in groups for rollout in group.rollouts_G]
    columns = _rollout_columns(groups)
    for name in grades[0].components if grades else ():
        columns[f"reward/{name}"] = (pa.float64(), [grade.components[name] for grade in grades])
    return _write_columns(path, columns)


def _rollout_columns(groups: Sequence[Group]) -> dict[str, tuple[Any, list[Any]]]:
    """Return type and values of the columns of `write_sample_table` but the rewards of the components."""
    import pyarrow as pa

    rollouts = [rollout for group in groups for rollout in group.rollouts_G]
    grades = [rollout.grade for rollout in rollouts]
    completions = [rollout.completion for rollout in rollouts]
    problems = [rollout.problem for rollout in rollouts]
    return {
        "source": (pa.string(), [problem.source for problem in problems]),
        "problem_id": (pa.string(), [problem.id for problem in problems]),
        "question": (pa.string(), [problem.label for problem in problems]),
        "prompt": (pa.string(), [rollout.prompt for rollout in rollouts]),
        "reference": (pa.string(), [problem.answer for problem in problems]),
        "grader": (pa.string(), [problem.grader for problem in problems]),
        "extra": (pa.string(), [encode_extra(problem.extra) for problem in problems]),
        "text": (pa.string(), [rollout.text for rollout in rollouts]),
        "reward": (pa.float64(), [grade.reward if grade.has_reward else None for grade in grades]),
        "accuracy": (pa.float64(), [float(grade.correct) for grade in grades]),
        "length": (pa.int32(), [len(completion.token_ids) for completion in completions]),
        "finish_reason": (pa.string(), [completion.finish_reason for completion in completions]),
        "verdict": (pa.string(), [grade.verdict for grade in grades]),
        "logprob_sum": (pa.float64(), [sum(completion.logprobs) for completion in completions]),
    }


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

    schema = _eval_schema()
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
    with _reading(path, "completions of an evaluation", _eval_schema()) as table:
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

    return _write_columns(path, {name: (pa.float32(), columns[name]) for name in TOKEN_COLUMNS})


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

    rollouts, shared = [rollout for group in groups for rollout in group.rollouts_G], _rollout_columns(groups)
    names, ids = ("problem_id", "prompt", "text", "reference", "reward", "verdict"), pa.list_(pa.int32())
    columns: dict[str, tuple[Any, Sequence[Any]]] = {
        "error": (pa.string(), [error] * len(rollouts)),
        **{name: shared[name] for name in names},
        "prompt_ids": (ids, [list(rollout.prompt_ids) for rollout in rollouts]),
        "token_ids": (ids, [list(rollout.completion.token_ids) for rollout in rollouts]),
    }
    columns |= {name: (pa.list_(pa.float32()), values) for name, values in numbers.items()}
    return _write_columns(run / BAD_BATCHES / f"{step_name(step)}-update-{update}.parquet", columns)


def _eval_schema() -> Any:
    """Return the Parquet schema of `EvalRow`. It is fixed, so that an empty table has the same columns."""
    import pyarrow as pa

    types: dict[Any, Any] = {str: pa.string(), float: pa.float64(), int: pa.int32()}
    hints = get_type_hints(EvalRow)
    return pa.schema([(name, types[(get_args(hint) or (hint,))[0]]) for name, hint in hints.items()])


def _write_columns(path: Path, columns: Mapping[str, tuple[Any, Any]]) -> Path:
    """Write a table with the given types and values of its columns."""
    import pyarrow as pa

    arrays = {name: pa.array(values, type=kind) for name, (kind, values) in columns.items()}
    return _write(path, pa.table(arrays))


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
