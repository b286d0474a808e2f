"""Metrics of a report, their values for a run, and entropy at equal accuracy.

Learning a task lowers the entropy, so at the same step the variant that has learned less has the higher entropy. At the
same held-out accuracy, a difference in entropy is a difference between the variants.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from bandpo_cli.errors import UserError
from bandpo_cli.reports.comparison.runs import VariantRunData, accuracy_of, mean
from bandpo_cli.reports.comparison.statistics import Limits
from bandpo_cli.reports.run_plots import Series

FAR_BEHIND = 0.5
"""Runs and variants whose best accuracy is under this share of the best variant's have no value and do not lower the
level."""

RunKey = tuple[str, int]
"""Variant and seed of a run."""


@dataclass(frozen=True)
class CommonLevel:
    """The highest held-out accuracy that all compared runs reach.

    Attributes:
        accuracy: the level, in [0, 1].
        set_by: the run whose best accuracy it is.
        next_accuracy: the level without that run.
        start: highest accuracy of a compared run at its first evaluation.
    """

    accuracy: float
    set_by: RunKey
    next_accuracy: float
    start: float

    @property
    def is_crossed(self) -> bool:
        """True if all compared runs start below the level."""
        return self.accuracy > self.start


@dataclass(frozen=True)
class EqualAccuracy:
    """Entropies of the runs at the same held-out accuracy.

    Attributes:
        behind: variants that fall far behind and are not compared.
        level: the accuracy; None for fewer than two variants to compare.
        values: entropy at the level by run, nats per token; empty for fewer than two variants with a value.
        missing: runs of the compared variants without a value.
    """

    behind: tuple[str, ...]
    level: CommonLevel | None = None
    values: Mapping[RunKey, float] = field(default_factory=dict)
    missing: tuple[RunKey, ...] = ()


def entropy_at_equal_accuracy(
    arms: Mapping[str, Sequence[VariantRunData]], sets: Sequence[str]
) -> EqualAccuracy:
    """Return the entropy of each run at the moment at which its held-out accuracy first reaches a common level.

    The level is the highest accuracy that all compared runs reach at some evaluation. Not compared are variants that
    fall far behind (the median over seeds of the runs' best accuracies is under `FAR_BEHIND` times that of the best
    variant), and single runs of other variants whose best accuracy is under the same limit. The level is a minimum over
    runs, so a single run determines it: `CommonLevel` names this run, and gives the level without it.

    There are no values if fewer than two variants have one, or if a run starts at or above the level: the moment at
    which such a run reached it is not known.

    Args:
        arms: the runs of each variant.
        sets: the evaluation sets whose mean accuracy is used.
    """
    records = {(name, record.run.seed): record for name, runs in arms.items() for record in runs}
    curves = {key: accuracy_of(record, sets) for key, record in records.items()}
    best = {key: max(accuracies) for key, (_, accuracies) in curves.items()}
    typical = {name: median(best[name, record.run.seed] for record in runs) for name, runs in arms.items()}
    limit = FAR_BEHIND * max(typical.values())
    behind = tuple(name for name in arms if typical[name] < limit)
    compared = [
        key
        for key, record in records.items()
        if key[0] not in behind and best[key] >= limit and record.entropy[0]
    ]
    if _number_of_variants(compared) < 2:
        return EqualAccuracy(behind)
    first, second = sorted(compared, key=lambda key: best[key])[:2]
    level = CommonLevel(best[first], first, best[second], max(curves[key][1][0] for key in compared))
    if not level.is_crossed:
        return EqualAccuracy(behind, level)
    entropies = {key: entropy_when_reached(records[key], curves[key], level.accuracy) for key in compared}
    values = {key: entropy for key, entropy in entropies.items() if entropy is not None}
    return EqualAccuracy(
        behind=behind,
        level=level,
        values=values if _number_of_variants(values) > 1 else {},
        missing=tuple(key for key in records if key[0] not in behind and key not in values),
    )


def entropy_when_reached(record: VariantRunData, accuracy: Series, level: float) -> float | None:
    """Return the entropy of the policy when `accuracy` first reaches `level`; None if it never does.

    The value is read from the straight line fitted by least squares to the entropies of the steps between the
    evaluations before and after that moment: this reduces the noise of single steps and follows the trend. Where the
    line leaves the range of these entropies or of their steps, the value is that at the end of the range.

    Args:
        record: the run, for its entropy. The entropy recorded at a step is the entropy of the policy after the step
            before.
        accuracy: held-out accuracy of the run over the steps.
        level: the accuracy at which the entropy is taken.

    Returns:
        Nats per token. None also if no entropy was recorded between the two evaluations.
    """
    moment = first_crossing(accuracy, level)
    if moment is None:
        return None
    steps = accuracy[0]
    after = next(index for index, step in enumerate(steps) if step >= moment)
    policies, entropies = np.array(record.entropy, dtype=np.float64)
    policies -= 1
    between = (steps[after - 1] <= policies) & (policies <= steps[after])
    policies, entropies = policies[between], entropies[between]
    if not len(policies):
        return None
    distances = policies - policies.mean()
    squares = float(np.sum(distances**2))
    slope = float(np.sum(distances * entropies)) / squares if squares else 0.0
    nearest_moment = np.clip(moment, policies[0], policies[-1])
    value = entropies.mean() + slope * (nearest_moment - policies.mean())
    return float(np.clip(value, entropies.min(), entropies.max()))


def first_crossing(accuracy: Series, level: float) -> float | None:
    """Return the moment, in steps, at which `accuracy` first reaches `level` from below; None if it never does.

    Between evaluations the accuracy is taken as linear. A curve that starts at or above the level has no moment.
    """
    steps, values = accuracy
    after = next((index for index, value in enumerate(values) if value >= level), 0)
    if not after:
        return None
    before = after - 1
    share = (level - values[before]) / (values[after] - values[before])
    return steps[before] + share * (steps[after] - steps[before])


def percent_text(accuracy: float) -> str:
    """Return an accuracy in percent with three digits, without trailing zeros: `21.8%`, `40%`."""
    return f"{100 * accuracy:.3g}%"


def _number_of_variants(runs: Iterable[RunKey]) -> int:
    return len({arm for arm, _ in runs})


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
            "reach, without variants and runs whose best value is under half of the best variant's; linear "
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
