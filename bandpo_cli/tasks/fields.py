"""Fields of a row: the choice of those with the question and the answer, and the conversion of their values."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from bandpo_cli.config.task import Fields
from bandpo_cli.errors import ConfigError
from bandpo_cli.grading.answers import final_answer, unwrap
from bandpo_cli.registries import Dataset
from bandpo_cli.types import Message, Prompt

QUESTION_NAMES = ("question", "problem", "prompt", "query", "input", "messages")
_VERL_ANSWER = "reward_model.ground_truth"
ANSWER_NAMES = ("answer", "final_answer", "ground_truth", "target", _VERL_ANSWER, "solution")
LEVEL_NAMES = ("level", "difficulty")
"""The usual names, in the order in which they are tried."""

NO_FIELDS = Fields()
ROLES = ("system", "user", "assistant")

_INTEGER_VALUED = re.compile(r"(-?\d+)\.0+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_FIRST_NUMBER = re.compile(r"\d+")


def find_fields(
    rows: Iterable[Mapping[str, Any]], configured: Fields = NO_FIELDS, known: Fields | Dataset = NO_FIELDS
) -> Fields:
    """Return the dotted paths of the fields, None for a field that was not found.

    The configured fields (`fields:` of a source) come first, else the first name that has a usable value in one of
    `rows`: of the verl layout, in which `prompt` is a list of chat messages and the answer is in
    `reward_model.ground_truth`; of the known data set; the usual names, with a worked solution last. Where no field has
    an answer, `answer` equals `question`: it is the assistant message at the end of the chat messages, as in data for
    supervised fine-tuning.
    """
    rows = list(rows)

    def first(names: Iterable[str | None], usable: Callable[[Any], Any]) -> str | None:
        return next((n for n in names if n and any(usable(value_at(row, n)) for row in rows)), None)

    verl = any(is_chat(row.get("prompt")) and value_at(row, _VERL_ANSWER) is not None for row in rows)
    questions = ["prompt" if verl else None, known.question, *QUESTION_NAMES]
    answers = sorted([known.answer, *ANSWER_NAMES], key=lambda name: name == "solution")
    question = configured.question or first(questions, lambda value: is_chat(value) or clean_text(value))
    question = question or first(questions, has_surrogates)  # its rows are dropped for that reason
    answer = configured.answer or first([_VERL_ANSWER if verl else None, *answers], as_answer)
    if answer is None:
        last_turns = [chat[-1] for row in rows if is_chat(chat := value_at(row, question))]
        if any(isinstance(turn, Mapping) and turn.get("role") == "assistant" for turn in last_turns):
            answer = question
    answer = answer or first(answers, has_surrogates)
    level = configured.level or first((known.level, *LEVEL_NAMES), as_level)
    return Fields(question=question, answer=answer, level=level, id=configured.id)


def value_at(row: Mapping[str, Any], path: str | None) -> Any:
    """Return the value at a dotted path (a key of that very name first), or None if there is none."""
    if path is None or path in row:
        return None if path is None else row[path]
    value: Any = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


class Question(NamedTuple):
    """The question of a row, as text or as the complete prompt in chat messages, and its answer; None for none.

    `has_solution`: an assistant message at the end is not part of the prompt, because the model writes its own.
    """

    prompt: Prompt
    answer: str | None
    has_solution: bool


def read_question(row: Mapping[str, Any], names: Fields, where: str) -> Question | None:
    """Read the question of a row, a text or chat messages; return None for blank text and for values of other types.

    Raise ConfigError if a list cannot be read as chat messages; the message begins with `where`.
    """
    value = value_at(row, names.question)
    prompt: Prompt | None = clean_text(value)
    solution = None
    if isinstance(value, list):
        try:
            prompt, solution = _read_messages(value)
        except ValueError as error:
            raise ConfigError(f"{where}: the chat messages of '{names.question}': {error}") from None
    if prompt is None:
        return None
    answer = solution if names.answer == names.question else value_at(row, names.answer)
    return Question(prompt, as_answer(answer), solution is not None)


def is_chat(value: Any) -> bool:
    """Return whether a value is meant as chat messages: a list whose first entry has a role or a content."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, Mapping) and ("role" in first or "content" in first)


