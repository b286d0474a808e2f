"""What is taken from a run is what its metrics.jsonl says, as documented; what cannot be counted says why."""

from __future__ import annotations

import json
import math

import pytest

from bandpo_cli.reports.sweep.runs import ArmRunData, ExcludedRun, read_arm_run
from bandpo_cli.reports.sweep.selection import ArmRun
from tests.reports.sweep_folders import edit_line, write_run


def _read(folder) -> ArmRunData | ExcludedRun:
    return read_arm_run(ArmRun("clip", 0, folder))


def test_the_figures_of_a_run_by_hand(tmp_path):
    record = _read(write_run(tmp_path / "a", accuracy={0: 0.2, 2: 0.3, 4: 0.5}))
    assert isinstance(record, ArmRunData)
    countdown = record.sets["countdown"]
    assert (countdown.n, countdown.steps, countdown.mean) == ("16", [0, 2, 4], [0.2, 0.3, 0.5])
    assert countdown.area == pytest.approx((0.25 * 2 + 0.4 * 2) / 4)
    assert countdown.passes == {4: pytest.approx(0.6), 16: pytest.approx(0.8)}
    assert record.final_entropy == pytest.approx(0.3)  # a tenth of 4 steps is at least one
    assert record.clipped == pytest.approx(0.02)
    assert record.seconds == pytest.approx(1.25)


def test_final_entropy_is_of_the_last_tenth(tmp_path):
    record = _read(write_run(tmp_path / "a", steps=20))
    assert record.final_entropy == pytest.approx((0.5 - 0.05 * 19 + 0.5 - 0.05 * 20) / 2)


def test_clipping_by_bin_weighs_steps_by_their_tokens(tmp_path):
    folder = write_run(tmp_path / "a", steps=2)
    edit_line(folder, 1, **{"clip/active_fraction/p_0.1_0.5": 1.0, "clip/token_share/p_0.1_0.5": 0.1})
    edit_line(folder, 2, **{"clip/active_fraction/p_0.1_0.5": 0.0, "clip/token_share/p_0.1_0.5": 0.3})
    record = _read(folder)
    assert record.clipped_by_bin == {"p_0.1_0.5": pytest.approx(0.25), "p_0.9_1": 0.0}
    assert list(record.token_share) == ["p_0.1_0.5", "p_0.9_1"]
    assert math.fsum(record.token_share.values()) == pytest.approx(1)


def test_values_that_are_no_numbers_do_not_count(tmp_path):
    folder = write_run(tmp_path / "a")
    edit_line(folder, 4, **{"train/entropy": None, "clip/active_fraction": float("nan"), "time/step": "x"})
    edit_line(folder, 3, **{"clip/active_fraction": 10**400, "time/step": 1e308})
    record = _read(folder)
    assert record.final_entropy is None
    assert record.clipped == pytest.approx(0.02)
    assert record.seconds == pytest.approx(1.25)


def test_a_step_written_twice_counts_as_it_was_written_last(tmp_path):
    folder = write_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "eval/countdown/mean_at_16": 0.7}) + "\n")
    assert _read(folder).sets["countdown"].mean == [0.2, 0.7]


def test_sets_with_slashes_and_unequal_counts_are_read(tmp_path):
    folder = write_run(tmp_path / "a", sets=[])
    edit_line(folder, 4, **{"eval/a/b/mean_at_n": 0.5, "eval/a/b/pass_at_2": 0.6})
    record = _read(folder)
    assert record.sets["a/b"].n == "n"
    assert record.sets["a/b"].passes == {2: 0.6}
    assert record.sets["a/b"].area is None


def _without(folder, name):
    (folder / name).unlink()


def _torn(folder):
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text()[:-5])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: folder.rename(folder.with_name("gone")), "its folder is not there"),
        (lambda folder: _without(folder, "config.yaml"), "no config.yaml"),
        (lambda folder: (folder / "config.yaml").write_text("a: ["), "config.yaml, line 1: not readable"),
        (lambda folder: _without(folder, "summary.json"), "not finished: step 4 of 4, no summary.json"),
        (lambda folder: (folder / "summary.json").write_text("{"), "summary.json is not readable"),
        (lambda folder: (folder / "summary.json").write_text("[]"), "summary.json is not readable"),
        (lambda folder: _without(folder, "metrics.jsonl"), "metrics.jsonl ends at step 0 of 4"),
        (_torn, "metrics.jsonl ends at step 3 of 4"),
        (lambda folder: (folder / "metrics.jsonl").write_text("{\n"), "damaged: metrics.jsonl, line 1"),
        (lambda folder: edit_line(folder, 2, step="two"), 'damaged: metrics.jsonl has a step "two"'),
        (lambda folder: edit_line(folder, 2, step=-1), "damaged: metrics.jsonl has a step -1"),
        (lambda folder: edit_line(folder, 2, step=10**400), "damaged: metrics.jsonl has a step 1000"),
        (
            lambda folder: edit_line(folder, 4, **{"eval/countdown/mean_at_16": None}),
            "no evaluation at its last step, 4",
        ),
    ],
)
def test_what_cannot_be_counted_says_why(tmp_path, damage, reason):
    folder = write_run(tmp_path / "a")
    damage(folder)
    left = _read(folder)
    assert isinstance(left, ExcludedRun)
    assert reason in left.reason
    assert "\n" not in left.reason
    assert (left.run, left.arm, left.seed) == ("a", "clip", 0)


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_a_run_that_ended_early_is_left_out_with_its_error(tmp_path, status):
    left = _read(write_run(tmp_path / "a", status=status))
    assert left.reason == f"{status.lower()} at step 4 of 4: NonFiniteError: the loss is nan"
