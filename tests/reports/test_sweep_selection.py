"""Selection of the runs of a report, their grouping into variants, and the names of variants."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from bandpo_cli.config.layers import flatten, read_assignments, resolve, to_yaml
from bandpo_cli.errors import UserError
from bandpo_cli.reports.comparison import read_sweep, select_runs
from bandpo_cli.reports.comparison.selection import (
    chosen_keys,
    differing_settings,
    format_setting,
    method_name,
    read_settings,
    variant_names,
)
from tests.reports.sweep_folders import CLIP, KL, write_plan, write_run, write_sweep


@pytest.fixture
def runs(tmp_path):
    """Return a folder with two runs of clip, one run of a Band, and entries that are not runs."""
    folder = tmp_path / "runs"
    write_run(folder / "a", CLIP, seed=0)
    write_run(folder / "b", CLIP, seed=1)
    write_run(folder / "c", KL, seed=0)
    (folder / "evaluation").mkdir()
    (folder / "mlflow.db").touch()
    return folder


def _listed(selection):
    return [(run.arm, run.seed, run.folder.name) for run in selection.runs]


def test_runs_of_a_sweep_have_the_arms_of_its_plan(tmp_path):
    sweep = write_sweep(tmp_path / "deltas", {"clip": {0: 0.4, 1: 0.5}, "kl 0.02": {0: 0.6}})
    selection = select_runs([sweep], tmp_path)
    assert (selection.title, selection.baseline) == ("deltas", "clip")
    assert [(run.arm, run.seed, run.folder) for run in selection.runs] == [
        ("clip", 0, sweep / "clip-s0"),
        ("clip", 1, sweep / "clip-s1"),
        ("kl 0.02", 0, sweep / "kl-0.02-s0"),
    ]
    assert selection.sweep is not None
    assert selection.sweep.path == sweep


def test_runs_of_a_folder_are_grouped_by_their_settings(runs, tmp_path):
    expected = [("clip", 0, "a"), ("clip", 1, "b"), ("kl 0.05", 0, "c")]
    assert _listed(select_runs([runs], tmp_path)) == expected
    assert _listed(select_runs([runs / "a", runs / "b", runs / "c"], tmp_path)) == expected
    assert select_runs([runs], tmp_path).baseline is None
    assert select_runs([runs], tmp_path, baseline="clip").baseline == "clip"


def test_names_are_looked_up_in_the_runs_folder(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _listed(select_runs([Path("a"), Path("c")], Path("runs"))) == [
        ("clip", 0, "a"),
        ("kl 0.05", 0, "c"),
    ]


def test_run_without_readable_settings_is_selected(runs, tmp_path):
    (runs / "b" / "config.yaml").write_text("a: [")
    assert _listed(select_runs([runs], tmp_path)) == [("clip", 0, "a"), ("", 0, "b"), ("kl 0.05", 0, "c")]


def test_by_groups_runs_and_sweeps_and_notes_the_other_differences(runs, tmp_path):
    selection = select_runs([runs], tmp_path, by=["optim.lr"])
    assert {arm for arm, _, _ in _listed(selection)} == {"lr=5e-5"}
    (note,) = selection.notes
    assert "bounds.method (clip, band)" in note
    assert select_runs([runs], tmp_path, by=["bounds"]).notes == ()
    sweep = write_sweep(tmp_path / "s", {"clip": {0: 0.4}, "kl 0.02": {0: 0.6}, "kl 0.03": {1: 0.5}})
    selection = select_runs([sweep], tmp_path, by=["bounds.method"])
    assert [arm for arm, _, _ in _listed(selection)] == ["clip", "band", "band"]
    assert selection.baseline == "clip"


def test_sweep_and_run_folders_can_be_combined(runs, tmp_path):
    sweep = write_sweep(tmp_path / "s", {"clip": {7: 0.4}})
    assert _listed(select_runs([sweep, runs / "c"], tmp_path)) == [
        ("clip", 7, "clip-s7"),
        ("kl 0.05", 0, "c"),
    ]


def _assert_refused(message, *args, **options):
    with pytest.raises(UserError) as refused:
        select_runs(*args, **options)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_paths_without_runs_are_refused(runs, tmp_path):
    _assert_refused("no such folder (did you mean 'runs'?)", [tmp_path / "rusn"], tmp_path)
    _assert_refused("is a file", [runs / "mlflow.db"], tmp_path)
    _assert_refused("no runs here", [runs / "evaluation"], tmp_path)
    _assert_refused("no such folder", [tmp_path / ("x" * 5000)], tmp_path)
    write_sweep(tmp_path / "all" / "deltas", {"clip": {0: 0.4}})
    _assert_refused("it holds sweeps, give one: deltas", [tmp_path / "all"], tmp_path)


def test_run_given_twice_is_refused(runs, tmp_path):
    _assert_refused("given twice", [runs / "a", runs / "." / "a"], tmp_path)
    _assert_refused("given twice", [runs, runs / "b"], tmp_path)
    (tmp_path / "link").symlink_to(runs / "a")
    _assert_refused("given twice", [runs / "a", tmp_path / "link"], tmp_path)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("runs: [", "line 1: not readable as YAML"),
        ("3", "the plan = '3': Input should be a dictionary"),
        ("runs: []", "runs = '[]': List should have at least 1 item"),
        ("runs: {a: 1}", "runs = \"{'a': 1}\": Input should be a valid list"),
        ("runs: [a]", "runs.0 = 'a': Input should be a dictionary"),
        ("runs: [{name: a, arm: x}]", "runs.0.seed = \"{'name': 'a', 'arm': 'x'}\": Field required"),
        ("runs: [{name: a, arm: x, seed: one}]", "runs.0.seed = 'one': Input should be a valid integer"),
        (
            "runs: [{name: a, arm: x, seed: -1}]",
            "runs.0.seed = '-1': Input should be greater than or equal to 0",
        ),
        ("runs: [{name: ../a, arm: x, seed: 1}]", "name = '../a' is not a valid folder name"),
        ("runs: [{name: .., arm: x, seed: 1}]", "name = '..' is not a valid folder name"),
        ("runs: [{name: plans, arm: x, seed: 1}]", "name = 'plans' is not a valid folder name"),
        (
            "runs: [{name: a, arm: x, seed: 1}, {name: a, arm: y, seed: 1}]",
            "name = 'a' is not a valid folder name, or",
        ),
        (
            "{runs: [{name: a, arm: clip, seed: 1}], baseline: klip}",
            "no variant of that name (did you mean 'clip'?)",
        ),
        (
            "{runs: [{name: a, arm: x, seed: 1}], gpus_per_run: true}",
            "gpus_per_run = 'True': Input should be a valid",
        ),
        (
            "{runs: [{name: a, arm: x, seed: 1}], gpus_per_run: 0}",
            "gpus_per_run = '0': Input should be greater than",
        ),
    ],
)
def test_error_for_a_damaged_plan(tmp_path, plan, message):
    (tmp_path / "sweep.yaml").write_text(plan)
    _assert_refused(message, [tmp_path], tmp_path)
    (tmp_path / "sweep.yaml").write_bytes(b"\xff\xfe\x00")
    _assert_refused("UTF-8 is expected", [tmp_path], tmp_path)


def test_arms_and_names_can_be_numbers_in_yaml(tmp_path):
    write_plan(tmp_path, {"name": 5, "baseline": 1, "runs": [{"name": 10, "arm": 1, "seed": 0}]})
    chosen = read_sweep(tmp_path)
    (run,) = chosen.runs
    assert (chosen.title, chosen.baseline, run.arm, run.folder.name) == ("5", "1", "1", "10")


@pytest.fixture
def settings(tmp_path):
    def read(*assignments):
        (tmp_path / "config.yaml").write_text(to_yaml(resolve([read_assignments(assignments)])))
        return read_settings(tmp_path)

    return read


def test_arm_is_named_by_its_method_and_the_other_differing_settings(settings):
    runs = [
        settings("bounds.method=clip"),
        settings("bounds.delta=0.05"),
        settings("bounds.delta=0.05", "optim.lr=1e-4"),
        settings("bounds.divergence=tv", "bounds.delta=0.1"),
        settings("bounds.method=none"),
    ]
    assert variant_names(runs) == [
        "clip lr=5e-5",
        "kl 0.05 lr=5e-5",
        "kl 0.05 lr=1e-4",
        "tv 0.1 lr=5e-5",
        "none lr=5e-5",
    ]
    assert variant_names([runs[0], runs[1], runs[3]]) == ["clip", "kl 0.05", "tv 0.1"]
    assert variant_names(runs[:1]) == ["clip"]


def test_names_have_settings_that_differ_within_a_method(settings):
    runs = [settings("bounds.method=clip", f"bounds.eps_high={high}") for high in (0.2, 0.3)]
    assert variant_names([*runs, settings()]) == ["clip eps_high=0.2", "clip eps_high=0.3", "kl 0.05"]
    capped = [settings(f"bounds.max_ratio={cap}") for cap in ("10", "null")]
    assert variant_names(capped) == ["kl 0.05 max_ratio=10", "kl 0.05 max_ratio=null"]


@pytest.mark.parametrize(
    "assignments",
    [
        ("tracking.mlflow=false", "tracking.experiment=other"),
        ("checkpoint.every=5", "checkpoint.keep_last=null", "checkpoint.best_metric=train/accuracy"),
        ("grading.workers=3",),
        ("model.gradient_checkpointing=true",),
        ("sampling.vllm.memory_fraction=0.3",),
    ],
)
def test_settings_without_effect_do_not_separate_arms(settings, assignments):
    runs = [settings("seed=0"), settings("seed=1", *assignments)]
    assert differing_settings(runs) == []
    assert len(set(variant_names(runs))) == 1


@pytest.mark.parametrize(
    "assignment", ["grading.deadline=1", "sampling.vllm.sleep=false", "model.device=cpu"]
)
def test_settings_that_can_change_a_number_separate_arms(settings, assignment):
    runs = [settings(), settings(assignment)]
    assert differing_settings(runs) == [assignment.split("=")[0]]
    assert len(set(variant_names(runs))) == 2


def test_tasks_are_distinguished_by_name_only():
    runs = [
        {"bounds.method": "clip", "task.name": "countdown", "task.numbers": 4},
        {"bounds.method": "clip", "task.name": "gsm8k", "task.grader": "math"},
    ]
    assert variant_names(runs) == ["clip task=countdown", "clip task=gsm8k"]


def test_settings_with_the_same_last_part_are_named_with_their_section(settings):
    runs = [settings(), settings("sampling.temperature=0.7"), settings("evaluation.temperature=0.7")]
    names = variant_names(runs)
    assert names[1] == "kl 0.05 sampling.temperature=0.7 evaluation.temperature=1"
    assert len(set(names)) == 3


def test_names_are_equal_exactly_when_the_settings_are():
    runs = [{"a": 1, "b": None}, {"a": "1", "b": None}, {"b": 2}, {"a": 0.1}, {"a": 0.1 + 1e-12}]
    for left in runs:
        for right in runs:
            pair = variant_names([left, right])
            same = {key: format_setting(value) for key, value in left.items()} == {
                key: format_setting(value) for key, value in right.items()
            }
            assert (pair[0] == pair[1]) == same


def test_arm_names_from_chosen_settings(settings):
    runs = [settings("bounds.method=clip"), settings("optim.lr=1e-4"), settings("bounds.delta=0.1")]
    assert variant_names(runs, chosen_keys(["optim.lr"], runs)) == ["lr=5e-5", "lr=1e-4", "lr=5e-5"]
    assert variant_names(runs, chosen_keys(["bounds.method"], runs)) == ["clip", "band", "band"]
    names = variant_names(runs, chosen_keys(["bounds"], runs))
    assert names[0].startswith("clip")
    assert names[1].startswith("kl 0.05")
    assert len(set(names)) == 3


@pytest.mark.parametrize(
    ("by", "hint"), [("optim.lrr", "optim.lr"), ("lr", "optim.lr"), ("delta", "bounds.delta")]
)
def test_error_for_an_unknown_setting_suggests_the_nearest(settings, by, hint):
    with pytest.raises(UserError, match=rf"--by {by}: no such setting \(did you mean '{hint}'"):
        chosen_keys([by], [settings()])


def test_settings_are_formatted_as_a_user_types_them():
    values = [
        1e-4, 0.05, 5e-05, 0.001, 10.0, 3, None, True, [4, 16], "gsm8k", 0.1 + 0.2, 1.25e-7, -2e-5, 1.23456789e-5,
    ]  # fmt: skip
    assert [format_setting(value) for value in values] == [
        "1e-4", "0.05", "5e-5", "1e-3", "10", "3", "null", "true", "4,16", "gsm8k", "0.30000000000000004",
        "1.25e-7", "-2e-5", "1.23456789e-05",
    ]  # fmt: skip


def test_settings_include_lists_of_data_sources(tmp_path):
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump({"task": {"train": [{"path": "a.jsonl"}], "k": [4, 16]}})
    )
    assert read_settings(tmp_path) == {"task.train.0.path": "a.jsonl", "task.k": [4, 16]}
    for damaged in ("a: [", "just text", "", "\x00", "3"):
        (tmp_path / "config.yaml").write_text(damaged)
        with pytest.raises(UserError, match=r"config\.yaml"):
            read_settings(tmp_path)


def test_methods_with_a_trust_region_are_named_by_it():
    """The Band by divergence and radius alone; a method that this version does not know by its name."""
    runs = [
        read_flat({"bounds": {"method": "band", "delta": 0.1}}),
        read_flat({"bounds": {"method": "dppo", "divergence": "tv"}}),
        read_flat({"bounds": {"method": "sapo"}}),
        {"bounds.method": "mine"},
    ]
    assert [method_name(run) for run in runs] == ["kl 0.1", "dppo tv 0.15", "sapo", "mine"]


def read_flat(layer):
    return flatten(resolve([layer]).model_dump(mode="json"))
