"""The `task` section for data sets: what may be written, and what `--task NAME|FILE` comes to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from bandpo_cli.config.data import FILE_SUFFIXES, Fields, Source
from bandpo_cli.config.task import DataTask, task_from_argument, task_names
from bandpo_cli.registries import DATASETS, GRADERS


@pytest.mark.parametrize(
    ("written", "source"),
    [
        ("gsm8k", Source(name="gsm8k")),
        ("my/questions.jsonl", Source(path="my/questions.jsonl")),
        ("org/set", Source(path="org/set")),
        ({"name": "math", "levels": [3, 4]}, Source(name="math", levels=(3, 4))),
        (
            {"path": "x.csv", "fields": {"question": "a.b"}},
            Source(path="x.csv", fields=Fields(question="a.b")),
        ),
    ],
)
def test_a_source_as_text_or_as_a_section(written: Any, source: Source) -> None:
    assert Source.model_validate(written) == source
    assert DataTask.model_validate({"name": "data", "train": written}).train == (source,)
    assert DataTask.model_validate({"name": "data", "train": [written, "y.jsonl"]}).train[0] == source


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({}, "give it a name"),
        ({"name": "gsm9"}, "gsm8k"),
        ({"path": ""}, "at least 1"),
        ({"path": "x", "limit": 0}, "greater than 0"),
        ({"path": "x", "grader": "maths"}, "did you mean 'math'"),
        ({"path": "x", "grader": "my-module:judge"}, "module:function"),
        ({"path": "x", "label": "a/b"}, "pattern"),
        ({"path": "x", "label": "x" * 61}, "60"),
        ({"path": "x", "fields": {"question": "q", "anwser": "a"}}, "anwser"),
    ],
)
def test_a_source_that_is_refused(settings: dict[str, Any], part: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Source.model_validate(settings)
    assert part in str(caught.value)


@pytest.mark.parametrize("grader", [*GRADERS, "module:function", "package.module:function"])
def test_graders_by_name_or_as_a_function(grader: str) -> None:
    assert Source(path="x", grader=grader).grader == grader


@pytest.mark.parametrize("template", ["answer-line", "boxed", "plain", "{question}", "Q: {question} {a}"])
def test_templates_by_name_or_as_text(template: str) -> None:
    assert DataTask(name="gsm8k", template=template).template == template


@pytest.mark.parametrize(
    ("template", "part"), [("boxd", "did you mean 'boxed'"), ("Q: {}", "{question} in it")]
)
def test_a_template_without_a_place_for_the_question(template: str, part: str) -> None:
    with pytest.raises(ValidationError) as caught:
        DataTask(name="gsm8k", template=template)
    assert part in str(caught.value)


@pytest.mark.parametrize("name", task_names())
def test_a_task_s_name_is_itself_a_layer(name: str) -> None:
    assert task_from_argument(name) == {"name": name}


def test_a_file_is_what_the_task_data_trains_on(tmp_path: Path) -> None:
    for ending in (*FILE_SUFFIXES, ".JSONL"):
        assert task_from_argument(f"a/x{ending}") == {"name": "data", "train": [{"path": f"a/x{ending}"}]}
    assert task_from_argument(str(tmp_path)) == {"name": "data", "train": [{"path": str(tmp_path)}]}
    assert task_from_argument("gsm8") == {"name": "gsm8"}, "left for the check of the settings to refuse"


def test_a_folder_called_like_a_task_does_not_hide_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gsm8k").mkdir()
    monkeypatch.chdir(tmp_path)
    assert task_from_argument("gsm8k") == {"name": "gsm8k"}


def test_the_names_of_tasks() -> None:
    assert task_names() == ("countdown", "data", *DATASETS)
