"""Files that are not stored completions: one line that names the row, for any content."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bandpo_cli.storage.tables import write_eval_table
from bandpo_cli.tasks.completions import read_completions
from tests.fuzz.outcome import accepts
from tests.tasks.stored_completions import ROW, error_of, jsonl, mutations, nested, swaps


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ["holds no completions"]),
        (b"[]", ["line 1", "expected an object"]),
        (b'{"question": "q", "answer": "1"}', ["no field found for the completions", "'question', 'answer'"]),
        (b'{"answer": "1", "completions": ["x"]}', ["no field found for the question"]),
        (b'{"question": "q", "completions": ["x"]}', ["no field found for the answer"]),
        (b'{"question": "q", "answer": "1", "completions": []}', ["row 1", "'completions'", "list of texts, not []"]),
        (b'{"question": "q", "answer": "1", "completions": {"a": 1}}', ["row 1", "{'a': 1}"]),
        (b'{"question": "q", "answer": "1", "completions": [["x"]]}', ["row 1", "must hold text, not ['x']"]),
        (b'{"question": "q", "answer": "1", "completions": ["x", 5]}', ["row 1", "not 5"]),
        (b'{"a\\nb": 1, "c": 2}', ["no field found"]),
        (b'{"question": "q", "answer": "1", "completions": ' + nested(900).encode() + b"}", ["row 1"]),
        (b'{"question": "q", "answer": ' + nested(900).encode() + b', "completions": ["x"]}', ["answer"]),
        (b'{"' + b"a" * 5_000_000 + b'": 1}', ["no field found"]),
        (b'{"question": "q", "answer": "1", "completions": [' + b"1," * 1_000_000 + b"1]}", ["must hold text"]),
    ],
)  # fmt: skip
def test_invalid_jsonl_files(tmp_path: Path, content: bytes, parts: list[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    line = error_of(path)
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("second", "part"),
    [
        ({"question": "q", "answer": "1"}, "'completions' must be a list of texts, not None"),
        ({"answer": "1", "completions": ["x"]}, "'question' holds no question: None"),
        ({"question": "q", "answer": {}, "completions": ["x"]}, "'answer' holds no answer: {}"),
        ({"question": "q", "answer": math.inf, "completions": ["x"]}, "no answer: inf"),
    ],
)
def test_error_in_a_later_row_names_the_row(tmp_path: Path, second: dict, part: str) -> None:
    first = {"question": "p", "answer": "1", "completions": ["x"]}
    line = error_of(jsonl(tmp_path / "a.jsonl", first, second))
    assert "row 2: " in line
    assert part in line


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"text": None}, ["row 2", "'text' must hold text, not None"]),
        ({"text": 5}, ["'text'", "not 5"]),
        ({"reference": 2}, ["'reference'"]),
        ({"grader": None}, ["'grader'"]),
        ({"prompt": ["x"]}, ["'prompt'"]),
        ({"task": "a/b"}, ["'task' = 'a/b'", "metric"]),
        ({"length": -1}, ["'length'", "-1"]),
        ({"length": 1.5}, ["'length'", "1.5"]),
        ({"length": 2**31}, ["'length'"]),
        ({"length": "x"}, ["'length'", "'x'"]),
        ({"length": True}, ["'length'"]),
        ({"length": [1]}, ["'length'"]),
        ({"logprob_sum": math.inf}, ["'logprob_sum'", "inf"]),
        ({"logprob_sum": 10**400}, ["'logprob_sum'"]),
        ({"finish_reason": 3}, ["'finish_reason'"]),
        ({"extra": "{"}, ["'extra' must hold a JSON object, not '{'"]),
        ({"extra": "[1]"}, ["'extra'"]),
        ({"extra": nested(100_000)}, ["'extra'"]),
        ({"extra": 5}, ["'extra'"]),
        ({"reference": "3"}, ["'p1' has another reference"]),
        ({"grader": "math"}, ["'p1' has another reference or grader"]),
    ],
)
def test_invalid_values_in_an_own_table(tmp_path: Path, change: dict, parts: list[str]) -> None:
    line = error_of(jsonl(tmp_path / "a.jsonl", ROW, {**ROW, **change}))
    for part in (*parts, "row 2"):
        assert part in line


def test_missing_field_in_an_own_table(tmp_path: Path) -> None:
    for missing in ("problem_id", "reference", "text", "task"):
        row = {key: value for key, value in ROW.items() if key != missing}
        message = error_of(jsonl(tmp_path / "a.jsonl", ROW, row))
        assert f"row 2: '{missing}' must hold text, not None" in message


def test_tables_without_rows_or_with_columns_of_other_types(tmp_path: Path) -> None:
    assert "holds no completions" in error_of(write_eval_table(tmp_path / "none.parquet", []))
    for name, column in (
        ("text", pa.array([b"\xff"], pa.binary())),
        ("text", pa.array([["x"]])),
        ("reference", pa.array([2.5])),
        ("length", pa.array([{"x": 1}])),
        ("extra", pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))),
    ):
        table = pa.Table.from_pylist([dict(ROW)])
        table = table.set_column(table.column_names.index(name), name, column)
        pq.write_table(table, tmp_path / "odd.parquet")
        assert f"'{name}'" in error_of(tmp_path / "odd.parquet")


@pytest.mark.slow
def test_mutated_files_are_read_or_rejected_in_one_line(tmp_path: Path) -> None:
    """Mutated bytes of a table, and values of other types in its rows; `tests.fuzz` has the other layout."""
    table = write_eval_table(tmp_path / "good.parquet", [ROW, {**ROW, "length": None}] * 3).read_bytes()
    contents = [("m.parquet", content) for content in mutations(table, 1, 400)]
    for rows in swaps([dict(ROW), dict(ROW)], 3, 400):
        contents.append(("s.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode()))
    accepted = 0
    for name, content in contents:
        (tmp_path / name).write_bytes(content)
        accepted += accepts(lambda name=name: read_completions(tmp_path / name), content[:2000])
    assert 0.05 < accepted / len(contents) < 0.95, "some files are read and some are rejected"
