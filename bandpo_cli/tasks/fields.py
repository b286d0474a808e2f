"""Fields of a row: the choice of those with the question and the answer, and the conversion of their values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from bandpo_cli.config.data import Fields
from bandpo_cli.extract import final_answer, unwrap
from bandpo_cli.types import Message

QUESTION_NAMES = ("question", "problem", "prompt", "query", "input")
_VERL_ANSWER = "reward_model.ground_truth"
ANSWER_NAMES = ("answer", "final_answer", "ground_truth", "target", _VERL_ANSWER, "solution")
LEVEL_NAMES = ("level", "difficulty")
"""The usual names, in the order in which they are tried."""

_INTEGER_VALUED = re.compile(r"(-?\d+)\.0+")
_FIRST_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class FieldNames:
    """Dotted paths of the fields in each row; None where no field was found."""

    question: str | None
    answer: str | None
    level: str | None
    id: str | None


def find_fields(rows: Iterable[Mapping[str, Any]], configured: Fields, dataset_fields: Fields) -> FieldNames:
    """Choose the fields: the configured ones, else the first usual name that has a usable value in one of `rows`.

    Names are tried in this order: the verl layout, in which `prompt` is a list of chat messages and the answer is in
    `reward_model.ground_truth`; the fields of a known data set; the usual names, with a worked solution last.

    Args:
        rows: The rows to search, for example the first thousand of a file.
        configured: The fields that the user names (`fields:` of a source).
        dataset_fields: The fields of the known data set that the rows are from; empty for other rows.
    """
    rows = list(rows)
    verl = any(as_messages(row.get("prompt")) and value_at(row, _VERL_ANSWER) is not None for row in rows)
    questions = (
        *(["prompt"] if verl else []),
        *([dataset_fields.question] if dataset_fields.question else []),
        *QUESTION_NAMES,
    )
    answers = [*([dataset_fields.answer] if dataset_fields.answer else []), *ANSWER_NAMES]
    answers.sort(key=lambda name: name == "solution")
    if verl:
        answers.insert(0, _VERL_ANSWER)

    def first(names: Iterable[str | None], usable: Any) -> str | None:
        return next(
            (name for name in names if name and any(usable(value_at(row, name)) for row in rows)), None
        )

    return FieldNames(
        question=configured.question or first(questions, as_question),
        answer=configured.answer or first(answers, as_answer),
        level=configured.level or first((dataset_fields.level, *LEVEL_NAMES), as_level),
        id=configured.id,
    )


def value_at(row: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path (a key of that very name first), or None if there is none."""
    if path in row:
        return row[path]
    value: Any = row
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def as_question(value: Any) -> str | tuple[Message, ...] | None:
    """Read a question, a text or chat messages; return None for anything else and for blank text."""
    return clean_text(value) if isinstance(value, str) else as_messages(value)


def clean_text(value: str) -> str | None:
    """Strip a text; return None if it is empty or has unpaired surrogates (JSON can encode them, UTF-8 cannot)."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    return value.strip() or None


def as_messages(value: Any) -> tuple[Message, ...] | None:
    """Read a list of {role, content}; return None if `value` is anything else or has no text."""
    if not isinstance(value, list) or not value:
        return None
    messages = []
    for turn in value:
        if not isinstance(turn, Mapping):
            return None
        role, content = turn.get("role"), turn.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            return None
        messages.append(Message(role, content))
        if content and clean_text(content) is None and content.strip():
            return None
    return tuple(messages) if any(message.content.strip() for message in messages) else None


def as_answer(value: Any) -> str | None:
    """Read a reference answer as text; return None if `value` is not a usable answer.

    Numbers become plain decimals (27.0 becomes 27), a worked solution is reduced to its final answer, the entries of a
    list are joined by commas, a mapping becomes JSON with sorted keys.
    """
    if isinstance(value, str):
        return _answer_in_text(value)
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, (int, float, Decimal)):
        return _plain_number(value)
    if isinstance(value, list):
        answers = [as_answer(entry) for entry in value if not isinstance(entry, (list, Mapping))]
        return ", ".join(answer for answer in answers if answer) or None
    if isinstance(value, Mapping) and value:
        return json.dumps(to_json_value(value), ensure_ascii=False, sort_keys=True)
    return None


def _answer_in_text(value: str) -> str | None:
    text = clean_text(value)
    if text is None:
        return None
    answer = final_answer(text) or (text if "\n" in text else unwrap(text))
    if match := _INTEGER_VALUED.fullmatch(answer):
        answer = match[1]
    return answer or None


def _plain_number(value: float | Decimal) -> str | None:
    if isinstance(value, int):
        return str(value)
    number = value if isinstance(value, Decimal) else Decimal(repr(value))
    if not number.is_finite() or abs(number.adjusted()) > 400:  # more digits than any float has
        return None
    return str(int(number)) if number == int(number) else format(number, "f")


def as_level(value: Any) -> int | None:
    """Read a level: 3 from 3, 3.0, "3" or "Level 3"; return None if `value` has none."""
    if isinstance(value, str):
        found = _FIRST_NUMBER.search(value)
        return int(found[0]) if found and len(found[0]) < 10 else None
    if isinstance(value, float):
        return int(value) if math.isfinite(value) and value == int(value) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def to_json_value(value: Any, depth: int = 0) -> Any:
    """Convert a value of a Parquet file into JSON values, because graders run in other processes.

    Values nested deeper than 50 levels become None, so that no row can exhaust the stack.
    """
    if depth > 50:
        return None
    if isinstance(value, Mapping):
        return {str(key): to_json_value(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(inner, depth + 1) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):  # JSON can encode unpaired surrogates, and UTF-8 cannot
        return value.encode("utf-8", "replace").decode("utf-8")
    return value if value is None or isinstance(value, (int, bool)) else str(value)
