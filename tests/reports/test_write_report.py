"""Reports agree with hand-computed values and scipy, claim no untested difference, and are self-contained files."""

import csv
import json
import re
from itertools import product
from unittest import mock

import numpy as np
import pytest
from scipy import stats

from bandpo_cli.errors import UserError
from bandpo_cli.reports.run_variants import Selection, VariantRun, read_sweep
from bandpo_cli.reports.write_report import write_report
from tests.reports.sweep_folders import (
    CLIP,
    KL,
    edit_line,
    report_of,
    report_on,
    write_run,
    write_sweep,
    write_variant,
)  # fmt: skip

CLEAR = {"clip": {0: 0.40, 1: 0.42, 2: 0.41}, "kl 0.02": {0: 0.50, 1: 0.53, 2: 0.52}}
CLEAR["kl 0.03"] = {0: 0.39, 1: 0.43, 2: 0.42}
pytestmark = pytest.mark.usefixtures("without_plots")


@pytest.fixture
def sweep(tmp_path):
    return write_sweep(tmp_path / "deltas", CLEAR)


def leaderboard(report):
    with report.files["leaderboard.csv"].open(newline="") as file:
        return list(csv.DictReader(file))


def in_accuracy(report):
    """Return the differences in the accuracy by variant."""
    return {item.variant: item for item in report.differences if item.metric == "accuracy"}


def test_leaderboard_has_means_and_intervals_of_scipy(sweep):
    report = report_of(sweep)
    rows = leaderboard(report)
    assert [row["variant"] for row in rows] == ["kl 0.02", "kl 0.03", "clip"]
    for row in rows:
        values = list(CLEAR[row["variant"]].values())
        low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
        expected = {
            "accuracy": np.mean(values), "accuracy_low": low, "accuracy_high": high, "seeds": 3, "steps": 4,
            "area": (0.2 + np.mean(values)) / 2, "pass_at_16": np.mean(values) + 0.3, "entropy": 0.3, "clipped": 0.02,
            "seconds_per_step": 1.25,
        }  # fmt: skip
        assert {key: float(row[key]) for key in expected} == pytest.approx(expected)
        assert row["entropy_low"] == ""
    assert [variant.name for variant in report.variants] == [row["variant"] for row in rows]


def test_time_per_step_has_the_range_of_its_steps(tmp_path):
    sweep = write_sweep(tmp_path / "s", {"clip": {0: 0.4, 1: 0.5}})
    seconds = [9.0, 1.0, 1.2, 1.4], [8.0, 2.0, 2.2, 2.4]
    for seed, step in product(range(2), range(1, 5)):
        times = {"time/step": seconds[seed][step - 1] + 0.75, "time/checkpoint": 0.5, "time/eval": 0.25}
        edit_line(sweep / f"clip-s{seed}", step, **times)
    report = report_of(sweep)
    (variant,) = report.variants
    low, high = np.percentile(seconds[0] + seconds[1], [10, 90])
    assert variant.metrics["seconds_per_step"].mean == pytest.approx((3.15 + 3.65) / 2)
    assert variant.spreads == {"seconds_per_step": pytest.approx([low, high])}
    (row,) = leaderboard(report)
    columns = ("seconds_per_step_p10", "seconds_per_step_p90")
    assert [float(row[name]) for name in columns] == pytest.approx([low, high])
    for name in ("report.html", "report.md"):
        assert f"{low:.2f} – {high:.2f}" in report.files[name].read_text()
    assert "largest" in json.loads(json.dumps(report.as_json()))["metrics"][0]


