"""Stored completions are read as they were written, and whatever else a file holds gets one line that names the row."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bandpo_cli.errors import ConfigError
from bandpo_cli.storage.tables import EvalRow, SampleRow, write_eval_table, write_sample_table
from bandpo_cli.tasks.completions import StoredCompletion, read_completions

ROW = EvalRow(
    task="aime24", problem_id="p1", prompt="1+1?", reference="2", grader="number", extra='{"level": 3}',
    text="Answer: 2", answer="2", accuracy=1.0, verdict="correct", length=5, finish_reason="stop", logprob_sum=-1.25,
)  # fmt: skip


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def line_of(path: Path, grader: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        read_completions(path, grader)
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    assert len(line) < 600 + len(str(path))
    return line


def test_an_evaluations_table_comes_back_as_it_was(tmp_path: Path) -> None:
    rows = [
        ROW,
        {**ROW, "text": "no", "length": None, "finish_reason": None, "logprob_sum": None},
        {**ROW, "task": "other", "grader": "math"},
        {**ROW, "problem_id": "p2", "extra": "{}"},
    ]
    sets = read_completions(write_eval_table(tmp_path / "samples.parquet", rows))
    assert list(sets) == ["aime24", "other"]
    first, second = sets["aime24"]
    assert (first.problem.id, first.problem.answer, first.problem.prompt) == ("p1", "2", "1+1?")
    assert (first.problem.grader, first.problem.source, first.problem.extra) == (
        "number",
        "aime24",
        {"level": 3},
    )
    assert first.completions_G == [StoredCompletion("Answer: 2", 5, "stop", -1.25), StoredCompletion("no")]
    assert (second.problem.id, len(second.completions_G)) == ("p2", 1)
    assert sets["other"][0].problem.grader == "math"


def test_a_training_steps_table_is_a_set_named_by_its_source(tmp_path: Path) -> None:
    row = SampleRow(
        source="countdown", problem_id="c", prompt="1 2=3:", reference="3", grader="countdown",
        extra='{"numbers": "1 2"}', text="1+2", reward=1.0, accuracy=1.0, length=4, finish_reason="stop",
        verdict="correct", logprob_sum=-0.5,
    )  # fmt: skip
    sets = read_completions(write_sample_table(tmp_path / "step-000002.parquet", [row, row]))
    assert [len(stored.completions_G) for stored in sets["countdown"]] == [2]


def test_rows_from_anywhere(tmp_path: Path) -> None:
    """A list or a single text, under the usual names; rows of one question are one problem, uneven or not."""
    rows = [
        {"question": "1+1?", "answer": 2, "completions": ["Answer: 2", "Answer: 3"]},
        {"question": "1+1?", "answer": "2", "completions": "Answer: 4"},
        {"question": "2+2?", "answer": "so\n#### 4", "completions": ["4"], "data_source": "mine"},
    ]
    ((label, problems),) = read_completions(jsonl(tmp_path / "my answers.jsonl", *rows)).items()
    assert label == "my-answers"
    assert [stored.problem.answer for stored in problems] == ["2", "4"]
    assert [[each.text for each in stored.completions_G] for stored in problems] == [
        ["Answer: 2", "Answer: 3", "Answer: 4"], ["4"],
    ]  # fmt: skip
    assert {stored.problem.grader for stored in problems} == {"math"}
    assert problems[1].problem.extra == {"data_source": "mine"}
    (again,) = read_completions(tmp_path / "my answers.jsonl", "number").values()
    assert {stored.problem.grader for stored in again} == {"number"}


@pytest.mark.parametrize(
    "name", ["completion", "response", "responses", "output", "generations", "predictions"]
)
def test_the_usual_names_of_completions(tmp_path: Path, name: str) -> None:
    (problems,) = read_completions(
        jsonl(tmp_path / "a.jsonl", {"problem": "q", "answer": "1", name: "x"})
    ).values()
    assert problems[0].completions_G == [StoredCompletion("x")]


def test_chat_messages_and_the_verl_layout(tmp_path: Path) -> None:
    row = {
        "prompt": [{"role": "system", "content": "be short"}, {"role": "user", "content": "1+1?"}],
        "reward_model": {"ground_truth": "2"},
        "responses": ["Answer: 2"],
        "extra_info": {"index": 7},
    }
    (problems,) = read_completions(jsonl(tmp_path / "a.jsonl", row)).values()
    assert problems[0].problem.prompt == "be short\n\n1+1?"
    assert problems[0].problem.answer == "2"
    assert problems[0].problem.extra == {"extra_info": {"index": 7}}


@pytest.mark.parametrize("ending", [".json", ".csv", ".parquet"])
def test_other_endings(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    rows = [
        {"question": "q", "answer": "1", "completion": "x, y"},
        {"question": "r", "answer": "2", "completion": ""},
    ]
    if ending == ".json":
        path.write_text(json.dumps(rows))
    elif ending == ".csv":
        path.write_text('question,answer,completion\nq,1,"x, y"\nr,2,\n')
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    (problems,) = read_completions(path).values()
    assert [stored.completions_G[0].text for stored in problems] == ["x, y", ""]


def test_our_own_table_as_csv_and_from_pandas(tmp_path: Path) -> None:
    """pandas writes a missing number as NaN, and into a CSV file as nothing."""
    import pandas as pd

    rows = [ROW, {**ROW, "length": None, "logprob_sum": None}]
    frame = pd.DataFrame(rows)
    frame.to_parquet(tmp_path / "a.parquet")
    frame.to_csv(tmp_path / "a.csv", index=False)
    for name in ("a.parquet", "a.csv"):
        (problems,) = read_completions(tmp_path / name).values()
        lengths = [(each.length, each.logprob_sum) for each in problems[0].completions_G]
        assert lengths == [(5, -1.25), (None, None)], name


@pytest.mark.parametrize(
    "name", ["日本.jsonl", "==.jsonl", "a b=c.jsonl", "x" * 200 + ".jsonl", "[bold].jsonl"]
)
def test_odd_names_of_files_give_plain_labels(tmp_path: Path, name: str) -> None:
    (label,) = read_completions(jsonl(tmp_path / name, {"question": "q", "answer": "1", "completion": "x"}))
    assert label.replace("-", "").replace("_", "").isascii()
    assert 0 < len(label) <= 60


def test_half_a_surrogate_pair_becomes_a_question_mark_wherever_it_stands(tmp_path: Path) -> None:
    """JSON can say it, a Parquet file cannot: the table is written all the same."""
    half = "\ud800"
    rows = [
        {"question": "q", "answer": {half: half}, "completions": [f"a{half}b"], "extra_info": {half: [half]}},
        {"question": "r", "answer": "1", "completions": ["x"], "data_source": half},
    ]
    (problems,) = read_completions(jsonl(tmp_path / "a.jsonl", *rows)).values()
    assert problems[0].completions_G[0].text == "a?b"
    assert problems[0].problem.extra == {"extra_info": {"?": ["?"]}}
    own = {**ROW, "extra": json.dumps({"x": half}), "text": half, "problem_id": f"p{half}"}
    (ours,) = read_completions(jsonl(tmp_path / "b.jsonl", own)).values()
    assert (ours[0].problem.id, ours[0].problem.extra) == ("p?", {"x": "?"})
    for stored in (*problems, *ours):
        stored.problem.answer.encode()
        json.dumps(dict(stored.problem.extra), ensure_ascii=False).encode()


def test_a_file_never_says_which_code_to_run(tmp_path: Path) -> None:
    """Otherwise a table from the internet could have any importable function called with a text of its own."""
    path = write_eval_table(tmp_path / "a.parquet", [{**ROW, "grader": "os:system", "text": "echo no"}])
    assert "--grader os:system" in line_of(path)
    (problems,) = read_completions(path, "os:system").values()
    assert problems[0].problem.grader == "os:system"


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ["holds no completions"]),
        (b"\n\n  \n", ["holds no completions"]),
        (b"[]", ["line 1", "expected an object"]),
        (b'{"question": "q", "answer": "1"}', ["no field found for the completions", "'question', 'answer'"]),
        (b'{"answer": "1", "completions": ["x"]}', ["no field found for the question"]),
        (b'{"question": "q", "completions": ["x"]}', ["no field found for the answer"]),
        (b'{"question": "q", "answer": "1", "completions": []}', ["row 1", "'completions'", "list of texts, not []"]),
        (b'{"question": "q", "answer": "1", "completions": null}', ["row 1", "not None"]),
        (b'{"question": "q", "answer": "1", "completions": 5}', ["row 1", "not 5"]),
        (b'{"question": "q", "answer": "1", "completions": {"a": 1}}', ["row 1", "{'a': 1}"]),
        (b'{"question": "q", "answer": "1", "completions": [["x"]]}', ["row 1", "must hold text, not ['x']"]),
        (b'{"question": "q", "answer": "1", "completions": ["x", null]}', ["row 1", "not None"]),
        (b'{"question": "q", "answer": "1", "completions": ["x", 5]}', ["row 1", "not 5"]),
        (b'{"question": "q", "answer": null, "completions": ["x"]}', ["no field found for the answer"]),
        (b'{"question": "q", "answer": NaN, "completions": ["x"]}', ["no field found for the answer"]),
        (b'{"question": "q", "answer": {}, "completions": ["x"]}', ["no field found for the answer"]),
        (b'{"question": "q", "answer": [], "completions": ["x"]}', ["no field found for the answer"]),
        (b'{"question": 7, "answer": "1", "completions": ["x"]}', ["no field found for the question"]),
        (b'{"question": " ", "answer": "1", "completions": ["x"]}', ["no field found for the question"]),
        (b'{"question": "q", "answer": "1", "completions": ["\xff"]}', ["line 1", "UTF-8"]),
        (b'{"question": "q", "answer": "1", "completions": ["x"', ["line 1", "not readable as JSON"]),
        (b'{"a\\nb": 1, "c": 2}', ["no field found"]),
        (b'{"question": "q", "answer": "1", "completions": ' + nested(100_000).encode() + b"}", ["line 1"]),
        (b'{"question": "q", "answer": "1", "completions": ' + nested(900).encode() + b"}", ["row 1"]),
        (b'{"question": "q", "answer": ' + nested(900).encode() + b', "completions": ["x"]}', ["answer"]),
        (b'{"x": "' + b"a" * 5_000_000 + b'"}', ["no field found"]),
        (b'{"' + b"a" * 5_000_000 + b'": 1}', ["no field found"]),
        (b'{"question": "q", "answer": "1", "completions": [' + b"1," * 1_000_000 + b"1]}", ["must hold text"]),
        (b'{"question": "q", "answer": ' + b"9" * 10_000 + b', "completions": ["x"]}', ["line 1"]),
    ],
)  # fmt: skip
def test_what_a_jsonl_file_may_not_hold(tmp_path: Path, content: bytes, parts: list[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    line = line_of(path)
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("second", "parts"),
    [
        ({"question": "q", "answer": "1"}, ["row 2", "'completions'", "not None"]),
        ({"answer": "1", "completions": ["x"]}, ["row 2", "'question' holds no question: None"]),
        ({"question": "q", "answer": {}, "completions": ["x"]}, ["row 2", "'answer' holds no answer: {}"]),
        ({"question": "q", "answer": math.inf, "completions": ["x"]}, ["row 2", "no answer: inf"]),
    ],
)
def test_a_later_row_is_named(tmp_path: Path, second: dict, parts: list[str]) -> None:
    first = {"question": "p", "answer": "1", "completions": ["x"]}
    line = line_of(jsonl(tmp_path / "a.jsonl", first, second))
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"text": None}, ["row 2", "'text' must hold text, not None"]),
        ({"text": 5}, ["'text'", "not 5"]),
        ({"problem_id": None}, ["'problem_id'"]),
        ({"reference": 2}, ["'reference'"]),
        ({"grader": None}, ["'grader'"]),
        ({"prompt": ["x"]}, ["'prompt'"]),
        ({"task": None}, ["'task'"]),
        ({"task": "a/b"}, ["'task' = 'a/b'", "metric"]),
        ({"task": "[/x]"}, ["'task' = '[/x]'"]),
        ({"length": -1}, ["'length'", "-1"]),
        ({"length": 1.5}, ["'length'", "1.5"]),
        ({"length": 2**31}, ["'length'"]),
        ({"length": "x"}, ["'length'", "'x'"]),
        ({"length": True}, ["'length'"]),
        ({"length": [1]}, ["'length'"]),
        ({"length": 10**400}, ["'length'"]),
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
def test_what_a_row_of_our_own_tables_may_not_hold(tmp_path: Path, change: dict, parts: list[str]) -> None:
    line = line_of(jsonl(tmp_path / "a.jsonl", ROW, {**ROW, **change}))
    for part in (*parts, "row 2"):
        assert part in line


@pytest.mark.parametrize("missing", ["problem_id", "reference", "text", "task"])
def test_a_row_of_our_own_tables_that_lacks_a_field(tmp_path: Path, missing: str) -> None:
    row = {key: value for key, value in ROW.items() if key != missing}
    assert f"row 2: '{missing}' must hold text, not None" in line_of(jsonl(tmp_path / "a.jsonl", ROW, row))


def test_deep_extra_is_cut_before_it_reaches_a_worker(tmp_path: Path) -> None:
    """A worker is sent its arguments by pickle, which a few hundred levels would exhaust."""
    import pickle

    deep = '{"x": ' + nested(900) + "}"
    (problems,) = read_completions(jsonl(tmp_path / "a.jsonl", {**ROW, "extra": deep})).values()
    pickle.dumps(problems[0].problem.extra)


@pytest.mark.parametrize(
    "name", ["nowhere.jsonl", "nowhere.parquet", "folder.jsonl", "folder.parquet", "a.txt", ""]
)
def test_what_is_no_file_of_completions(tmp_path: Path, name: str) -> None:
    for folder in ("folder.jsonl", "folder.parquet"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a.txt").write_text("x")
    line_of(tmp_path / name)


@pytest.mark.parametrize(
    "content", [b"", b"PAR1", b"PAR1PAR1", b"not parquet at all, but long enough to look at"]
)
def test_what_is_no_parquet(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    assert "not readable as Parquet" in line_of(path)


def test_tables_without_rows_and_with_columns_of_other_types(tmp_path: Path) -> None:
    assert "holds no completions" in line_of(write_eval_table(tmp_path / "none.parquet", []))
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
        assert f"'{name}'" in line_of(tmp_path / "odd.parquet")


def mutations(content: bytes, seed: int, count: int) -> Iterator[bytes]:
    """Yield `content` with flipped bits, cut, with pieces doubled, dropped or overwritten."""
    rng = random.Random(seed)
    for _ in range(count):
        data = bytearray(content)
        for _ in range(rng.choice((1, 1, 2, 8, 64))):
            if not data:
                break
            start = rng.randrange(len(data))
            stop = min(len(data), start + rng.choice((1, 2, 8, 200)))
            kind = rng.randrange(6)
            if kind == 0:
                data[start] ^= 1 << rng.randrange(8)
            elif kind == 1:
                data[start:] = b""
            elif kind == 2:
                data[start:start] = data[start:stop]
            elif kind == 3:
                del data[start:stop]
            elif kind == 4:
                data[start:stop] = rng.randbytes(stop - start)
            else:
                data[start:stop] = bytes(stop - start)
        yield bytes(data)


ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, math.nan, math.inf, 10**30, "", " ", "x", "\ud800", "\x00", "a" * 5000, [], ["x"], [None],
    [[]], [["x", 1]], {}, {"a": {"b": None}}, [{"role": "user", "content": "q"}], [{"role": 1}], "#### ", "\\boxed{",
    "Answer: " + "9" * 5000, "\n", "[/bold]", "module:function", "null",
)  # fmt: skip


def swaps(rows: list[dict[str, Any]], seed: int, count: int) -> Iterator[list[dict[str, Any]]]:
    """Yield `rows` with values of other types, fields left out, renamed and added."""
    rng = random.Random(seed)
    for _ in range(count):
        changed = [dict(row) for row in rows]
        for _ in range(rng.choice((1, 1, 2, 5))):
            row = rng.choice(changed)
            name = rng.choice([*row, "text"])
            kind = rng.randrange(4)
            if kind == 3:
                row.pop(name, None)
            elif kind == 2:
                row[rng.choice(("task", "completions", "prompt", "extra_info", "", "a.b"))] = rng.choice(ODD)
            else:
                row[name] = rng.choice(ODD)
        yield changed


FOREIGN = [
    {"question": "1+1?", "answer": "2", "completions": ["Answer: 2", "\\boxed{3}"], "data_source": "x"},
    {"question": "2+2?", "answer": 4, "completions": "#### 4"},
]


def outcome(path: Path, content: bytes) -> bool:
    """Tell whether a file is read; where it is refused it must be in one line."""
    path.write_bytes(content)
    try:
        sets = read_completions(path)
    except ConfigError as error:
        lines = str(error).splitlines()
    else:
        for stored in (stored for problems in sets.values() for stored in problems):
            assert all(isinstance(each.text, str) for each in stored.completions_G)
            stored.problem.answer.encode()
        return True
    assert len(lines) == 1
    return False


def test_mutated_files_are_read_or_refused_in_a_line(tmp_path: Path) -> None:
    """1,600 of them by a fixed seed: bytes of a Parquet table and of JSON rows, and values of other types."""
    table = write_eval_table(tmp_path / "good.parquet", [ROW, {**ROW, "length": None}] * 3).read_bytes()
    text = "".join(json.dumps(row) + "\n" for row in FOREIGN).encode()
    read = [outcome(tmp_path / "m.parquet", each) for each in mutations(table, 1, 400)]
    read += [outcome(tmp_path / "m.jsonl", each) for each in mutations(text, 2, 400)]
    for seed, rows in ((3, [dict(ROW), dict(ROW)]), (4, FOREIGN)):
        for changed in swaps(rows, seed, 400):
            read.append(
                outcome(tmp_path / "s.jsonl", "".join(json.dumps(row) + "\n" for row in changed).encode())
            )
    assert len(read) == 1600
    assert 0.05 < sum(read) / len(read) < 0.95, "both ends must be met"
