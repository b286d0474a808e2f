"""Reference answers of real data sets: correct for their own problem, and wrong for another."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from bandpo_cli.extract import final_answer
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.types import Problem

DATA = Path(__file__).parents[2].parent / "shared" / "data"
SIZES = {"gsm8k_train": 7473, "gsm8k_test": 1319, "aime24": 30, "amc23": 40, "minerva_math": 272}
FORMS = ("%s\nAnswer: %s", "%s\nSo it is $\\boxed{%s}$.")


def worked_answers(name: str) -> list[tuple[str, str]]:
    """Return (solution, reference answer) of each row; skip the test if the file is missing."""
    path = DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"needs {name}.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == SIZES[name]
    solutions = [row.get("solution", str(row.get("answer", ""))) for row in rows]
    if name in ("aime24", "amc23"):
        return [(solution, str(row["answer"])) for solution, row in zip(solutions, rows, strict=True)]
    return [(solution, final_answer(solution) or "") for solution in solutions]


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_each_reference_is_correct_for_its_own_problem_and_wrong_for_another(
    pool: GraderPool, name: str
) -> None:
    rows = random.Random(0).sample(
        worked_answers(name), min(SIZES[name], 30 if name == "minerva_math" else 300)
    )
    pairs = [(gold, other) for (_, gold), (_, other) in zip(rows, rows[1:] + rows[:1], strict=True)]
    different = [(gold, f"Answer: {other}", "wrong") for gold, other in pairs if differ(gold, other)]
    assert len(different) > 0.8 * len(rows)
    own = [(row[1], form % row, "correct") for row in rows for form in FORMS]
    golds, texts, expected = zip(*own, *different, strict=True)
    problems = [Problem(str(index), "", gold, name, "math") for index, gold in enumerate(golds)]
    grades = pool.grade(problems, texts)
    results = zip(golds, texts, expected, grades, strict=True)
    assert [(gold, text) for gold, text, verdict, grade in results if grade.verdict != verdict] == []


def differ(first: str, second: str) -> bool:
    """Return True if two answers differ as Python numbers, or as texts if they are not numbers."""
    try:
        return float(first.replace(",", "")) != float(second.replace(",", ""))
    except ValueError:
        return first != second


@pytest.mark.slow
def test_expression_in_another_form_is_correct(pool: GraderPool) -> None:
    """The added zero requires symbolic comparison; the texts differ."""
    golds = [gold for _, gold in worked_answers("minerva_math") if "\\frac" in gold and "=" not in gold][::10]
    problems = [Problem(str(index), "", gold, "minerva", "math") for index, gold in enumerate(golds)]
    grades = pool.grade(problems, [f"\\boxed{{0+{gold}}}" for gold in golds])
    assert len(golds) > 5
    assert [gold for gold, grade in zip(golds, grades, strict=True) if not grade.correct] == []
