"""Controls of a report: which variants are controls, and whether a gain exceeds theirs, computed by hand."""

import pandas as pd
import pytest
from scipy import stats

from bandpo_cli.reports.controls import control_notes, evaluated_rewards, is_control
from bandpo_cli.reports.run_tables import RUN, RunTables
from bandpo_cli.reports.run_variants import read_settings
from tests.reports.sweep_folders import CLIP, report_on, write_run, write_variant

COIN = {"bounds.method": "clip", "task.rewards.0.weight": 0.0, "task.rewards.1.grader": "random"}
COIN_RUN = ("bounds.method=clip", "task.rewards=[{weight: 0}, random]")


def tables(finals: dict[str, list[float]], settings: dict[str, dict]) -> RunTables:
    """Return runs that begin at an accuracy of 0.2."""
    accuracy = {(name, seed): value for name, values in finals.items() for seed, value in enumerate(values)}
    runs = {"accuracy": [*accuracy.values()], "settings": [settings[name] for name, _ in accuracy]}
    curves = {(*run, step): value if step else 0.2 for run, value in accuracy.items() for step in (0, 4)}
    steps = pd.DataFrame({"accuracy": pd.Series(curves)})
    steps.index.names = [*RUN, "step"]
    index = pd.MultiIndex.from_tuples([*accuracy], names=RUN)
    return RunTables(pd.DataFrame(runs, index), steps, pd.DataFrame())


def test_the_gain_is_compared_with_that_of_each_control():
    """Against `random` differences of 0.30, 0.31, 0.32; against `none` 0.1, −0.1, 0.03, which decides nothing."""
    finals = {"clip": [0.50, 0.52, 0.54], "random": [0.2, 0.21, 0.22], "none": [0.4, 0.62, 0.51]}
    settings = {"clip": {"bounds.method": "clip"}, "random": COIN, "none": {"bounds.method": "none"}}
    (note,) = control_notes(tables(finals, settings))
    assert note.startswith(
        "The gain of clip over the initial evaluation, +0.320, is not shown to exceed that of each control: "
        "random +0.010 (exceeded; difference +0.310, 95% interval "
    )
    half = stats.t.ppf(0.975, 2) * stats.sem([0.30, 0.31, 0.32])
    assert f"95% interval +{0.31 - half:.3f} to +{0.31 + half:.3f} over 3 seeds)" in note
    assert "none +0.310 (undecided: " in note
    del finals["none"]
    (note,) = control_notes(tables(finals, settings))
    assert "+0.320, exceeds that of each control: random +0.010 (exceeded;" in note


def test_without_controls_or_without_other_variants_there_is_no_note():
    settings = {"clip": {"bounds.method": "clip"}, "random": COIN}
    assert control_notes(tables({"clip": [0.5, 0.6]}, settings)) == []
    assert control_notes(tables({"random": [0.5, 0.6]}, settings)) == []
    (note,) = control_notes(tables({"clip": [0.5], "random": [0.3]}, settings))
    assert "is not shown to exceed that of each control: random +0.100 (one seed: no test; " in note
    forks = tables({"clip": [0.5, 0.6], "random": [0.3, 0.3]}, settings)
    forks.steps.loc[("clip", 1, 0), "accuracy"] = float("nan")
    (note,) = control_notes(forks)
    assert "no evaluation where they begin" in note


def test_controls_are_known_by_their_settings(tmp_path):
    form = ("bounds.method=clip", "task.rewards=[{}, {grader: format, weight: 0.5}]")
    length = ("bounds.method=clip", "task.rewards=[{}, 'length:short']")
    cases = {CLIP: (False, ""), ("bounds.method=none",): (True, ""), COIN_RUN: (True, "")}
    for number, (settings, expected) in enumerate(cases.items()):
        read = read_settings(write_run(tmp_path / f"{number}", settings))
        assert (is_control(read), evaluated_rewards(read)) == expected
    mixed = read_settings(write_run(tmp_path / "mixed", form))
    custom = read_settings(write_run(tmp_path / "custom", length))
    assert (is_control(mixed), is_control(custom)) == (True, False)
    assert "length:short" in evaluated_rewards(custom)
    assert evaluated_rewards(mixed) != evaluated_rewards(custom)


@pytest.mark.usefixtures("without_plots")
def test_the_report_has_the_line_and_no_doubt_about_the_evaluations(tmp_path):
    runs = [
        write_variant(tmp_path, name, settings, seed, accuracy={0: 0.2, 4: final + seed / 50})
        for name, settings, final in (("clip", CLIP, 0.5), ("random", COIN_RUN, 0.2))
        for seed in range(3)
    ]
    report = report_on(runs, tmp_path, "clip")
    assert [note for note in report.notes if note.startswith("The gain of clip over the initial evaluation")]
    assert not [note for note in report.notes if "different problems" in note]
