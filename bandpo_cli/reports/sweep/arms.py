"""What a report holds. Every table, page and JSON is made from this alone."""

# MERGED: From runs to arms: the figures of each, and how they differ from the baseline's.
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bandpo_cli.errors import UserError
from bandpo_cli.reports.sweep.runs import ArmRunData, ExcludedRun, mean
from bandpo_cli.reports.sweep.selection import ABSENT, differing_settings, format_setting
from bandpo_cli.reports.sweep.statistics import LEVEL, Estimate, PairedTest, estimate, holm, paired_test


@dataclass(frozen=True)
class Metric:
    """Something that is measured of every run.

    Attributes:
        key: its column in leaderboard.csv.
        name: as tables head it.
        about: what exactly, with its unit.
        compared: whether arms are compared by it, so that tables show its interval.
        pattern: how a value is written.
        percent: whether it is written in hundredths.
    """

    key: str
    name: str
    about: str
    compared: bool = True
    pattern: str = ".3f"
    percent: bool = False

    def text(self, value: float, sign: bool = False) -> str:
        """Return a value as tables have it."""
        words = format(100 * value if self.percent else value, ("+" if sign else "") + self.pattern)
        return f"{words}%" if self.percent else words


@dataclass(frozen=True)
class Arm:
    """The runs that differ in their seed alone.

    Attributes:
        name: of the arm.
        seeds: of the runs that are counted.
        steps: their last steps, the least and the greatest.
        settings: those in which the arms differ, as typed.
        figures: by key of `Report.figures`; those that the runs have.
    """

    name: str
    seeds: tuple[int, ...]
    steps: tuple[int, int]
    settings: Mapping[str, str]
    figures: Mapping[str, Estimate]


@dataclass(frozen=True)
class ArmDifference:
    """An arm against the baseline in one figure, by common seeds.

    Attributes:
        arm, figure: names of the arm and key of the figure.
        paired: None without common seeds.
        p_holm: the p-value adjusted for the arms that are compared in this figure.
        verdict: what may be said, in words.
    """

    arm: str
    figure: str
    paired: PairedTest | None
    p_holm: float | None
    verdict: str


@dataclass(frozen=True)
class Report:
    """Arms compared.

    Attributes:
        title, finding: what was compared, and what came out, in a sentence.
        about: arms, seeds and steps in a line.
        baseline: the arm that others are compared with; None where there is none.
        sets: the evaluation sets that all runs have; of several, figures without a set's name are the plain mean.
        figures: what was measured, accuracy first.
        arms: the most accurate first.
        differences: by figure, then arm.
        notes: what a reader must know to read the figures right.
        left_out: runs that no figure is of.
        files: what was written, by name.
    """

    title: str
    about: str
    finding: str
    baseline: str | None
    sets: tuple[str, ...]
    figures: tuple[Metric, ...]
    arms: tuple[Arm, ...]
    differences: tuple[ArmDifference, ...]
    notes: tuple[str, ...]
    left_out: tuple[ExcludedRun, ...]
    files: Mapping[str, Path]

    def figure(self, key: str) -> Metric:
        """Return the figure of a key."""
        return next(figure for figure in self.figures if figure.key == key)

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        plain = asdict(self)
        plain["files"] = {name: str(path) for name, path in self.files.items()}
        return plain


ValueOf = Callable[[ArmRunData], float | None]


@dataclass(frozen=True)
class ArmMetric:
    """A figure, and how it is taken of a run."""

    figure: Metric
    value: ValueOf


def group_by_arm(records: Iterable[ArmRunData]) -> dict[str, list[ArmRunData]]:
    """Return the runs of each arm by seed.

    Raises:
        UserError: two runs of an arm have the same seed; the line names them.
    """
    arms: dict[str, dict[int, ArmRunData]] = {}
    for record in records:
        seeds = arms.setdefault(record.run.arm, {})
        other = seeds.setdefault(record.run.seed, record)
        if other is not record:
            keys = differing_settings([other.settings, record.settings])
            advice = f"they differ in {', '.join(keys[:3])}: add it to --by" if keys else "give one of them"
            raise UserError(
                f"{other.run.folder} and {record.run.folder} are both seed {record.run.seed} of the arm "
                f"'{record.run.arm}'; {advice}"
            )
    return {name: [seeds[seed] for seed in sorted(seeds)] for name, seeds in arms.items()}


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
            f"{other.run.folder.name} has {', '.join(other.sets)}; report them apart"
        )
    return sets


def common_k(records: Sequence[ArmRunData], sets: Sequence[str]) -> int | None:
    """Return the largest k whose pass@k all runs have on all sets."""
    shared = [set(record.sets[label].passes) for record in records for label in sets]
    return max(set.intersection(*shared), default=None)


