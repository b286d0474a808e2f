"""Rows of the sources in a config, as plain dicts of plain values, and the fields with question, answer and level.

Sources are local .jsonl, .json, .csv and .parquet files, folders, and data sets on the Hugging Face hub.
"""

import csv
import io
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from bandpo_cli.config.task import FILE_SUFFIXES, Fields, Source
from bandpo_cli.errors import ConfigError, first_line, nearest
from bandpo_cli.grading.answers import final_answer, unwrap
from bandpo_cli.paths import check_regular_file, path_exists, user_path
from bandpo_cli.registries import DATASETS, Dataset

Row = dict[str, Any]
SplitName = Literal["train", "heldout"]  # The setting that names a source: `task.train` or `task.heldout`

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_LABEL_CHARS = re.compile(r"[^A-Za-z0-9_.-]+")
_OTHER = Dataset("", "", hub_id="", question="", answer="", train_split="train", eval_split="test")
_MAX_CSV_FIELD = 2**31 - 1  # the default limit of 128 KiB is shorter than a long worked solution

QUESTION_NAMES = ("question", "problem", "prompt", "query", "input", "messages")
_VERL_ANSWER = "reward_model.ground_truth"
ANSWER_NAMES = ("answer", "final_answer", "ground_truth", "target", _VERL_ANSWER, "solution")
LEVEL_NAMES = ("level", "difficulty")
"""The usual names, in the order in which they are tried."""

