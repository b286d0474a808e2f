"""Metrics that comparisons of runs leave out, records with rewards other than 0 and 1, and seeds of a run."""

import pytest

from bandpo_cli.metric_names import (
    CLOCK_PREFIXES,
    has_nonbinary_rewards,
    heldout_score,
    is_clock_metric,
    without_clock,
)
from bandpo_cli.types import derive_seed
from scripts.compare_checkouts.compare import CLOCK_KEYS, without_keys


def test_times_and_performance_are_left_out_and_nothing_else():
    kept = {"step": 1, "train/time/x": 3.0, "performance": 4.0}
    record = {"time/step": 2.0, **kept, "perf/padding_fraction": 0.1}
    assert without_clock(record) == kept
    assert [key for key in record if is_clock_metric(key)] == ["time/step", "perf/padding_fraction"]
    assert without_keys(record, list(CLOCK_KEYS)) == kept, "make compare has the same rule"
    assert set(CLOCK_PREFIXES) == {"time/", "perf/"}


SETS = {"eval/a/mean_at_4": 0.25, "eval/a/reward": 0.25, "eval/b/c/mean_at_n": 0.5}


@pytest.mark.parametrize(
    ("record", "nonbinary"),
    [
        ({}, False),
        ({"train/accuracy": 0.5}, False),
        ({"train/reward": None, "train/accuracy": 0.0}, False),
        ({"train/reward": 0.3, "train/accuracy": 0.3}, False),
        # 2 of 5 answers were not graded, and 2 of the other 3 are correct.
        ({"train/reward": 2 / 3, "train/accuracy": 0.4, "train/ungraded_fraction": 0.4}, False),
        ({"train/reward": 2 / 3, "train/accuracy": 0.4, "grade/not_applicable_fraction": 0.4}, False),
        ({"train/reward": 0.059, "train/accuracy": 0.0}, True),
        ({"train/reward": -0.4, "train/accuracy": 0.3}, True),  # rewards of 1 and -1
        ({**SETS, "eval/b/c/reward": 0.5}, False),
        ({**SETS, "eval/b/c/reward": 0.6}, True),
    ],
)
def test_records_with_rewards_other_than_0_and_1(record, nonbinary):
    assert has_nonbinary_rewards(record) == nonbinary


def test_the_score_of_an_evaluation_is_its_reward_or_in_runs_of_verl_its_accuracy():
    accuracies = {"eval/a/mean_at_4": 0.25, "eval/b/mean_at_4": 0.5}
    assert heldout_score(accuracies) == 0.375
    assert heldout_score(accuracies | {"eval/a/reward": 0.5, "eval/b/reward": 0.75}) == 0.625
    assert heldout_score(accuracies | {"eval/b/mean_at_4": None}) is None


def test_seeds_differ_by_run_purpose_and_step():
    seeds = {derive_seed(seed, purpose, step) for seed in range(5) for purpose in "ab" for step in range(50)}
    assert len(seeds) == 500
    assert all(0 <= seed < 2**63 for seed in seeds)
