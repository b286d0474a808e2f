"""Public data sets in their published form, if a copy is present: all problems, and answers checked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from bandpo_cli.config.task import Source
from bandpo_cli.tasks.questions import LoadedQuestions, load_questions

DATA = Path(__file__).parents[2].parent / "shared" / "data"

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="no copy of the public data sets here")


def load(file: str, name: str | None) -> LoadedQuestions:
    if not (DATA / file).is_file():
        pytest.skip(f"no {file} here")
    return load_questions(Source.model_validate({"path": str(DATA / file), "name": name}), "heldout")


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("file", "name", "count", "first_answers"),
    [
        ("gsm8k_train.jsonl", "gsm8k", 7473, ["72", "10", "5"]),
        ("gsm8k_test.jsonl", "gsm8k", 1319, ["18", "3", "70000"]),
        ("aime24.jsonl", "aime24", 30, ["204", "113", "371"]),
        ("amc23.jsonl", "amc23", 40, ["27", "36", "45", "3159"]),
        ("minerva_math.jsonl", "minerva", 272, ["1.6", "4.5e33"]),
    ],
)
def test_number_of_problems_and_first_answers(
    file: str, name: str, count: int, first_answers: list[str], named: bool
) -> None:
    loaded = load(file, name if named else None)
    assert len(loaded.questions) == count
    assert not loaded.dropped
    assert [question.answer for question in loaded.questions][: len(first_answers)] == first_answers
    assert all(
        "\n" not in question.answer and "boxed" not in question.answer for question in loaded.questions
    )
