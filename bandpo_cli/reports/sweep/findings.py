"""Sentences of a report: the scope of the comparison, its result, and notes on its limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bandpo_cli.errors import plural
from bandpo_cli.reports.sweep.arms import Arm, ArmDifference
from bandpo_cli.reports.sweep.equal_accuracy import EqualAccuracy, RunKey, percent_text
from bandpo_cli.reports.sweep.metrics import Metric
from bandpo_cli.reports.sweep.runs import ArmRunData, ExcludedRun
from bandpo_cli.reports.sweep.selection import differing_settings
from bandpo_cli.reports.sweep.statistics import LEVEL

_MAX_NAMED = 3
"""Arms that the headline names in each direction."""

_MAX_LISTED = 6
"""Arms or settings that a note lists."""

_EVALUATION_KEYS = ("task", "evaluation.problems", "evaluation.temperature", "model.prompts")
"""Settings and sections whose values make the accuracies of two runs incomparable."""


def scope(arms: Sequence[Arm], sets: Sequence[str]) -> str:
    """Return `3 arms, 9 runs over seeds 0, 1, 2; 100 steps; evaluated on countdown`."""
    seeds = sorted({seed for arm in arms for seed in arm.seeds})
    least, most = min(arm.steps[0] for arm in arms), max(arm.steps[1] for arm in arms)
    runs = sum(len(arm.seeds) for arm in arms)
    steps = f"{most:,} steps" if least == most else f"{least:,} to {most:,} steps"
    listed = ", ".join(map(str, seeds))
    over = f"{len(seeds)} seeds" if len(seeds) > 8 else f"{'seed' if len(seeds) == 1 else 'seeds'} {listed}"
    return f"{plural(len(arms), 'arm')}, {plural(runs, 'run')} over {over}; {steps}; evaluated on {', '.join(sets)}"


def headline(
    arms: Sequence[Arm], baseline: str | None, differences: Sequence[ArmDifference], metric: Metric
) -> str:
    """Return the result in one sentence, which claims no more than the tests support.

    Args:
        arms: highest accuracy first.
        baseline: name of the baseline; None for no comparison.
        differences: the differences in `metric`.
        metric: the accuracy.
    """
    if not differences:
        return _ranking(arms, metric)
    tested = [each for each in differences if each.p_holm is not None]
    if not tested:
        return f"{_ranking(arms, metric)[:-1]}; with these seeds no difference from {baseline} can be tested."
    significant = sorted(filter(_is_significant, tested), key=lambda each: -abs(_mean(each)))
    if significant:
        others = _others_text(len(differences) - len(significant))
        return f"Against {baseline}, final held-out accuracy is {_significant_text(significant, metric)}{others}."
    if len(differences) == 1:
        (only,) = tested
        return (
            f"{only.arm} and {baseline} do not differ significantly in final held-out accuracy: "
            f"the difference is {_evidence_text(only, metric)}."
        )
    largest = max(tested, key=lambda each: abs(_mean(each)))
    return (
        f"No arm differs significantly from {baseline} in final held-out accuracy; the largest difference is that of "
        f"{largest.arm}: {_evidence_text(largest, metric)}."
    )


def report_notes(
    arms: Mapping[str, Sequence[ArmRunData]],
    baseline: str | None,
    differences: Sequence[ArmDifference],
    sets: Sequence[str],
    has_pass_at_k: bool,
    excluded: Sequence[ExcludedRun],
    equal: EqualAccuracy,
) -> list[str]:
    """Return what limits the comparison, one sentence per note."""
    records = [record for runs in arms.values() for record in runs]
    return [
        *_notes_on_seeds(arms, excluded),
        *_notes_on_baseline(arms, baseline, differences),
        *_notes_on_steps(arms),
        *_notes_on_settings(arms, records),
        *_notes_on_sets(records, sets, has_pass_at_k),
        *_notes_on_equal_accuracy(equal),
    ]


def p_text(p: float) -> str:
    """Return a p-value with two or three digits; `< 0.001` below that."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def _significant_text(differences: Sequence[ArmDifference], metric: Metric) -> str:
    """Return `higher for a (evidence), c (+0.020) and lower for b (evidence)`, the largest differences first."""
    groups = []
    for word, sign in (("higher", 1), ("lower", -1)):
        group = [each for each in differences if sign * _mean(each) > 0]
        texts = [f"{each.arm} ({metric.text(_mean(each), sign=True)})" for each in group[1:_MAX_NAMED]]
        if len(group) > _MAX_NAMED:
            texts.append(plural(len(group) - _MAX_NAMED, "more arm"))
        if group:
            first = f"{group[0].arm} ({_evidence_text(group[0], metric)})"
            groups.append(f"{word} for {_join_with_and([first, *texts])}")
    return " and ".join(groups)


