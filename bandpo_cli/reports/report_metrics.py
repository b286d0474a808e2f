"""Metrics of a report, their values for a run, and entropy at equal accuracy.

Learning a task lowers the entropy, so at the same step the variant that has learned less has the higher entropy. At the
same held-out accuracy, a difference in entropy is a difference between the variants.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from bandpo_cli.errors import plural
from bandpo_cli.reports.run_plots import Curve
from bandpo_cli.reports.run_tables import RUN, RunTables, common_n, scores_of
from bandpo_cli.reports.statistics import Estimate, Limits

FAR_BEHIND = 0.5
"""Runs and variants whose best accuracy is under this share of the best variant's have no value and do not lower the
level."""

MAX_LISTED = 6  # variants or settings that a note lists

RunKey = tuple[str, int]
"""Variant and seed of a run."""


class EqualAccuracy(NamedTuple):
    """Entropies of the runs at the same held-out accuracy.

    Attributes:
        level: the accuracy, in [0, 1]; None where fewer than two variants have a value.
        values: nats per token; empty without a level.
        notes: sentences on the level and on the runs without a value, or why there is no level.
    """

    level: float | None
    values: Mapping[RunKey, float]
    notes: Sequence[str]


def entropy_at_equal_accuracy(steps: pd.DataFrame) -> EqualAccuracy:
    """Return the entropy of each run at the moment at which its held-out accuracy first reaches a common level.

    The level is the highest accuracy that all compared runs reach at some evaluation. Not compared are variants that
    fall far behind (the median over seeds of the runs' best accuracies is under `FAR_BEHIND` times that of the best
    variant), and single runs of other variants whose best accuracy is under the same limit. The level is a minimum over
    runs, so a single run determines it: a note names this run, and gives the level without it.

    There are no values if fewer than two variants have one, or if a run starts at or above the level: the moment at
    which such a run reached it is not known.

    Args:
        steps: `accuracy` and `entropy` by variant, seed and step.
    """
    accuracy = steps["accuracy"].dropna().groupby(level=RUN, sort=False)
    entropies = {run: _curve(values) for run, values in steps["entropy"].dropna().groupby(level=RUN)}
    best = accuracy.max()
    typical = best.groupby(level="variant", sort=False).median()
    limit = FAR_BEHIND * typical.max()
    behind = list(typical.index[typical < limit])
    compared = [run for run in best.index if run[0] not in behind and best[run] >= limit and run in entropies]
    none = "No entropy at equal held-out accuracy"
    if len({variant for variant, _ in compared}) < 2:
        why = "fewer than two variants are left without those whose best value (median over seeds) is under half of"
        note = f"{none}: {why} the best variant's, {shorten_list(behind)}."
        return EqualAccuracy(None, {}, [note] if behind else [])
    lowest, second = sorted(compared, key=best.__getitem__)[:2]
    level, percent, next_percent = float(best[lowest]), percent_text(best[lowest]), percent_text(best[second])
    start = accuracy.first()[compared].max()
    if level <= start:
        above = f"{percent}, is not above all first evaluations (up to {percent_text(start)})"
        return EqualAccuracy(None, {}, [f"{none}: the highest level that all compared runs reach, {above}."])
    reached = {
        run: entropy_when_reached(entropies[run], _curve(accuracy.get_group(run)), level) for run in compared
    }
    values = {run: entropy for run, entropy in reached.items() if entropy is not None}
    if len({variant for variant, _ in values}) < 2:
        return EqualAccuracy(None, {}, [])
    texts = {(variant, seed): f"{variant} (seed {seed})" for variant, seed in best.index}
    notes = [
        f"The entropy of a run is taken where its held-out accuracy first reaches {percent}, the highest level that "
        f"all compared runs reach. {texts[lowest]} does not exceed {percent}"
        + ("." if next_percent == percent else f"; without this run, the level would be {next_percent}.")
    ]
    if behind:
        notes.append(
            f"No entropy at {percent} held-out accuracy, since the best value (median over seeds) is under half of the "
            f"best variant's: {shorten_list(behind)}."
        )
    if missing := [text for run, text in texts.items() if run[0] not in behind and run not in values]:
        notes.append(
            f"{plural(len(missing), 'run')} of the compared variants without entropy at {percent} held-out accuracy: "
            f"{shorten_list(missing)}."
        )
    return EqualAccuracy(level, values, notes)


def _curve(values: "pd.Series[float]") -> Curve:
    """Return the values of a run by step."""
    return dict(zip(values.index.get_level_values("step"), values, strict=True))


def entropy_when_reached(entropy: Curve, accuracy: Curve, level: float) -> float | None:
    """Return the entropy of the policy when `accuracy` first reaches `level`; None if it never does.

    The value is read from the straight line fitted by least squares to the entropies of the steps between the
    evaluations before and after that moment: this reduces the noise of single steps and follows the trend. Where the
    line leaves the range of these entropies or of their steps, the value is that at the end of the range.

    Args:
        entropy: nats per token by step; the value of a step is the entropy of the policy after the step before.
        accuracy: held-out accuracy by step.
        level: the accuracy at which the entropy is taken.

    Returns:
        Nats per token. None also if no entropy was recorded between the two evaluations.
    """
    if (moment := first_crossing(accuracy, level)) is None:
        return None
    before = max(step for step in accuracy if step < moment)
    after = min(step for step in accuracy if step >= moment)
    points = [(step - 1, value) for step, value in entropy.items() if before <= step - 1 <= after]
    if not points:
        return None
    policies, entropies = np.array(points, dtype=np.float64).T
    distances = policies - policies.mean()
    squares = float(np.sum(distances**2))
    slope = float(np.sum(distances * entropies)) / squares if squares else 0.0
    nearest_moment = np.clip(moment, policies[0], policies[-1])
    value = entropies.mean() + slope * (nearest_moment - policies.mean())
    return float(np.clip(value, entropies.min(), entropies.max()))


def first_crossing(accuracy: Curve, level: float) -> float | None:
    """Return the moment, in steps, at which `accuracy` first reaches `level` from below; None if it never does.

    Between evaluations the accuracy is taken as linear. A curve that starts at or above the level has no moment.
    """
    steps = list(accuracy)
    if not (after := next((index for index, step in enumerate(steps) if accuracy[step] >= level), 0)):
        return None
    low, high = steps[after - 1], steps[after]
    share = (level - accuracy[low]) / (accuracy[high] - accuracy[low])
    return low + share * (high - low)


def percent_text(accuracy: float) -> str:
    """Return an accuracy in percent with three digits, without trailing zeros: `21.8%`, `40%`."""
    return f"{100 * accuracy:.3g}%"


def shorten_list(names: Sequence[str]) -> str:
    """Return the first `MAX_LISTED` names, and the number of the others."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


