"""Completions that were stored, with the questions and reference answers that they are judged by."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from bandpo_cli.config.data import Fields, Source
from bandpo_cli.errors import ConfigError
from bandpo_cli.registries import is_function_path
from bandpo_cli.tasks.fields import as_answer, as_question, find_fields, to_json_value, value_at
from bandpo_cli.tasks.questions import text_hash
from bandpo_cli.tasks.rows import read_file, source_label
from bandpo_cli.types import Problem, Prompt

COMPLETION_NAMES = (
    "completions",
    "completion",
    "responses",
    "response",
    "outputs",
    "output",
    "generations",
    "predictions",
)
"""The fields that completions are looked for in, unless the file is a table of ours."""

_OWN_TABLE_COLUMNS = frozenset({"problem_id", "reference", "text"})
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,59}")
_SAMPLE_ROWS = 1000  # rows that the fields are chosen by
_MAX_TOKENS = 2**31 - 1  # the table keeps lengths as 32-bit numbers


@dataclass(frozen=True)
class StoredCompletion:
    """A completion as text; what else was known when it was sampled, or None."""

    text: str
    length: int | None = None
    finish_reason: str | None = None
    logprob_sum: float | None = None


@dataclass(frozen=True)
class StoredProblem:
    """A problem with the completions that were stored for it."""

    problem: Problem
    completions_G: list[StoredCompletion] = field(default_factory=list)


def read_completions(path: Path, grader: str | None = None) -> dict[str, list[StoredProblem]]:
    """Read the evaluation sets in a .parquet, .jsonl, .json or .csv file, by label.

    Two layouts are known: the tables of this package, one completion a row (`samples.parquet` of an evaluation,
    `samples/step-000010.parquet` of a run); and rows with a question, an answer and completions, a list of texts or a
    single one, from anywhere.

    Args:
        grader: judges all of them, in place of the one that the table names (`math` where none is named).

    Raises:
        ConfigError: the file cannot be read, lacks a field, or holds something else than texts; the row is named.
    """
    rows = read_file(path)
    seen = list(islice(rows, _SAMPLE_ROWS))
    if not seen:
        raise ConfigError(f"{path}: holds no completions")
    everything = chain(seen, rows)
    if set(seen[0]) >= _OWN_TABLE_COLUMNS:
        return _read_own_table(path, everything, grader)
    return {
        _label_of(path): _read_question_rows(path, seen, everything, "math" if grader is None else grader)
    }


def _label_of(path: Path) -> str:
    try:
        return source_label(Source(path=str(path)))
    except ConfigError:  # nothing of the name may stand in a metric's name
        return "samples"


def _read_own_table(
    path: Path, rows: Iterable[Mapping[str, Any]], grader: str | None
) -> dict[str, list[StoredProblem]]:
    sets: dict[str, dict[str, StoredProblem]] = {}
    for number, row in enumerate(rows, start=1):
        where = f"{path}, row {number}"
        label = _label(row.get("task") or row.get("source"), where)
        problem = _problem(row, label, grader, where)
        stored = sets.setdefault(label, {}).setdefault(problem.id, StoredProblem(problem))
        if stored.problem.answer != problem.answer or stored.problem.grader != problem.grader:
            raise ConfigError(
                f"{where}: problem {_short_repr(problem.id)} has another reference or grader than in a row before; give "
                "problems that differ ids that differ"
            )
        stored.completions_G.append(_completion(row, where))
    return {label: list(problems.values()) for label, problems in sets.items()}


def _label(value: Any, where: str) -> str:
    label = _text(value, "task", where)
    if not _LABEL.fullmatch(label):
        raise ConfigError(
            f"{where}: 'task' = {_short_repr(label)} cannot stand in a metric's name; take letters, digits and _ . - alone, "
            "60 at most"
        )
    return label


def _problem(row: Mapping[str, Any], label: str, grader: str | None, where: str) -> Problem:
    """Return the problem of a row of our own tables. A table never says which code is to run: the user does."""
    own = _text(row.get("grader", "math"), "grader", where) if grader is None else grader
    if grader is None and is_function_path(own):
        raise ConfigError(
            f"{where}: it names a function as its grader, which no file is let to run unasked; if you trust it, add "
            f"--grader {own:.100}"
        )
    return Problem(
        id=_text(row.get("problem_id"), "problem_id", where),
        prompt=_text(row.get("prompt", ""), "prompt", where),
        answer=_text(row.get("reference"), "reference", where),
        source=label,
        grader=own,
        extra=_extra(row.get("extra"), where),
    )


def _completion(row: Mapping[str, Any], where: str) -> StoredCompletion:
    reason = row.get("finish_reason")
    length = _number(row.get("length"), "length", where)
    if length is not None and not (0 <= length <= _MAX_TOKENS and length == int(length)):
        raise ConfigError(f"{where}: 'length' must be a number of tokens, not {_short_repr(length)}")
    return StoredCompletion(
        text=_text(row.get("text"), "text", where),
        length=None if length is None else int(length),
        finish_reason=None if reason is None else _text(reason, "finish_reason", where),
        logprob_sum=_number(row.get("logprob_sum"), "logprob_sum", where),
    )


def _read_question_rows(
    path: Path, seen: list[dict[str, Any]], rows: Iterable[Mapping[str, Any]], grader: str
) -> list[StoredProblem]:
    completions = next((name for name in COMPLETION_NAMES if any(name in row for row in seen)), None)
    left = [{key: value for key, value in row.items() if key != completions} for row in seen]
    names = find_fields(left, Fields(), Fields())
    missing = [
        name
        for name, found in (
            ("question", names.question),
            ("answer", names.answer),
            ("completions", completions),
        )
        if found is None
    ]
    if missing:
        raise ConfigError(
            f"{path}: no field found for the {' and the '.join(missing)}; its fields: {_column_names(seen[0])}; expected "
            '{"question": ..., "answer": ..., "completions": ["...", ...]} in each row, or the samples.parquet of an '
            "evaluation"
        )
    problems: dict[str, StoredProblem] = {}
    for number, row in enumerate(rows, start=1):
        where = f"{path}, row {number}"
        question = as_question(value_at(row, str(names.question)))
        answer = as_answer(value_at(row, str(names.answer)))
        if question is None:
            raise ConfigError(
                f"{where}: '{names.question}' holds no question: {_short_value(row, names.question)}"
            )
        if answer is None:
            raise ConfigError(f"{where}: '{names.answer}' holds no answer: {_short_value(row, names.answer)}")
        text, answer = _as_text(question), _replace_surrogates(answer)
        id_ = text_hash(json.dumps([text, answer]))
        extra = {key: row[key] for key in ("data_source", "extra_info") if row.get(key) is not None}
        problem = Problem(id_, text, answer, path.stem, grader, _plain(extra))
        stored = problems.setdefault(id_, StoredProblem(problem))
        stored.completions_G.extend(_completions(row, str(completions), where))
    return list(problems.values())


def _completions(row: Mapping[str, Any], name: str, where: str) -> list[StoredCompletion]:
    value = row.get(name)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        raise ConfigError(f"{where}: '{name}' must be a list of texts, not {_short_value(row, name)}")
    return [StoredCompletion(_text(text, name, where)) for text in texts]


def _as_text(question: Prompt) -> str:
    if isinstance(question, str):
        return question
    return "\n\n".join(message.content for message in question)


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where}: '{name}' must hold text, not {_short_repr(value)}")
    return _replace_surrogates(value)


def _replace_surrogates(text: str) -> str:
    """Return `text` with ? for half surrogate pairs: JSON can say them, and no file in UTF-8 can."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _number(value: Any, name: str, where: str) -> float | None:
    """Read a number; None where there is none, for which pandas writes NaN and a CSV file nothing."""
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ConfigError(f"{where}: '{name}' must be a number, not {_short_repr(value)}")
    try:
        number = float(value)  # a CSV file has numbers as text
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{where}: '{name}' must be a finite number, not {_short_repr(value)}")
    return number


def _extra(value: Any, where: str) -> dict[str, Any]:
    try:
        extra = json.loads(value) if value else {}
    except (TypeError, ValueError, RecursionError):
        extra = None
    if not isinstance(extra, dict):
        raise ConfigError(f"{where}: 'extra' must hold a JSON object, not {_short_repr(value)}")
    return _plain(extra)


def _plain(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a grader's process can be sent and a table can hold."""
    found: dict[str, Any] = json.loads(
        _replace_surrogates(json.dumps(to_json_value(extra), ensure_ascii=False))
    )
    return found


def _column_names(row: Mapping[str, Any]) -> str:
    most = 20
    return ", ".join(map(_short_repr, islice(row, most))) + (", ..." if len(row) > most else "")


def _short_value(row: Mapping[str, Any], name: str | None) -> str:
    return _short_repr(value_at(row, str(name)))


_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60
_short.maxlevel = 3


def _short_repr(value: Any) -> str:
    """Return a value as a line of a message can show it, however long or deep it is."""
    text = _short.repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
