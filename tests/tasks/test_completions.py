"""Stored completions: both layouts are read as they were written, from every file format."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bandpo_cli.storage.tables import write_eval_table
from bandpo_cli.tasks.completions import StoredCompletion, read_completions
from bandpo_cli.types import Problem
from tests.tasks.stored_completions import ROW, error_of, jsonl, nested


def test_table_of_an_evaluation_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [
        ROW,
        {**ROW, "text": "no", "length": None, "finish_reason": None, "logprob_sum": None},
        {**ROW, "task": "other", "grader": "math"},
        {**ROW, "problem_id": "p2", "extra": "{}"},
    ]
    sets = read_completions(write_eval_table(tmp_path / "samples.parquet", rows))
    problems = [Problem("p1", "1+1?", "2", "aime24", "number", {"level": 3})]
    problems += [replace(problems[0], id="p2", extra={}), replace(problems[0], source="other", grader="math")]
    assert [stored.problem for stored in (*sets["aime24"], *sets["other"])] == problems
    first, second = sets["aime24"]
    assert first.completions_G == [StoredCompletion("Answer: 2", 5, "stop", -1.25), StoredCompletion("no")]
    assert len(second.completions_G) == 1


def test_rows_with_question_answer_and_completions(tmp_path: Path) -> None:
    """A list or a single text, under the usual names; all rows of a question are one problem."""
    rows = [
        {"question": "1+1?", "answer": 2, "completions": ["Answer: 2", "Answer: 3"]},
        {"question": "1+1?", "answer": "2", "completions": "Answer: 4"},
        {"question": "2+2?", "answer": "so\n#### 4", "completions": ["4"], "data_source": "mine"},
    ]
    ((label, problems),) = read_completions(jsonl(tmp_path / "my answers.jsonl", *rows)).items()
    assert label == "my-answers"
    assert [stored.problem.answer for stored in problems] == ["2", "4"]
    assert [[completion.text for completion in stored.completions_G] for stored in problems] == [
        ["Answer: 2", "Answer: 3", "Answer: 4"], ["4"],
    ]  # fmt: skip
    assert {stored.problem.grader for stored in problems} == {"math"}
    assert problems[1].problem.extra == {"data_source": "mine"}
    (again,) = read_completions(tmp_path / "my answers.jsonl", "number").values()
    assert {stored.problem.grader for stored in again} == {"number"}


def test_names_of_the_completions_field_and_the_verl_layout(tmp_path: Path) -> None:
    """Any file name gives a label that metric names can have."""
    row = {
        "prompt": [{"role": "system", "content": "be short"}, {"role": "user", "content": "1+1?"}],
        "reward_model": {"ground_truth": "2"},
        "extra_info": {"index": 7},
    }
    names = ("completion", "response", "responses", "output", "generations", "predictions")
    files = ("日本.jsonl", "==.jsonl", "a b=c.jsonl", "x" * 200 + ".jsonl", "[bold].jsonl", "a.jsonl")
    for name, file in zip(names, files, strict=True):
        ((label, (stored,)),) = read_completions(jsonl(tmp_path / file, {**row, name: "Answer: 2"})).items()
        assert stored.completions_G == [StoredCompletion("Answer: 2")]
        assert (stored.problem.prompt, stored.problem.answer) == ("be short\n\n1+1?", "2")
        assert stored.problem.extra == {"extra_info": {"index": 7}}
        assert label.replace("-", "").replace("_", "").isascii()
        assert 0 < len(label) <= 60


def test_own_table_as_csv_and_from_pandas(tmp_path: Path) -> None:
    """pandas writes a missing number as NaN, and in a CSV file as an empty text."""
    import pandas as pd

    rows = [ROW, {**ROW, "length": None, "logprob_sum": None}]
    frame = pd.DataFrame(rows)
    frame.to_parquet(tmp_path / "a.parquet")
    frame.to_csv(tmp_path / "a.csv", index=False)
    for name in ("a.parquet", "a.csv"):
        (problems,) = read_completions(tmp_path / name).values()
        lengths = [(completion.length, completion.logprob_sum) for completion in problems[0].completions_G]
        assert lengths == [(5, -1.25), (None, None)], name


def test_unpaired_surrogates_become_question_marks(tmp_path: Path) -> None:
    """JSON can encode unpaired surrogates and Parquet cannot: the values must fit into the table."""
    surrogate = "\ud800"
    odd = {surrogate: [surrogate]}
    rows = [
        {"question": "q", "answer": odd, "completions": [f"a{surrogate}b"], "extra_info": odd},
        {"question": "r", "answer": "1", "completions": ["x"], "data_source": surrogate},
    ]
    (problems,) = read_completions(jsonl(tmp_path / "a.jsonl", *rows)).values()
    assert problems[0].completions_G[0].text == "a?b"
    assert problems[0].problem.extra == {"extra_info": {"?": ["?"]}}
    own_row = {**ROW, "extra": json.dumps({"x": surrogate}), "text": surrogate, "problem_id": f"p{surrogate}"}
    (own_problems,) = read_completions(jsonl(tmp_path / "b.jsonl", own_row)).values()
    assert (own_problems[0].problem.id, own_problems[0].problem.extra) == ("p?", {"x": "?"})
    for stored in (*problems, *own_problems):
        stored.problem.answer.encode()
        json.dumps(dict(stored.problem.extra), ensure_ascii=False).encode()


def test_depth_of_extra_is_limited(tmp_path: Path) -> None:
    """Serialisation of a few hundred levels would exhaust the stack; pickle stands for any recursive serialiser."""
    import pickle

    deep = '{"x": ' + nested(900) + "}"
    (problems,) = read_completions(jsonl(tmp_path / "a.jsonl", {**ROW, "extra": deep})).values()
    assert pickle.loads(pickle.dumps(problems[0].problem.extra)) == problems[0].problem.extra


@pytest.mark.parametrize("grader", ["os:system", "verl:os:system", "trl:os:system"])
def test_a_file_cannot_choose_code_to_run(tmp_path: Path, grader: str) -> None:
    """Otherwise a downloaded table could have any importable function called with a text of its choice."""
    path = write_eval_table(tmp_path / "a.parquet", [{**ROW, "grader": grader, "text": "echo no"}])
    assert f"--grader {grader}" in error_of(path)
    for requested in (grader, "math"):
        (problems,) = read_completions(path, requested).values()
        assert problems[0].problem.grader == requested


def test_a_custom_grader_gets_all_columns_but_the_completions(tmp_path: Path) -> None:
    row = {"question": "1+1?", "answer": "so 2\n#### 2", "hint": "two", "completions": ["2"]}
    path = jsonl(tmp_path / "a.jsonl", row)
    (problems,) = read_completions(path, "trl:mine:reward").values()
    assert problems[0].problem.extra == {"question": "1+1?", "answer": "so 2\n#### 2", "hint": "two"}
    (problems,) = read_completions(path, "math").values()
    assert problems[0].problem.extra == {}


def test_one_question_with_two_reference_answers_is_two_problems(tmp_path: Path) -> None:
    """Each completion is graded with the answer in its row."""
    answers = [("2", ["Answer: 2", "Answer: 3"]), ("-2", ["Answer: -2"]), ("2", ["Answer: 5"])]
    rows = [{"question": "A root of x^2 = 4?", "answer": a, "completions": texts} for a, texts in answers]
    first, second = read_completions(jsonl(tmp_path / "roots.jsonl", *rows))["roots"]
    assert first.problem.id != second.problem.id
    assert (first.problem.answer, second.problem.answer) == ("2", "-2")
    assert [completion.text for completion in first.completions_G] == ["Answer: 2", "Answer: 3", "Answer: 5"]
    assert [completion.text for completion in second.completions_G] == ["Answer: -2"]