def clean_text(value: Any) -> str | None:
    """Strip a text; return None if it is empty or has unpaired surrogates (JSON can encode them, UTF-8 cannot), and for
    values of other types."""
    return None if not isinstance(value, str) or has_surrogates(value) else value.strip() or None


def has_surrogates(value: Any) -> bool:
    """Return whether a value is a text with unpaired surrogates."""
    return isinstance(value, str) and _SURROGATE.search(value) is not None


def _read_messages(value: list[Any]) -> tuple[tuple[Message, ...], str | None]:
    """Return the prompt, and the content of an assistant message at the end; raise ValueError for anything else."""
    messages = []
    for number, entry in enumerate(value, start=1):
        message = entry if isinstance(entry, Mapping) else {}
        role, content = message.get("role"), message.get("content")
        if role not in ROLES or (role == "system" and number > 1):
            raise ValueError(
                f"message {number} has the role {role!r:.50}; expected {{role: user, content: ...}}, with the role "
                "user, assistant or, of the first message, system"
            )
        if isinstance(content, list):
            parts = [part if isinstance(part, Mapping) else {} for part in content]
            texts = [part.get("text") if part.get("type") == "text" else None for part in parts]
            content = "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None
        if not isinstance(content, str) or (content.strip() and clean_text(content) is None):
            raise ValueError(
                f"message {number} has content that is no text in UTF-8; only a text, or a list of parts of the type "
                "'text', is supported"
            )
        messages.append(Message(role, content))
    solution = messages.pop().content if messages and messages[-1].role == "assistant" else None
    if not messages or messages[-1].role != "user" or not messages[-1].content.strip():
        raise ValueError(
            "no question, which is a message with the role user and a text, at the end or before an assistant message"
        )
    return tuple(messages), solution


def as_answer(value: Any) -> str | None:
    """Read a reference answer as text; return None if `value` is not a usable answer.

    Numbers become plain decimals (27.0 becomes 27), a worked solution is reduced to its final answer, the entries of a
    list are joined by commas, a mapping becomes JSON with sorted keys.
    """
    if isinstance(value, str):
        text = clean_text(value) or ""
        answer = final_answer(text) or (text if "\n" in text else unwrap(text))
        integer = _INTEGER_VALUED.fullmatch(answer)
        return (integer[1] if integer else answer) or None
    if isinstance(value, int):
        return str(value)
    if isinstance(value, (float, Decimal)):
        number = Decimal(str(value))
        if not number.is_finite() or abs(number.adjusted()) > 400:  # more digits than any float has
            return None
        return str(int(number)) if number == int(number) else format(number, "f")
    if isinstance(value, list):
        answers = [as_answer(entry) for entry in value if not isinstance(entry, (list, Mapping))]
        return ", ".join(answer for answer in answers if answer) or None
    if isinstance(value, Mapping) and value:
        return json.dumps(to_json_value(value), ensure_ascii=False, sort_keys=True)
    return None


def as_level(value: Any) -> int | None:
    """Read a level: 3 from 3, 3.0, "3" or "Level 3"; return None if `value` has none."""
    if isinstance(value, str):
        digits = _FIRST_NUMBER.search(value)
        return int(digits[0]) if digits and len(digits[0]) < 10 else None
    if isinstance(value, float):
        return int(value) if math.isfinite(value) and value == int(value) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def to_json_value(value: Any, depth: int = 0) -> Any:
    """Convert a value of a row into JSON values that can be stored in a table and sent to a worker process.

    Values nested deeper than 50 levels become None, so that no row can exhaust the stack.
    """
    if depth > 50:
        return None
    if isinstance(value, Mapping):
        return {replace_surrogates(str(key)): to_json_value(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(inner, depth + 1) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return replace_surrogates(value)
    return value if value is None or isinstance(value, (int, bool)) else str(value)


def replace_surrogates(text: str) -> str:
    """Return `text` with ? for unpaired surrogates, which JSON can encode and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")
