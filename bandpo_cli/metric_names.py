"""Names of metrics, and the prefix of profiler labels."""

import re
from collections.abc import Mapping
from typing import TypeVar

CLOCK_PREFIXES = ("time/", "perf/")
"""Metrics with these prefixes depend on the machine and its load. Two runs of one configuration are equal if all other
metrics are: comparisons of runs leave these out."""

PROFILER_PREFIX = "bandpo/"
"""Prefix of the labels that a profiler trace has for the phases of a step."""

SCORE = re.compile(r"eval/(.+)/(mean|pass)_at_(\d+|n)")
"""The name of mean@n or pass@k of an evaluation set: the set, the kind, and n or k."""

Value = TypeVar("Value")


def is_heldout_accuracy(key: str) -> bool:
    """Return whether the metric `key` is mean@n of an evaluation set."""
    return (match := SCORE.fullmatch(key)) is not None and match[2] == "mean"


def is_clock_metric(key: str) -> bool:
    """Return whether the metric `key` depends on the machine and its load."""
    return key.startswith(CLOCK_PREFIXES)


def without_clock(record: Mapping[str, Value]) -> dict[str, Value]:
    """Return a line of metrics.jsonl or of summary.json without the metrics that depend on the clock."""
    return {key: value for key, value in record.items() if not is_clock_metric(key)}