def test_differences_are_paired_by_seed_and_adjusted_and_the_finding_names_the_significant_ones(sweep):
    report = report_of(sweep)
    differences = in_accuracy(report)
    higher, neither = differences["kl 0.02"], differences["kl 0.03"]
    for difference, factor in ((higher, 2), (neither, 1)):
        expected = stats.ttest_rel(list(CLEAR[difference.variant].values()), list(CLEAR["clip"].values()))
        assert difference.paired.p == pytest.approx(expected.pvalue)
        assert difference.p_holm == pytest.approx(factor * expected.pvalue)
        assert difference.paired.change.low == pytest.approx(expected.confidence_interval().low)
    assert higher.verdict == "better"
    assert re.fullmatch(r"undecided: \d+ more seeds", neither.verdict)
    assert (neither.paired.higher, neither.paired.lower) == (2, 1)
    assert re.fullmatch(
        r"Against clip, final held-out accuracy is better for kl 0\.02 \(\+0\.107, 95% interval \+0\.\d+ to \+0\.\d+ "
        r"over 3 seeds, Holm-adjusted p = 0\.0\d+\), and is undecided for kl 0\.03 \([+-]0\.\d+, 95% interval .* over "
        r"3 seeds, p = .*; 0\.\d+ could have been shown; about \d+ more seeds would decide\)\.",
        report.finding,
    )


def _report_with_rewards(folder, finals, rewards):
    """Return the report of runs with these final accuracies, and these final rewards by seed."""
    runs = []
    for name, settings in (("clip", CLIP), ("kl", KL)):
        for seed, reward in enumerate(rewards[name]):
            curves = {"accuracy": {0: 0.0, 4: finals[name]}, "reward": {0: 0.0, 4: reward}}
            runs.append(write_variant(folder, name, settings, seed, **curves))
    return report_on(runs, folder, "clip")


def test_rewards_other_than_0_and_1_come_before_the_accuracy_and_decide(tmp_path):
    finals, rewards = {"clip": 0.2, "kl": 0.1}, {"clip": (-0.5, -0.3), "kl": (-0.1, 0.1)}
    report = _report_with_rewards(tmp_path / "nonbinary", finals, rewards)
    assert [metric.key for metric in report.metrics][:3] == ["reward", "accuracy", "area"]
    assert [variant.name for variant in report.variants] == ["kl", "clip"]
    kl = report.variants[0].metrics
    assert (kl["reward"].mean, kl["accuracy"].mean, kl["area"].mean) == pytest.approx((0.0, 0.1, 0.0))
    assert kl["reward"].low < -1, "the interval of a reward has no limits"
    assert report.finding.startswith("Which variant has the higher held-out reward is undecided: a test need")
    equal = {name: (final,) * 2 for name, final in finals.items()}
    report = _report_with_rewards(tmp_path / "binary", finals, equal)
    assert [metric.key for metric in report.metrics][:2] == ["accuracy", "area"]
    assert [variant.name for variant in report.variants] == ["clip", "kl"]


def test_finding_on_several_variants_in_both_directions(tmp_path):
    finals = {"clip": CLEAR["clip"]}
    for index, change in enumerate((0.1, 0.2, 0.3, 0.4, -0.1, 0.0)):
        noise = (0.001, -0.001, 0.0)
        finals[f"kl {index}"] = {seed: CLEAR["clip"][seed] + change + noise[seed] for seed in range(3)}
    finding = report_of(write_sweep(tmp_path / "s", finals)).finding
    assert re.fullmatch(
        r"Against clip, final held-out accuracy is better for kl 3 \(\+0\.400, 95% .*, Holm-adjusted p < 0\.001\), "
        r"kl 2 \(\+0\.300, .*\), kl 1 \(\+0\.200, .*\) and 1 more variant and worse for kl 4 \(-0\.100, [^()]*\) and "
        r"equivalent within ±0\.02 for kl 5 \([^()]*\)\.",
        finding,
    )


def test_verdict_where_only_the_unadjusted_p_value_is_significant(tmp_path):
    finals = {"clip": CLEAR["clip"], "kl 0.02": {0: 0.43, 1: 0.48, 2: 0.45}}
    finals |= {f"kl 0.0{index}": {0: 0.39 + index / 1000, 1: 0.43, 2: 0.42} for index in (3, 4, 5)}
    report = report_of(write_sweep(tmp_path / "s", finals))
    difference = in_accuracy(report)["kl 0.02"]
    assert difference.paired.p < 0.05 < difference.p_holm
    assert re.fullmatch(r"undecided: \d+ more seeds", difference.verdict)
    assert re.match(
        r"Against clip, final held-out accuracy is equivalent .*\), and is undecided for kl 0\.02 "
        r"\(\+0\.04\d, 95% interval \+0\.\d+ to \+0\.\d+ over 3 seeds, Holm-adjusted p = 0\.\d+; "
        r"0\.\d+ could have been shown; about \d+ more seeds would decide\)",
        report.finding,
    )