_INTEGER_VALUED = re.compile(r"(-?\d+)\.0+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_FIRST_NUMBER = re.compile(r"\d+")
CHAT_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")


class NotLoadedError(ConfigError):
    """A data set on the hub, or in a folder, that cannot be loaded; the caller advises how to give local copies."""


def read_rows(source: Source, part: SplitName, revision: str | None = None) -> Iterator[Row]:
    """Read the rows of a source, a data set in its latest revision by default; raise ConfigError if that fails."""
    path = user_path(str(source.path))
    if hub_id(source) is not None or (path_exists(path) and path.is_dir()):
        return _read_dataset(source, part, revision)
    if not path_exists(path) and path.suffix.lower() not in FILE_SUFFIXES:
        raise ConfigError(
            f"task.{part} = '{source.path}': no such file, and no known data set of that name"
            f"{nearest(str(source.path), DATASETS)}; known: {', '.join(DATASETS)}"
        )
    for name in ("subset", "split"):
        if getattr(source, name) is not None:
            raise ConfigError(f"task.{part}: {name} is for data sets on the hub; '{path}' is a file")
    return read_file(path)


def known_dataset(source: Source) -> Dataset:
    """Return the known data set that a source is from; for any other source, an entry with the general defaults."""
    return _OTHER if source.name is None else DATASETS[source.name]


def hub_id(source: Source) -> str | None:
    """Return the id of the data set on the hub that `read_rows` reads; None for a file or folder."""
    if source.path is None:
        return known_dataset(source).hub_id or None
    path = user_path(source.path)
    is_local = path_exists(path) or path.suffix.lower() in FILE_SUFFIXES
    return None if is_local or not _HUB_ID.fullmatch(source.path) else source.path


def read_file(path: Path) -> Iterator[Row]:
    """Read the rows of a local file, one at a time if the format allows it; raise ConfigError if that fails."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path}: not a data file; supported: {', '.join(FILE_SUFFIXES)}")
    check_regular_file(path, str(path))
    try:
        yield from reader(path)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or first_line(error)}") from None
    except Exception as error:  # noqa: BLE001 - pyarrow raises errors of any type for a damaged file
        raise ConfigError(f"{path}: not readable as {path.suffix}: {first_line(error)}") from None


def _read_dataset(source: Source, part: SplitName, revision: str | None) -> Iterator[Row]:
    """Read the rows of one split of a data set: on the hub, in a folder of its layout, or as it was saved to disk."""
    import datasets
    from huggingface_hub.utils.tqdm import disable_progress_bars

    known = known_dataset(source)
    path, subset = hub_id(source) or str(user_path(str(source.path))), source.subset or known.subset
    split = source.split or known.split(part)
    if split is None:
        raise ConfigError(
            f"task.{part}: '{source.name}' has no split for this part; name one with split:, or use another data set"
        )
    parts = {"data set": path, "subset": subset, "split": split, "revision": revision}
    what = ", ".join(f"{name} '{value}'" for name, value in parts.items() if value)
    datasets.disable_progress_bars()  # they redraw their line with control codes, which would be escaped
    disable_progress_bars()
    logging.disable(logging.WARNING)  # an unreachable hub logs every retry; the error message reports it once
    try:
        if any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json")):
            rows = datasets.load_from_disk(path)
        else:
            at_revision = {"revision": revision} if revision else {}
            rows = datasets.load_dataset(path, subset, split=split, **at_revision)
    except Exception as error:  # noqa: BLE001 - OSError, ValueError, errors of pyarrow and of the library
        raise NotLoadedError(f"{what}: cannot be loaded ({first_line(error).rstrip('.')})") from None
    finally:
        logging.disable(logging.NOTSET)
    if isinstance(rows, datasets.DatasetDict):
        if split not in rows:
            raise ConfigError(f"{what}: no such split; it has {', '.join(rows)}")
        rows = rows[split]
    try:
        for batch in rows.with_format("arrow").iter(batch_size=1024):
            yield from batch.to_pylist()
    except Exception as error:  # noqa: BLE001 - readers raise errors of any type for a damaged file
        raise ConfigError(f"data set '{path}': cannot be read ({first_line(error)})") from None


def source_label(source: Source) -> str:
    """Return the name of a source in metrics: its label, else the name of the data set, else the name of the file.

    Characters that are not allowed in a metric name are replaced; raise ConfigError if no character is allowed.
    """
    if given := source.label or source.name:
        return given
    path = Path(str(source.path))
    base = path.stem if path.suffix.lower() in FILE_SUFFIXES else path.name
    label = _LABEL_CHARS.sub("-", base).strip("-_.")[:60]
    if not label:
        raise ConfigError(f"'{source.path}': its name cannot be part of a metric name; give it a label:")
    return label


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):  # bytes: only \n ends a line, no other separator
            where = f"{path}, line {number}"
            if text := _text(line, where).strip():
                try:
                    yield _row(_parse_json(text), where)
                except (ValueError, RecursionError) as error:
                    raise _json_error(where, error) from None


def _read_json(path: Path) -> Iterator[Row]:
    try:
        content = _parse_json(_text(path.read_bytes(), str(path)))
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise _json_error(f"{path}, line {error.lineno}", error) from None
        yield from _read_jsonl(path)  # one object per line, although the extension is .json
        return
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        content = lists[0] if len(lists) == 1 else None
    if not isinstance(content, list):
        raise ConfigError(f"{path}: expected a list of objects, or one object that contains such a list")
    for number, entry in enumerate(content, start=1):
        yield _row(entry, f"{path}, entry {number}")


def _read_csv(path: Path) -> Iterator[Row]:
    text = io.StringIO(_text(path.read_bytes(), str(path)), newline="")
    earlier_limit = csv.field_size_limit(_MAX_CSV_FIELD)
    reader = csv.DictReader(text, strict=True, skipinitialspace=True)
    try:
        names = reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"{path}, line 1: two columns have the same name; the first line must name the columns"
            )
        if len(names) == 1 and (separators := [mark for mark in ";\t" if mark in names[0]]):
            defect = f"its columns seem to be separated by {separators[0]!r}"
            raise ConfigError(f"{path}, line 1: {defect}; save it with commas")
        for row in reader:
            if None in row:
                raise ConfigError(
                    f"{path}, line {reader.line_num}: {len(names) + len(row[None])} values for {len(names)} columns; "
                    "put texts with commas in double quotes"
                )
            yield row
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.reader.line_num}: not readable as CSV: {error}") from None
    finally:
        csv.field_size_limit(earlier_limit)


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            yield from batch.to_pylist()


_READERS = dict(zip(FILE_SUFFIXES, (_read_jsonl, _read_json, _read_csv, _read_parquet), strict=True))


def _text(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: not UTF-8 text; save it as UTF-8") from None


def _parse_json(text: str) -> Any:
    """Parse JSON. Raise ValueError also for a key that an object has twice: `json` keeps the last value only."""

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(fields := dict(pairs)) < len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise ValueError(f"an object has the key {twice!r:.80} twice")
        return fields

    return json.loads(text, object_pairs_hook=unique_keys)


def _json_error(where: str, error: Exception) -> ConfigError:
    problem = first_line(error)
    if isinstance(error, json.JSONDecodeError):
        problem = f"{error.msg}, column {error.colno}"
    return ConfigError(f"{where}: not readable as JSON: {problem}")


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise ConfigError(f'{where}: expected an object, {{"question": ..., "answer": ...}}')
    return value


def find_fields(
    rows: Iterable[Mapping[str, Any]], configured: Fields | None = None, known: Fields | Dataset | None = None
) -> Fields:
    """Return the dotted paths of the fields, None for a field that was not found.

    The configured fields (`fields:` of a source) come first, else the first name that has a usable value in one of
    `rows`: of verl's layout, of the known data set, of the usual names, with a worked solution last. Without a field
    for answers, `answer` equals `question`: the assistant message at the end of the chat messages.
    """
    configured, known, rows = configured or Fields(), known or Fields(), list(rows)

    def first(names: Iterable[str | None], usable: Callable[[Any], Any]) -> str | None:
        return next((n for n in names if n and any(usable(value_at(row, n)) for row in rows)), None)

    verl = any(
        is_chat(chat_value(row.get("prompt"))) and value_at(row, _VERL_ANSWER) is not None for row in rows
    )
    questions = ["prompt" if verl else None, known.question, *QUESTION_NAMES]
    answers = sorted([known.answer, *ANSWER_NAMES], key=lambda name: name == "solution")
    question = configured.question or first(questions, lambda value: is_chat(value) or clean_text(value))
    question = question or first(questions, has_surrogates)  # its rows are dropped for that reason
    answer = configured.answer or first([_VERL_ANSWER if verl else None, *answers], as_answer)
    if answer is None:
        last_turns = [chat[-1] for row in rows if is_chat(chat := chat_value(value_at(row, question)))]
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


def chat_value(value: Any) -> Any:
    """Return chat messages that are JSON text, as in the cells of a CSV file, as the list; other values unchanged."""
    if isinstance(value, str) and CHAT_TEXT.match(value):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


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
    """Convert a value of a row into JSON values that can be stored in a table and sent to a worker process."""
    if depth > 50:  # no row can exhaust the stack
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
