"""Rows of local files: .jsonl, .json, .csv and .parquet, as plain dicts of plain Python values."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bandpo_cli.config.data import FILE_ENDINGS
from bandpo_cli.errors import ConfigError
from bandpo_cli.paths import check_regular

Row = dict[str, Any]

_MAX_CSV_FIELD = 2**31 - 1  # the csv module's own limit of 128 KiB is shorter than a long worked solution


def read_file(path: Path) -> Iterator[Row]:
    """Read the rows of a file, one at a time where the format allows it.

    Raises:
        ConfigError: the file cannot be read, has another ending, or is damaged; the line is named where it is known.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path}: not a data file; {', '.join(FILE_ENDINGS)} can be read")
    check_regular(path, str(path))
    try:
        yield from reader(path)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or _first_line(error)}") from None
    except Exception as error:  # noqa: BLE001 - of a damaged Parquet file pyarrow raises errors of any kind
        raise ConfigError(f"{path}: not readable: {_first_line(error)}") from None


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):  # bytes: only \n ends a line, whatever a text holds
            where = f"{path}, line {number}"
            text = _text(line, where)
            if text.strip():
                yield _row(_json(text, where), where)


def _read_json(path: Path) -> Iterator[Row]:
    text = _text(path.read_bytes(), str(path))
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # one object a line, under the ending of a whole document
            yield from _read_jsonl(path)
            return
        raise ConfigError(f"{path}, line {error.lineno}: not readable as JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {_first_line(error)}") from None
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        content = lists[0] if len(lists) == 1 else None
    if not isinstance(content, list):
        raise ConfigError(f"{path}: expected a list of objects, or one object with such a list in it")
    for number, entry in enumerate(content, start=1):
        yield _row(entry, f"{path}, entry {number}")


def _read_csv(path: Path) -> Iterator[Row]:
    text = io.StringIO(_text(path.read_bytes(), str(path)), newline="")
    earlier_limit = csv.field_size_limit(_MAX_CSV_FIELD)
    reader = csv.reader(text, strict=True, skipinitialspace=True)
    try:
        names = [name.strip() for name in next(reader, [])]
        _check_columns(names, path)
        for values in reader:
            if len(values) > len(names):
                raise ConfigError(
                    f"{path}, line {reader.line_num}: {len(values)} values for {len(names)} columns; "
                    "put a text with commas into double quotes"
                )
            if values:
                yield dict(zip(names, values, strict=False))
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: not readable as CSV: {error}") from None
    finally:
        csv.field_size_limit(earlier_limit)


def _check_columns(names: list[str], path: Path) -> None:
    if len(set(names)) < len(names):
        raise ConfigError(f"{path}, line 1: two columns have one name; the first line must name the columns")
    separator = next((mark for mark in ";\t" if len(names) == 1 and mark in names[0]), None)
    if separator:
        raise ConfigError(
            f"{path}, line 1: its columns seem to be separated by {separator!r}; save it with commas"
        )


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not readable as Parquet: {_first_line(error)}") from None


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
        raise ConfigError(f"{where}: not a text in UTF-8; save it as UTF-8") from None


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not readable as JSON: {_first_line(error)}") from None


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise ConfigError(f'{where}: expected an object, {{"question": ..., "answer": ...}}')
    return value


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
