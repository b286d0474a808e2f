"""Rows of the sources in a config: local files, folders and data sets on the Hugging Face hub.

Rows are plain dicts of plain Python values. Local files may be .jsonl, .json, .csv or .parquet.
"""

import csv
import io
import json
import logging
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from bandpo_cli.config.task import FILE_SUFFIXES, Source
from bandpo_cli.errors import ConfigError, first_line, nearest
from bandpo_cli.paths import check_regular_file, path_exists, user_path
from bandpo_cli.registries import DATASETS, Dataset

Row = dict[str, Any]
SplitName = Literal["train", "heldout"]
"""The setting that names a source: `task.train` or `task.heldout`."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_LABEL_CHARS = re.compile(r"[^A-Za-z0-9_.-]+")
_OTHER = Dataset("", "", hub_id="", question="", answer="", train_split="train", eval_split="test")
_MAX_CSV_FIELD = 2**31 - 1  # the default limit of 128 KiB is shorter than a long worked solution


def read_rows(source: Source, part: SplitName, revision: str | None = None) -> Iterator[Row]:
    """Read the rows of a source: a local file, a folder, or a data set on the hub, by default its latest revision.

    Raise ConfigError if there is no such file or data set, or it cannot be read.
    """
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
    """Read the rows of a local file, one at a time if the format allows it.

    Raise ConfigError, with the line if it is known, if the file cannot be read, has another extension, or is damaged.
    """
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
        copy = "FILE" if source.name is None else f"{{name: {source.name}, path: FILE}}"
        raise ConfigError(
            f"{what}: cannot be loaded ({first_line(error).rstrip('.')}); give a local copy: --set "
            f"{shlex.quote(f'task.{part}={copy}')}"
        ) from None
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
            raise ConfigError(
                f"{path}, line 1: its columns seem to be separated by {separators[0]!r}; save it with commas"
            )
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


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


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
