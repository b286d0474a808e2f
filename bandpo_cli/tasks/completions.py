"""Completions that were stored, with the questions and reference answers that they are judged by."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from bandpo_cli.config.data import Fields, Source
from bandpo_cli.errors import ConfigError
from bandpo_cli.tasks.fields import as_answer, as_json, as_question, find_fields, value_at
from bandpo_cli.tasks.files import read_file
from bandpo_cli.tasks.questions import stable_hash
from bandpo_cli.tasks.sources import label_of
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

_OURS = frozenset({"problem_id", "reference", "text"})
_LOOKED_AT = 1000  # rows that the fields are chosen by


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
    seen = list(islice(rows, _LOOKED_AT))
    if not seen:
        raise ConfigError(f"{path}: holds no completions")
    everything = chain(seen, rows)
    if set(seen[0]) >= _OURS:
        return _from_table(path, everything, grader)
    return {label_of(Source(path=str(path))): _from_questions(path, seen, everything, grader or "math")}


def _from_table(
    path: Path, rows: Iterable[Mapping[str, Any]], grader: str | None
) -> dict[str, list[StoredProblem]]:
    sets: dict[str, dict[str, StoredProblem]] = {}
    for number, row in enumerate(rows, start=1):
        where = f"{path}, row {number}"
        label = _text(row.get("task") or row.get("source"), "task", where)
        id_ = _text(row["problem_id"], "problem_id", where)
        problems = sets.setdefault(label, {})
        if id_ not in problems:
            problems[id_] = StoredProblem(
                Problem(
                    id=id_,
                    prompt=_text(row.get("prompt", ""), "prompt", where),
                    answer=_text(row["reference"], "reference", where),
                    source=label,
                    grader=grader or _text(row.get("grader", "math"), "grader", where),
                    extra=_extra(row.get("extra"), where),
                )
            )
        problems[id_].completions_G.append(
            StoredCompletion(
                _text(row["text"], "text", where),
                _number(row.get("length"), "length", where, int),
                None
                if row.get("finish_reason") is None
                else _text(row["finish_reason"], "finish_reason", where),
                _number(row.get("logprob_sum"), "logprob_sum", where, float),
            )
        )
    return {label: list(problems.values()) for label, problems in sets.items()}


def _from_questions(
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
            f"{path}: no field found for the {' and the '.join(missing)}; its fields: {', '.join(seen[0])}; expected "
            '{"question": ..., "answer": ..., "completions": ["...", ...]} in each row, or the samples.parquet of an '
            "evaluation"
        )
    problems: dict[str, StoredProblem] = {}
    for number, row in enumerate(rows, start=1):
        where = f"{path}, row {number}"
        question = as_question(value_at(row, str(names.question)))
        answer = as_answer(value_at(row, str(names.answer)))
        if question is None:
            raise ConfigError(f"{where}: '{names.question}' holds no question: {_shown(row, names.question)}")
        if answer is None:
            raise ConfigError(f"{where}: '{names.answer}' holds no answer: {_shown(row, names.answer)}")
        text = _as_text(question)
        id_ = stable_hash(json.dumps([text, answer]))
        extra = {key: as_json(row[key]) for key in ("data_source", "extra_info") if row.get(key) is not None}
        problem = Problem(id_, text, answer, path.stem, grader, extra)
        stored = problems.setdefault(id_, StoredProblem(problem))
        stored.completions_G.extend(_completions(row, str(completions), where))
    return list(problems.values())


def _completions(row: Mapping[str, Any], name: str, where: str) -> list[StoredCompletion]:
    value = row.get(name)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        raise ConfigError(f"{where}: '{name}' must be a list of texts, not {_shown(row, name)}")
    return [StoredCompletion(_text(text, name, where)) for text in texts]


def _as_text(question: Prompt) -> str:
    if isinstance(question, str):
        return question
    return "\n\n".join(message.content for message in question)


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where}: '{name}' must hold text, not {value!r:.60}")
    # JSON can say half a surrogate pair, and no file in UTF-8 can.
    return value.encode("utf-8", "replace").decode("utf-8")


def _number(value: Any, name: str, where: str, kind: type) -> Any:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{where}: '{name}' must be a number, not {value!r:.60}")
    return kind(value)


def _extra(value: Any, where: str) -> dict[str, Any]:
    try:
        extra = json.loads(value) if value else {}
    except (TypeError, ValueError, RecursionError):
        extra = None
    if not isinstance(extra, dict):
        raise ConfigError(f"{where}: 'extra' must hold a JSON object, not {value!r:.60}")
    return extra


def _shown(row: Mapping[str, Any], name: str | None) -> str:
    return f"{value_at(row, str(name))!r:.60}"
