"""Settings of data set tasks: accepted forms of a source, and the meaning of `--task NAME|FILE`."""

from typing import Any, cast

import pytest
from pydantic import ValidationError

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.task import FILE_SUFFIXES, DataTask, Fields, Source, TaskSettings, task_from_arguments
from bandpo_cli.errors import ConfigError
from bandpo_cli.registries import DATASETS


@pytest.mark.parametrize(
    ("written", "source"),
    [
        ("gsm8k", Source(name="gsm8k")),
        ("my/questions.jsonl", Source(path="my/questions.jsonl")),
        ("org/set", Source(path="org/set")),
        ({"name": "math", "levels": [3, 4]}, Source(name="math", levels=(3, 4))),
        ({"path": "x", "grader": "verl:a.b:c"}, Source(path="x", grader="verl:a.b:c")),
        ({"path": "x", "fields": {"question": "a.b"}}, Source(path="x", fields=Fields(question="a.b"))),
    ],
)
def test_a_source_is_a_string_or_a_section(written, source):
    assert Source.model_validate(written) == source
    assert DataTask.model_validate({"name": "data", "train": written}).train == (source,)
    several = {"name": "data", "train": [written, "y.jsonl"], "grader": "math"}
    assert DataTask.model_validate(several).train[0] == source


@pytest.mark.parametrize(
    ("task", "grader", "chosen", "of_sources"),
    [
        ({"name": "gsm8k"}, "number", None, []),
        ({"name": "dapo-math-17k"}, "math", None, []),
        ({"name": "gsm8k", "grader": "gsm8k"}, "gsm8k", "gsm8k", []),
        ({"train": "x.jsonl"}, "math", None, [None]),
        ({"train": "x.jsonl", "heldout": "math500"}, "math", None, [None, None]),
        ({"train": ["x.jsonl", "gsm8k"]}, None, None, ["math", "number"]),
        ({"train": "x.jsonl", "heldout": "gsm8k"}, None, None, ["math", "number"]),
        ({"train": ["x.jsonl", "gsm8k"], "grader": "math"}, "math", "math", [None, None]),
        ({"train": {"path": "x.jsonl", "grader": "number"}}, "number", None, ["number"]),
        ({"train": "x.jsonl", "rewards": ["number", "math"]}, None, "number", [None]),
        ({"heldout": "gsm8k"}, "number", None, [None]),
    ],
)
def test_the_settings_name_the_grader_that_is_used(task, grader, chosen, of_sources):
    """A grader that the user did not choose is not used for other data, such as that of `eval --task`."""
    settings = cast(DataTask, resolve([{"task": {"name": "data", **task}}]).task)
    assert (settings.grader, settings.chosen_grader) == (grader, chosen)
    assert [source.grader for source in (*settings.train, *settings.heldout)] == of_sources
    assert resolve([{"task": settings.model_dump(mode="json")}]).task == settings


@pytest.mark.parametrize(
    ("layer", "defaults"),
    [
        ({}, (5e-5, 8, 2048, False, 16)),
        ({"model": {"path": "a/b"}, "task": {"min_target": 37}}, (1e-6, 32, 512, "auto", 16)),
        ({"model": {"path": "a/b"}, "task": {"name": "gsm8k"}}, (1e-6, 1024, 512, "auto", 4)),
        ({"task": {"name": "gsm8k"}}, (1e-6, 1024, 512, "auto", 4)),
        ({"task": {"name": "gsm8k"}, "optim": {"lr": 3e-6}}, (3e-6, 1024, 512, "auto", 4)),
    ],
)
def test_defaults_follow_the_task_and_the_model(layer, defaults):
    config = resolve([layer])
    sampling, evaluation = config.sampling, config.evaluation
    lengths = (sampling.max_tokens, sampling.max_sequences)
    assert (config.optim.lr, *lengths, config.model.gradient_checkpointing, evaluation.samples) == defaults


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"path": "x", "grader": "maths"}, "did you mean 'math'"),
        ({"path": "x", "grader": "my-module:judge"}, "module:function"),
        ({"path": "x", "label": "a/b"}, "pattern"),
        ({"path": "x", "fields": {"question": "q", "anwser": "a"}}, "anwser"),
        ({"path": "x", "grader": "nosuch:a:b:c"}, "module:function"),
    ],
)
def test_invalid_sources_are_refused(settings, part):
    with pytest.raises(ValidationError) as caught:
        Source.model_validate(settings)
    assert part in str(caught.value)


def test_a_name_as_argument_is_a_task_also_beside_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").mkdir()
    names = [*TaskSettings.classes()]
    assert names == ["countdown", "calculator", "reasoning-gym", "data", *DATASETS]
    for name in (*names, "gsm8"):  # the validation of the settings refuses gsm8
        assert task_from_arguments([name]) == {"name": name}


def test_a_file_as_argument_is_the_training_data_of_the_task_data(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    for ending in (*FILE_SUFFIXES, ".JSONL"):
        (tmp_path / f"a/x{ending}").touch()
        assert task_from_arguments([f"a/x{ending}"]) == {"name": "data", "train": [{"path": f"a/x{ending}"}]}
    assert task_from_arguments([str(tmp_path)]) == {"name": "data", "train": [{"path": str(tmp_path)}]}


def resolve_rewards(rewards: Any, **task: Any) -> DataTask:
    task = {"name": "gsm8k", "rewards": rewards, **task}
    return cast(DataTask, resolve([{"task": task, "model": {"path": "a/b"}}]).task)


def test_rewards_are_graders_with_weights():
    task = resolve_rewards(["math", {"grader": "trl:mine.rewards:in_tags", "weight": 0.2}])
    assert [(reward.label, reward.weight) for reward in task.rewards] == [("math", 1.0), ("in_tags", 0.2)]
    assert task.answer_grader == "math"
    assert resolve_rewards([{}, "a:b"], grader="number").answer_grader == "number"
    assert resolve_rewards("a:b").answer_grader == "a:b"


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([], r"task\.rewards = \[\]: the list is empty"),
        (["math", {"grader": "a:b", "weight": float("nan")}], r"task\.rewards\[1\]\.weight = nan: .*finite"),
        (["math", {"grader": "a:b", "weight": "x"}], r"task\.rewards\[1\]\.weight = 'x'"),
        (["mth"], r"task\.rewards\[0\]\.grader = 'mth': .*did you mean 'math'"),
        (["math", "vrl:a:b"], r"task\.rewards\[1\]\.grader = 'vrl:a:b': no grader of that name"),
        (["math", {}], "each entry but the first needs a grader"),
        (["a:b", "c:b"], "two entries have the name 'b'"),
        ([{"grader": "a:b", "name": "x/y"}], r"task\.rewards\[0\]\.name = 'x/y'"),
        ([{"grader": "a:b", "wight": 1}], r"\[0\]\.wight: no such setting \(did you mean 'weight'\?\)"),
        ([{"grader": "a:b", "weight": 0}], "every weight is 0"),
    ],
)
def test_invalid_rewards_are_one_line(rewards, message):
    with pytest.raises(ConfigError, match=message) as error:
        resolve_rewards(rewards)
    assert "\n" not in str(error.value)


def test_the_first_reward_is_the_only_grader_of_the_answers():
    with pytest.raises(ConfigError, match="'number' and the first of the rewards, 'math', both grade"):
        resolve_rewards(["math"], grader="number")
    with pytest.raises(ConfigError, match="remove `grader` from the first entry"):
        resolve([{"task": {"name": "countdown", "rewards": ["math"]}}])
