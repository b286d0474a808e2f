"""Local files: all formats give the same rows, and the error for a damaged file is one line with the place."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pandas
import pytest

from bandpo_cli.errors import ConfigError
from bandpo_cli.tasks.rows import read_file

ROWS: list[dict[str, Any]] = [
    {"question": 'He said "1, 2"\nand then?', "answer": "3"},
    {"question": "a line\u2028separator, é, 𝕏, {braces}", "answer": ""},
]


def write_file(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def error_of(path: Path) -> str:
    with pytest.raises(ConfigError, match=re.escape(str(path))) as caught:
        list(read_file(path))
    return str(caught.value)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the format of the extension, CSV as a spreadsheet saves it, with a BOM."""
    if path.suffix == ".csv":
        pandas.DataFrame(rows).to_csv(path, index=False, encoding="utf-8-sig", quoting=csv.QUOTE_ALL)
    elif path.suffix == ".parquet":
        pandas.DataFrame(rows).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps({"version": 1, "data": rows}, indent=1))
    else:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.JSONL"])
def test_all_formats_give_the_same_rows(tmp_path: Path, name: str) -> None:
    assert list(read_file(write_rows(tmp_path / name, ROWS))) == ROWS


def test_json_and_csv_in_other_forms(tmp_path: Path) -> None:
    """A list, an object per line under the extension .json, and spaces after the commas of CSV."""
    assert list(read_file(write_file(tmp_path / "list.json", json.dumps(ROWS)))) == ROWS
    lines = write_file(tmp_path / "lines.json", "\n\n".join(map(json.dumps, ROWS)))
    assert list(read_file(lines)) == ROWS
    path = write_file(tmp_path / "x.csv", 'question, answer\n"1, 2 or 3?", "3"\nq, 4\n')
    assert [[*row.values()] for row in read_file(path)] == [["1, 2 or 3?", "3"], ["q", "4"]]


def test_parquet_gives_plain_python_values(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "q"}], "reward_model": {"truth": "1"}, "n": 3, "x": None}
    (read,) = read_file(write_rows(tmp_path / "verl.parquet", [row]))
    assert read == row
    assert [type(read[name]) for name in ("prompt", "reward_model", "n")] == [list, dict, int]


def test_row_of_megabytes(tmp_path: Path) -> None:
    rows = [{"question": "x" * 2_000_000, "answer": "1"}]
    for name in ("long.jsonl", "long.csv"):
        assert list(read_file(write_rows(tmp_path / name, rows))) == rows
    assert csv.field_size_limit() < 2_000_000, "the global limit of the csv module is restored"


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("x.jsonl", '{"a": 1}\n{"a": \n', ["line 2", "not readable as JSON"]),
        ("x.jsonl", '{"a": 1}\n\n[1]\n', ["line 3", "expected an object"]),
        ("x.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', ["line 2", "UTF-8"]),
        ("x.jsonl", '{"a": ' + "[" * 100_000, ["line 1", "not readable as JSON"]),
        ("x.jsonl", '{"a": ' + "9" * 10_000 + "}", ["line 1", "not readable as JSON"]),
        ("x.jsonl", "question,answer\n1,2\n", ["line 1", "not readable as JSON"]),
        ("x.jsonl", '{"a": 1}\n{"a": {"b": 1, "c": 2, "b": 1}}', ["line 2", "has the key 'b' twice"]),
        ("x.json", '[{"answer": 1, "answer": 2}]', ["not readable as .json", "has the key 'answer' twice"]),
        ("x.json", "", ["line 1", "not readable as JSON"]),
        ("x.json", '{\n"a": [,]}', ["line 2", "not readable as JSON"]),
        ("x.json", "3", ["expected a list of objects"]),
        ("x.json", '{"a": [1], "b": [2]}', ["expected a list of objects"]),
        ("x.json", '[{"a": 1}, null]', ["entry 2", "expected an object"]),
        ("x.json", b"\xff\xfe{\x00}\x00", ["UTF-8"]),
        ("x.csv", "a,b\n1,2\n1,2,3\n", ["line 3", "3 values for 2 columns", "double quotes"]),
        ("x.csv", "question;answer\n1;2\n", ["line 1", "separated by ';'", "commas"]),
        ("x.csv", "a,a\n1,2\n", ["line 1", "two columns"]),
        ("x.csv", 'a,b\n1,"2\n', ["line 2", "not readable as CSV"]),
        ("x.csv", "a\n\xe9\n".encode("latin-1"), ["UTF-8"]),
        ("x.parquet", b"PAR1 is not enough", ["not readable as .parquet"]),
        ("x.parquet", b"", ["not readable as .parquet"]),
        ("x.txt", "q", [".jsonl, .json, .csv, .parquet"]),
    ],
)
def test_damaged_file_is_reported_in_one_line(
    tmp_path: Path, name: str, content: bytes | str, parts: list[str]
) -> None:
    message = error_of(write_file(tmp_path / name, content))
    for part in parts:
        assert part in message, message


def test_missing_files_and_files_without_rows(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    assert "directory" in error_of(tmp_path / "folder.json")
    assert "No such file" in error_of(tmp_path / "none.csv")
    for name, content in (
        ("e.jsonl", "\n \n"),
        ("e.csv", ""),
        ("h.csv", "question,answer\n"),
        ("e.json", "[]"),
    ):
        assert list(read_file(write_file(tmp_path / name, content))) == []