def _others_text(count: int) -> str:
    """Return a clause that the other arms do not differ significantly; '' if there are none."""
    others = "the other arm does" if count == 1 else f"the other {count} arms do"
    return f"; {others} not differ significantly from it" if count else ""


def _is_significant(difference: ArmDifference) -> bool:
    return difference.p_holm is not None and difference.p_holm <= 1 - LEVEL


def _mean(difference: ArmDifference) -> float:
    assert difference.paired is not None
    return difference.paired.change.mean


def _evidence_text(difference: ArmDifference, metric: Metric) -> str:
    """Return `+0.031, 95% interval +0.010 to +0.052 over 3 seeds, p = 0.02`."""
    assert difference.paired is not None
    assert difference.p_holm is not None
    change = difference.paired.change
    assert change.low is not None
    assert change.high is not None
    ends = f"{metric.text(change.low, sign=True)} to {metric.text(change.high, sign=True)}"
    adjusted = "" if difference.p_holm == difference.paired.p else "Holm-adjusted "
    p = p_text(difference.p_holm)
    return (
        f"{metric.text(change.mean, sign=True)}, 95% interval {ends} over {change.n} seeds, "
        f"{adjusted}p {p if p.startswith('<') else f'= {p}'}"
    )


def _ranking(arms: Sequence[Arm], metric: Metric) -> str:
    """Return a sentence on the final held-out accuracy of the first arm, which adds that a ranking is not a test."""
    best = arms[0]
    value = best.figures[metric.key]
    ends = (
        "one seed, no interval"
        if value.n == 1
        else f"{value.n} seeds"
        if value.low is None or value.high is None
        else f"95% interval {metric.text(value.low)} to {metric.text(value.high)} over {value.n} seeds"
    )
    if len(arms) == 1:
        return f"{best.name} ends at a held-out accuracy of {metric.text(value.mean)} ({ends})."
    untested = "" if value.n == 1 else "; a ranking, not a test"
    return (
        f"{best.name} ends with the highest held-out accuracy, {metric.text(value.mean)} ({ends}){untested}."
    )


def _notes_on_seeds(
    arms: Mapping[str, Sequence[ArmRunData]], excluded: Sequence[ExcludedRun]
) -> Iterable[str]:
    missing = sorted({each.arm for each in excluded if each.arm and each.arm not in arms})
    if missing:
        yield f"All runs of {_shorten_list(missing)} were excluded."
    single = [name for name, runs in arms.items() if len(runs) == 1]
    if single:
        yield f"One seed, so no interval: {_shorten_list(single)}."
    if len({tuple(record.run.seed for record in runs) for runs in arms.values()}) > 1:
        yield "The arms do not have the same seeds; an arm is compared over the seeds that it shares with the baseline."


