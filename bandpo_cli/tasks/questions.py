"""From a question to what is put before the model."""

# MERGED: From one source in the config to its questions, each with its answer. What cannot be used is counted.
from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, islice
from typing import Any

from bandpo_cli.config.data import Source
from bandpo_cli.errors import ConfigError
from bandpo_cli.registries import DATASETS, GRADERS
from bandpo_cli.tasks.fields import (
    FieldNames,
    as_answer,
    as_level,
    as_question,
    clean_text,
    find_fields,
    to_json_value,
    value_at,
)
from bandpo_cli.tasks.rows import SplitName, known_fields, read_rows, source_label
from bandpo_cli.types import Message, Prompt

_SLOT = "{question}"

TEMPLATES = {
    # arXiv 2603.04918 trains with this, as DAPO does.
    "answer-line": "Solve the following math problem step by step. The last line of your response should be of the "
    "form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    "{question}\n\n"
    'Remember to put your answer on its own line after "Answer:".',
    "boxed": "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "plain": "{question}",
}
"""The user messages known by name. The slot is filled in literally: questions are full of braces."""


def build_prompt(question: str, template: str, system: str | None = None) -> Prompt:
    """Return the chat messages: `system`, if any, then the template (a known name or a text) with the question.

    An instruction of the known templates is put in place of one that came with the question, not around it.
    """
    text = TEMPLATES.get(template, template)
    if template in TEMPLATES and text != _SLOT:
        question = bare_question(question)
    user = Message("user", text.replace(_SLOT, question))
    return (user,) if system is None else (Message("system", system), user)


def bare_question(text: str) -> str:
    """Take a known instruction off again, as data sets bring some with their questions."""
    for template in TEMPLATES.values():
        before, _, after = template.partition(_SLOT)
        if (before or after) and text.startswith(before) and text.rstrip().endswith(after):
            return text.rstrip()[len(before) :].removesuffix(after)
    return text


_LOOKED_AT = 1000  # rows that the fields are chosen by; a file of millions is read once only


@dataclass(frozen=True)
class Question:
    """A question with its reference answer, before any template is put around it."""

    id: str
    text: str | tuple[Message, ...]
    answer: str
    label: str
    grader: str
    extra: Mapping[str, object] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The same for questions that differ in spacing, case, dollar signs or a known instruction around them."""
        messages = (Message("user", self.text),) if isinstance(self.text, str) else self.text
        turns = [bare_question(message.content) for message in messages if message.role != "system"]
        text = unicodedata.normalize("NFKC", "\n".join(turns)).casefold()
        return text_hash(re.sub(r"[\s$]+", "", text))


@dataclass(frozen=True)
class LoadedQuestions:
    """The questions of one source, in the order of its rows, and how many rows were left out for which reason."""

    label: str
    questions: tuple[Question, ...]
    left_out: Mapping[str, int]


def text_hash(text: str) -> str:
    """A short name for a text, the same on every machine, as Python's own hash() is not."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def load_questions(source: Source, part: SplitName, grader: str | None = None) -> LoadedQuestions:
    """Read a source; `grader` judges its answers in place of the one that it names itself.

    Raises:
        ConfigError: it is out of reach, damaged, has no field for the question or the answer, or no usable row.
    """
    label = source_label(source)
    grader = grader or source.grader or (DATASETS[source.name].grader if source.name else "math")
    rows = read_rows(source, part)
    seen = list(islice(rows, _LOOKED_AT))
    columns = list(dict.fromkeys(str(name) for row in seen for name in row))
    names = find_fields(seen, source.fields, known_fields(source))
    if not seen:
        raise ConfigError(f"task.{part}: '{source.path or source.name}' holds no rows")
    _check_fields(names, source, columns)
    left_out: Counter[str] = Counter()
    questions: dict[str, Question] = {}
    for row in chain(seen, rows):
        question = _question(row, names, source.levels, label, grader)
        if isinstance(question, str):
            left_out[question] += 1
        elif question.id in questions:
            left_out["repeated"] += 1
        else:
            questions[question.id] = question
    if not questions:
        raise ConfigError(
            f"task.{part}: no row of '{source.path or source.name}' can be used: {format_counts(left_out)}; the question was "
            f"looked for in '{names.question}', the answer in '{names.answer}'; its fields: {', '.join(columns)}"
        )
    kept = _evenly_spread(list(questions.values()), source.limit)
    if len(kept) < len(questions):
        left_out["beyond the limit"] = len(questions) - len(kept)
    return LoadedQuestions(label, tuple(kept), left_out)


def format_counts(left_out: Mapping[str, int]) -> str:
    """Write the reasons with their numbers: `2 without an answer, 1 repeated`."""
    return ", ".join(f"{number:,} {reason}" for reason, number in left_out.items())


def _check_fields(names: FieldNames, source: Source, columns: list[str]) -> None:
    missing = [name for name in ("question", "answer") if getattr(names, name) is None]
    if source.levels is not None and names.level is None:
        missing.append("level")
    if missing:
        mapping = ", ".join(f"{name}: ..." for name in missing)
        raise ConfigError(
            f"'{source.path or source.name}': no field found for the {' and the '.join(missing)}; "
            f"its fields: {', '.join(columns)}; say which with fields: {{{mapping}}}"
        )


def _question(
    row: Mapping[str, Any], names: FieldNames, levels: Collection[int] | None, label: str, grader: str
) -> Question | str:
    """Return the row's question, or the reason why it has none."""
    text = as_question(value_at(row, str(names.question)))
    if text is None:
        return "without a question"
    answer = as_answer(value_at(row, str(names.answer)))
    a_proof = answer is not None and "\n" in answer and grader in GRADERS  # without an end to compare with
    if answer is None or a_proof:
        return "without an answer"
    level = as_level(value_at(row, names.level)) if names.level else None
    if levels is not None and level not in levels:
        return "of other levels"
    extra = {
        key: to_json_value(row[key]) for key in ("data_source", "extra_info") if row.get(key) is not None
    }
    if level is not None:
        extra["level"] = level
    name = (_name(value_at(row, names.id)) if names.id else None) or _hash_of(text, answer)
    return Question(f"{label}/{name}", text, answer, label, grader, extra)


def _hash_of(text: str | tuple[Message, ...], answer: str) -> str:
    content = [text] if isinstance(text, str) else [[turn.role, turn.content] for turn in text]
    return text_hash(json.dumps([content, answer]))


def _name(value: Any) -> str | None:
    return clean_text(value) if isinstance(value, str) else as_answer(value)


def _evenly_spread(questions: list[Question], limit: int | None) -> list[Question]:
    if limit is None or limit >= len(questions):
        return questions
    return [questions[index * len(questions) // limit] for index in range(limit)]
