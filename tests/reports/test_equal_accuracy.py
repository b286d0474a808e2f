"""Entropies at equal accuracy agree with curves computed by hand, and no single run determines the level silently."""

import csv
import json
import re
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from bandpo_cli.reports.run_tables import EqualAccuracy, entropy_at_equal_accuracy, entropy_when_reached
from tests.reports.sweep_folders import edit_line, report_of, report_on, write_sweep, write_variant

FALLING = [1.0, 0.9, 0.8, 0.7]


def _entropy(of_policies: Sequence[float]) -> pd.Series:
    """Return the recorded entropies; entropy i is the entropy of the policy after i steps."""
    return pd.Series(of_policies, range(1, len(of_policies) + 1), dtype=float)


def _run(accuracy: Mapping[int, float], entropy: Sequence[float], variant: str, seed=0) -> pd.DataFrame:
    table = pd.DataFrame({"accuracy": pd.Series(accuracy), "entropy": _entropy(entropy)})
    return pd.concat([table], keys=[(variant, seed)], names=["variant", "seed", "step"])


def _equal(finals: Mapping[str, Sequence[float]], start: float = 0.1) -> EqualAccuracy:
    """Return the entropies at equal accuracy of runs whose accuracy rises from `start` in 4 steps."""
    runs = [
        _run({0: start, 4: final}, FALLING, variant, seed)
        for variant, ends in finals.items()
        for seed, final in enumerate(ends)
    ]
    return entropy_at_equal_accuracy(pd.concat(runs))


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
    accuracy = pd.Series({0: 0.1, 4: 0.5, 8: 0.2, 12: 0.6})
    entropy = _entropy(range(13))  # the number of the policy
    expected = moment if moment is None else pytest.approx(moment)
    assert entropy_when_reached(entropy, accuracy, level) == expected


def test_entropy_is_the_value_of_a_line_fitted_between_the_evaluations():
    # Policies 4 to 8 have these entropies; all others have 99. Their mean is 0.7 and the slope of the line is
    # (−2·1.0 − 1·0.8 + 0·0.9 + 1·0.5 + 2·0.3) / 10 = −0.17.
    entropies = [99.0] * 4 + [1.0, 0.8, 0.9, 0.5, 0.3] + [99.0] * 3
    accuracy = pd.Series({0: 0.1, 4: 0.3, 8: 0.5, 12: 0.6})
    for level, expected in ((0.35, 0.7 + 0.17), (0.40, 0.7), (0.45, 0.7 - 0.17)):  # moments 5, 6 and 7
        assert entropy_when_reached(_entropy(entropies), accuracy, level) == pytest.approx(expected)
    line = np.polyfit(range(4, 9), entropies[4:9], 1)
    assert entropy_when_reached(_entropy(entropies), accuracy, 0.43) == pytest.approx(np.polyval(line, 6.6))
    assert entropy_when_reached(_entropy(entropies), accuracy, 0.61) is None


@pytest.mark.parametrize(
    ("entropies", "level", "expected"),
    [
        # The last policy is the policy after step 4, whose entropy is not recorded: the line ends after step 3.
        (FALLING, 0.5, 0.7),
        (FALLING, 0.4, 0.7),
        (FALLING, 0.3, 0.8),
        ([1.0, 0.1, 0.0, 0.0], 0.5, 0.0),  # the fitted line is below 0 at the end
        ([0.9], 0.3, 0.9),  # a single value
        ([], 0.3, None),
    ],
)
def test_entropy_stays_in_the_range_of_steps_and_values_that_it_is_computed_from(entropies, level, expected):
    value = entropy_when_reached(_entropy(entropies), pd.Series({0: 0.1, 4: 0.5}), level)
    assert value == (None if expected is None else pytest.approx(expected))
    assert entropy_when_reached(_entropy([0.9]), pd.Series([0.1, 0.2, 0.3]), 0.25) is None
    assert entropy_when_reached(_entropy([0.9, 0.6]), pd.Series([0.1, 0.2, 0.3]), 0.25) == 0.6


def test_level_is_the_highest_that_all_runs_reach_at_any_evaluation():
    runs = [
        _run({0: 0.1, 2: 0.4, 4: 0.2}, FALLING, "a"),  # its best evaluation is not the last
        _run({0: 0.1, 2: 0.3, 4: 0.5}, FALLING, "a", seed=1),
        _run({0: 0.1, 2: 0.5, 4: 0.6}, [0.5, 0.4, 0.3, 0.2], "b"),
    ]
    equal = entropy_at_equal_accuracy(pd.concat(runs))
    assert equal.level == 0.4
    # reached after 2, 3 and 1.5 steps
    assert equal.values == pytest.approx({("a", 0): 0.8, ("a", 1): 0.7, ("b", 0): 0.35})
    (note,) = equal.notes
    assert note.endswith("a (seed 0) does not exceed 40%; without this run, the level would be 50%.")


