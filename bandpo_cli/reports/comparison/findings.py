"""Sentences of a report: the scope of the comparison, its result, and notes on its limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bandpo_cli.errors import plural
from bandpo_cli.reports.comparison.report_metrics import EqualAccuracy, Metric, RunKey, percent_text
from bandpo_cli.reports.comparison.runs import ExcludedRun, VariantRunData
from bandpo_cli.reports.comparison.selection import differing_settings, is_within
from bandpo_cli.reports.comparison.statistics import LEVEL, Estimate
from bandpo_cli.reports.comparison.tables import interval_text, p_text
from bandpo_cli.reports.comparison.variants import Variant, VariantDifference

_MAX_NAMED = 3
"""Variants that the headline names in each direction."""

_MAX_LISTED = 6
"""Variants or settings that a note lists."""

_EVALUATION_KEYS = ("task", "evaluation.problems", "evaluation.temperature", "model.prompts")
"""Settings and sections whose values make the accuracies of two runs incomparable."""


def scope(arms: Sequence[Variant], sets: Sequence[str]) -> str:
    """Return `3 variants, 9 runs over seeds 0, 1, 2; 100 steps; evaluated on countdown`."""
    seeds = sorted({seed for arm in arms for seed in arm.seeds})
    least, most = min(arm.steps[0] for arm in arms), max(arm.steps[1] for arm in arms)
    runs = sum(len(arm.seeds) for arm in arms)
    steps = f"{most:,} steps" if least == most else f"{least:,} to {most:,} steps"
    listed = ", ".join(map(str, seeds))
    over = f"{len(seeds)} seeds" if len(seeds) > 8 else f"{'seed' if len(seeds) == 1 else 'seeds'} {listed}"
    return f"{plural(len(arms), 'variant')}, {plural(runs, 'run')} over {over}; {steps}; evaluated on {', '.join(sets)}"


def headline(
    arms: Sequence[Variant], baseline: str | None, differences: Sequence[VariantDifference], metric: Metric
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
    tested = [difference for difference in differences if difference.p_holm is not None]
    if not tested:
        return f"{_ranking(arms, metric)[:-1]}; with these seeds no difference from {baseline} can be tested."
    tested.sort(key=lambda difference: -abs(_change(difference).mean))
    significant = [difference for difference in tested if (difference.p_holm or 0) <= 1 - LEVEL]
    if significant:
        rest = len(differences) - len(significant)
        others = "the other variant does" if rest == 1 else f"the other {rest} variants do"
        more = f"; {others} not differ significantly from it" if rest else ""
        return (
            f"Against {baseline}, final held-out accuracy is {_significant_text(significant, metric)}{more}."
        )
    largest = tested[0]
    if len(differences) == 1:
        return (
            f"{largest.arm} and {baseline} do not differ significantly in final held-out accuracy: "
            f"the difference is {_evidence(largest, metric)}."
        )
    return (
        f"No variant differs significantly from {baseline} in final held-out accuracy; the largest difference has "
        f"{largest.arm}: {_evidence(largest, metric)}."
    )


def report_notes(
    arms: Mapping[str, Sequence[VariantRunData]],
    baseline: str | None,
    differences: Sequence[VariantDifference],
    sets: Sequence[str],
    has_pass_at_k: bool,
    excluded: Sequence[ExcludedRun],
    equal: EqualAccuracy,
) -> list[str]:
    """Return what limits the comparison, one sentence per note."""
    return [
        *_notes_on_variants(arms, baseline, differences, excluded),
        *_notes_on_comparability(arms, sets, has_pass_at_k),
        *_notes_on_equal_accuracy(equal),
    ]


def _significant_text(differences: Sequence[VariantDifference], metric: Metric) -> str:
    """Return `higher for a (evidence), c (+0.020) and lower for b (evidence)`, the largest differences first."""
    groups = []
    for word, sign in (("higher", 1), ("lower", -1)):
        group = [difference for difference in differences if sign * _change(difference).mean > 0]
        texts = [
            f"{difference.arm} ({_evidence(difference, metric)})"
            if difference is group[0]
            else f"{difference.arm} ({metric.text(_change(difference).mean, sign=True)})"
            for difference in group[:_MAX_NAMED]
        ]
        if len(group) > _MAX_NAMED:
            texts.append(plural(len(group) - _MAX_NAMED, "more variant"))
        if texts:
            *first, last = texts
            groups.append(f"{word} for {', '.join(first)} and {last}" if first else f"{word} for {last}")
    return " and ".join(groups)


def _change(difference: VariantDifference) -> Estimate:
    assert difference.paired is not None
    return difference.paired.change


def _evidence(difference: VariantDifference, metric: Metric) -> str:
    """Return `+0.031, 95% interval +0.010 to +0.052 over 3 seeds, p = 0.02`."""
    change, p_holm = _change(difference), difference.p_holm
    assert difference.paired is not None
    assert p_holm is not None
    adjusted = "" if p_holm == difference.paired.p else "Holm-adjusted "
    p = p_text(p_holm)
    return (
        f"{metric.text(change.mean, sign=True)}, 95% interval {interval_text(metric, change, sign=True)} over "
        f"{change.n} seeds, {adjusted}p {p if p.startswith('<') else f'= {p}'}"
    )


def _ranking(arms: Sequence[Variant], metric: Metric) -> str:
    """Return a sentence on the final held-out accuracy of the first variant; it adds that a ranking is no test."""
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


def _notes_on_variants(
    arms: Mapping[str, Sequence[VariantRunData]],
    baseline: str | None,
    differences: Sequence[VariantDifference],
    excluded: Sequence[ExcludedRun],
) -> Iterable[str]:
    missing = sorted({run.arm for run in excluded if run.arm and run.arm not in arms})
    if missing:
        yield f"All runs of {_shorten_list(missing)} were excluded."
    single = [name for name, runs in arms.items() if len(runs) == 1]
    if single:
        yield f"Only one seed, and therefore no interval: {_shorten_list(single)}."
    if len({tuple(record.run.seed for record in runs) for runs in arms.values()}) > 1:
        yield "The variants do not have the same seeds; each variant is compared over the seeds that it shares with "
        "the baseline."
    if len(arms) < 2:
        return
    if baseline is None:
        yield "No baseline was given, so there are no differences; choose one with --baseline ARM."
    elif baseline not in arms:
        yield f"All runs of the baseline '{baseline}' were excluded, so there are no differences."
    elif len(arms) > 2:
        metrics = len({difference.figure for difference in differences})
        yield (
            f"{plural(len(differences), 'comparison')}: {len(arms) - 1} variants against {baseline} in {metrics} "
            "metrics. p-values are adjusted over the variants for each metric (Holm), not over the metrics."
        )


def _notes_on_comparability(
    arms: Mapping[str, Sequence[VariantRunData]], sets: Sequence[str], has_pass_at_k: bool
) -> Iterable[str]:
    """Yield where the runs differ in their length, their settings or their evaluation sets."""
    records = [record for runs in arms.values() for record in runs]
    unequal = [name for name, runs in arms.items() if len({record.steps for record in runs}) > 1]
    if unequal:
        yield (
            f"Runs of unequal length in {_shorten_list(unequal)}: curves cover the common steps; final metrics are "
            f"taken at the last step of each run."
        )
    if len({record.steps for record in records}) > 1:
        yield "The numbers of steps of the runs differ."
    for name, runs in arms.items():
        keys = differing_settings(record.settings for record in runs)
        if keys:
            yield f"The runs of {name} differ in more than their seed: {', '.join(keys[:_MAX_LISTED])}."
    incomparable = [
        key
        for key in differing_settings(record.settings for record in records)
        if is_within(key, _EVALUATION_KEYS)
    ]
    if incomparable:
        yield (
            f"The runs differ in {', '.join(incomparable[:_MAX_LISTED])}: their held-out accuracies come from "
            "different problems or different sampling."
        )
    others = sorted({label for record in records for label in record.sets} - set(sets))
    if others:
        yield f"Excluded, because not every run was evaluated on these sets: {', '.join(others)}."
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
                "No entropy at equal held-out accuracy: fewer than two variants are left without those whose best "
                f"value (median over seeds) is under half of the best variant's, {_shorten_list(equal.behind)}."
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
            f"No entropy at {reached}, since the best value (median over seeds) is under half of the best variant's: "
            f"{_shorten_list(equal.behind)}."
        )
    if equal.missing:
        yield (
            f"{plural(len(equal.missing), 'run')} of the compared variants without entropy at {reached}: "
            f"{_shorten_list([_run_text(run) for run in equal.missing])}."
        )


def _run_text(run: RunKey) -> str:
    return f"{run[0]} (seed {run[1]})"


def _shorten_list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
