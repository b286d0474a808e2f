"""Prefixes of metrics that comparisons of runs leave out."""

from bandpo_cli.metric_names import CLOCK_PREFIXES, is_clock_metric, without_clock
from scripts.compare_checkouts.compare import CLOCK_KEYS, without_keys


def test_times_and_performance_are_left_out_and_nothing_else() -> None:
    record = {
        "step": 1,
        "time/step": 2.0,
        "perf/padding_fraction": 0.1,
        "train/time/x": 3.0,
        "performance": 4.0,
    }
    kept = {"step": 1, "train/time/x": 3.0, "performance": 4.0}
    assert without_clock(record) == kept
    assert [key for key in record if is_clock_metric(key)] == ["time/step", "perf/padding_fraction"]
    assert without_keys(record, list(CLOCK_KEYS)) == kept, "make compare has the same rule"
    assert set(CLOCK_PREFIXES) == {"time/", "perf/"}