@pytest.mark.parametrize("last_seed", [[], [0.5]])
def test_a_variant_far_behind_has_no_value_and_does_not_lower_the_level(last_seed):
    """A mean over its seeds that reach the level would be a mean over selected seeds."""
    equal = _equal({"a": [0.6, 0.5], "b": [0.4, 0.45], "none": [0.12, 0.15, *last_seed]})
    assert equal.level == 0.4
    assert {variant for variant, _ in equal.values} == {"a", "b"}
    (note,) = equal.notes[1:]
    start = "No entropy at 40% held-out accuracy, since the best value (median over seeds) is under"
    assert note.startswith(start)
    assert note.endswith(" variant's: none.")


def test_half_of_the_best_accuracy_is_the_limit():
    assert {variant for variant, _ in _equal({"a": [0.6], "b": [0.3]}).values} == {"a", "b"}
    assert "fewer than two variants are left" in _equal({"a": [0.6], "b": [0.299]}).notes[0]


def test_one_failing_seed_neither_lowers_the_level_nor_removes_its_variant():
    equal = _equal({"a": [0.6, 0.5, 0.55], "b": [0.4, 0.12, 0.45]})
    assert equal.level == 0.4
    assert ("b", 0) in equal.values
    assert ("b", 1) not in equal.values
    assert equal.notes[1].startswith("1 run of the compared variants without entropy")
    assert "b (seed 1)" in equal.notes[1]


@pytest.mark.parametrize(
    ("finals", "start", "notes"),
    [
        ({"a": [0.6, 0.5]}, 0.1, []),
        ({"a": [0.6, 0.5], "b": [0.1, 0.2]}, 0.1, ["fewer than two variants are left .* best variant's, b"]),
        ({"a": [0.6, 0.5], "b": [0.4, 0.5]}, 0.4, ["40%, is not above all first evaluations .up to 40%"]),
        ({"a": [0.0], "b": [0.0]}, 0.0, ["0%, is not above all first evaluations"]),
    ],
)
def test_no_values_without_a_level_that_two_variants_cross(finals, start, notes):
    equal = _equal(finals, start)
    assert (equal.level, equal.values, len(equal.notes)) == (None, {}, len(notes))
    for note, pattern in zip(equal.notes, notes, strict=True):
        assert re.search(f"No entropy at equal held-out accuracy: .*{pattern}", note)


def test_runs_without_entropy_have_no_value():
    accuracy = {0: 0.1, 4: 0.5}
    without = _run(accuracy, [], "a", seed=1)
    others = [_run(accuracy, [0.5] * 4, "a"), _run(accuracy, [0.4] * 4, "b")]
    equal = entropy_at_equal_accuracy(pd.concat([*others, without]))
    assert equal.values == {("a", 0): 0.5, ("b", 0): 0.4}
    assert "a (seed 1)" in equal.notes[-1]
    assert entropy_at_equal_accuracy(pd.concat([without, others[1]])).values == {}


def test_all_forms_of_the_report_have_the_metric(tmp_path, without_plots):
    # Accuracy rises linearly from 0.2 in 4 steps; the recorded entropy of the policy after t steps is 0.45 − 0.05·t.
    ends, better = [0.40, 0.50, 0.60], [0.60, 0.62, 0.70]
    finals = {"clip": ends, "kl 0.02": better, "kl 0.03": [0.21, 0.22, 0.23]}
    report = report_of(write_sweep(tmp_path / "s", {name: dict(enumerate(finals[name])) for name in finals}))
    clip, kl = ([0.45 - 0.05 * min(3, 0.8 / (end - 0.2)) for end in values] for values in (ends, better))
    metric = report.metrics[3]
    assert (metric.key, metric.name) == ("entropy_at_accuracy", "entropy at 40% accuracy")
    assert json.loads(json.dumps(report.as_json()))["accuracy_level"] == 0.4
    differences = {item.variant: item for item in report.differences if item.metric == metric.key}
    expected = stats.ttest_rel(kl, clip)
    tested, untested = differences["kl 0.02"], differences["kl 0.03"]
    assert tested.p_holm == tested.paired.p == pytest.approx(expected.pvalue), "the other is not tested"
    assert (untested.paired, untested.verdict) == (None, "no value")
    with report.files["leaderboard.csv"].open(newline="") as file:
        rows = {row["variant"]: row[metric.key] for row in csv.DictReader(file)}
    assert (float(rows["clip"]), float(rows["kl 0.02"])) == pytest.approx((np.mean(clip), np.mean(kl)))
    assert rows["kl 0.03"] == ""
    for name in ("report.md", "report.html"):
        text = report.files[name].read_text()
        for part in (metric.name, f"{np.mean(kl):.3f}", "No entropy at 40% held-out accuracy"):
            assert part in text


def test_several_sets_are_compared_at_their_mean_accuracy(tmp_path, without_plots):
    runs = [write_variant(tmp_path, name, accuracy={0: 0.2, 4: 0.4}, sets=["x", "y"]) for name in "ab"]
    edit_line(runs[1].folder, 4, **{"eval/y/mean_at_16": 0.8})
    report = report_on(runs, tmp_path)
    assert report.accuracy_level == pytest.approx(0.4)
    best = report.variants[0].metrics["entropy_at_accuracy"]
    assert best.mean == pytest.approx(0.45 - 0.05 * 2)  # halfway from 0.2 to 0.6
