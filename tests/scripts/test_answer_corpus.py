"""The corpus of completions for graders: the file, its repeatability, and the verdicts on its answer lines."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pandas
import pytest

from bandpo_cli.config.run import GradingConfig
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.tasks.completions import read_completions
from bandpo_cli.types import Problem
from scripts.answer_corpus import __main__ as script
from scripts.answer_corpus import verdicts
from scripts.answer_corpus.__main__ import main, read_problems
from scripts.answer_corpus.lines import LINES, wrong_value
from scripts.answer_corpus.score import Score, by_origin, score

PROBLEMS = [
    {
        "question": f"Ann has {n} boxes of {m} eggs. How many eggs does she have?",
        "answer": f"{n} * {m} = {n * m}\n#### {n * m}",
    }
    for n in range(2, 6)
    for m in range(3, 7)
]


@pytest.fixture(scope="module")
def problem_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("problems") / "eggs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def short_completions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample few tokens, except in slow tests."""
    if request.node.get_closest_marker("slow"):
        return
    monkeypatch.setattr(script, "SETTINGS", ((0.3, 4), (1.0, 8), (1.5, 16)))


def generate(problems: Path, out: Path, *words: str) -> list[dict[str, Any]]:
    """Run the script with a model of two small layers and return the rows that it wrote."""
    small = ("--hidden", "32", "--layers", "2", "--completions", "101")
    main(["--problems", str(problems), "--out", str(out), *small, *words])
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_same_seed_and_steps_give_the_same_file_that_the_reader_accepts(
    problem_file: Path, tmp_path: Path, one_thread: None
) -> None:
    first = generate(problem_file, tmp_path / "a.jsonl", "--steps", "3")
    assert generate(problem_file, tmp_path / "b.jsonl", "--steps", "3") == first
    assert generate(problem_file, tmp_path / "c.jsonl", "--steps", "3", "--seed", "1") != first

    [(_, stored)] = read_completions(tmp_path / "a.jsonl").items()
    assert sum(len(each.completions_G) for each in stored) == 101
    assert {each.problem.answer for each in stored} <= {str(n * m) for n in range(2, 6) for m in range(3, 7)}
    kinds = Counter(origin.split()[0] for row in first for origin in row["origins"])
    assert kinds["sampled"] == 51
    assert set(kinds) == {"sampled", "right", "wrong", "unclear"}
    settings = {origin for row in first for origin in row["origins"] if origin.startswith("sampled")}
    assert len(settings) == len(script.SETTINGS)
    assert all(len(row["origins"]) == len(row["completions"]) for row in first)


def test_right_lines_state_the_reference_and_wrong_lines_another_value(
    problem_file: Path, tmp_path: Path
) -> None:
    """A plain search for the value decides, instead of a grader."""
    for row in generate(problem_file, tmp_path / "a.jsonl", "--steps", "1"):
        for origin, text in zip(row["origins"], row["completions"], strict=True):
            kind, _, index = origin.partition(" line=")
            if kind not in ("right", "wrong"):
                continue
            stated = str(LINES[int(index)].fill(row["answer"]))
            assert text.endswith(f"\n{stated}") == (kind == "right"), (row["answer"], text)


@pytest.mark.parametrize("row", [{"question": "q"}, {"answer": "1"}, {"question": 3, "answer": "1"}])
def test_row_without_question_or_answer_is_named(tmp_path: Path, row: dict[str, Any]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(PROBLEMS[0]) + "\n" + json.dumps(row) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="row 2: no question, or no answer"):
        read_problems(path)


def test_wrong_values_differ_from_the_reference() -> None:
    rng = random.Random(0)
    others = ["0", "18", "18.0", "19", r"\frac{1}{2}", "x+1"]
    assert "18" not in {wrong_value("18", others, rng) for _ in range(200)}
    assert {wrong_value("0", ["0", "0.0", "1"], rng) for _ in range(50)} == {"1"}
    assert {wrong_value("1/2", ["0.5", r"\frac12", "x"], rng) for _ in range(50)} == {"x"}
    with pytest.raises(ValueError, match="no other answer"):
        wrong_value("1/2", ["0.5", "1/2"], rng)


def test_page_has_the_table_of_the_present_graders(capsys: pytest.CaptureFixture[str]) -> None:
    assert verdicts.main(["--check"]) == 0, capsys.readouterr().err


def test_no_line_with_a_wrong_value_is_correct() -> None:
    problem = {grader: Problem("p", "", "18", "test", grader) for grader in ("math", "number")}
    with GraderPool(GradingConfig(workers=1, deadline=30)) as pool:
        for grader in problem:
            for value in ("17", "-18", "180", "1", "2", "9", "20", "0.18"):
                texts = [f"9 * 2 = 18\n{line.fill(value)}" for line in LINES if line.fill(value)]
                grades = pool.grade([problem[grader]] * len(texts), texts)
                assert [text for text, grade in zip(texts, grades, strict=True) if grade.correct] == [], (
                    grader
                )


@pytest.mark.slow
def test_generated_completions_are_scored_without_errors(tmp_path: Path) -> None:
    """600 completions through the command: each has a verdict, and no line with a wrong value is correct."""
    problems = tmp_path / "problems.jsonl"
    data = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k_test.jsonl"
    rows = data.read_text(encoding="utf-8").splitlines()[:200] if data.exists() else map(json.dumps, PROBLEMS)
    problems.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    stored = tmp_path / "stored.jsonl"
    main(["--problems", str(problems), "--out", str(stored), "--steps", "100", "--hidden", "64", "--layers", "2",
          "--completions", "600"])  # fmt: skip
    for grader in ("math", "number"):
        result = score(stored, grader)
        assert result.passed, result.false_positives
        assert "completions in" in result.summary
        assert sum(result.verdicts.values()) == 600
    allowed = {"correct", "wrong", "malformed"} | ({"timeout"} if grader == "math" else set())
    assert {verdict for _, verdict in result.verdicts} <= allowed
    counts = Counter(origin for origin, _ in result.verdicts.elements())
    assert counts["wrong"] > 50
    assert result.verdicts["right", "correct"] > 0.5 * counts["right"]


def test_verdicts_are_counted_by_origin(tmp_path: Path) -> None:
    """Three completions are labelled by hand, one of them falsely."""
    row = {
        "question": "q",
        "answer": "18",
        "completions": ["Answer: 18", "Answer: 18.0", "Answer: 17"],
        "origins": ["right line=0", "wrong line=0", "wrong line=0"],
    }
    stored = tmp_path / "a.jsonl"
    stored.write_text(json.dumps(row) + "\n", encoding="utf-8")
    table = pandas.DataFrame({"prompt": "q", "reference": "18", "text": row["completions"]})
    table["verdict"] = ["correct", "correct", "wrong"]
    result = Score(*by_origin(stored, table.iloc[::-1]), summary="", tracebacks=0)
    assert not result.passed
    assert result.false_positives == ("reference '18', wrong line=0: 'Answer: 18.0'",)
    assert dict(result.verdicts) == {
        ("right", "correct"): 1,
        ("wrong", "correct"): 1,
        ("wrong", "wrong"): 1,
    }
    assert [line.split() for line in result.table().splitlines()] == [
        ["origin", "correct", "wrong", "all"],
        ["right", "1", "0", "1"],
        ["wrong", "1", "1", "2"],
        ["all", "2", "1", "3"],
    ]