def _notes_on_baseline(
    arms: Mapping[str, Sequence[ArmRunData]], baseline: str | None, differences: Sequence[ArmDifference]
) -> Iterable[str]:
    if len(arms) < 2:
        return
    if baseline is None:
        yield "No baseline was given, so there are no differences; choose one with --baseline ARM."
    elif baseline not in arms:
        yield f"All runs of the baseline '{baseline}' were excluded, so there are no differences."
    elif len(arms) > 2:
        metrics = len(dict.fromkeys(each.figure for each in differences))
        yield (
            f"{plural(len(differences), 'comparison')}: {len(arms) - 1} arms against {baseline} in {metrics} metrics. "
            "p-values are adjusted over the arms for each metric (Holm), not over the metrics."
        )


def _notes_on_steps(arms: Mapping[str, Sequence[ArmRunData]]) -> Iterable[str]:
    unequal = [name for name, runs in arms.items() if len({record.steps for record in runs}) > 1]
    if unequal:
        yield (
            f"Runs of unequal length in {_shorten_list(unequal)}: curves cover the common steps, "
            "final metrics are those of each run's last step."
        )
    if len({record.steps for runs in arms.values() for record in runs}) > 1:
        yield "The runs were not all trained for the same number of steps."


def _notes_on_settings(
    arms: Mapping[str, Sequence[ArmRunData]], records: Sequence[ArmRunData]
) -> Iterable[str]:
    for name, runs in arms.items():
        keys = differing_settings(record.settings for record in runs)
        if keys:
            yield f"The runs of {name} differ in more than their seed: {', '.join(keys[:_MAX_LISTED])}."
    incomparable = [
        key
        for key in differing_settings(record.settings for record in records)
        if any(key == each or key.startswith(f"{each}.") for each in _EVALUATION_KEYS)
    ]
    if incomparable:
        yield (
            f"The runs differ in {', '.join(incomparable[:_MAX_LISTED])}: their held-out accuracies come from "
            "different problems or different sampling."
        )


def _notes_on_sets(records: Sequence[ArmRunData], sets: Sequence[str], has_pass_at_k: bool) -> Iterable[str]:
    others = sorted({label for record in records for label in record.sets} - set(sets))
    if others:
        yield f"Excluded, since not every run was evaluated on them: {', '.join(others)}."
    ns = sorted({record.sets[label].n for record in records for label in sets})
    if len(ns) > 1:
        yield f"The number of completions per problem differs between the values of mean@n: {', '.join(ns)}."
    if not has_pass_at_k:
        yield "No pass@k is common to all runs."


def _notes_on_equal_accuracy(equal: EqualAccuracy) -> Iterable[str]:
    level = equal.level
    if level is None:
        if equal.behind:
            yield (
                "No entropy at equal held-out accuracy: fewer than two arms are left without those whose best value "
                f"(median over seeds) is under half of the best arm's, {_shorten_list(equal.behind)}."
            )
        return
    if not level.is_crossed:
        yield (
            "No entropy at equal held-out accuracy: the highest level that all compared runs reach, "
            f"{percent_text(level.accuracy)}, is not above all first evaluations (up to {percent_text(level.start)})."
        )
    if not equal.values:
        return
    reached = f"{percent_text(level.accuracy)} held-out accuracy"
    others = percent_text(level.next_accuracy)
    without = "the same" if others == percent_text(level.accuracy) else others
    yield (
        f"Entropies are compared at {reached}, the highest level that all compared runs reach. It is the best value of "
        f"{_run_text(level.set_by)}; without this run it would be {without}."
    )
    if equal.behind:
        yield (
            f"No entropy at {reached}, since the best value (median over seeds) is under half of the best arm's: "
            f"{_shorten_list(equal.behind)}."
        )
    if equal.missing:
        yield (
            f"{plural(len(equal.missing), 'run')} of the compared arms without entropy at {reached}: "
            f"{_shorten_list([_run_text(run) for run in equal.missing])}."
        )


def _run_text(run: RunKey) -> str:
    arm, seed = run
    return f"{arm} (seed {seed})"


def _join_with_and(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def _shorten_list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
