"""Stored completions with their questions and reference answers, read from a file for grading.

Two layouts are supported: the tables of this package, with one completion per row, and rows from anywhere with a
question, an answer and completions.
"""

import json
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, FiniteFloat, ValidationError

from bandpo_cli.config.batch_and_sampling import Label, needs_answer
from bandpo_cli.config.task import Source
from bandpo_cli.errors import ConfigError
from bandpo_cli.registries import is_custom_grader
from bandpo_cli.tasks.question_answers import SAMPLE_ROWS, grader_columns, read_question
from bandpo_cli.tasks.rows import (
    find_fields,
    read_file,
    replace_surrogates,
    source_label,
    to_json_value,
    value_at,
)
from bandpo_cli.tasks.task import text_hash
from bandpo_cli.types import Problem, joined_text

COMPLETION_NAMES = (
    "completions", "completion", "responses", "response", "outputs", "output", "generations", "predictions",
)  # fmt: skip
"""The usual names of the field with the completions, in a file that is not a table of this package."""

_OWN_TABLE_COLUMNS = frozenset({"problem_id", "reference", "text"})


@dataclass(frozen=True)
class StoredCompletion:
    """A completion as text, with its length in tokens and its log-probability in nats; None for what is unknown."""

    text: str
    length: int | None = None
    finish_reason: str | None = None
    logprob_sum: float | None = None


@dataclass(frozen=True)
class StoredProblem:
    """A problem with the stored completions [G] for it."""

    problem: Problem
    completions_G: list[StoredCompletion] = field(default_factory=list)


_StoredRow = tuple[str, Problem, list[StoredCompletion]]
"""The evaluation set, the problem and the completions of a row."""
_RowReader = Callable[[Mapping[str, Any], str | None, str], _StoredRow]
"""A function from a row, the grader that the user names and the place of the row for messages."""


def read_completions(path: Path, grader: str | None = None) -> dict[str, list[StoredProblem]]:
    """Read the evaluation sets in a .parquet, .jsonl, .json or .csv file, by label.

    It is a table of this package with one completion per row, or has rows with a question, an answer and completions (a
    list of texts or a text). `grader` replaces the one that the table names (`math` if it names none). Raise
    ConfigError, which names the row, if the file cannot be read, lacks a field, or has values of another type.
    """
    rows = read_file(path)
    first_rows = list(islice(rows, SAMPLE_ROWS))
    if not first_rows:
        raise ConfigError(f"{path}: holds no completions")
    is_table = set(first_rows[0]) >= _OWN_TABLE_COLUMNS
    read_row: _RowReader = _read_table_row if is_table else _question_row_reader(path, first_rows, grader)
    sets: dict[str, dict[str, StoredProblem]] = {}
    for number, row in enumerate(chain(first_rows, rows), start=1):
        label, problem, completions = read_row(row, grader, f"{path}, row {number}")
        stored = sets.setdefault(label, {}).setdefault(problem.id, StoredProblem(problem))
        if (stored.problem.answer, stored.problem.grader) != (problem.answer, problem.grader):
            raise ConfigError(
                f"{path}, row {number}: problem {_short_repr(problem.id)} has another reference or grader than in an "
                "earlier row; give different problems different ids"
            )
        stored.completions_G.extend(completions)
    return {label: list(problems.values()) for label, problems in sets.items()}


def _load_object(value: Any) -> Any:
    """Return the values of a JSON object; return what is none unchanged, so that its type is refused."""
    try:
        return to_json_value(json.loads(value or "{}"))
    except (TypeError, ValueError, RecursionError):
        return value


_Text = Annotated[
    str, BeforeValidator(lambda value: replace_surrogates(value) if isinstance(value, str) else value)
]
_Tokens = Annotated[int, Field(ge=0, lt=2**31)]  # stored as a 32-bit integer
# pandas writes a missing value as NaN, and a CSV file as an empty text.
_Missing = BeforeValidator(lambda value: None if value == "" or value != value else value)


