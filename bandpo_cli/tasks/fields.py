"""Which fields of a row hold the question and the answer, and what their values come to."""

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

_WHOLE = re.compile(r"(-?\d+)\.0+")
_FIRST_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class FieldNames:
    """Where to look in each row; None where no field was found."""

    question: str | None
    answer: str | None
    level: str | None
    id: str | None


def find_fields(rows: Iterable[Mapping[str, Any]], given: Fields, known: Fields) -> FieldNames:
    """Choose the fields: those given, else the first of the usual names that holds something in one of `rows`.

    Names are tried in this order: the verl layout, where `prompt` is a list of chat messages and the answer lies in
    `reward_model.ground_truth`; the fields of a known data set; the usual names, a worked solution last of all.
    """
    rows = list(rows)
    verl = any(as_messages(row.get("prompt")) and value_at(row, _VERL_ANSWER) is not None for row in rows)
    questions = (
        *(["prompt"] if verl else []),
        *([known.question] if known.question else []),
        *QUESTION_NAMES,
    )
    answers = [*([known.answer] if known.answer else []), *ANSWER_NAMES]
    answers.sort(key=lambda name: name == "solution")
    if verl:
        answers.insert(0, _VERL_ANSWER)

    def first(names: Iterable[str | None], usable: Any) -> str | None:
        return next(
            (name for name in names if name and any(usable(value_at(row, name)) for row in rows)), None
        )

    return FieldNames(
        question=given.question or first(questions, as_question),
        answer=given.answer or first(answers, as_answer),
        level=given.level or first((known.level, *LEVEL_NAMES), as_level),
        id=given.id,
    )


def value_at(row: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, None where it leads nowhere."""
    if path in row:
        return row[path]
    value: Any = row
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def as_question(value: Any) -> str | tuple[Message, ...] | None:
    """Read a question: a text, or chat messages; None for anything else and for nothing but spaces."""
    return clean_text(value) if isinstance(value, str) else as_messages(value)


def clean_text(value: str) -> str | None:
    """Strip a text; None for an empty one, and for half a surrogate pair (JSON can say it, UTF-8 cannot)."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    return value.strip() or None


def as_messages(value: Any) -> tuple[Message, ...] | None:
    """Read a list of {role, content}; None where it is something else, or holds no text."""
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
    """Read a reference answer as text; None where there is none.

    Numbers are written plainly (27.0 is 27), a worked solution is reduced to its end, a list is joined by commas.
    """
    if isinstance(value, str):
        return _answer_in_text(value)
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, (int, float, Decimal)):
        return _plain_number(value)
    if isinstance(value, list):
        parts = [as_answer(part) for part in value if not isinstance(part, (list, Mapping))]
        return ", ".join(part for part in parts if part) or None
    if isinstance(value, Mapping) and value:
        return json.dumps(to_json_value(value), ensure_ascii=False, sort_keys=True)
    return None


def _answer_in_text(value: str) -> str | None:
    text = clean_text(value)
    if text is None:
        return None
    answer = final_answer(text) or (text if "\n" in text else unwrap(text))
    if whole := _WHOLE.fullmatch(answer):
        answer = whole[1]
    return answer or None


def _plain_number(value: float | Decimal) -> str | None:
    if isinstance(value, int):
        return str(value)
    number = value if isinstance(value, Decimal) else Decimal(repr(value))
    if not number.is_finite() or abs(number.adjusted()) > 400:  # 400 digits: beyond any float
        return None
    return str(int(number)) if number == int(number) else format(number, "f")


def as_level(value: Any) -> int | None:
    """Read a level: 3 from 3, 3.0, "3" or "Level 3"."""
    if isinstance(value, str):
        found = _FIRST_NUMBER.search(value)
        return int(found[0]) if found and len(found[0]) < 10 else None
    if isinstance(value, float):
        return int(value) if math.isfinite(value) and value == int(value) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def to_json_value(value: Any, depth: int = 0) -> Any:
    """Turn what a Parquet file may hold into what JSON may hold: graders run in other processes.

    What lies deeper than 50 levels is dropped, so that no row can exhaust the stack.
    """
    if depth > 50:
        return None
    if isinstance(value, Mapping):
        return {str(key): to_json_value(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(inner, depth + 1) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):  # JSON can say half a surrogate pair, and no file in UTF-8 can
        return value.encode("utf-8", "replace").decode("utf-8")
    return value if value is None or isinstance(value, (int, bool)) else str(value)
