"""Trials of graders in a dry run: the dummy completion, its grade and warnings, and errors of custom functions."""

from pathlib import Path
from typing import Any

import pytest

from bandpo_cli.config.layers import resolve
from bandpo_cli.errors import ConfigError
from bandpo_cli.experiments.trials import try_graders
from bandpo_cli.tasks.task import build_task

REWARDS = """
import json
def characters(text, answer, extra): return len(text) / 100
def field(text, answer, extra): return json.loads(text)["answer"] == answer
def length(text, answer, extra): return len(text)
def not_a_number(text, answer, extra): return float("nan")
def needs_gold(completions, gold): return [1.0]
"""
PROBLEMS = "question,answer\nWho?,Rome\n1+1?,2\n2+1?,3\n3+1?,4\n"

TRIALS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "number": (
        {},
        ["'Answer: 2' correct 1.0", "grader 'number' cannot grade answers to 1 of 3 problems; the first: "],
    ),
    "gsm8k": ({"template": "hashes"}, ["'#### 2' correct 1.0", "cannot grade answers to 1 of 3 problems"]),
    "math-dapo": (
        {"template": "boxed"},
        [
            "'\\\\boxed{2}' malformed 0.0",
            "'math-dapo' does not read an answer in the form that task.template",
        ],
    ),
    "rewards:characters": ({"template": "plain"}, ["'2' wrong 0.01"]),
}
"""A grader, the settings of the task, the completion with its grade, and parts of the warnings."""
ERRORS = {
    "rewards:field": r"'Answer: 2': JSONDecodeError: .* \(rewards.py:4, in field\)",
    "rewards:length": r"must return .* not 9; scale it, or use TRL's .*trl: or .* \(rewards.py:5, in length\)",
    "rewards:not_a_number": r"with 'score', not nan \(rewards.py:6",
    "rewards:needs_gold": r"no column gold in the rows, which have answer, question \(rewards.py:7",
}


def trials(grader: str, **task: Any) -> list[str]:
    config = resolve([{"task": {"name": "data", "train": "problems.csv", "grader": grader, **task}}])
    (trial,) = try_graders(config, build_task(config.task))
    grade = trial.grade
    return [f"{trial.completion!r} {grade.verdict} {grade.reward}", *trial.warnings]


def test_graders_are_tried_on_the_reference(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(REWARDS)
    Path("problems.csv").write_text(PROBLEMS)
    for grader, (task, expected) in TRIALS.items():
        lines = trials(grader, **task)
        assert lines[0] == expected[0]
        assert [part for part, line in zip(expected, lines, strict=True) if part not in line] == [], lines
    for grader, message in ERRORS.items():
        with pytest.raises(ConfigError, match=message):
            trials(grader)


def test_a_problem_without_a_reference_has_a_dummy_completion_of_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(REWARDS)
    Path("problems.csv").write_text("prompt\nWrite a line.\nWrite two.\n")
    assert trials("rewards:characters") == ["'This is a dummy completion.' wrong 0.27"]
