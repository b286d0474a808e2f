"""Files that are not stored completions: one line that names the row, for any content."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.tasks.stored_completions import ROW, error_of, jsonl, nested


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
        ({"question": "q", "answer": math.inf, "completions": ["x"]}, "'answer' holds no answer: inf"),
    ],
)
def test_error_in_a_later_row_names_the_row(tmp_path: Path, second: dict, part: str) -> None:
    first = {"question": "p", "answer": "1", "completions": ["x"]}
    assert f"row 2: {part}" in error_of(jsonl(tmp_path / "a.jsonl", first, second))


CHANGES = [
    *(({name: value}, f"'{name}' = {value!r}: Input should be a valid string") for name, value in (
        ("text", None), ("text", 5), ("reference", 2), ("grader", None), ("prompt", ["x"]), ("task", None),
        ("problem_id", None), ("finish_reason", 3),
    )),
    *(({name: value}, f"'{name}' = ") for name, value in (
        ("length", "x"), ("length", [1]), ("length", -1), ("length", 1.5), ("length", 2**31), ("logprob_sum", math.inf),
        ("logprob_sum", 10**400),
    )),
    *(({"extra": value}, "'extra' = ") for value in ("{", "[1]", nested(100_000), 5)),
    ({"task": "a/b"}, "'task' = 'a/b': String should match pattern"),
    ({"task": "x" * 61}, "at most 60 characters"),
    ({"reference": "3"}, "'p1' has another reference or grader"),
    ({"grader": "math"}, "'p1' has another reference or grader"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "part"), CHANGES)
def test_invalid_values_in_an_own_table(tmp_path: Path, change: dict, part: str) -> None:
    line = error_of(jsonl(tmp_path / "a.jsonl", ROW, {**ROW, **change}))
    assert "row 2: " in line
    assert part in line
