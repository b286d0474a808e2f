"""Reports at an equal amount of compute, with values computed by hand, and the axes of plots."""

import json
import math
from pathlib import Path

import pandas as pd
import pytest

from bandpo_cli.errors import UserError
from bandpo_cli.metric_names import AXES, TOTALS
from bandpo_cli.reports.report_plots import common_curves
from bandpo_cli.reports.run_plots import plot_run
from bandpo_cli.reports.run_tables import at_axis, read_runs
from bandpo_cli.reports.run_variants import VariantRun
from tests.reports.sweep_folders import CLIP, KL, edit_line, report_on, write_run

RUNS = {"a": (CLIP, 0, {0: 0.2, 2: 0.3, 4: 0.5}, 100), "b": (KL, 0, {0: 0.2, 2: 0.4, 4: 0.6}, 150)}
"""Settings, seed, held-out accuracy, tokens of a step: at 400 tokens b is a third of the way from step 2 to step 4."""


def write(folder: Path, settings=CLIP, seed: int = 0, accuracy=None, per_step: float = 100.0) -> Path:
    """Write a run of 4 steps that takes the same number of everything in each."""
    write_run(folder, settings, seed, accuracy)
    for step in range(5):
        edit_line(folder, step, **dict.fromkeys(TOTALS, per_step * step))
    return folder


@pytest.fixture
def two_runs(tmp_path):
    return [VariantRun(name, 0, write(tmp_path / name, *values)) for name, values in RUNS.items()]


def test_values_at_points_of_an_axis_are_linear_between_the_steps_that_have_one():
    curve = pd.Series({0: 0.2, 1: math.nan, 2: 0.4, 4: 0.6})
    tokens = pd.Series({0: 0, 1: 120, 2: 300, 3: 500, 4: 600})
    points = at_axis(curve, tokens, [0, 150, 300, 400, 600, 601])
    assert points[:5] == pytest.approx([0.2, 0.3, 0.4, 0.4 + 0.2 / 3, 0.6])
    assert math.isnan(points[5]), "the run did not get there"
    assert math.isnan(at_axis(curve * math.nan, tokens, [0])[0])


@pytest.mark.parametrize("name", ["tokens", "flops", "seconds"])
def test_runs_are_compared_at_the_largest_amount_that_all_reach(two_runs, name):
    tables = read_runs(two_runs, axis=AXES[name])
    a, b = (tables.runs.loc[run] for run in (("a", 0), ("b", 0)))
    assert tables.level == 400
    assert (a["accuracy/countdown"], b["accuracy/countdown"]) == pytest.approx((0.5, 0.4 + 0.2 / 3))
    assert b["pass_at_4/countdown"] == pytest.approx(0.5 + 0.2 / 3)
    assert a["area/countdown"] == pytest.approx((200 * 0.25 + 200 * 0.4) / 400)
    assert b["area/countdown"] == pytest.approx((300 * 0.3 + 100 * (0.4 + 0.1 / 3)) / 400)
    assert (a["steps"], b["steps"]) == (4, 2), "the last step within the amount"
    assert b["entropy"] == pytest.approx(0.5 - 0.05 * 2)
    by_step = read_runs(two_runs)
    assert by_step.level is None
    assert by_step.runs.loc[("b", 0), "accuracy/countdown"] == 0.6


