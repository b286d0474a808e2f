"""Local files: all formats give the same rows, and the error for a damaged file is one line with the place."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bandpo_cli.errors import ConfigError
from bandpo_cli.tasks.rows import read_file

ROWS = [
    {"question": 'He said "1, 2"\nand then?', "answer": "3"},
    {"question": "a line\u2028separator, é, 𝕏, {braces}", "answer": ""},
]


def write_file(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def error_of(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        list(read_file(path))
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")


def write_json(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps({"version": 1, "data": rows}, indent=1), encoding="utf-8")


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8-sig", newline="") as file:  # as a spreadsheet saves it, BOM included
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


WRITERS = {
    ".jsonl": write_jsonl,
    ".json": write_json,
    ".csv": write_csv,
    ".parquet": write_parquet,
    ".JSONL": write_jsonl,
}


@pytest.mark.parametrize("ending", WRITERS)
def test_all_formats_give_the_same_rows(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"rows{ending}"
    WRITERS[ending](path, ROWS)
    assert list(read_file(path)) == ROWS


def test_json_extension_with_a_list_or_one_object_per_line(tmp_path: Path) -> None:
    assert list(read_file(write_file(tmp_path / "list.json", json.dumps(ROWS)))) == ROWS
    lines = tmp_path / "lines.json"
    write_jsonl(lines, ROWS)
    assert list(read_file(lines)) == ROWS


def test_spaces_after_commas_in_csv(tmp_path: Path) -> None:
    path = write_file(tmp_path / "x.csv", 'question, answer\n"1, 2 or 3?", "3"\nq, 4\n')
    assert list(read_file(path)) == [
        {"question": "1, 2 or 3?", "answer": "3"},
        {"question": "q", "answer": "4"},
    ]


def test_parquet_gives_plain_python_values(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "q"}], "reward_model": {"truth": "1"}, "n": 3, "x": None}
    path = tmp_path / "verl.parquet"
    write_parquet(path, [row])
    (read,) = read_file(path)
    assert read == row
    assert [type(read[name]) for name in ("prompt", "reward_model", "n")] == [list, dict, int]


@pytest.mark.slow
def test_row_of_ten_megabytes(tmp_path: Path) -> None:
    long = "x" * 10_000_000
    for ending in (".jsonl", ".csv"):
        path = tmp_path / f"long{ending}"
        WRITERS[ending](path, [{"question": long, "answer": "1"}])
        assert list(read_file(path)) == [{"question": long, "answer": "1"}]
    assert csv.field_size_limit() < 10_000_000, "the global limit of the csv module is restored"


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


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for ending in (".jsonl", ".json", ".csv", ".parquet"):
        assert "No such file" in error_of(tmp_path / f"none{ending}")
    (tmp_path / "folder.json").mkdir()
    assert "directory" in error_of(tmp_path / "folder.json")


def test_files_without_rows(tmp_path: Path) -> None:
    for name, content in (
        ("e.jsonl", "\n \n"),
        ("e.csv", ""),
        ("h.csv", "question,answer\n"),
        ("e.json", "[]"),
    ):
        assert list(read_file(write_file(tmp_path / name, content))) == []
