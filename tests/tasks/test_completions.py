"""Stored completions: both layouts are read as they were written; for other content, one line names the row."""

import json
import math
from dataclasses import replace

import pandas
import pytest

from bandpo_cli.storage.tables import write_eval_table
from bandpo_cli.tasks.completions import StoredCompletion, read_completions
from bandpo_cli.types import Problem
from tests.tasks.stored_completions import ROW, error_of, jsonl, nested


def test_table_of_an_evaluation_is_read_as_it_was_written(tmp_path):
    without = {"text": "no", "length": None, "finish_reason": None, "logprob_sum": None}
    others = ({"task": "other", "grader": "math"}, {"problem_id": "p2", "extra": "{}"})
    rows = [ROW, *({**ROW, **changes} for changes in (without, *others))]
    sets = read_completions(write_eval_table(tmp_path / "samples.parquet", rows))
    problems = [Problem("p1", "1+1?", "2", "aime24", "number", {"level": 3})]
    problems += [replace(problems[0], id="p2", extra={}), replace(problems[0], source="other", grader="math")]
    assert [stored.problem for stored in (*sets["aime24"], *sets["other"])] == problems
    first, second = sets["aime24"]
    assert first.completions_G == [StoredCompletion("Answer: 2", 5, "stop", -1.25), StoredCompletion("no")]
    assert len(second.completions_G) == 1


def test_rows_with_question_answer_and_completions(tmp_path):
    """A list or a single text, under the usual names; all rows of a question are one problem."""
    rows = [
        {"question": "1+1?", "answer": 2, "completions": ["Answer: 2", "Answer: 3"]},
        {"question": "1+1?", "answer": "2", "completions": "Answer: 4"},
        {"question": "2+2?", "answer": "so\n#### 4", "completions": ["4"], "data_source": "mine"},
    ]
    ((label, problems),) = read_completions(jsonl(tmp_path / "my answers.jsonl", *rows)).items()
    assert label == "my-answers"
    assert [stored.problem.answer for stored in problems] == ["2", "4"]
    texts = [[completion.text for completion in stored.completions_G] for stored in problems]
    assert texts == [["Answer: 2", "Answer: 3", "Answer: 4"], ["4"]]
    assert {stored.problem.grader for stored in problems} == {"math"}
    assert problems[1].problem.extra == {"data_source": "mine"}
    (again,) = read_completions(tmp_path / "my answers.jsonl", "number").values()
    assert {stored.problem.grader for stored in again} == {"number"}


def test_names_of_the_completions_field_and_the_verl_layout(tmp_path):
    """Any file name gives a label that metric names can have."""
    prompt = [{"role": "system", "content": "be short"}, {"role": "user", "content": "1+1?"}]
    row = {"prompt": prompt, "reward_model": {"ground_truth": "2"}, "extra_info": {"index": 7}}
    names = ("completion", "response", "responses", "output", "generations", "predictions")
    files = ("日本.jsonl", "==.jsonl", "a b=c.jsonl", "x" * 200 + ".jsonl", "[bold].jsonl", "a.jsonl")
    for name, file in zip(names, files, strict=True):
        ((label, (stored,)),) = read_completions(jsonl(tmp_path / file, {**row, name: "Answer: 2"})).items()
        assert stored.completions_G == [StoredCompletion("Answer: 2")]
        assert (stored.problem.prompt, stored.problem.answer) == ("be short\n\n1+1?", "2")
        assert stored.problem.extra == {"extra_info": {"index": 7}}
        assert label.replace("-", "").replace("_", "").isascii()
        assert 0 < len(label) <= 60


def test_own_table_as_csv_and_from_pandas(tmp_path):
    """pandas writes a missing number as NaN, and in a CSV file as an empty text."""
    frame = pandas.DataFrame([ROW, {**ROW, "length": None, "logprob_sum": None}])
    frame.to_parquet(tmp_path / "a.parquet")
    frame.to_csv(tmp_path / "a.csv", index=False)
    for name in ("a.parquet", "a.csv"):
        (problems,) = read_completions(tmp_path / name).values()
        lengths = [(completion.length, completion.logprob_sum) for completion in problems[0].completions_G]
        assert lengths == [(5, -1.25), (None, None)], name