SECONDS_PER_STEP = "seconds_per_step"  # the metric for which a report also shows the spread over the steps


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
        smallest, largest: smallest and largest possible value, null for none.
    """

    key: str
    name: str
    about: str
    compared: bool = True
    pattern: str = ".3f"
    percent: bool = False
    smallest: float | None = 0.0
    largest: float | None = 1.0

    @property
    def limits(self) -> Limits:
        """Smallest and largest possible value."""
        smallest = -math.inf if self.smallest is None else self.smallest
        return smallest, math.inf if self.largest is None else self.largest

    def text(self, value: float, sign: bool = False) -> str:
        """Return `value` as tables show it, with a plus sign for positive values if `sign`."""
        number = format(100 * value if self.percent else value, ("+" if sign else "") + self.pattern)
        return f"{number}%" if self.percent else number

    def interval(self, estimate: Estimate, sign: bool = False) -> str:
        """Return `0.451 – 0.497`; "" without an interval and for metrics that variants are not compared by."""
        if not self.compared or estimate.low is None or estimate.high is None:
            return ""
        return (" to " if sign else " – ").join(self.text(end, sign) for end in (estimate.low, estimate.high))


def measure(tables: RunTables, sets: Sequence[str], level: float | None) -> list[Metric]:
    """Return the metrics that at least one run has a value of, the mean over several sets first.

    The first metrics are those of `scores_of`; only they are compared in a single set, not its area and pass@k.

    Args:
        level: the accuracy of the entropy at equal accuracy.
    """
    runs, n, compared = tables.runs, common_n(tables.runs, sets), scores_of(tables)
    passes = [key for key in runs.columns if key.startswith("pass_at_") and "/" not in key]
    complete = [int(key.removeprefix("pass_at_")) for key in passes if runs[key].notna().all()]
    k = max(complete, default=None)  # None has no values
    over = f"mean over {len(sets)} evaluation sets of " if len(sets) > 1 else ""
    under = f"mean@{n}" if compared[0] == "accuracy" else "the mean reward"
    unlimited: dict[str, Any] = {"smallest": None, "largest": None}
    area_limits = unlimited if "reward" in compared else {}
    scores = {
        "reward": Metric("reward", "held-out reward", "mean reward of the last evaluation", **unlimited),
        "accuracy": Metric("accuracy", "held-out accuracy", f"mean@{n} of the last evaluation"),
        "area": Metric(
            "area", "area", f"area under {under} over the steps, divided by the steps", **area_limits
        ),
        "pass": Metric(f"pass_at_{k}", f"pass@{k}", f"pass@{k} of the last evaluation"),
    }
    means = {key: replace(metric, about=over + metric.about) for key, metric in scores.items()}
    reached = percent_text(level or 0.0)
    at_accuracy = (
        f"entropy when {over}mean@{n} first reaches {reached}, nats per token: the highest level that all runs reach, "
        "without variants and runs whose best value is under half of the best variant's; linear between evaluations"
    )
    seconds = (
        "seconds per step, without evaluations and checkpoints; the range covers the middle 80% of all steps"
    )
    shown: dict[str, Any] = {"compared": False, "pattern": ".2f"}
    metrics = [
        *(means[key] for key in compared),
        means["area"],
        Metric("entropy", "entropy", "mean over the last tenth of the steps, nats per token", largest=None),
        Metric("entropy_at_accuracy", f"entropy at {reached} accuracy", at_accuracy, largest=None),
        means["pass"],
        Metric(
            "clipped",
            "clipped",
            "share of tokens with zero gradient, mean over the run",
            percent=True,
            **shown,
        ),
        Metric(SECONDS_PER_STEP, "s/step", seconds, largest=None, **shown),
    ]
    for label in sets if len(sets) > 1 else ():
        metrics += [
            replace(
                scores[key],
                key=f"{scores[key].key}/{label}",
                name=f"{scores[key].name}, {label}",
                compared=key in compared,
            )
            for key in (*compared, "area", "pass")
        ]
    return [metric for metric in metrics if metric.key in runs and runs[metric.key].notna().any()]