def test_a_report_says_what_it_compares_at_which_amount(tmp_path, without_plots):
    runs = []
    for name, settings, final, per_step in (("clip", CLIP, 0.5, 100), ("kl", KL, 0.6, 150)):
        for seed in range(3):
            accuracy = {0: 0.2, 2: 0.3, 4: final + 0.01 * seed}
            folder = write(tmp_path / f"{name}{seed}", settings, seed, accuracy, per_step)
            runs.append(VariantRun(name, seed, folder))
    report = report_on(runs, tmp_path, "clip", axis=AXES["tokens"])
    text = (tmp_path / "out" / "report.md").read_text()
    assert "Against clip, held-out accuracy at 400 sampled tokens is " in report.finding
    assert "At equal compute: the scores are those at 400 sampled tokens, the most that all runs re" in text
    assert "| held-out accuracy at 400 sampled tokens |" in text
    assert ": mean@16 at 400 sampled tokens, the most that all runs reach, linear between evaluations" in text
    assert ": area under mean@16 over the sampled tokens, divided by the sampled tokens" in text
    content = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (content["axis"], content["axis_level"]) == ("tokens", 400)
    means = {variant["name"]: variant["metrics"]["accuracy"]["mean"] for variant in content["variants"]}
    assert means == pytest.approx({"clip": 0.51, "kl": 0.3 + 0.31 / 3})


@pytest.mark.parametrize("name", ["tokens", "flops", "seconds"])
def test_runs_without_the_metric_are_refused(tmp_path, name):
    run = VariantRun("clip", 0, write_run(tmp_path / "a"))
    refused = pytest.raises(UserError, match=f"--x {name}: .* of .*a has no {AXES[name].key} at step 0")
    with refused:
        read_runs([run], axis=AXES[name])
    with refused:
        plot_run(run.folder, axis=AXES[name])
    assert read_runs([run]).runs.index[0] == ("clip", 0)


def test_a_run_that_reached_a_budget_counts_by_compute_only(tmp_path):
    for stopped_by, is_counted in (("stop.tokens = 350: x", True), ("stop.entropy_below = 0.1: x", False)):
        folder = write(tmp_path / stopped_by.split()[0])
        summary = {"status": "FINISHED", "stopped_by": stopped_by}
        (folder / "summary.json").write_text(json.dumps(summary))
        config = (folder / "config.yaml").read_text().replace("steps: 4", "steps: 40", 1)
        (folder / "config.yaml").write_text(config)
        runs = [VariantRun("clip", 0, folder)]
        assert len(read_runs(runs, axis=AXES["tokens"]).runs) == is_counted
        (excluded,) = read_runs(runs).excluded
        assert f"ended at step 4 of 40: {stopped_by.split(':')[0]}" in excluded.reason
        assert ("--x tokens, flops or seconds compares such runs" in excluded.reason) == is_counted


def test_the_curve_of_a_variant_is_over_the_range_that_all_its_runs_have():
    """Places are the means of the runs at a step, within the range of both; values are linear between own places."""
    index = pd.MultiIndex.from_product([["a"], [0, 1], [0, 1, 2]], names=["variant", "seed", "step"])
    values = pd.Series([0.0, 1.0, 2.0, 0.0, 10.0, 20.0], index)
    amounts = pd.Series([0.0, 10.0, 20.0, 0.0, 20.0, 40.0], index)
    places, values_RS = common_curves(values, ["a"], amounts)["a"]
    assert places.tolist() == [0, 15, 20]
    assert values_RS.tolist() == [[0, 1.5, 2], [0, 7.5, 10]]


def test_plots_of_a_run_are_over_the_axis(tmp_path, figures):
    folder = write(tmp_path / "a", per_step=5e5)
    plot_run(folder, axis=AXES["tokens"])
    (axes,) = figures["entropy.png"].axes
    assert axes.get_xlabel() == "sampled tokens"
    assert axes.lines[0].get_xdata().tolist() == [5e5, 1e6, 1.5e6, 2e6]
    figures["entropy.png"].canvas.draw()
    assert "1.2M" in [label.get_text() for label in axes.get_xticklabels()]


def test_amounts_have_their_unit():
    assert AXES["tokens"].text(123456) == "123,456 sampled tokens"
    assert AXES["flops"].text(3.4561e15) == "3.46e15 model FLOPs"
    assert AXES["seconds"].text(812.4) == "812 seconds of training"
    assert AXES["tokens"].text(1234567) == "1.23e6 sampled tokens"
