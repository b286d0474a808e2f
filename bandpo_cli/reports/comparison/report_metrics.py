"""Metrics of a report, their values for a run, and entropy at equal accuracy.

Learning a task lowers the entropy, so at the same step the variant that has learned less has the higher entropy. At the
same held-out accuracy, a difference in entropy is a difference between the variants.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from bandpo_cli.errors import UserError, plural
from bandpo_cli.reports.comparison.runs import VariantRunData, Variants, scores_of
from bandpo_cli.reports.comparison.statistics import Estimate, Limits
from bandpo_cli.reports.run_plots import Curve

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


def entropy_at_equal_accuracy(variants: Variants, sets: Sequence[str]) -> EqualAccuracy:
    """Return the entropy of each run at the moment at which its held-out accuracy first reaches a common level.

    The level is the highest accuracy that all compared runs reach at some evaluation. Not compared are variants that
    fall far behind (the median over seeds of the runs' best accuracies is under `FAR_BEHIND` times that of the best
    variant), and single runs of other variants whose best accuracy is under the same limit. The level is a minimum over
    runs, so a single run determines it: a note names this run, and gives the level without it.

    There are no values if fewer than two variants have one, or if a run starts at or above the level: the moment at
    which such a run reached it is not known. The accuracy is the mean over `sets`.
    """
    runs = {(name, run.seed): run for name, members in variants.items() for run in members}
    curves = {key: run.accuracy(sets) for key, run in runs.items()}
    best = {key: max(curve.values()) for key, curve in curves.items()}
    typical = {name: median(best[name, run.seed] for run in members) for name, members in variants.items()}
    limit = FAR_BEHIND * max(typical.values())
    behind = [name for name in variants if typical[name] < limit]
    compared = [key for key in runs if key[0] not in behind and best[key] >= limit and runs[key].entropy]
    none = "No entropy at equal held-out accuracy"
    if len({variant for variant, _ in compared}) < 2:
        why = "fewer than two variants are left without those whose best value (median over seeds) is under half of"
        note = f"{none}: {why} the best variant's, {shorten_list(behind)}."
        return EqualAccuracy(None, {}, [note] if behind else [])
    lowest, second = sorted(compared, key=best.__getitem__)[:2]
    level, percent, next_percent = best[lowest], percent_text(best[lowest]), percent_text(best[second])
    start = max(curves[key][min(curves[key])] for key in compared)
    if level <= start:
        above = f"{percent}, is not above all first evaluations (up to {percent_text(start)})"
        return EqualAccuracy(None, {}, [f"{none}: the highest level that all compared runs reach, {above}."])
    entropies = {key: entropy_when_reached(runs[key].entropy, curves[key], level) for key in compared}
    values = {key: entropy for key, entropy in entropies.items() if entropy is not None}
    if len({variant for variant, _ in values}) < 2:
        return EqualAccuracy(None, {}, [])
    texts = {(variant, seed): f"{variant} (seed {seed})" for variant, seed in runs}
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
    if missing := [texts[key] for key in runs if key[0] not in behind and key not in values]:
        notes.append(
            f"{plural(len(missing), 'run')} of the compared variants without entropy at {percent} held-out accuracy: "
            f"{shorten_list(missing)}."
        )
    return EqualAccuracy(level, values, notes)


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

Values = Mapping[str, Mapping[int, float]]
"""Values of a metric by variant and seed, without the runs that have none."""


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


def common_sets(records: Sequence[VariantRunData]) -> list[str]:
    """Return the evaluation sets that all runs have; raise UserError if there is none."""
    first, *others = records
    sets = [label for label in first.sets if all(label in record.sets for record in others)]
    if not sets:
        other = min(others, key=lambda record: len(record.sets.keys() & first.sets.keys()))
        raise UserError(
            f"the runs share no evaluation set: {first.folder.name} has {', '.join(first.sets)}, "
            f"{other.folder.name} has {', '.join(other.sets)}; make a report of each group"
        )
    return sets


def common_n(records: Sequence[VariantRunData], sets: Sequence[str]) -> str:
    """Return n of mean@n, the number of completions per problem; "n" where the number differs."""
    ns = {record.sets[label].n for record in records for label in sets}
    return ns.pop() if len(ns) == 1 else "n"


def measure(variants: Variants, sets: Sequence[str], equal: EqualAccuracy) -> list[tuple[Metric, Values]]:
    """Return the metrics that at least one run has a value of, the mean over several sets first.

    The first metrics are those of `scores_of`; only they are compared in a single set, not its area and pass@k. `equal`
    has the values of the entropy at equal accuracy.
    """
    runs = [run for members in variants.values() for run in members]
    n, passes_of = common_n(runs, sets), [set(run.sets[label].passes) for run in runs for label in sets]
    k = max(set.intersection(*passes_of), default=None)  # None has no values
    over = f"mean over {len(sets)} evaluation sets of " if len(sets) > 1 else ""
    reached = percent_text(equal.level or 0.0)
    at_accuracy = (
        f"entropy when {over}mean@{n} first reaches {reached}, nats per token: the highest level that all runs reach, "
        "without variants and runs whose best value is under half of the best variant's; linear between evaluations"
    )
    seconds = (
        "seconds per step, without evaluations and checkpoints; the range covers the middle 80% of all steps"
    )
    passes = f"pass_at_{k}"
    compared = scores_of(runs)
    under = f"mean@{n}" if compared[0] == "accuracy" else "the mean reward"
    scores = {
        "reward": ("held-out reward", "mean reward of the last evaluation"),
        "accuracy": ("held-out accuracy", f"mean@{n} of the last evaluation"),
        "area": ("area", f"area under {under} over the steps, divided by the steps"),
        passes: (f"pass@{k}", f"pass@{k} of the last evaluation"),
    }

    def score(key: str, label: str = "") -> tuple[Metric, Callable[[VariantRunData], float | None]]:
        name, about = scores[key]
        is_reward = key == "reward" or (key == "area" and "reward" in compared)
        smallest, largest = (None, None) if is_reward else (0.0, 1.0)
        if label:
            metric = Metric(f"{key}/{label}", f"{name}, {label}", about, compared=key in compared)
        else:
            metric = Metric(key, name, over + about)
        metric = replace(metric, smallest=smallest, largest=largest)
        return metric, lambda run: run.score(key, [label] if label else sets)

    last_tenth = "mean over the last tenth of the steps, nats per token"
    entropy = Metric("entropy", "entropy", last_tenth, largest=None)
    at_equal = Metric("entropy_at_accuracy", f"entropy at {reached} accuracy", at_accuracy, largest=None)
    clipped = Metric("clipped", "clipped", "share of tokens with zero gradient, mean over the run",
                     compared=False, pattern=".2f", percent=True)  # fmt: skip
    time = Metric(SECONDS_PER_STEP, "s/step", seconds, compared=False, pattern=".2f", largest=None)
    table = [
        *map(score, compared),
        score("area"),
        (entropy, lambda run: run.final_entropy),
        (at_equal, lambda run: equal.values.get((run.variant, run.seed))),
        score(passes),
        (clipped, lambda run: run.clipped),
        (time, lambda run: fmean(run.step_seconds) if run.step_seconds else None),
        *(score(key, label) for label in sets if len(sets) > 1 for key in (*compared, "area", passes)),
    ]
    measured: list[tuple[Metric, Values]] = []
    for metric, value_of in table:
        values = {
            name: {run.seed: value for run in members if (value := value_of(run)) is not None}
            for name, members in variants.items()
        }
        if any(values.values()):
            measured.append((metric, values))
    return measured
