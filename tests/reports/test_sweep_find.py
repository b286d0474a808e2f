"""The runs that a report is of: a sweep's as its plan says, others by their settings; mistakes are a line each."""

from __future__ import annotations

import pytest

from bandpo_cli.errors import UserError
from bandpo_cli.reports.sweep import read_sweep, select_runs
from tests.reports.sweep_folders import CLIP, KL, write_plan, write_run, write_sweep


@pytest.fixture
def runs(tmp_path):
    """Return a folder with two runs of a fixed clip, one Band, and things that are no runs."""
    folder = tmp_path / "runs"
    write_run(folder / "a", CLIP, seed=0)
    write_run(folder / "b", CLIP, seed=1)
    write_run(folder / "c", KL, seed=0)
    (folder / "evaluation").mkdir()
    (folder / "mlflow.db").touch()
    return folder


def _told(selection):
    return [(run.arm, run.seed, run.folder.name) for run in selection.runs]


def test_a_sweep_is_read_as_planned(tmp_path):
    sweep = write_sweep(tmp_path / "deltas", {"clip": {0: 0.4, 1: 0.5}, "kl 0.02": {0: 0.6}})
    title, baseline, runs = read_sweep(sweep)
    assert (title, baseline) == ("deltas", "clip")
    assert [(run.arm, run.seed, run.folder) for run in runs] == [
        ("clip", 0, sweep / "clip-s0"),
        ("clip", 1, sweep / "clip-s1"),
        ("kl 0.02", 0, sweep / "kl-0.02-s0"),
    ]
    selection = select_runs([sweep], tmp_path)
    assert (selection.title, selection.baseline, selection.runs) == (title, baseline, runs)
    assert selection.sweep == sweep


def test_the_runs_of_a_folder_are_told_apart_by_their_settings(runs, tmp_path):
    expected = [("clip", 0, "a"), ("clip", 1, "b"), ("kl 0.05", 0, "c")]
    assert _told(select_runs([runs], tmp_path)) == expected
    assert _told(select_runs([runs / "a", runs / "b", runs / "c"], tmp_path)) == expected
    assert select_runs([runs], tmp_path).baseline is None
    assert select_runs([runs], tmp_path, baseline="clip").baseline == "clip"


def test_names_are_looked_for_in_the_runs_folder(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from pathlib import Path

    assert _told(select_runs([Path("a"), Path("c")], Path("runs"))) == [("clip", 0, "a"), ("kl 0.05", 0, "c")]


def test_a_run_without_settings_is_kept_to_be_listed(runs, tmp_path):
    (runs / "b" / "config.yaml").write_text("a: [")
    assert _told(select_runs([runs], tmp_path)) == [("clip", 0, "a"), ("", 0, "b"), ("kl 0.05", 0, "c")]


def test_by_makes_the_arms_and_says_what_it_hides(runs, tmp_path):
    selection = select_runs([runs], tmp_path, by=["optim.lr"])
    assert {arm for arm, _, _ in _told(selection)} == {"lr=5e-5"}
    (note,) = selection.notes
    assert "bounds.method (clip, band)" in note
    assert select_runs([runs], tmp_path, by=["bounds"]).notes == ()


def test_by_regroups_a_sweep_and_keeps_a_baseline_that_is_still_there(tmp_path):
    sweep = write_sweep(tmp_path / "s", {"clip": {0: 0.4}, "kl 0.02": {0: 0.6}, "kl 0.03": {1: 0.5}})
    selection = select_runs([sweep], tmp_path, by=["bounds.method"])
    assert [arm for arm, _, _ in _told(selection)] == ["clip", "band", "band"]
    assert selection.baseline == "clip"


def test_a_sweep_among_others_gives_its_runs(runs, tmp_path):
    sweep = write_sweep(tmp_path / "s", {"clip": {7: 0.4}})
    assert _told(select_runs([sweep, runs / "c"], tmp_path)) == [("clip", 7, "clip-s7"), ("kl 0.05", 0, "c")]


def _refused(message, *args, **options):
    with pytest.raises(UserError) as refused:
        select_runs(*args, **options)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_paths_that_are_no_runs_are_refused(runs, tmp_path):
    _refused("no such folder (did you mean 'runs'?)", [tmp_path / "rusn"], tmp_path)
    _refused("is a file", [runs / "mlflow.db"], tmp_path)
    _refused("no runs here", [runs / "evaluation"], tmp_path)
    _refused("no such folder", [tmp_path / ("x" * 5000)], tmp_path)
    write_sweep(tmp_path / "all" / "deltas", {"clip": {0: 0.4}})
    _refused("it holds sweeps, give one: deltas", [tmp_path / "all"], tmp_path)


def test_a_run_given_twice_is_refused(runs, tmp_path):
    _refused("given twice", [runs / "a", runs / "." / "a"], tmp_path)
    _refused("given twice", [runs, runs / "b"], tmp_path)
    (tmp_path / "link").symlink_to(runs / "a")
    _refused("given twice", [runs / "a", tmp_path / "link"], tmp_path)


def test_an_unknown_baseline_gets_the_nearest(runs, tmp_path):
    _refused("--baseline clpi: no arm of that name (did you mean 'clip'?)", [runs], tmp_path, baseline="clpi")
    sweep = write_sweep(tmp_path / "s", {"clip": {0: 0.4}}, baseline="klip")
    _refused("baseline = 'klip': no arm of that name (did you mean 'clip'?); arms: clip", [sweep], tmp_path)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("runs: [", "line 1: not readable as YAML"),
        ("3", "lists no runs"),
        ("runs: []", "lists no runs"),
        ("runs: {a: 1}", "lists no runs"),
        ("runs: [a]", "run 1 has no name"),
        ("runs: [{name: a, arm: x}]", "run 1 has no seed"),
        ("runs: [{name: a, arm: x, seed: one}]", "seed = 'one' is no whole number"),
        ("runs: [{name: ../a, arm: x, seed: 1}]", "name = '../a' is no folder's name"),
        ("runs: [{name: .., arm: x, seed: 1}]", "name = '..' is no folder's name"),
        ("runs: [{name: a, arm: x, seed: 1}, {name: a, arm: y, seed: 1}]", "given twice"),
    ],
)
def test_a_damaged_plan_is_said(tmp_path, plan, message):
    (tmp_path / "sweep.yaml").write_text(plan)
    _refused(message, [tmp_path], tmp_path)


def test_a_plan_that_is_no_text_is_said(tmp_path):
    (tmp_path / "sweep.yaml").write_bytes(b"\xff\xfe\x00")
    _refused("UTF-8 is expected", [tmp_path], tmp_path)


def test_arms_and_names_may_be_numbers_in_yaml(tmp_path):
    write_plan(tmp_path, {"name": 5, "baseline": 1, "runs": [{"name": 10, "arm": 1, "seed": 0}]})
    title, baseline, (run,) = read_sweep(tmp_path)
    assert (title, baseline, run.arm, run.folder.name) == ("5", "1", "1", "10")
