"""Which stored rows make one problem, and who judges it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bandpo_cli.storage.tables import write_eval_table
from bandpo_cli.tasks.completions import read_completions
from tests.tasks.test_completions import ROW


@pytest.mark.parametrize("asked", ["math", "countdown", "my_module:judge"])
def test_the_grader_that_is_asked_for_replaces_that_of_a_table(tmp_path: Path, asked: str) -> None:
    path = write_eval_table(
        tmp_path / "samples.parquet", [ROW, {**ROW, "problem_id": "p2", "grader": "math"}]
    )
    judges = {stored.problem.id: stored.problem.grader for stored in read_completions(path)["aime24"]}
    assert judges == {"p1": "number", "p2": "math"}
    judges = {stored.problem.id: stored.problem.grader for stored in read_completions(path, asked)["aime24"]}
    assert judges == {"p1": asked, "p2": asked}


def test_one_question_with_two_reference_answers_is_two_problems(tmp_path: Path) -> None:
    """Each completion is judged by the answer of its own row."""
    rows = [
        {"question": "A root of x^2 = 4?", "answer": "2", "completions": ["Answer: 2", "Answer: 3"]},
        {"question": "A root of x^2 = 4?", "answer": "-2", "completions": ["Answer: -2"]},
        {"question": "A root of x^2 = 4?", "answer": "2", "completions": ["Answer: 5"]},
    ]
    path = tmp_path / "roots.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = read_completions(path)["roots"]
    assert first.problem.id != second.problem.id
    assert (first.problem.answer, second.problem.answer) == ("2", "-2")
    assert [each.text for each in first.completions_G] == ["Answer: 2", "Answer: 3", "Answer: 5"]
    assert [each.text for each in second.completions_G] == ["Answer: -2"]
