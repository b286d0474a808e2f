"""Metrics of a report, and their values for a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bandpo_cli.errors import UserError
from bandpo_cli.reports.comparison.equal_accuracy import EqualAccuracy, percent_text
from bandpo_cli.reports.comparison.runs import VariantRunData, mean
from bandpo_cli.reports.comparison.statistics import Limits

HELD_OUT_ACCURACY = "held-out accuracy"
"""Heading of the accuracy, which the evaluations measure; the accuracy of training is not in a report."""

SECONDS_PER_STEP = "seconds_per_step"
"""Key of the metric for which a report also shows the spread over the steps."""


@dataclass(frozen=True)
class Metric:
    """A metric with one value per run. The fields are keys of `bandpo report --format json`.

    Attributes:
        key: column in leaderboard.csv.
        name: heading in tables.
        about: definition, with the unit.
        compared: whether variants are compared by this metric; tables then show its interval.
        pattern: format specification of a value.
        percent: whether a value is shown in percent.
        largest: largest possible value, null for none; the smallest possible value of every metric is 0.
    """

    key: str
    name: str
    about: str
    compared: bool = True
    pattern: str = ".3f"
    percent: bool = False
    largest: float | None = 1.0

    @property
    def limits(self) -> Limits:
        """Smallest and largest possible value."""
        return 0.0, math.inf if self.largest is None else self.largest

    def text(self, value: float, sign: bool = False) -> str:
        """Return `value` as tables show it, with a plus sign for positive values if `sign`."""
        number = format(100 * value if self.percent else value, ("+" if sign else "") + self.pattern)
        return f"{number}%" if self.percent else number


def common_sets(records: Sequence[VariantRunData]) -> list[str]:
    """Return the evaluation sets that all runs have.

    Raises:
        UserError: there is none.
    """
    sets = [label for label in records[0].sets if all(label in record.sets for record in records)]
    if not sets:
        other = next(record for record in records if not record.sets.keys() & records[0].sets.keys())
        raise UserError(
            f"the runs share no evaluation set: {records[0].run.folder.name} has {', '.join(records[0].sets)}, "
            f"{other.run.folder.name} has {', '.join(other.sets)}; make a report of each group"
        )
    return sets


def common_k(records: Sequence[VariantRunData], sets: Sequence[str]) -> int | None:
    """Return the largest k for which all runs have pass@k on all sets; None if there is none."""
    shared = [set(record.sets[label].passes) for record in records for label in sets]
    return max(set.intersection(*shared), default=None)


def report_metrics(
    records: Sequence[VariantRunData], sets: Sequence[str], level: float | None
) -> list[Metric]:
    """Return the metrics of a report on these runs, accuracy first; with several sets their mean first, then each set.

    Variants are compared by the accuracy in a set, not by its area and pass@k.

    Args:
        records: the runs.
        sets: the evaluation sets that all of them have.
        level: the accuracy at which entropies are compared; None for no such comparison.
    """
    ns = {record.sets[label].n for record in records for label in sets}
    n, k = ns.pop() if len(ns) == 1 else "n", common_k(records, sets)
    over = f"mean over {len(sets)} evaluation sets of " if len(sets) > 1 else ""
    metrics = [
        Metric("accuracy", HELD_OUT_ACCURACY, f"{over}mean@{n} of the last evaluation"),
        Metric("area", "area", f"{over}area under mean@{n} over the steps, divided by the steps"),
        Metric("entropy", "entropy", "mean over the last tenth of the steps, nats per token", largest=None),
    ]
    if level is not None:
        reached = percent_text(level)
        about = (
            f"entropy when {over}mean@{n} first reaches {reached}, nats per token: the highest level that all runs "
            "reach, without variants and runs whose best accuracy is under half of the best variant's; linear "
            "between evaluations"
        )
        metrics.append(Metric("entropy_at_accuracy", f"entropy at {reached} accuracy", about, largest=None))
    if k:
        metrics.append(Metric(f"pass_at_{k}", f"pass@{k}", f"{over}pass@{k} of the last evaluation"))
    zero_gradient = "share of tokens with zero gradient, mean over the run"
    seconds = (
        "seconds per step, without evaluations and checkpoints; the range covers the middle 80% of the steps of "
        "all seeds"
    )
    metrics += [
        Metric("clipped", "clipped", zero_gradient, compared=False, pattern=".2f", percent=True),
        Metric(SECONDS_PER_STEP, "s/step", seconds, compared=False, pattern=".2f", largest=None),
    ]
    last = "of the last evaluation"
    for label in sets if len(sets) > 1 else ():
        metrics += [
            Metric(f"accuracy/{label}", f"{HELD_OUT_ACCURACY}, {label}", f"mean@{n} {last}"),
            Metric(f"area/{label}", f"area, {label}", f"area under mean@{n}, divided by the steps", False),
        ]
        if k:
            metrics.append(Metric(f"pass_at_{k}/{label}", f"pass@{k}, {label}", f"pass@{k} {last}", False))
    return metrics


def run_values(
    record: VariantRunData, sets: Sequence[str], k: int | None = None, equal: EqualAccuracy | None = None
) -> dict[str, float]:
    """Return the values of a run by key of the metric, without the metrics for which the run has no value."""
    evaluations = [record.sets[label] for label in sets]
    by_set: dict[str, list[float | None]] = {
        "accuracy": [evaluation.mean[-1] for evaluation in evaluations],
        "area": [evaluation.area for evaluation in evaluations],
        f"pass_at_{k}": [evaluation.passes.get(k) if k else None for evaluation in evaluations],
    }
    values: dict[str, float | None] = {
        "entropy": record.final_entropy,
        "entropy_at_accuracy": None if equal is None else equal.values.get((record.run.arm, record.run.seed)),
        "clipped": record.clipped,
        SECONDS_PER_STEP: mean(record.step_seconds),
    }
    for key, column in by_set.items():
        known = [value for value in column if value is not None]
        values[key] = mean(known) if len(known) == len(sets) else None
        values |= {f"{key}/{label}": value for label, value in zip(sets, column, strict=True)}
    return {key: value for key, value in values.items() if value is not None}
