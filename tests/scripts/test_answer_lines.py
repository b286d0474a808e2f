"""The answer lines of scripts/answer_lines.py: the table of the docs, the corpus, and its verdicts."""

import json
import random
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest

from bandpo_cli.config.batch_and_sampling import GradingConfig
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.types import Problem
from scripts import answer_lines
from scripts.answer_lines import LINES, fill, wrong_value
from tests.cli.eval_command import bandpo

TEXTS = ("Each box has 3 eggs, so 2 * 3 = 6.\nAnswer: 6", "I do not know.")


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    with GraderPool(GradingConfig(workers=1, deadline=60)) as pool:
        yield pool


@pytest.mark.slow
def test_the_page_has_the_table_of_the_present_graders(pool, monkeypatch, capsys):
    monkeypatch.setattr(answer_lines, "GraderPool", lambda config: nullcontext(pool))
    assert answer_lines.main(["table", "--check"]) == 0, capsys.readouterr().err


def test_wrong_values_differ_from_the_reference():
    rng = random.Random(0)
    others = ["0", "18", "18.0", "19", r"\frac{1}{2}", "x+1"]
    assert "18" not in {wrong_value("18", others, rng) for _ in range(200)}
    assert {wrong_value("0", ["0", "0.0", "1"], rng) for _ in range(50)} == {"1"}
    assert {wrong_value("1/2", ["0.5", r"\frac12", "x"], rng) for _ in range(50)} == {"x"}
    with pytest.raises(ValueError, match="no other answer"):
        wrong_value("1/2", ["0.5", "1/2"], rng)


@pytest.mark.slow
def test_no_line_with_a_wrong_value_is_correct(pool):
    values = ("17", "-18", "180", "2", "0.18")
    texts = [*{f"9 * 2 = 18\n{fill(line, value)}" for line in LINES for value in values}]
    for grader in ("math", "number"):
        grades = pool.grade([Problem("p", "", "18", "test", grader)] * len(texts), texts)
        assert not any(grade.correct for grade in grades), grader


def run_in_this_process(command: list[str], cwd: Path, **_: Any) -> subprocess.CompletedProcess[str]:
    """Run `python -m bandpo_cli ...` without a new interpreter."""
    done = bandpo(*command[3:], cwd=cwd)
    return subprocess.CompletedProcess(command, done.code, done.out, done.err)


@pytest.mark.slow
def test_a_corpus_is_repeatable_and_every_completion_gets_a_verdict(tmp_path, monkeypatch):
    """A plain search for the value, instead of a grader, tells lines with the right value from the wrong ones."""
    rows = [(f"How many eggs are in {n} boxes?", str(3 * n), text) for n in range(2, 42) for text in TEXTS]
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
                assert text.endswith(f"\n{fill(LINES[int(index)], row['answer'])}") == (kind == "right")
    assert kinds == {"sampled", "right", "wrong", "unclear"}
    monkeypatch.setattr(answer_lines, "subprocess", SimpleNamespace(run=run_in_this_process))
    scored, rate = answer_lines.score(tmp_path / "a.jsonl", "number")
    assert len(scored) == 160
    assert scored["verdict"].notna().all()
    assert "completions in" in rate
    assert answer_lines.failures(scored).empty
    right = scored[scored["origins"] == "right"]
    assert (right["verdict"] == "correct").mean() > 0.6  # 20 of 31; the graders refuse the other forms


def test_false_positives_and_grader_errors_are_failures():
    scored = pandas.DataFrame({
        "origins": ["right", "wrong", "wrong", "sampled"],
        "verdict": ["correct", "correct", "wrong", "grader-error"],
    })  # fmt: skip
    assert list(answer_lines.failures(scored).index) == [1, 3]
