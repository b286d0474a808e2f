"""Sentences of a report: the scope of the comparison, its result, and notes on its limits."""

from collections.abc import Iterator, Sequence

from bandpo_cli.errors import plural
from bandpo_cli.reports.comparison.report_metrics import MAX_LISTED, Metric, shorten_list
from bandpo_cli.reports.comparison.runs import Arms
from bandpo_cli.reports.comparison.selection import differing_settings, is_within
from bandpo_cli.reports.comparison.statistics import p_text
from bandpo_cli.reports.comparison.variants import Report, Variant, VariantDifference

_MAX_NAMED = 3  # variants that the headline names in each direction

_EVALUATION_KEYS = ("task", "evaluation.problems", "evaluation.temperature", "model.prompts")
"""Settings and sections whose values make the accuracies of two runs incomparable."""


def scope(arms: Sequence[Variant], sets: Sequence[str]) -> str:
    """Return `3 variants, 9 runs over seeds 0, 1, 2; 100 steps; evaluated on countdown`."""
    seeds = sorted({seed for arm in arms for seed in arm.seeds})
    least, most = min(arm.steps[0] for arm in arms), max(arm.steps[1] for arm in arms)
    runs = plural(sum(len(arm.seeds) for arm in arms), "run")
    steps = f"{most:,} steps" if least == most else f"{least:,} to {most:,} steps"
    listed = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    over = listed if len(seeds) <= 8 else f"{len(seeds)} seeds"
    return f"{plural(len(arms), 'variant')}, {runs} over {over}; {steps}; evaluated on {', '.join(sets)}"


def headline(
    arms: Sequence[Variant], baseline: str | None, differences: Sequence[VariantDifference], metric: Metric
) -> str:
    """Return the result in one sentence, which claims no more than the tests support.

    Args:
        arms: highest accuracy first.
        baseline: name of the baseline; None for no comparison.
        differences: the differences in `metric`, the accuracy.
    """
    tested = [difference for difference in differences if difference.p_holm is not None]
    if not tested:
        untested = f"; with these seeds no difference from {baseline} can be tested" if differences else ""
        return f"{_ranking(arms, metric)}{untested}."
    tested.sort(key=lambda difference: -abs(difference.change.mean))
    groups, rest = [], len(differences)
    for word in ("higher", "lower"):
        group = [difference for difference in tested if difference.verdict == word]
        texts = [
            f"{difference.arm} ({_evidence(difference, metric, in_full=difference is group[0])})"
            for difference in group[:_MAX_NAMED]
        ]
        if len(group) > _MAX_NAMED:
            texts.append(plural(len(group) - _MAX_NAMED, "more variant"))
        if texts:
            groups.append(f"{word} for {' and '.join(filter(None, [', '.join(texts[:-1]), texts[-1]]))}")
        rest -= len(group)
    if groups:
        others = "the other variant does" if rest == 1 else f"the other {rest} variants do"
        more = f"; {others} not differ significantly from it" if rest else ""
        return f"Against {baseline}, final held-out accuracy is {' and '.join(groups)}{more}."
    largest, evidence = tested[0].arm, _evidence(tested[0], metric)
    if len(differences) == 1:
        return (
            f"{largest} and {baseline} do not differ significantly in final held-out accuracy: the difference is "
            f"{evidence}."
        )
    return (
        f"No variant differs significantly from {baseline} in final held-out accuracy; the largest difference has "
        f"{largest}: {evidence}."
    )


def _evidence(difference: VariantDifference, metric: Metric, in_full: bool = True) -> str:
    """Return `+0.031`, `in_full` followed by `, 95% interval +0.010 to +0.052 over 3 seeds, p = 0.02`."""
    change, pair, p_holm = difference.change, difference.paired, difference.p_holm
    mean = metric.text(change.mean, sign=True)
    if not in_full or pair is None or p_holm is None:
        return mean
    p = f"p = {p_text(p_holm)}".replace("= <", "<")
    return (
        f"{mean}, 95% interval {metric.interval(change, sign=True)} over {change.n} seeds, "
        f"{'' if p_holm == pair.p else 'Holm-adjusted '}{p}"
    )


def _ranking(arms: Sequence[Variant], metric: Metric) -> str:
    """Return a sentence on the final held-out accuracy of the first variant; it adds that a ranking is no test."""
    value = arms[0].figures[metric.key]
    seeds = f"{value.n} seeds" if value.n > 1 else "one seed, no interval"
    if interval := metric.interval(value):
        seeds = f"95% interval {interval.replace(' – ', ' to ')} over {seeds}"
    mean = metric.text(value.mean)
    if len(arms) == 1:
        return f"{arms[0].name} ends at a held-out accuracy of {mean} ({seeds})"
    untested = "; a ranking, not a test" if value.n > 1 else ""
    return f"{arms[0].name} ends with the highest held-out accuracy, {mean} ({seeds}){untested}"


def report_notes(report: Report, arms: Arms, baseline: str | None) -> Iterator[str]:
    """Yield what limits the comparison, one sentence per note; all runs of the baseline may have been excluded."""
    runs = [run for members in arms.values() for run in members]
    if missing := sorted({run.arm for run in report.left_out if run.arm and run.arm not in arms}):
        yield f"All runs of {shorten_list(missing)} were excluded."
    if single := [name for name, members in arms.items() if len(members) == 1]:
        yield f"Only one seed, and therefore no interval: {shorten_list(single)}."
    if len({tuple(run.seed for run in members) for members in arms.values()}) > 1:
        yield (
            "The variants do not have the same seeds; each variant is compared over the seeds that it shares with the "
            "baseline."
        )
    if len(arms) > 1 and baseline is None:
        yield "No baseline was given, so there are no differences; choose one with --baseline ARM."
    elif len(arms) > 1 and baseline not in arms:
        yield f"All runs of the baseline '{baseline}' were excluded, so there are no differences."
    elif len(arms) > 2:
        metrics = len({difference.figure for difference in report.differences})
        yield (
            f"{plural(len(report.differences), 'comparison')}: {len(arms) - 1} variants against {baseline} in "
            f"{metrics} metrics. p-values are adjusted over the variants for each metric (Holm), not over the metrics."
        )
    if unequal := [name for name, members in arms.items() if len({run.steps for run in members}) > 1]:
        yield (
            f"Runs of unequal length in {shorten_list(unequal)}: curves cover the common steps; final metrics are "
            "taken at the last step of each run."
        )
    if len({run.steps for run in runs}) > 1:
        yield "The numbers of steps of the runs differ."
    for name, members in arms.items():
        if keys := differing_settings(run.settings for run in members):
            yield f"The runs of {name} differ in more than their seed: {', '.join(keys[:MAX_LISTED])}."
    differing = differing_settings(run.settings for run in runs)
    if incomparable := [key for key in differing if is_within(key, _EVALUATION_KEYS)]:
        yield (
            f"The runs differ in {', '.join(incomparable[:MAX_LISTED])}: their held-out accuracies come from different "
            "problems or different sampling."
        )
    if others := sorted({label for run in runs for label in run.sets} - set(report.sets)):
        yield f"Excluded, because not every run was evaluated on these sets: {', '.join(others)}."
    if len(ns := sorted({run.sets[label].n for run in runs for label in report.sets})) > 1:
        yield f"The number of completions per problem differs between the values of mean@n: {', '.join(ns)}."
    if not any(metric.key.startswith("pass_at_") for metric in report.figures):
        yield "No pass@k is common to all runs."
