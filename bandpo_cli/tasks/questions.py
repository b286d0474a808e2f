"""Questions of one source in the config, with their reference answers, as problems."""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, islice
from typing import Any

from bandpo_cli.config.task import Fields, Source
from bandpo_cli.errors import ConfigError
from bandpo_cli.registries import GRADERS
from bandpo_cli.tasks.fields import (
    Question,
    as_answer,
    as_level,
    clean_text,
    find_fields,
    read_question,
    to_json_value,
    value_at,
)
from bandpo_cli.tasks.prompts import bare_question
from bandpo_cli.tasks.rows import SplitName, known_dataset, read_rows, source_label
from bandpo_cli.types import Message, Problem, Prompt

_MAX_MARKS = 30  # combining characters in a row; no language uses more than four
_GRAPHEME_JOINER = "\u034f"
SAMPLE_ROWS = 1000  # the fields are chosen by these rows, so that a file of millions is read only once


@dataclass(frozen=True)
class LoadedQuestions:
    """The questions of one source, in the order of the rows, and the number of dropped rows by reason.

    The prompt of a question is the question alone, without a template, or the complete prompt as chat messages. `note`
    is a remark about the rows for the user; '' for none.
    """

    label: str
    questions: Sequence[Problem]
    dropped: Mapping[str, int]
    note: str = ""


def question_key(prompt: Prompt) -> str:
    """Return a hash that ignores spacing, case, dollar signs and a known instruction around the question."""
    messages = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    turns = [bare_question(message.content) for message in messages if message.role != "system"]
    text = compatibility_form("\n".join(turns)).casefold()
    return text_hash(re.sub(r"[\s$]+", "", text))


def hash_order(problems: Iterable[Problem]) -> list[Problem]:
    """Sort by a hash of the id, so that any prefix is a fair sample, independent of the order of the rows."""
    return sorted(problems, key=lambda problem: (text_hash(problem.id), problem.id))


def compatibility_form(text: str) -> str:
    """Return the NFKC form of a text in time linear in its length.

    `unicodedata.normalize` sorts the marks after a letter by insertion, which takes minutes for 100,000 of them. So
    a joiner splits the marks after each 30th, as in the Stream-Safe Text Format of Unicode (UAX #15, section 13). Texts
    with fewer marks in a row are not changed.
    """
    if text.isascii():
        return text
    chars: list[str] = []
    marks = 0
    for char in "".join(unicodedata.normalize("NFKD", char) for char in text):
        marks = marks + 1 if unicodedata.combining(char) else 0
        if marks > _MAX_MARKS:
            chars.append(_GRAPHEME_JOINER)
            marks = 1
        chars.append(char)
    return unicodedata.normalize("NFKC", "".join(chars))


def text_hash(text: str) -> str:
    """Return a hash of a text (16 hex digits) that is the same on every machine, unlike the built-in hash()."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def load_questions(
    source: Source,
    part: SplitName,
    grader: str | None = None,
    keep_columns: bool = False,
    revision: str | None = None,
) -> LoadedQuestions:
    """Read the questions of a source.

    Args:
        source: The source in the config.
        part: The setting that names the source.
        grader: The grader of its answers, instead of the one that the source names.
        keep_columns: Keep all columns of a row for the grader, as is always done for a custom grader.
        revision: The revision of a data set on the hub; None for the latest.

    Raises:
        ConfigError: If the source cannot be read, has no field for the question or the answer, has chat messages that
            are malformed, or has no usable row.
    """
    label, place, known = source_label(source), source.path or source.name, known_dataset(source)
    grader = grader or source.grader or known.grader
    rows = read_rows(source, part, revision)
    first_rows = list(islice(rows, SAMPLE_ROWS))
    if not first_rows:
        raise ConfigError(f"task.{part}: '{place}' holds no rows")
    columns = ", ".join(dict.fromkeys(str(name) for row in first_rows for name in row))
    names = find_fields(first_rows, source.fields, known)
    required = ["question", "answer", *(["level"] if source.levels is not None else [])]
    if missing := [name for name in required if getattr(names, name) is None]:
        mapping = ", ".join(f"{name}: ..." for name in missing)
        raise ConfigError(
            f"'{place}': no field found for the {' and the '.join(missing)}; its fields: {columns}; "
            f"set fields: {{{mapping}}}"
        )
    dropped: Counter[str] = Counter()
    problems: dict[str, Problem] = {}
    solutions = 0
    for number, row in enumerate(chain(first_rows, rows), start=1):
        question = read_question(row, names, f"{place}, row {number}")
        if question is None:
            dropped["without a question"] += 1
            continue
        solutions += question.has_solution
        level = as_level(value_at(row, names.level))
        # A text of several lines has no final answer that the known graders could compare with.
        if question.answer is None or ("\n" in question.answer and grader in GRADERS):
            dropped["without an answer"] += 1
        elif source.levels is not None and level not in source.levels:
            dropped["of other levels"] += 1
        elif (id_ := f"{label}/{_name(row, names, question)}") in problems:
            dropped["repeated"] += 1
        else:
            extra = grader_columns(row, keep_columns or grader not in GRADERS)
            extra |= {} if level is None else {"level": level}
            problems[id_] = Problem(id_, question.prompt, question.answer, label, grader, extra)
    if not problems:
        raise ConfigError(
            f"task.{part}: no row of '{place}' can be used: {format_counts(dropped)}; the question was read from "
            f"'{names.question}', the answer from '{names.answer}'; its fields: {columns}"
        )
    selected = list(problems.values())
    if source.limit is not None and source.limit < len(problems):
        dropped["over the limit"] = len(problems) - source.limit
        selected = [selected[index * len(problems) // source.limit] for index in range(source.limit)]
    prompts = "1 prompt ends" if solutions == 1 else f"{solutions:,} prompts end"
    use = "the reference answer" if names.answer == names.question else "left out"
    note = f"{prompts} with an assistant message, which is {use}" if solutions else ""
    return LoadedQuestions(label, selected, dropped, note)


def format_counts(dropped: Mapping[str, int]) -> str:
    """Format the number of rows per reason: `2 without an answer, 1 repeated`."""
    return ", ".join(f"{number:,} {reason}" for reason, number in dropped.items())


def grader_columns(row: Mapping[str, Any], all_columns: bool) -> dict[str, Any]:
    """Return the columns of a row for its grader, as JSON values: all, or those of verl's layout for graders."""
    names = row if all_columns else ("data_source", "extra_info")
    return {key: to_json_value(row[key]) for key in names if row.get(key) is not None}


def _name(row: Mapping[str, Any], names: Fields, question: Question) -> str:
    """Return the identifier in the row, else a hash of the prompt and the answer."""
    value, prompt = value_at(row, names.id), question.prompt
    name = clean_text(value) if isinstance(value, str) else as_answer(value)
    content = [prompt] if isinstance(prompt, str) else [[turn.role, turn.content] for turn in prompt]
    return name or text_hash(json.dumps([content, question.answer]))
