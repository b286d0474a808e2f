"""The answer lines of scripts/answer_lines.py: the table of the docs, the corpus, and its verdicts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pandas
import pytest

from bandpo_cli.config.run import GradingConfig
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.types import Problem
from scripts import answer_lines
from scripts.answer_lines import LINES, wrong_value

TEXTS = ("Each box has 3 eggs, so 2 * 3 = 6.\nAnswer: 6", "I do not know.")


@pytest.mark.slow
def test_the_page_has_the_table_of_the_present_graders(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer_lines.main(["table", "--check"]) == 0, capsys.readouterr().err


def test_wrong_values_differ_from_the_reference() -> None:
    rng = random.Random(0)
    others = ["0", "18", "18.0", "19", r"\frac{1}{2}", "x+1"]
    assert "18" not in {wrong_value("18", others, rng) for _ in range(200)}
    assert {wrong_value("0", ["0", "0.0", "1"], rng) for _ in range(50)} == {"1"}
    assert {wrong_value("1/2", ["0.5", r"\frac12", "x"], rng) for _ in range(50)} == {"x"}
    with pytest.raises(ValueError, match="no other answer"):
        wrong_value("1/2", ["0.5", "1/2"], rng)


@pytest.mark.slow
def test_no_line_with_a_wrong_value_is_correct() -> None:
    texts = {
        f"9 * 2 = 18\n{line.fill(value)}" for line in LINES for value in ("17", "-18", "180", "2", "0.18")
    }
    with GraderPool(GradingConfig(workers=1, deadline=30)) as pool:
        for grader in ("math", "number"):
            grades = pool.grade([Problem("p", "", "18", "test", grader)] * len(texts), [*texts])
            assert not any(grade.correct for grade in grades), grader


@pytest.mark.slow
def test_a_corpus_is_repeatable_and_every_completion_gets_a_verdict(tmp_path: Path) -> None:
    """A plain search for the value, instead of a grader, tells lines with the right value from the wrong ones."""
    rows = [(f"How many eggs are in {n} boxes?", str(3 * n), text) for n in range(2, 12) for text in TEXTS]
    pandas.DataFrame(rows, columns=["prompt", "reference", "text"]).to_parquet(tmp_path / "samples.parquet")
    contents = []
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        out = tmp_path / f"{name}.jsonl"
        answer_lines.main(["corpus", str(tmp_path / "samples.parquet"), "--out", str(out), "--seed", seed])
        contents.append(out.read_text())
    assert contents[0] == contents[1] != contents[2]
    kinds = set()
    for row in map(json.loads, contents[0].splitlines()):
        assert len(row["completions"]) == len(row["origins"]) == 2 * len(TEXTS)
        for text, origin in zip(row["completions"], row["origins"], strict=True):
            kind, _, index = origin.partition(" line=")
            kinds.add(kind)
            if kind in ("right", "wrong"):
                assert text.endswith(f"\n{LINES[int(index)].fill(row['answer'])}") == (kind == "right")
    assert kinds == {"sampled", "right", "wrong", "unclear"}
    scored, rate = answer_lines.score(tmp_path / "a.jsonl", "number")
    assert len(scored) == 40
    assert scored["verdict"].notna().all()
    assert "completions in" in rate
    assert answer_lines.failures(scored).empty
    right = scored[scored["origins"] == "right"]
    assert (right["verdict"] == "correct").mean() > 0.3


def test_false_positives_and_grader_errors_are_failures() -> None:
    """Four completions are labelled by hand; the second and the fourth are failures."""
    origins, verdicts = (
        ["right", "wrong", "wrong", "sampled"],
        ["correct", "correct", "wrong", "grader-error"],
    )
    scored = pandas.DataFrame({"origins": origins, "verdict": verdicts})
    assert list(answer_lines.failures(scored).index) == [1, 3]
