"""Public data sets, if a copy is present: all problems are read, and each reference is correct for its own alone."""

import random
from pathlib import Path

import pytest

from bandpo_cli.config.task import Source
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.tasks.question_answers import load_questions
from bandpo_cli.types import Problem

DATA = Path(__file__).parents[2].parent / "shared" / "data"
SETS = [
    ("gsm8k_train", "gsm8k", 7473, ["72", "10", "5"]),
    ("gsm8k_test", "gsm8k", 1319, ["18", "3", "70000"]),
    ("aime24", "aime24", 30, ["204", "113", "371"]),
    ("amc23", "amc23", 40, ["27", "36", "45", "3159"]),
    ("minerva_math", "minerva", 272, ["1.6", "4.5e33"]),
]
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
def test_each_reference_is_correct_for_its_own_problem_and_wrong_for_another(
    pool: GraderPool, file: str, name: str, count: int, first_answers: list[str]
) -> None:
    problems = load(file)
    golds = [problem.answer for problem in problems]
    assert golds == [problem.answer for problem in load(file, name)], (
        "the usual fields are those of the data set"
    )
    assert (len(golds), golds[: len(first_answers)]) == (count, first_answers)
    assert not any("\n" in gold or "boxed" in gold for gold in golds)
    sample = random.Random(0).sample(golds, min(count, 30 if file == "minerva_math" else 300))
    pairs = [pair for pair in zip(sample, sample[1:] + sample[:1], strict=True) if differ(*pair)]
    assert len(pairs) > 0.8 * len(sample)
    expected = [(gold, f"Answer: {other}", "wrong") for gold, other in pairs]
    expected += [(gold, f"18.\nAnswer: {gold}", "correct") for gold in sample]
    expected += [(gold, f"18.\nSo it is $\\boxed{{{gold}}}$.", "correct") for gold in sample]
    problems = [Problem(str(index), "", gold, name, "math") for index, (gold, _, _) in enumerate(expected)]
    grades = pool.grade(problems, [text for _, text, _ in expected])
    found = [(*case[:2], grade.verdict) for case, grade in zip(expected, grades, strict=True)]
    assert [case for case in found if case not in expected] == []


def differ(first: str, second: str) -> bool:
    """Return True if two answers differ as Python numbers, or as texts if they are not numbers."""
    try:
        return float(first.replace(",", "")) != float(second.replace(",", ""))
    except ValueError:
        return first != second


@pytest.mark.slow
def test_expression_in_another_form_is_correct(pool: GraderPool) -> None:
    """The added zero requires symbolic comparison; the texts differ."""
    golds = [p.answer for p in load("minerva_math") if "\\frac" in p.answer and "=" not in p.answer][::10]
    problems = [Problem(str(index), "", gold, "minerva", "math") for index, gold in enumerate(golds)]
    grades = pool.grade(problems, [f"\\boxed{{0+{gold}}}" for gold in golds])
    assert len(golds) > 3
    assert [gold for gold, grade in zip(golds, grades, strict=True) if not grade.correct] == []