def test_unpaired_surrogates_become_question_marks(tmp_path):
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


@pytest.mark.parametrize("grader", ["os:system", "verl:os:system", "trl:os:system"])
def test_a_file_cannot_choose_code_to_run(tmp_path, grader):
    """Otherwise a downloaded table could have any importable function called with a text of its choice."""
    path = write_eval_table(tmp_path / "a.parquet", [{**ROW, "grader": grader, "text": "echo no"}])
    assert f"--grader {grader}" in error_of(path)
    for requested in (grader, "math"):
        (problems,) = read_completions(path, requested).values()
        assert problems[0].problem.grader == requested


def test_a_custom_grader_gets_all_columns_but_the_completions(tmp_path):
    row = {"question": "1+1?", "answer": "so 2\n#### 2", "hint": "two", "completions": ["2"]}
    path = jsonl(tmp_path / "a.jsonl", row)
    (problems,) = read_completions(path, "trl:mine:reward").values()
    assert problems[0].problem.extra == {"question": "1+1?", "answer": "so 2\n#### 2", "hint": "two"}
    (problems,) = read_completions(path, "math").values()
    assert problems[0].problem.extra == {}


def test_one_question_with_two_reference_answers_is_two_problems(tmp_path):
    """Each completion is graded with the answer in its row."""
    answers = [("2", ["Answer: 2", "Answer: 3"]), ("-2", ["Answer: -2"]), ("2", ["Answer: 5"])]
    rows = [{"question": "A root of x^2 = 4?", "answer": a, "completions": texts} for a, texts in answers]
    first, second = read_completions(jsonl(tmp_path / "roots.jsonl", *rows))["roots"]
    assert first.problem.id != second.problem.id
    assert (first.problem.answer, second.problem.answer) == ("2", "-2")
    assert [completion.text for completion in first.completions_G] == ["Answer: 2", "Answer: 3", "Answer: 5"]
    assert [completion.text for completion in second.completions_G] == ["Answer: -2"]


QUESTION = b'{"question": "q", "answer": "1", "completions": '
FIRST = QUESTION + b'["x"]}\n'
FILES = [
    (b"", ["holds no completions"]),
    (b"[]", ["line 1", "expected an object"]),
    (b'{"question": "q", "answer": "1"}', ["no field found for the completions", "'question', 'answer'"]),
    (b'{"answer": "1", "completions": ["x"]}', ["no field found for the question"]),
    (b'{"question": "q", "completions": ["x"]}', ["no field found for the answer"]),
    (QUESTION + b"[]}", ["row 1", "'completions'", "list of texts, not []"]),
    (QUESTION + b'{"a": 1}}', ["row 1", "{'a': 1}"]),
    (QUESTION + b'[["x"]]}', ["row 1", "list of texts, not [['x']]"]),
    (QUESTION + b'["x", 5]}', ["row 1", "not ['x', 5]"]),
    (b'{"a\\nb": 1, "c": 2}', ["no field found"]),
    (QUESTION + nested(900).encode() + b"}", ["row 1"]),
    (b'{"question": "q", "answer": ' + nested(900).encode() + b', "completions": ["x"]}', ["answer"]),
    (b'{"' + b"a" * 5_000_000 + b'": 1}', ["no field found"]),
    (QUESTION + b"[" + b"1," * 100_000 + b"1]}", ["list of texts"]),
    (FIRST + b'{"question": "q", "answer": "1"}', ["row 2: 'completions' must be a list of texts, not None"]),
    (FIRST + b'{"answer": "1", "completions": ["x"]}', ["row 2: 'question' holds no question: None"]),
    (FIRST + b'{"question": "q", "answer": Infinity}', ["row 2: 'answer' holds no answer: inf"]),
]


def test_invalid_jsonl_files(tmp_path):
    path = tmp_path / "a.jsonl"
    for content, parts in FILES:
        path.write_bytes(content)
        line = error_of(path)
        assert all(part in line for part in parts), line


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


def test_invalid_values_in_an_own_table(tmp_path):
    for change, part in CHANGES:
        line = error_of(jsonl(tmp_path / "a.jsonl", ROW, {**ROW, **change}))
        assert "row 2: " in line
        assert part in line