class _TableRow(BaseModel):
    """A row of a table of this package: a problem with one completion."""

    problem_id: _Text
    prompt: _Text = ""
    question: _Text = ""
    reference: _Text
    task: Label  # a part of metric names
    grader: _Text = "math"
    extra: Annotated[dict[str, Any], BeforeValidator(_load_object)] = Field(default_factory=dict)
    text: _Text
    length: Annotated[_Tokens | None, _Missing] = None
    finish_reason: Annotated[_Text | None, _Missing] = None
    logprob_sum: Annotated[FiniteFloat | None, _Missing] = None


def _read_table_row(row: Mapping[str, Any], grader: str | None, where: str) -> _StoredRow:
    """Read a row of a table of this package.

    A table never decides which code runs: a custom grader in it is refused unless the user names it.
    """
    given = {"task": row.get("task") or row.get("source")} | ({"grader": grader} if grader else {})
    try:
        values = _TableRow.model_validate({**row, **given})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        raise ConfigError(f"{where}: '{name}' = {_short_repr(row.get(name))}: {first['msg']}") from None
    if grader is None and is_custom_grader(values.grader):
        raise ConfigError(
            f"{where}: it names a function as its grader, and a file must not choose code to run; if you trust it, add "
            f"--grader {values.grader:.100}"
        )
    texts = values.problem_id, values.prompt, values.reference, values.task, values.grader
    problem = Problem(*texts, values.extra, values.question)
    completion = StoredCompletion(values.text, values.length, values.finish_reason, values.logprob_sum)
    return values.task, problem, [completion]


def _question_row_reader(path: Path, first_rows: list[dict[str, Any]], grader: str | None) -> _RowReader:
    """Return a reader of rows with a question, an answer that `grader` may do without, and completions.

    Equal questions and answers have one id.
    """
    try:
        label = source_label(Source(path=str(path)))
    except ConfigError:  # no character of the file name is allowed in a metric name
        label = "samples"
    completions = next((name for name in COMPLETION_NAMES if any(name in row for row in first_rows)), None)
    names = find_fields(
        {key: value for key, value in row.items() if key != completions} for row in first_rows
    )
    answer = names.answer if needs_answer(grader or "math") else ""
    fields = {"question": names.question, "answer": answer, "completions": completions}
    if missing := " and the ".join(name for name, field in fields.items() if field is None):
        columns = ", ".join(map(_short_repr, islice(first_rows[0], 20)))
        raise ConfigError(
            f"{path}: no field found for the {missing}; its fields: {columns}; "
            'expected {"question": ..., "answer": ..., "completions": ["...", ...]} in each row, '
            "or the samples.parquet of an evaluation; a custom --grader needs no answer"
        )

    def read_row(row: Mapping[str, Any], grader: str | None, where: str) -> _StoredRow:
        question = read_question(row, names, where)
        answer = None if question is None else question.answer if names.answer else ""
        if question is None or answer is None:
            field, name = (names.question, "question") if question is None else (names.answer, "answer")
            raise ConfigError(f"{where}: '{field}' holds no {name}: {_short_repr(value_at(row, field))}")
        texts = value_at(row, completions)
        texts = [texts] if isinstance(texts, str) else texts
        if not (isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts)):
            raise ConfigError(f"{where}: '{completions}' must be a list of texts, not {_short_repr(texts)}")
        prompt = joined_text(question.prompt)
        id_, grader = text_hash(json.dumps([prompt, question.answer])), grader or "math"
        extra = grader_columns({key: value for key, value in row.items() if key != completions}, [grader])
        problem = Problem(id_, prompt, answer, path.stem, grader, extra)
        return label, problem, [StoredCompletion(replace_surrogates(text)) for text in texts]

    return read_row


_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60
_short.maxlevel = 3


def _short_repr(value: Any) -> str:
    """Return at most 100 characters for a value of any length and depth, for one line of a message."""
    text = _short.repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
