"""Entropy at equal accuracy: the accuracy level common to all runs, and each run's entropy when it first reaches it.

Learning a task lowers the entropy, so at the same step the variant that has learned less has the higher entropy. At the
same held-out accuracy the difference in entropy is one between the variants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from bandpo_cli.reports.comparison.runs import VariantRunData, accuracy_of
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
