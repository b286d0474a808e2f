"""Public data sets, if a copy is present: all problems are read, and references are correct for their own problems."""

import random
from pathlib import Path

import pytest

from bandpo_cli.config.task import Source
from bandpo_cli.tasks.question_answers import load_questions
from bandpo_cli.types import Problem

DATA = Path(__file__).parents[2].parent / "shared" / "data"
SETS = [
    ("gsm8k_train", "gsm8k", 7473, ["72", "10", "5"]), ("gsm8k_test", "gsm8k", 1319, ["18", "3", "70000"]),
    ("aime24", "aime24", 30, ["204", "113", "371"]), ("amc23", "amc23", 40, ["27", "36", "45", "3159"]),
    ("minerva_math", "minerva", 272, ["1.6", "4.5e33"]),
]  # fmt: skip
"""File, name of the data set, number of problems, and first answers, which were read by hand."""


def load(file: str, name: str | None = None) -> list[Problem]:
    if not (DATA / f"{file}.jsonl").is_file():
        pytest.skip(f"no {file}.jsonl here")
    source = Source.model_validate({"path": str(DATA / f"{file}.jsonl"), "name": name, "label": file})
    problems, notes = load_questions(source, "heldout")
    assert notes == [f"{file}: {len(problems):,} evaluation problems"], "no row is dropped"
    return problems


@pytest.mark.slow
@pytest.mark.parametrize(("file", "name", "count", "first_answers"), SETS)
def test_references_are_correct_for_their_own_problem_and_no_other(pool, file, name, count, first_answers):
    golds, named = ([problem.answer for problem in load(file, known)] for known in (None, name))
    assert golds == named, "the usual fields are those of the data set"
    assert (len(golds), golds[: len(first_answers)]) == (count, first_answers)
    assert not any("\n" in gold or "boxed" in gold for gold in golds)
    sample = random.Random(0).sample(golds, min(count, 20 if name == "minerva" else 200))
    own = [Problem("p", "", gold, name, "math") for gold in sample]
    for form in ("18.\nAnswer: {}", "18.\nSo it is $\\boxed{{{}}}$."):
        grades = pool.grade(own, [*map(form.format, sample)])
        assert [gold for gold, grade in zip(sample, grades, strict=True) if not grade.correct] == []
    numbers = [gold for gold in sample if gold.replace(",", "").isdigit()]
    others = [Problem("p", "", f"{int(gold.replace(',', '')) + 1}", name, "math") for gold in numbers]
    grades = pool.grade(others, [f"Answer: {gold}" for gold in numbers])
    assert {grade.verdict for grade in grades} <= {"wrong"}
