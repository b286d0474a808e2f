"""Metrics of a report, one value per run, and how each is read from the data of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bandpo_cli.errors import UserError
from bandpo_cli.reports.sweep.equal_accuracy import EqualAccuracy, percent_text
from bandpo_cli.reports.sweep.runs import ArmRunData, mean
from bandpo_cli.reports.sweep.statistics import Limits

ValueOf = Callable[[ArmRunData], float | None]
"""Returns the value of a metric for a run, None where the run has no value."""

HELD_OUT_ACCURACY = "held-out accuracy"
"""Heading of the accuracy, which is that of the evaluations; the accuracy of training is not in a report."""


@dataclass(frozen=True)
class Metric:
    """A metric with one value per run. The fields are keys of `bandpo report --format json`.

    Attributes:
        key: column in leaderboard.csv.
        name: heading in tables.
        about: definition, with the unit.
        compared: whether arms are compared by this metric; tables then show its interval.
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


@dataclass(frozen=True)
class ArmMetric:
    """A metric and how it is read from a run.

    Attributes:
        value: returns its value for a run.
        steps: returns its values at the single steps of a run, where a report shows their spread.
    """

    metric: Metric
    value: ValueOf
    steps: Callable[[ArmRunData], Sequence[float]] | None = None


def common_sets(records: Sequence[ArmRunData]) -> list[str]:
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


def common_k(records: Sequence[ArmRunData], sets: Sequence[str]) -> int | None:
    """Return the largest k for which all runs have pass@k on all sets; None if there is none."""
    shared = [set(record.sets[label].passes) for record in records for label in sets]
    return max(set.intersection(*shared), default=None)


def arm_metrics(
    records: Sequence[ArmRunData], sets: Sequence[str], equal: EqualAccuracy | None = None
) -> list[ArmMetric]:
    """Return the metrics of these runs, accuracy first; with several sets their mean first, then each set.

    Args:
        records: the runs.
        sets: the evaluation sets that all of them have.
        equal: their entropies at equal accuracy; None for none.
    """
    ns = {record.sets[label].n for record in records for label in sets}
    n, k = ns.pop() if len(ns) == 1 else "n", common_k(records, sets)
    over = f"mean over {len(sets)} evaluation sets of " if len(sets) > 1 else ""
    metrics = [
        ArmMetric(
            Metric("accuracy", HELD_OUT_ACCURACY, f"{over}mean@{n} of the last evaluation"),
            _mean_over(sets, _final_accuracy),
        ),
        ArmMetric(
            Metric("area", "area", f"{over}area under mean@{n} over the steps, divided by the steps"),
            _mean_over(sets, _area),
        ),
        ArmMetric(
            Metric(
                "entropy", "entropy", "mean over the last tenth of the steps, nats per token", largest=None
            ),
            lambda record: record.final_entropy,
        ),
    ]
    if equal is not None and equal.level is not None and equal.values:
        reached = percent_text(equal.level.accuracy)
        metrics.append(
            ArmMetric(
                Metric(
                    "entropy_at_accuracy",
                    f"entropy at {reached} accuracy",
                    f"entropy when {over}mean@{n} first reaches {reached}, nats per token: the "
                    "highest level that all runs reach, without arms and runs whose best is under half of the best "
                    "arm's; linear between evaluations",
                    largest=None,
                ),
                lambda record: equal.values.get((record.run.arm, record.run.seed)),
            )
        )
    if k:
        metrics.append(
            ArmMetric(
                Metric(f"pass_at_{k}", f"pass@{k}", f"{over}pass@{k} of the last evaluation"),
                _mean_over(sets, _final_pass_at(k)),
            )
        )
    metrics += [
        ArmMetric(
            Metric(
                "clipped",
                "clipped",
                "share of tokens with zero gradient, mean over the run",
                compared=False,
                pattern=".2f",
                percent=True,
            ),
            lambda record: record.clipped,
        ),
        ArmMetric(
            Metric(
                "seconds_per_step",
                "s/step",
                "seconds per step, without evaluations and checkpoints; the range is that of the middle 80% of the "
                "steps of all seeds",
                compared=False,
                pattern=".2f",
                largest=None,
            ),
            lambda record: record.seconds,
            steps=lambda record: record.step_seconds,
        ),
    ]
    for label in sets if len(sets) > 1 else ():
        metrics += _metrics_of_set(label, n, k)
    return metrics


def _metrics_of_set(label: str, n: str, k: int | None) -> list[ArmMetric]:
    """Return the metrics of one of several sets; arms are compared by its accuracy, not by its area and pass@k."""
    accuracy = Metric(
        f"accuracy/{label}", f"{HELD_OUT_ACCURACY}, {label}", f"mean@{n} of the last evaluation"
    )
    area = Metric(
        f"area/{label}", f"area, {label}", f"area under mean@{n}, divided by the steps", compared=False
    )
    metrics = [
        ArmMetric(accuracy, _mean_over([label], _final_accuracy)),
        ArmMetric(area, _mean_over([label], _area)),
    ]
    if k is not None:
        pass_at_k = Metric(
            f"pass_at_{k}/{label}", f"pass@{k}, {label}", f"pass@{k} of the last evaluation", compared=False
        )
        metrics.append(ArmMetric(pass_at_k, _mean_over([label], _final_pass_at(k))))
    return metrics


def _final_accuracy(record: ArmRunData, label: str) -> float | None:
    return record.sets[label].mean[-1]


def _area(record: ArmRunData, label: str) -> float | None:
    return record.sets[label].area


def _final_pass_at(k: int) -> Callable[[ArmRunData, str], float | None]:
    return lambda record, label: record.sets[label].passes.get(k)


def _mean_over(sets: Sequence[str], value_of_set: Callable[[ArmRunData, str], float | None]) -> ValueOf:
    """Return a function that gives the plain mean over `sets`; None where a set has no value."""

    def value(record: ArmRunData) -> float | None:
        values = [value_of_set(record, label) for label in sets]
        known = [each for each in values if each is not None]
        return mean(known) if len(known) == len(values) else None

    return value
