"""Entropies at equal accuracy agree with curves computed by hand, and no single run determines the level silently."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from bandpo_cli.reports.comparison import VariantRun, write_report
from bandpo_cli.reports.comparison.report_metrics import (
    EqualAccuracy,
    entropy_at_equal_accuracy,
    entropy_when_reached,
    first_crossing,
)
from bandpo_cli.reports.comparison.runs import Evaluations, VariantRunData
from tests.reports.sweep_folders import edit_line, report_of, write_run, write_sweep


def _run(
    accuracy: Mapping[int, float], entropy_of_policy: Sequence[float] = (), arm: str = "a", seed: int = 0
) -> VariantRunData:
    """Return a run with these accuracies by step; entropy i is that of the policy after i steps."""
    return VariantRunData(
        run=VariantRun(arm, seed, Path("unused")),
        settings={},
        steps=max(accuracy),
        sets={"countdown": Evaluations("16", list(accuracy), list(accuracy.values()), {})},
        entropy=([step + 1 for step in range(len(entropy_of_policy))], list(entropy_of_policy)),
        clipped=None,
        clipped_by_bin={},
        token_share={},
        step_seconds=[],
    )


def _equal(finals: Mapping[str, Sequence[float]], start: float = 0.1) -> EqualAccuracy:
    """Return the entropies at equal accuracy of runs whose accuracy rises from `start` in 4 steps, by variant and seed.

    The entropy of every run falls from 1.0 by 0.1 per step.
    """
    arms = {
        arm: [
            _run({0: start, 4: final}, [1.0, 0.9, 0.8, 0.7], arm, seed) for seed, final in enumerate(by_seed)
        ]
        for arm, by_seed in finals.items()
    }
    return entropy_at_equal_accuracy(arms, ["countdown"])


@pytest.mark.parametrize(
    ("level", "moment"),
    [
        (0.2, 1.0),  # a quarter of the way from 0.1 to 0.5, which is 4 steps long
        (0.5, 4.0),  # at an evaluation
        (0.3, 2.0),  # the curve falls below 0.3 again and rises above it once more after step 8
        (0.55, 11.5),  # reached after the dip only: 8 + 4 · 0.35 / 0.4
        (0.1, None),  # starts at the level
        (0.05, None),  # starts above the level
        (0.61, None),  # never reached
    ],
)
def test_moment_of_the_first_crossing_from_below(level, moment):
    accuracy = ([0, 4, 8, 12], [0.1, 0.5, 0.2, 0.6])
    expected = moment if moment is None else pytest.approx(moment)
    assert first_crossing(accuracy, level) == expected


def test_entropy_is_that_of_a_line_fitted_between_the_evaluations():
    # Policies 4 to 8 have these entropies; all others have 99. Their mean is 0.7 and the slope of the line is
    # (−2·1.0 − 1·0.8 + 0·0.9 + 1·0.5 + 2·0.3) / 10 = −0.17.
    entropies = [99.0] * 4 + [1.0, 0.8, 0.9, 0.5, 0.3] + [99.0] * 3
    record = _run({0: 0.1, 4: 0.3, 8: 0.5, 12: 0.6}, entropies)
    accuracy = ([0, 4, 8, 12], [0.1, 0.3, 0.5, 0.6])
    assert entropy_when_reached(record, accuracy, 0.35) == pytest.approx(0.7 + 0.17)  # moment 5
    assert entropy_when_reached(record, accuracy, 0.40) == pytest.approx(0.7)  # moment 6
    assert entropy_when_reached(record, accuracy, 0.45) == pytest.approx(0.7 - 0.17)  # moment 7
    line = np.polyfit(range(4, 9), entropies[4:9], 1)
    assert entropy_when_reached(record, accuracy, 0.43) == pytest.approx(np.polyval(line, 6.6))
    assert entropy_when_reached(record, accuracy, 0.61) is None


def test_entropy_stays_in_the_range_of_steps_and_values_that_it_is_computed_from():
    # The last policy is that after step 4, whose entropy is not recorded: the line ends at the policy after step 3.
    record = _run({0: 0.1, 4: 0.5}, [1.0, 0.9, 0.8, 0.7])
    assert entropy_when_reached(record, ([0, 4], [0.1, 0.5]), 0.5) == pytest.approx(0.7)
    assert entropy_when_reached(record, ([0, 4], [0.1, 0.5]), 0.4) == pytest.approx(0.7)
    assert entropy_when_reached(record, ([0, 4], [0.1, 0.5]), 0.3) == pytest.approx(0.8)
    steep = _run({0: 0.1, 4: 0.5}, [1.0, 0.1, 0.0, 0.0])  # the fitted line is below 0 at the end
    assert entropy_when_reached(steep, ([0, 4], [0.1, 0.5]), 0.5) == 0.0


def test_a_single_entropy_and_none_between_the_evaluations():
    accuracy = ([0, 1, 2], [0.1, 0.2, 0.3])
    assert entropy_when_reached(_run({0: 0.1, 1: 0.2, 2: 0.3}, [0.9, 0.6]), accuracy, 0.25) == 0.6
    assert entropy_when_reached(_run({0: 0.1, 1: 0.2, 2: 0.3}, [0.9]), accuracy, 0.25) is None


def test_level_is_the_highest_that_all_runs_reach_at_any_evaluation():
    arms = {
        "a": [
            _run({0: 0.1, 2: 0.4, 4: 0.2}, [1.0, 0.9, 0.8, 0.7]),  # its best evaluation is not the last
            _run({0: 0.1, 2: 0.3, 4: 0.5}, [1.0, 0.9, 0.8, 0.7], seed=1),
        ],
        "b": [_run({0: 0.1, 2: 0.5, 4: 0.6}, [0.5, 0.4, 0.3, 0.2], arm="b")],
    }
    equal = entropy_at_equal_accuracy(arms, ["countdown"])
    assert (equal.level.accuracy, equal.level.set_by, equal.level.next_accuracy) == (0.4, ("a", 0), 0.5)
    assert equal.values == {  # reached after 2, 3 and 1.5 steps
        ("a", 0): pytest.approx(0.8),
        ("a", 1): pytest.approx(0.7),
        ("b", 0): pytest.approx(0.35),
    }
    assert (equal.behind, equal.missing) == ((), ())


def test_an_arm_far_behind_has_no_value_and_does_not_lower_the_level():
    equal = _equal({"a": [0.6, 0.5], "b": [0.4, 0.45], "none": [0.15, 0.20]})
    assert equal.level.accuracy == 0.4
    assert equal.behind == ("none",)
    assert equal.missing == ()
    assert {arm for arm, _ in equal.values} == {"a", "b"}
    # A mean over the seeds that reach the level would be one over selected seeds.
    lucky = _equal({"a": [0.6, 0.5], "b": [0.4, 0.45], "none": [0.12, 0.15, 0.5]})
    assert lucky.behind == ("none",)
    assert {arm for arm, _ in lucky.values} == {"a", "b"}
    assert _equal({"a": [0.6], "b": [0.3]}).behind == ()
    assert _equal({"a": [0.6], "b": [0.299]}).behind == ("b",)


def test_one_failing_seed_neither_lowers_the_level_nor_removes_its_arm():
    equal = _equal({"a": [0.6, 0.5, 0.55], "b": [0.4, 0.12, 0.45]})
    assert equal.level.accuracy == 0.4
    assert equal.behind == ()
    assert equal.missing == (("b", 1),)
    assert ("b", 0) in equal.values


@pytest.mark.parametrize(
    "equal",
    [
        _equal({"a": [0.6, 0.5]}),
        _equal({"a": [0.6, 0.5], "b": [0.1, 0.2]}),
        _equal({"a": [0.6, 0.5], "b": [0.4, 0.5]}, start=0.4),
        _equal({"a": [0.0], "b": [0.0]}, start=0.0),
    ],
    ids=["one variant", "one variant is left", "not above the start", "nothing learned"],
)
def test_no_values_without_a_level_that_two_arms_cross(equal):
    assert equal.values == {}


def test_runs_without_entropy_are_missing():
    arms = {
        "a": [_run({0: 0.1, 4: 0.5}, [0.5] * 4), _run({0: 0.1, 4: 0.5}, seed=1)],
        "b": [_run({0: 0.1, 4: 0.5}, [0.4] * 4, arm="b")],
    }
    equal = entropy_at_equal_accuracy(arms, ["countdown"])
    assert equal.missing == (("a", 1),)
    assert equal.values == {("a", 0): 0.5, ("b", 0): 0.4}
    assert entropy_at_equal_accuracy({"a": arms["a"][1:], "b": arms["b"]}, ["countdown"]).values == {}


def test_all_forms_of_the_report_have_the_metric(tmp_path, without_plots):
    # Accuracy rises linearly from 0.2 in 4 steps; the recorded entropy of the policy after t steps is 0.45 − 0.05·t.
    finals = {
        "clip": {0: 0.40, 1: 0.50, 2: 0.60},
        "kl 0.02": {0: 0.60, 1: 0.62, 2: 0.70},
        "kl 0.03": {0: 0.21, 1: 0.22, 2: 0.23},
    }
    report = report_of(write_sweep(tmp_path / "s", finals))
    entropies = {
        arm: [0.45 - 0.05 * min(3, 4 * 0.2 / (final - 0.2)) for final in by_seed.values()]
        for arm, by_seed in finals.items()
    }
    metric = report.metric("entropy_at_accuracy")
    assert metric.name == "entropy at 40% accuracy"
    assert report.accuracy_level == 0.4
    assert [figure.key for figure in report.figures][:4] == [
        "accuracy",
        "area",
        "entropy",
        "entropy_at_accuracy",
    ]
    difference = next(
        item for item in report.differences if (item.arm, item.figure) == ("kl 0.02", metric.key)
    )
    expected = stats.ttest_rel(entropies["kl 0.02"], entropies["clip"])
    assert difference.paired.p == pytest.approx(expected.pvalue)
    assert difference.p_holm == pytest.approx(expected.pvalue)  # the variant without values is not tested
    without = next(item for item in report.differences if (item.arm, item.figure) == ("kl 0.03", metric.key))
    assert (without.paired, without.verdict) == (None, "no value")
    with report.files["leaderboard.csv"].open(newline="") as file:
        rows = {row["arm"]: row for row in csv.DictReader(file)}
    for arm in ("clip", "kl 0.02"):
        assert float(rows[arm]["entropy_at_accuracy"]) == pytest.approx(np.mean(entropies[arm]))
        assert rows[arm]["entropy_at_accuracy_low"]
    assert rows["kl 0.03"]["entropy_at_accuracy"] == ""
    for name in ("report.md", "report.html"):
        text = report.files[name].read_text()
        assert "entropy at 40% accuracy" in text
        assert f"{np.mean(entropies['kl 0.02']):.3f}" in text
    assert json.loads(json.dumps(report.as_json()))["accuracy_level"] == 0.4


def test_notes_name_the_run_that_sets_the_level_and_what_has_no_value(tmp_path, without_plots):
    finals = {
        "clip": {0: 0.40, 1: 0.44, 2: 0.22},
        "kl 0.02": {0: 0.60, 1: 0.62, 2: 0.70},
        "kl 0.03": {0: 0.21, 1: 0.22, 2: 0.23},
    }
    notes = report_of(write_sweep(tmp_path / "s", finals)).notes
    assert (
        "Entropies are compared at 40% held-out accuracy, the highest level that all compared runs reach. It is the "
        "best value of clip (seed 0); without this run it would be 44%."
    ) in notes
    assert (
        "No entropy at 40% held-out accuracy, since the best value (median over seeds) is under half of the best "
        "variant's: kl 0.03."
    ) in notes
    assert "1 run of the compared variants without entropy at 40% held-out accuracy: clip (seed 2)." in notes


@pytest.mark.parametrize(
    ("finals", "note"),
    [
        (
            {"clip": {0: 0.19}, "kl 0.02": {0: 0.2}},
            "No entropy at equal held-out accuracy: the highest level that all compared runs reach, 20%, is not above "
            "all first evaluations (up to 20%).",
        ),
        (
            {"clip": {0: 0.9}, "kl 0.02": {0: 0.3}},
            "No entropy at equal held-out accuracy: fewer than two variants are left without those whose best value "
            "(median over seeds) is under half of the best variant's, kl 0.02.",
        ),
    ],
)
def test_a_note_says_why_there_is_no_level(tmp_path, without_plots, finals, note):
    report = report_of(write_sweep(tmp_path / "s", finals))
    assert note in report.notes
    assert report.accuracy_level is None
    assert not any(figure.key == "entropy_at_accuracy" for figure in report.figures)


def test_several_sets_are_compared_at_their_mean_accuracy(tmp_path, without_plots):
    runs = []
    for arm, final in (("a", 0.4), ("b", 0.8)):
        folder = write_run(tmp_path / arm, accuracy={0: 0.2, 4: 0.4}, sets=["x", "y"])
        edit_line(folder, 4, **{"eval/y/mean_at_16": final})
        runs.append(VariantRun(arm, 0, folder))
    report = write_report(runs, "t", None, tmp_path / "out")
    assert report.accuracy_level == pytest.approx(0.4)
    b = next(arm for arm in report.arms if arm.name == "b")
    assert b.figures["entropy_at_accuracy"].mean == pytest.approx(0.45 - 0.05 * 2)  # halfway from 0.2 to 0.6
