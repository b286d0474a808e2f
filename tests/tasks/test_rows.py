"""Rows of local files in all formats, the choice of their fields, and the conversion of values of any type."""

import contextlib
import csv
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bandpo_cli.config.task import Fields
from bandpo_cli.errors import ConfigError
from bandpo_cli.tasks.question_answers import read_question
from bandpo_cli.tasks.rows import (
    ANSWER_NAMES,
    as_answer,
    as_level,
    find_fields,
    read_file,
    to_json_value,
    value_at,
)  # fmt: skip

NONE = Fields()
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]

TEXTS = st.text(st.sampled_from("a1 \n\x00#$\\{}é\ud800"), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.binary(max_size=3) | st.decimals(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=10,
)


ANSWERS = [
    (27.0, "27"), (-0.5, "-0.5"), (1e-7, "0.0000001"), (1e22, "10000000000000000000000"), ("27.0", "27"),
    (2**80 + 1, "1208925819614629174706177"), (Decimal("12.50"), "12.50"), (Decimal("3.00"), "3"), ("025", "025"),
    (" $\\frac{1}{2}$ ", "\\frac{1}{2}"), ("$5", "$5"), ("$1$ and $2$", "$1$ and $2$"),
    ("So it is 6 * 3.\n#### 18", "18"), ("First \\boxed{1}, then \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
    (["$2$", "$-1,5$"], "2, -1,5"), (["4"], "4"), (True, "True"), ("\ud800", None), ([[["1"]]], None),
    ({"target": 28, "numbers": [1, 3]}, '{"numbers": [1, 3], "target": 28}'),
    *((nothing, None) for nothing in (None, "", "  ", [], [None], {}, float("nan"), float("inf"), b"18")),
]  # fmt: skip


def test_answers():
    for value, answer in ANSWERS:
        assert as_answer(value) == answer, value


def test_levels():
    levels = {"Level 3": 3, 3: 3, "5": 5, "Level ?": None, 2.5: None, None: None, 4.0: 4}
    assert {value: as_level(value) for value in levels} == levels
    assert as_level(True) is None


@settings(max_examples=15)
@given(VALUES)
def test_any_value_is_converted_or_none(value):
    """Only chat messages raise an error; every result can be encoded as UTF-8 and JSON."""
    if (answer := as_answer(value)) is not None:
        assert answer.encode().strip()
    with contextlib.suppress(ConfigError):
        question = read_question({"q": value}, Fields(question="q"), "row 1")
        assert question is None or question.prompt
    as_level(value)
    json.dumps(to_json_value(value), allow_nan=False)


def test_nesting_depth_cannot_exhaust_the_stack():
    deep = "1"
    for _ in range(5000):
        deep = {"a": [deep]}
    assert to_json_value(deep) is not None
    assert as_answer(deep) is not None
    assert as_answer([deep]) is None


def test_dotted_paths():
    row = {"a": {"b": {"c": 1}}, "a.b": 2, "x": None}
    assert value_at(row, "a.b.c") == 1
    assert value_at(row, "a.b") == 2
    assert value_at(row, "a.z") is None
    assert value_at(row, "x.y") is None


USUAL_NAMES = [
    ({"question": "q", "answer": "a", "prompt": "p"}, ("question", "answer")),
    ({"query": "q", "target": 0}, ("query", "target")),
    ({"input": "q", "solution": "1"}, ("input", "solution")),
    ({"question": None, "problem": "q", "ground_truth": 1}, ("problem", "ground_truth")),
    ({"question": "q", "text": "a"}, ("question", None)),
    ({"text": "q", "answer": "a"}, (None, "answer")),
    ({"messages": CHAT, "problem": "q", "solution": "1"}, ("problem", "solution")),
    ({}, (None, None)),
]


def test_usual_names():
    for row, names in USUAL_NAMES:
        for rows in ([row], [dict.fromkeys(row), row]):  # a row without values does not decide
            fields = find_fields(rows)
            assert (fields.question, fields.answer) == names, row


def test_configured_fields_and_the_verl_layout_have_priority():
    row = {"prompt": CHAT, "reward_model": {"ground_truth": "2"}, "question": "no", "answer": "no"}
    row["level"] = 3
    verl = Fields(question="prompt", answer="reward_model.ground_truth", level="level")
    assert find_fields([row]) == verl
    configured = Fields(question="meta.q", answer="meta.n", level="hard", id="meta.q")
    assert find_fields([row | {"meta": {"q": "x", "n": 7}, "hard": 5}], configured) == configured


def test_fields_of_a_known_dataset_precede_the_usual_names_and_a_solution_is_last():
    known = Fields(question="prompt", answer="solution", level="level")
    row = {"question": "other", "prompt": "q", "solution": "\\boxed{1}", "level": "Level 2"}
    assert find_fields([row], NONE, known) == known
    assert find_fields([{**row, "answer": "1"}], NONE, known).answer == "answer"
    row = {"question": "1+1?", "answer": "a comment", "final_answer": "2"}
    assert find_fields([row], NONE, Fields(answer="final_answer")).answer == "final_answer"
    assert find_fields([row]).answer == "answer"


def test_worked_solution_is_used_only_without_an_answer_field():
    """Also for a copy of a known data set whose answer field is the worked solution."""
    for name in ANSWER_NAMES[:-1]:
        section, _, key = name.partition(".")
        row = {"question": "1+1?", "solution": "It is \\boxed{3}."}
        answered = row | {section: {key: "2"} if key else "2"}
        for known in (NONE, Fields(answer="solution")):
            assert find_fields([answered], NONE, known).answer == name
            assert find_fields([row], NONE, known).answer == "solution"


ROWS = [
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
def test_all_formats_give_the_same_rows(tmp_path, name):
    assert list(read_file(write_rows(tmp_path / name, ROWS))) == ROWS


def test_json_and_csv_in_other_forms(tmp_path):
    """A list, an object per line under the extension .json, and spaces after the commas of CSV."""
    assert list(read_file(write_file(tmp_path / "list.json", json.dumps(ROWS)))) == ROWS
    lines = write_file(tmp_path / "lines.json", "\n\n".join(map(json.dumps, ROWS)))
    assert list(read_file(lines)) == ROWS
    path = write_file(tmp_path / "x.csv", 'question, answer\n"1, 2 or 3?", "3"\nq, 4\n')
    assert [[*row.values()] for row in read_file(path)] == [["1, 2 or 3?", "3"], ["q", "4"]]


def test_parquet_gives_plain_python_values(tmp_path):
    row = {"prompt": [{"role": "user", "content": "q"}], "reward_model": {"truth": "1"}, "n": 3, "x": None}
    (read,) = read_file(write_rows(tmp_path / "verl.parquet", [row]))
    assert read == row
    assert [type(read[name]) for name in ("prompt", "reward_model", "n")] == [list, dict, int]


def test_row_of_megabytes(tmp_path):
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
def test_damaged_file_is_reported_in_one_line(tmp_path, name, content, parts):
    message = error_of(write_file(tmp_path / name, content))
    for part in parts:
        assert part in message, message


def test_missing_files_and_files_without_rows(tmp_path):
    (tmp_path / "folder.json").mkdir()
    assert "directory" in error_of(tmp_path / "folder.json")
    assert "No such file" in error_of(tmp_path / "none.csv")
    empty = {"e.jsonl": "\n \n", "e.csv": "", "h.csv": "question,answer\n", "e.json": "[]"}
    for name, content in empty.items():
        assert list(read_file(write_file(tmp_path / name, content))) == []
