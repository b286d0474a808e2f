"""Arms are told apart by what differs, and have the names that a reader would give them."""

from __future__ import annotations

import pytest
import yaml

from bandpo_cli.config.layers import read_assignments, resolve, to_yaml
from bandpo_cli.errors import UserError
from bandpo_cli.reports.sweep.selection import (
    arm_names,
    chosen_keys,
    differing_settings,
    format_setting,
    read_settings,
)


@pytest.fixture
def settings(tmp_path):
    def read(*assignments):
        (tmp_path / "config.yaml").write_text(to_yaml(resolve([read_assignments(assignments)])))
        return read_settings(tmp_path)

    return read


def test_an_arm_is_named_by_its_method_and_what_else_differs(settings):
    runs = [
        settings("bounds.method=clip"),
        settings("bounds.delta=0.05"),
        settings("bounds.delta=0.05", "optim.lr=1e-4"),
        settings("bounds.divergence=tv", "bounds.delta=0.1"),
        settings("bounds.method=none"),
    ]
    assert arm_names(runs) == [
        "clip lr=5e-5",
        "kl 0.05 lr=5e-5",
        "kl 0.05 lr=1e-4",
        "tv 0.1 lr=5e-5",
        "none lr=5e-5",
    ]
    assert arm_names([runs[0], runs[1], runs[3]]) == ["clip", "kl 0.05", "tv 0.1"]
    assert arm_names(runs[:1]) == ["clip"]


def test_settings_of_the_same_method_are_told_others_are_not(settings):
    runs = [settings("bounds.method=clip", f"bounds.eps_high={high}") for high in (0.2, 0.3)]
    assert arm_names([*runs, settings()]) == ["clip eps_high=0.2", "clip eps_high=0.3", "kl 0.05"]
    capped = [settings(f"bounds.max_ratio={cap}") for cap in ("10", "null")]
    assert arm_names(capped) == ["kl 0.05 max_ratio=10", "kl 0.05 max_ratio=null"]


def test_seed_and_tracking_make_no_arm(settings):
    runs = [settings("seed=0", "tracking.mlflow=false"), settings("seed=1", "tracking.experiment=other")]
    assert differing_settings(runs) == []
    assert arm_names(runs) == ["kl 0.05", "kl 0.05"]


def test_a_task_is_told_by_its_name_alone():
    runs = [
        {"bounds.method": "clip", "task.name": "countdown", "task.numbers": 4},
        {"bounds.method": "clip", "task.name": "gsm8k", "task.grader": "math"},
    ]
    assert arm_names(runs) == ["clip task=countdown", "clip task=gsm8k"]


def test_two_settings_of_one_name_are_told_by_their_section(settings):
    runs = [settings(), settings("sampling.temperature=0.7"), settings("evaluation.temperature=0.7")]
    names = arm_names(runs)
    assert names[1] == "kl 0.05 sampling.temperature=0.7 evaluation.temperature=1"
    assert len(set(names)) == 3


def test_names_are_the_same_exactly_where_the_settings_are():
    runs = [{"a": 1, "b": None}, {"a": "1", "b": None}, {"b": 2}, {"a": 0.1}, {"a": 0.1 + 1e-12}]
    for left in runs:
        for right in runs:
            pair = arm_names([left, right])
            same = {key: format_setting(value) for key, value in left.items()} == {
                key: format_setting(value) for key, value in right.items()
            }
            assert (pair[0] == pair[1]) == same


def test_by_chooses_the_settings(settings):
    runs = [settings("bounds.method=clip"), settings("optim.lr=1e-4"), settings("bounds.delta=0.1")]
    assert arm_names(runs, chosen_keys(["optim.lr"], runs)) == ["lr=5e-5", "lr=1e-4", "lr=5e-5"]
    assert arm_names(runs, chosen_keys(["bounds.method"], runs)) == ["clip", "band", "band"]
    names = arm_names(runs, chosen_keys(["bounds"], runs))
    assert names[0].startswith("clip")
    assert names[1].startswith("kl 0.05")
    assert len(set(names)) == 3


@pytest.mark.parametrize(
    ("by", "hint"), [("optim.lrr", "optim.lr"), ("lr", "optim.lr"), ("delta", "bounds.delta")]
)
def test_an_unknown_setting_gets_the_nearest(settings, by, hint):
    with pytest.raises(UserError, match=rf"--by {by}: no such setting \(did you mean '{hint}'"):
        chosen_keys([by], [settings()])


def test_values_are_written_as_they_are_typed():
    values = [
        1e-4,
        0.05,
        5e-05,
        0.001,
        10.0,
        3,
        None,
        True,
        [4, 16],
        "gsm8k",
        0.1 + 0.2,
        1.25e-7,
        -2e-5,
        1.23456789e-5,
    ]
    assert [format_setting(value) for value in values] == [
        "1e-4", "0.05", "5e-5", "1e-3", "10", "3", "null", "true", "4,16", "gsm8k", "0.30000000000000004",
        "1.25e-7", "-2e-5", "1.23456789e-05",
    ]  # fmt: skip


@pytest.mark.parametrize("content", ["a: [", "just text", "", "\x00", "3"])
def test_a_damaged_config_is_said(tmp_path, content):
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(UserError, match=r"config\.yaml"):
        read_settings(tmp_path)


def test_sources_of_data_are_settings_too(tmp_path):
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump({"task": {"train": [{"path": "a.jsonl"}], "k": [4, 16]}})
    )
    assert read_settings(tmp_path) == {"task.train.0.path": "a.jsonl", "task.k": [4, 16]}
