"""From runs to arms: the figures of each, and how they differ from the baseline's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bandpo_cli.errors import UserError
from bandpo_cli.reports.sweep.result import Arm, Difference, Figure
from bandpo_cli.reports.sweep.runs import RunRecord, mean
from bandpo_cli.reports.sweep.settings import ABSENT, differing, text
from bandpo_cli.reports.sweep.statistics import LEVEL, Paired, estimate, holm, paired

ValueOf = Callable[[RunRecord], float | None]


@dataclass(frozen=True)
class Measure:
    """A figure, and how it is taken of a run."""

    figure: Figure
    value: ValueOf


def by_arm(records: Iterable[RunRecord]) -> dict[str, list[RunRecord]]:
    """Return the runs of each arm by seed.

    Raises:
        UserError: two runs of an arm have the same seed; the line names them.
    """
    arms: dict[str, dict[int, RunRecord]] = {}
    for record in records:
        seeds = arms.setdefault(record.run.arm, {})
        other = seeds.setdefault(record.run.seed, record)
        if other is not record:
            keys = differing([other.settings, record.settings])
            advice = f"they differ in {', '.join(keys[:3])}: add it to --by" if keys else "give one of them"
            raise UserError(
                f"{other.run.folder} and {record.run.folder} are both seed {record.run.seed} of the arm "
                f"'{record.run.arm}'; {advice}"
            )
    return {name: [seeds[seed] for seed in sorted(seeds)] for name, seeds in arms.items()}


def common_sets(records: Sequence[RunRecord]) -> list[str]:
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


def common_k(records: Sequence[RunRecord], sets: Sequence[str]) -> int | None:
    """Return the largest k whose pass@k all runs have on all sets."""
    shared = [set(record.sets[label].passes) for record in records for label in sets]
    return max(set.intersection(*shared), default=None)


def measures(records: Sequence[RunRecord], sets: Sequence[str]) -> list[Measure]:
    """Return what is measured of these runs; of several sets their mean first, then each."""
    ns = {record.sets[label].n for record in records for label in sets}
    n, k = ns.pop() if len(ns) == 1 else "n", common_k(records, sets)
    over = f"mean over {len(sets)} evaluation sets of " if len(sets) > 1 else ""
    passing = [Figure(f"pass_at_{k}", f"pass@{k}", f"{over}pass@{k} of the last evaluation")] if k else []
    found = [
        Measure(
            Figure("accuracy", "accuracy", f"{over}mean@{n} of the last evaluation"), _over(sets, _final)
        ),
        Measure(
            Figure("area", "area", f"{over}the area under mean@{n} over the steps, divided by the steps"),
            _over(sets, _area),
        ),
        Measure(
            Figure("entropy", "entropy", "mean of the last tenth of the steps, nats a token"),
            lambda record: record.final_entropy,
        ),
        *(Measure(figure, _over(sets, _passing(k))) for figure in passing if k),
        Measure(
            Figure(
                "clipped",
                "clipped",
                "share of tokens with a zero gradient, mean of the run",
                False,
                ".2f",
                True,
            ),
            lambda record: record.clipped,
        ),
        Measure(
            Figure("seconds_per_step", "s/step", "seconds, evaluations and checkpoints apart", False, ".2f"),
            lambda record: record.seconds,
        ),
    ]
    for label in sets if len(sets) > 1 else ():
        found += _of_set(label, n, k)
    return found


def _of_set(label: str, n: str, k: int | None) -> list[Measure]:
    """Return the figures of one set among several; by its area and pass@k arms are not compared once more."""
    accuracy = Figure(f"accuracy/{label}", f"accuracy, {label}", f"mean@{n} of the last evaluation")
    area = Figure(f"area/{label}", f"area, {label}", f"the area under mean@{n}, divided by the steps", False)
    found = [Measure(accuracy, _over([label], _final)), Measure(area, _over([label], _area))]
    if k is not None:
        passing = Figure(
            f"pass_at_{k}/{label}", f"pass@{k}, {label}", f"pass@{k} of the last evaluation", False
        )
        found.append(Measure(passing, _over([label], _passing(k))))
    return found


def _final(record: RunRecord, label: str) -> float | None:
    return record.sets[label].mean[-1]


def _area(record: RunRecord, label: str) -> float | None:
    return record.sets[label].area


def _passing(k: int) -> Callable[[RunRecord, str], float | None]:
    return lambda record, label: record.sets[label].passes.get(k)


def _over(sets: Sequence[str], of_set: Callable[[RunRecord, str], float | None]) -> ValueOf:
    """Return the plain mean over the sets; None where one has no value."""

    def value(record: RunRecord) -> float | None:
        values = [of_set(record, label) for label in sets]
        known = [each for each in values if each is not None]
        return mean(known) if len(known) == len(values) else None

    return value


def measure_arms(arms: Mapping[str, Sequence[RunRecord]], taken: Sequence[Measure]) -> list[Arm]:
    """Return the arms with their figures, the most accurate first."""
    keys = differing(record.settings for records in arms.values() for record in records)
    found = []
    for name, records in arms.items():
        estimates = {each.figure.key: estimate(list(_by_seed(records, each).values())) for each in taken}
        values = {
            key: dict.fromkeys(text(record.settings.get(key, ABSENT)) for record in records) for key in keys
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
    arms: Mapping[str, Sequence[RunRecord]], baseline: str, taken: Sequence[Measure]
) -> list[Difference]:
    """Return how each arm differs from the baseline in each figure that arms are compared by.

    p-values are adjusted over the arms, figure by figure.
    """
    found = []
    for each in taken:
        if not each.figure.compared:
            continue
        base = _by_seed(arms[baseline], each)
        pairs = {name: paired(_by_seed(runs, each), base) for name, runs in arms.items() if name != baseline}
        tested = {name: pair.p for name, pair in pairs.items() if pair is not None and pair.p is not None}
        adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
        for name, pair in pairs.items():
            p_holm = adjusted.get(name)
            found.append(Difference(name, each.figure.key, pair, p_holm, verdict(pair, p_holm)))
    return found


def verdict(pair: Paired | None, p_holm: float | None) -> str:
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


def _by_seed(records: Iterable[RunRecord], each: Measure) -> dict[int, float]:
    values = {record.run.seed: each.value(record) for record in records}
    return {seed: value for seed, value in values.items() if value is not None}
