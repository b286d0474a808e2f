"""Selection of the runs of a report, their grouping into variants, and the names of variants."""

import re
from itertools import product
from pathlib import Path

import pytest
import yaml

from bandpo_cli.config.layers import flatten, read_assignments, resolve
from bandpo_cli.errors import UserError
from bandpo_cli.reports.run_variants import (
    chosen_keys,
    differing_settings,
    format_setting,
    read_settings,
    read_sweep,
    select_runs,
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


def _listed(paths, runs_dir, **options):
    return [(run.variant, run.seed, run.folder.name) for run in select_runs(paths, runs_dir, **options).runs]


def test_runs_of_a_sweep_have_the_variants_of_its_plan(tmp_path):
    sweep = write_sweep(tmp_path / "deltas", {"clip": {0: 0.4, 1: 0.5}, "kl 0.02": {0: 0.6}})
    selection = select_runs([sweep], tmp_path)
    assert (selection.title, selection.baseline, selection.sweep.path) == ("deltas", "clip", sweep)
    folders = [sweep / name for name in ("clip-s0", "clip-s1", "kl-0.02-s0")]
    expected = zip(("clip", "clip", "kl 0.02"), (0, 1, 0), folders, strict=True)
    assert [(run.variant, run.seed, run.folder) for run in selection.runs] == list(expected)


def test_other_runs_are_grouped_by_their_settings(runs, tmp_path, monkeypatch):
    expected = [("clip", 0, "a"), ("clip", 1, "b"), ("kl 0.05", 0, "c")]
    assert _listed([runs], tmp_path) == _listed([runs / "a", runs / "b", runs / "c"], tmp_path) == expected
    assert select_runs([runs], tmp_path).baseline is None
    assert select_runs([runs], tmp_path, baseline="clip").baseline == "clip"
    monkeypatch.chdir(tmp_path)
    assert _listed([Path("a"), Path("c")], Path("runs")) == [expected[0], expected[2]]
    sweep = write_sweep(tmp_path / "s", {"clip": {7: 0.4}})
    assert _listed([sweep, runs / "c"], tmp_path) == [("clip", 7, "clip-s7"), expected[2]]
    (runs / "b" / "config.yaml").write_text("a: [")
    assert _listed([runs], tmp_path) == [expected[0], ("", 0, "b"), expected[2]]


def test_runs_with_different_custom_code_are_variants(runs, tmp_path):
    """A run without a module, such as that of a callback, is no other variant for this reason."""
    write_run(runs / "d", CLIP, seed=2)
    for name in "ab":
        (runs / name / "loss.py").write_text("x = 1")
    assert {variant for variant, _, _ in _listed([runs / name for name in "abd"], tmp_path)} == {"clip"}
    (runs / "b" / "loss.py").write_text("x = 2")
    variants = [variant for variant, _, _ in _listed([runs / "a", runs / "b"], tmp_path)]
    assert len({*variants}) == 2
    assert all(variant.startswith("clip loss=") for variant in variants)


def test_by_groups_runs_and_sweeps_and_notes_the_other_differences(runs, tmp_path):
    selection = select_runs([runs], tmp_path, by=["optim.lr"])
    assert {run.variant for run in selection.runs} == {"lr=5e-5"}
    (note,) = selection.notes
    assert "bounds.method (clip, band)" in note
    assert select_runs([runs], tmp_path, by=["bounds"]).notes == ()
    sweep = write_sweep(tmp_path / "s", {"clip": {0: 0.4}, "kl 0.02": {0: 0.6}, "kl 0.03": {1: 0.5}})
    selection = select_runs([sweep], tmp_path, by=["bounds.method"])
    assert [run.variant for run in selection.runs] == ["clip", "band", "band"]
    assert selection.baseline == "clip"


def test_paths_without_runs_and_runs_given_twice_are_refused(runs, tmp_path):
    write_sweep(tmp_path / "all" / "deltas", {"clip": {0: 0.4}})
    (tmp_path / "link").symlink_to(runs / "a")
    for message, *paths in (
        ("no such folder (did you mean 'runs'?)", tmp_path / "rusn"),
        ("is a file", runs / "mlflow.db"),
        ("no runs here", runs / "evaluation"),
        ("no such folder", tmp_path / ("x" * 5000)),
        ("it holds sweeps, give one: deltas", tmp_path / "all"),
        ("given twice", runs, runs / "b"),
        ("given twice", runs / "a", tmp_path / "link"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            select_runs(paths, Path())


RUN = "{name: a, variant: clip, seed: 1}"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("runs: [", ": not readable as YAML"),
        ("runs: []", "runs = '[]': List should have at least 1 item"),
        ("runs: [{name: a, variant: x}]", "runs.0.seed = \"{'name': 'a', 'variant': 'x'}\": Field required"),
        ("runs: [{name: ../a, variant: x, seed: 1}]", "name = '../a' is not a valid folder name"),
        ("runs: [{name: plans, variant: x, seed: 1}]", "name = 'plans' is not a valid folder name"),
        (f"runs: [{RUN}, {RUN}]", "name = 'a' is not a valid folder name or"),
        (f"{{runs: [{RUN}], baseline: klip}}", "no variant of that name (did you mean 'clip'?)"),
        (f"{{runs: [{RUN}], gpus_per_run: true}}", "gpus_per_run = 'True': Input should be a valid"),
    ],
)
def test_error_for_a_damaged_plan(tmp_path, plan, message):
    (tmp_path / "sweep.yaml").write_text(plan)
    with pytest.raises(UserError, match=re.escape(message)):
        select_runs([tmp_path], Path())


def test_names_of_a_plan_can_be_numbers(tmp_path):
    write_plan(tmp_path, {"name": 5, "baseline": 1, "runs": [{"name": 10, "variant": 1, "seed": 0}]})
    chosen = read_sweep(tmp_path)
    (run,) = chosen.runs
    assert (chosen.title, chosen.baseline, run.variant, run.folder.name) == ("5", "1", "1", "10")


def settings(*assignments):
    return flatten(resolve([read_assignments(assignments)]).model_dump(mode="json"))


def test_a_variant_is_named_by_its_method_and_the_other_differing_settings():
    clip, none = settings("bounds.method=clip"), settings("bounds.method=none")
    kl, tv = settings("bounds.delta=0.05"), settings("bounds.divergence=tv", "bounds.delta=0.1")
    runs = [clip, kl, settings("bounds.delta=0.05", "optim.lr=1e-4"), tv, none]
    names = ["clip lr=5e-5", "kl 0.05 lr=5e-5", "kl 0.05 lr=1e-4", "tv 0.1 lr=5e-5", "none lr=5e-5"]
    assert variant_names(runs) == names
    assert variant_names([clip, kl, tv]) == ["clip", "kl 0.05", "tv 0.1"]
    assert variant_names([clip]) == ["clip"]
    higher = [settings("bounds.method=clip", f"bounds.eps_high={high}") for high in (0.2, 0.3)]
    assert variant_names([*higher, settings()]) == ["clip eps_high=0.2", "clip eps_high=0.3", "kl 0.05"]
    capped = [settings(f"bounds.max_ratio={cap}") for cap in ("10", "null")]
    assert variant_names(capped) == ["kl 0.05 max_ratio=10", "kl 0.05 max_ratio=null"]
    assert variant_names([settings("bounds.method=dppo", "bounds.divergence=tv")]) == ["dppo tv 0.15"]
    assert variant_names([{"bounds.method": "mine"}]) == ["mine"]  # not known to this version


@pytest.mark.parametrize(
    ("assignments", "differing"),
    [
        (("tracking.mlflow=false", "tracking.experiment=other"), []),
        (("checkpoint.every=5", "checkpoint.keep_last=null", "checkpoint.best_metric=train/accuracy"), []),
        (("grading.workers=3", "model.gradient_checkpointing=true", "sampling.vllm.memory_fraction=0.3"), []),
        (("grading.deadline=1",), ["grading.deadline"]),
        (("sampling.vllm.sleep=false",), ["sampling.vllm.sleep"]),
        (("model.device=cpu",), ["model.device"]),
    ],
)
def test_settings_that_can_change_a_number_separate_variants(assignments, differing):
    runs = [settings("seed=0"), settings("seed=1", *assignments)]
    assert differing_settings(runs) == differing
    assert len(set(variant_names(runs))) == (2 if differing else 1)


def test_tasks_are_distinguished_by_name_and_settings_with_the_same_last_part_by_their_section():
    countdown = {"bounds.method": "clip", "task.name": "countdown", "task.numbers": 4}
    gsm8k = {"bounds.method": "clip", "task.name": "gsm8k", "task.grader": "math"}
    assert variant_names([countdown, gsm8k]) == ["clip task=countdown", "clip task=gsm8k"]
    runs = [settings(), settings("sampling.temperature=0.7"), settings("evaluation.temperature=0.7")]
    names = variant_names(runs)
    assert names[1] == "kl 0.05 sampling.temperature=0.7 evaluation.temperature=1"
    assert len(set(names)) == 3


def test_names_are_equal_exactly_when_the_settings_are():
    runs = [{"a": 1, "b": None}, {"a": "1", "b": None}, {"b": 2}, {"a": 0.1}, {"a": 0.1 + 1e-12}]
    texts = [{key: format_setting(value) for key, value in run.items()} for run in runs]
    for left, right in product(range(5), repeat=2):
        names = variant_names([runs[left], runs[right]])
        assert (names[0] == names[1]) == (texts[left] == texts[right])


def test_variant_names_from_chosen_settings():
    runs = [settings("bounds.method=clip"), settings("optim.lr=1e-4"), settings("bounds.delta=0.1")]
    assert variant_names(runs, chosen_keys(["optim.lr"], runs)) == ["lr=5e-5", "lr=1e-4", "lr=5e-5"]
    by_section = variant_names(runs, chosen_keys(["bounds"], runs))
    assert [re.match(r"clip|kl [\d.]+", name)[0] for name in by_section] == ["clip", "kl 0.05", "kl 0.1"]
    for by, hint in (("optim.lrr", "optim.lr"), ("lr", "optim.lr"), ("delta", "bounds.delta")):
        with pytest.raises(UserError, match=rf"--by {by}: no such setting \(did you mean '{hint}'"):
            chosen_keys([by], runs)


def test_settings_are_formatted_as_a_user_types_them():
    texts = {
        1e-4: "1e-4", 0.05: "0.05", 5e-05: "5e-5", 0.001: "1e-3", 10.0: "10", 3: "3", None: "null", True: "true",
        "gsm8k": "gsm8k", 0.1 + 0.2: "0.30000000000000004", 1.25e-7: "1.25e-7", -2e-5: "-2e-5",
        1.23456789e-5: "1.23456789e-05",
    }  # fmt: skip
    assert [format_setting(value) for value in texts] == list(texts.values())
    assert format_setting([4, 16]) == "4,16"


def test_settings_include_lists_of_data_sources(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"task": {"train": [{"path": "a.jsonl"}], "k": [4, 16]}}))
    settings = {"task.train.0.path": "a.jsonl", "task.k": [4, 16]}
    assert read_settings(tmp_path) == settings
    (tmp_path / "env.json").write_text('{"parent": {"run": "runs/a", "step": 4}}')
    assert read_settings(tmp_path) == settings | {"fork": "runs/a@4"}
    for damaged in ("a: [", "just text", "", "\x00", "3"):
        path.write_text(damaged)
        with pytest.raises(UserError, match=r"config\.yaml"):
            read_settings(tmp_path)
