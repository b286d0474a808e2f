"""Overviews of runs: the task of a run on files, and the settings that differ from the defaults."""

from __future__ import annotations

import pytest

from bandpo_cli.config.layers import resolve
from bandpo_cli.experiments.overview import changed_settings


@pytest.mark.parametrize(
    ("task", "title"),
    [
        ({"name": "countdown"}, "countdown"),
        ({"name": "gsm8k"}, "gsm8k"),
        ({"name": "data", "train": "my/sums.jsonl"}, "sums"),
        ({"name": "data", "train": ["gsm8k", {"path": "a.jsonl", "label": "mine"}]}, "gsm8k+mine"),
    ],
)
def test_a_task_of_files_has_their_names(task: dict[str, object], title: str) -> None:
    assert resolve([{"task": task}]).task.title == title


def test_template_and_grader_are_changed_settings_and_the_files_are_not() -> None:
    model = {"model": {"dtype": "float32"}}  # a run stores the dtype that it had
    files = {"name": "data", "train": "sums.jsonl", "heldout": "exam.jsonl"}
    assert list(changed_settings(resolve([model, {"task": files}]))) == []
    task = {**files, "template": "{question} Number only.", "grader": "gsm8k-flexible"}
    changed = changed_settings(resolve([model, {"task": task}]))
    assert {each.key: (each.value, each.default) for each in changed} == {
        "task.template": ("{question} Number only.", "answer-line"),
        "task.grader": ("gsm8k-flexible", None),
    }