def test_one_seed_has_no_interval_in_any_output(tmp_path):
    sweep = write_sweep(tmp_path / "s", {"clip": {0: 0.4}, "kl 0.02": {0: 0.6}})
    report = report_of(sweep)
    assert all(value.low is None for variant in report.variants for value in variant.metrics.values())
    assert {difference.verdict for difference in report.differences} == {"one seed: no test"}
    undecided = "Which variant has the higher held-out accuracy is undecided: a test needs two common seeds"
    assert report.finding == f"{undecided} with different values."
    text = (sweep / "report" / "report.md").read_text()
    assert "±" not in text.replace("within ±0.02", "")  # the margin of equivalence


def test_without_the_runs_of_the_baseline_nothing_is_compared(sweep):
    runs = read_sweep(sweep).runs
    gone = [run for run in runs if run.variant != "clip"] + [VariantRun("clip", 0, sweep / "gone")]
    report = write_report(Selection("t", "clip", gone), sweep / "report")
    assert (report.baseline, report.differences) == (None, ())
    assert any("All runs of the baseline 'clip' were excluded" in note for note in report.notes)
    assert report.finding.endswith("is undecided: a test needs finished runs of the baseline.")
    assert "Differences" not in (sweep / "report" / "report.html").read_text()


def test_the_first_variant_is_the_baseline_where_none_is_named(sweep):
    report, named = report_of(sweep, baseline=None), report_of(sweep, baseline="clip")
    assert (report.baseline, report.finding, report.differences) == ("clip", named.finding, named.differences)
    assert report.notes[0] == "The baseline is the first variant, clip; --baseline VARIANT names another one."
    assert report.notes[1:] == named.notes


def test_only_common_seeds_are_compared(tmp_path):
    finals = {"clip": {0: 0.4, 1: 0.42, 5: 0.9}, "kl 0.02": {0: 0.5, 1: 0.53, 7: 0.1}, "kl 0.03": {9: 0.5}}
    report = report_of(write_sweep(tmp_path / "s", finals))
    differences = in_accuracy(report)
    assert differences["kl 0.02"].paired.change.n == 2
    assert differences["kl 0.02"].paired.change.mean == pytest.approx(0.105)
    assert differences["kl 0.03"].verdict == "no common seed"
    assert any(note.startswith("The variants do not have the same seeds;") for note in report.notes)


def test_excluded_runs_are_listed_and_do_not_change_the_results(sweep):
    runs = read_sweep(sweep).runs
    failed = write_run(sweep / "failed", CLIP, 3, {0: 0.2, 4: 0.99}, status="FAILED")
    more = [*runs, VariantRun("clip", 3, failed), VariantRun("dcpo", 0, sweep / "gone")]
    report = write_report(Selection("t", "clip", more), sweep / "report")
    excluded = [(item.run, item.variant, item.seed) for item in report.excluded]
    assert excluded == [("failed", "clip", 3), ("gone", "dcpo", 0)]
    for name in ("report.html", "report.md"):
        text = report.files[name].read_text()
        assert "NonFiniteError: the loss is nan" in text
        assert "does not exist" in text
    assert report.variants == report_of(sweep).variants


@pytest.mark.parametrize("exists", [False, True])
def test_an_interrupted_report_leaves_no_partial_folder(sweep, monkeypatch, exists):
    runs = read_sweep(sweep).runs
    if exists:
        write_report(Selection("earlier", "clip", runs), sweep / "report")
    before = {path: path.read_bytes() for path in sweep.rglob("*") if path.is_file()}
    render = mock.Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("bandpo_cli.reports.write_report.render", render)
    with pytest.raises(KeyboardInterrupt):
        write_report(Selection("t", "clip", runs), sweep / "report")
    assert {path: path.read_bytes() for path in sweep.rglob("*") if path.is_file()} == before
    assert (sweep / "report").exists() == exists