def arm_metrics(records: Sequence[ArmRunData], sets: Sequence[str]) -> list[ArmMetric]:
    """Return what is measured of these runs; of several sets their mean first, then each."""
    ns = {record.sets[label].n for record in records for label in sets}
    n, k = ns.pop() if len(ns) == 1 else "n", common_k(records, sets)
    over = f"mean over {len(sets)} evaluation sets of " if len(sets) > 1 else ""
    passing = [Metric(f"pass_at_{k}", f"pass@{k}", f"{over}pass@{k} of the last evaluation")] if k else []
    found = [
        ArmMetric(
            Metric("accuracy", "accuracy", f"{over}mean@{n} of the last evaluation"), _over(sets, _final)
        ),
        ArmMetric(
            Metric("area", "area", f"{over}the area under mean@{n} over the steps, divided by the steps"),
            _over(sets, _area),
        ),
        ArmMetric(
            Metric("entropy", "entropy", "mean of the last tenth of the steps, nats a token"),
            lambda record: record.final_entropy,
        ),
        *(ArmMetric(figure, _over(sets, _passing(k))) for figure in passing if k),
        ArmMetric(
            Metric(
                "clipped",
                "clipped",
                "share of tokens with a zero gradient, mean of the run",
                False,
                ".2f",
                True,
            ),
            lambda record: record.clipped,
        ),
        ArmMetric(
            Metric("seconds_per_step", "s/step", "seconds, evaluations and checkpoints apart", False, ".2f"),
            lambda record: record.seconds,
        ),
    ]
    for label in sets if len(sets) > 1 else ():
        found += _of_set(label, n, k)
    return found


def _of_set(label: str, n: str, k: int | None) -> list[ArmMetric]:
    """Return the figures of one set among several; by its area and pass@k arms are not compared once more."""
    accuracy = Metric(f"accuracy/{label}", f"accuracy, {label}", f"mean@{n} of the last evaluation")
    area = Metric(f"area/{label}", f"area, {label}", f"the area under mean@{n}, divided by the steps", False)
    found = [ArmMetric(accuracy, _over([label], _final)), ArmMetric(area, _over([label], _area))]
    if k is not None:
        passing = Metric(
            f"pass_at_{k}/{label}", f"pass@{k}, {label}", f"pass@{k} of the last evaluation", False
        )
        found.append(ArmMetric(passing, _over([label], _passing(k))))
    return found


def _final(record: ArmRunData, label: str) -> float | None:
    return record.sets[label].mean[-1]


def _area(record: ArmRunData, label: str) -> float | None:
    return record.sets[label].area


def _passing(k: int) -> Callable[[ArmRunData, str], float | None]:
    return lambda record, label: record.sets[label].passes.get(k)


def _over(sets: Sequence[str], of_set: Callable[[ArmRunData, str], float | None]) -> ValueOf:
    """Return the plain mean over the sets; None where one has no value."""

    def value(record: ArmRunData) -> float | None:
        values = [of_set(record, label) for label in sets]
        known = [each for each in values if each is not None]
        return mean(known) if len(known) == len(values) else None

    return value


def evaluate_arms(arms: Mapping[str, Sequence[ArmRunData]], taken: Sequence[ArmMetric]) -> list[Arm]:
    """Return the arms with their figures, the most accurate first."""
    keys = differing_settings(record.settings for records in arms.values() for record in records)
    found = []
    for name, records in arms.items():
        estimates = {each.figure.key: estimate(list(_by_seed(records, each).values())) for each in taken}
        values = {
            key: dict.fromkeys(format_setting(record.settings.get(key, ABSENT)) for record in records)
            for key in keys
        }
        found.append(
            Arm(
                name=name,
                seeds=tuple(record.run.seed for record in records),
                steps=(min(record.steps for record in records), max(record.steps for record in records)),
                settings={key: " or ".join(each) for key, each in values.items()},
                figures={key: each for key, each in estimates.items() if each is not None},
            )
        )
    return sorted(found, key=lambda arm: -arm.figures["accuracy"].mean)


def compare_arms(
    arms: Mapping[str, Sequence[ArmRunData]], baseline: str, taken: Sequence[ArmMetric]
) -> list[ArmDifference]:
    """Return how each arm differs from the baseline in each figure that arms are compared by.

    p-values are adjusted over the arms, figure by figure.
    """
    found = []
    for each in taken:
        if not each.figure.compared:
            continue
        base = _by_seed(arms[baseline], each)
        pairs = {
            name: paired_test(_by_seed(runs, each), base) for name, runs in arms.items() if name != baseline
        }
        tested = {name: pair.p for name, pair in pairs.items() if pair is not None and pair.p is not None}
        adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
        for name, pair in pairs.items():
            p_holm = adjusted.get(name)
            found.append(ArmDifference(name, each.figure.key, pair, p_holm, verdict(pair, p_holm)))
    return found


def verdict(pair: PairedTest | None, p_holm: float | None) -> str:
    """Return what a difference allows to be said."""
    if pair is None:
        return "no seed in common"
    change = pair.change
    if change.low is None or change.high is None:
        alike = (
            "the same difference in every seed: no interval" if change.mean else "no difference in any seed"
        )
        return "one seed: cannot tell" if change.n == 1 else alike
    if change.low <= 0 <= change.high:
        return "cannot tell apart"
    word = "higher" if change.mean > 0 else "lower"
    return word if p_holm is not None and p_holm <= 1 - LEVEL else f"{word}, but not after Holm's adjustment"


def _by_seed(records: Iterable[ArmRunData], each: ArmMetric) -> dict[int, float]:
    values = {record.run.seed: each.value(record) for record in records}
    return {seed: value for seed, value in values.items() if value is not None}