def test_errors_are_one_line(sweep, tmp_path):
    runs = read_sweep(sweep).runs
    gone = [VariantRun("clip", seed, sweep / f"gone-{seed}") for seed in (0, 1)]

    def and_run(variant, name, *settings, sets=("countdown",)):
        return [*runs, VariantRun(variant, 0, write_run(sweep / name, (*CLIP, *settings), 0, sets=sets))]

    sets = {"a": ["x", "y"], "b": ["x"], "c": ["y"]}  # only pairs share a set
    pairs = [VariantRun(name, 0, write_run(tmp_path / name, CLIP, sets=sets[name])) for name in sets]
    for listed, baseline, message in (
        (gone, None, "all runs are excluded: gone-0: its folder does not exist; 1 more"),
        ([], None, "no runs to report on"),
        (and_run("clip", "again"), None, "both seed 0 of the variant 'clip'; give only one of them"),
        (and_run("clip", "lr", "optim.lr=1e-4"), None, "they differ in optim.lr: add it to --by"),
        (and_run("x", "gsm", sets=["gsm8k"]), None, "set: clip-s0 has countdown, gsm has gsm8k"),
        (pairs, None, "share no evaluation set: a has x, y, b has x"),
        (runs, "clpi", "baseline = 'clpi': no variant of that name (did you mean 'clip'?)"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            report_on(listed, tmp_path, baseline)
        assert not (tmp_path / "out").exists()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written to"):
        report_of(sweep, out=tmp_path / "file")


def test_several_sets_have_a_mean_and_values_per_set(tmp_path):
    sets = ["gsm8k", "math500"]
    run = write_variant(tmp_path, "clip", sets=sets)
    edit_line(run.folder, 4, **{"eval/math500/mean_at_16": 0.1})
    report = report_on([run], tmp_path)
    figures = report.variants[0].metrics
    assert figures["accuracy"].mean == pytest.approx(0.25)
    assert (figures["accuracy/gsm8k"].mean, figures["accuracy/math500"].mean) == (0.4, 0.1)
    assert figures["area"].mean == pytest.approx((0.3 + 0.15) / 2)
    assert report.sets == ("gsm8k", "math500")


def test_forks_of_one_checkpoint_are_compared_from_it_on(tmp_path):
    runs = [write_variant(tmp_path, name, accuracy={0: 0.9, 2: 0.2, 4: 0.4}) for name in "ab"]
    for run in runs:
        (run.folder / "env.json").write_text('{"parent": {"run": "runs/x", "step": 2}}')
        for step, clipped in ((2, 0.9), (3, 0.3), (4, 0.1)):
            edit_line(run.folder, step, **{"clip/active_fraction": clipped})
    report = report_on(runs, tmp_path)
    figures = report.variants[0].metrics
    assert figures["clipped"].mean == pytest.approx(0.2)
    assert figures["area"].mean == pytest.approx(0.3)
    assert "All runs are forks of runs/x@2: metrics and curves begin at step 2." in report.notes


def test_notes_name_differences_that_make_runs_incomparable(tmp_path):
    longer = write_variant(tmp_path, "a", (*CLIP, "task.max_number=8"), 1, steps=6)
    (longer.folder / "env.json").write_text('{"parent": {"run": "runs/x", "step": 2}}')
    notes = " ".join(report_on([write_variant(tmp_path, "a"), longer], tmp_path).notes)
    assert "The runs of a differ in more than their seed: steps, task.max_number, fork" in notes
    assert "Forks of runs/x@2 (1 run) share its record" in notes
    assert "their held-out accuracies come from different problems" in notes
    runs = [write_variant(tmp_path, "c", sets=["x", "y"]), write_variant(tmp_path, "d", KL, sets=["y"])]
    report = report_on(runs, tmp_path)
    assert report.sets == ("y",)
    assert "Excluded, because not every run was evaluated on these sets: x." in report.notes
