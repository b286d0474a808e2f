"""What came out, in a sentence that claims no more than the seeds allow."""

# MERGED: What a reader must know to read the figures right.
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bandpo_cli.reports.sweep.arms import Arm, ArmDifference, Metric
from bandpo_cli.reports.sweep.runs import ArmRunData, ExcludedRun
from bandpo_cli.reports.sweep.selection import differing_settings
from bandpo_cli.reports.sweep.statistics import LEVEL

_MOST_NAMED = 3


def scope(arms: Sequence[Arm], sets: Sequence[str]) -> str:
    """Return `3 arms, 9 runs over seeds 0, 1, 2; 100 steps; evaluated on countdown`."""
    seeds = sorted({seed for arm in arms for seed in arm.seeds})
    least, most = min(arm.steps[0] for arm in arms), max(arm.steps[1] for arm in arms)
    runs = sum(len(arm.seeds) for arm in arms)
    listed = ", ".join(map(str, seeds)) if len(seeds) <= 8 else f"{len(seeds)} of them"
    steps = f"{most:,} steps" if least == most else f"{least:,} to {most:,} steps"
    return (
        f"{plural(len(arms), 'arm')}, {plural(runs, 'run')} over {'seed' if len(seeds) == 1 else 'seeds'} {listed}; "
        f"{steps}; evaluated on {', '.join(sets)}"
    )


def headline(
    arms: Sequence[Arm], baseline: str | None, differences: Sequence[ArmDifference], figure: Metric
) -> str:
    """Return the sentence. `differences` are those of `figure`, the accuracy; `arms` have the most accurate first."""
    if not differences:
        return _ranking(arms, figure)
    tested = [each for each in differences if each.p_holm is not None]
    if not tested:
        return f"{_ranking(arms, figure)[:-1]}; with these seeds no difference from {baseline} can be tested."
    told = sorted(filter(_significant, tested), key=lambda each: -abs(_mean(each)))
    if told:
        return f"Against {baseline}, final accuracy is {_significant_text(told, figure)}{_others_text(len(differences) - len(told))}."
    if len(differences) == 1:
        (only,) = tested
        apart = f"{only.arm} and {baseline} cannot be told apart by final accuracy"
        return f"{apart}: the difference is {_evidence_text(only, figure)}."
    largest = max(tested, key=lambda each: abs(_mean(each)))
    return (
        f"No arm can be told apart from {baseline} by final accuracy; the largest difference is that of "
        f"{largest.arm}: {_evidence_text(largest, figure)}."
    )


def _significant_text(told: Sequence[ArmDifference], figure: Metric) -> str:
    """Return `higher for a (evidence), c (+0.020) and lower for b (evidence)`, the largest differences first."""
    groups = []
    for word, sign in (("higher", 1), ("lower", -1)):
        group = [each for each in told if sign * _mean(each) > 0]
        words = [f"{each.arm} ({figure.text(_mean(each), sign=True)})" for each in group[1:_MOST_NAMED]]
        if len(group) > _MOST_NAMED:
            words.append(plural(len(group) - _MOST_NAMED, "more arm"))
        if group:
            groups.append(
                f"{word} for {_and([f'{group[0].arm} ({_evidence_text(group[0], figure)})', *words])}"
            )
    return " and ".join(groups)


def _others_text(count: int) -> str:
    """Say that the other arms are not told apart, where there are some."""
    others = "the other arm" if count == 1 else f"the other {count} arms"
    return f"; {others} cannot be told apart from it" if count else ""


def _significant(each: ArmDifference) -> bool:
    return each.p_holm is not None and each.p_holm <= 1 - LEVEL


def _mean(each: ArmDifference) -> float:
    assert each.paired is not None
    return each.paired.change.mean


def _evidence_text(each: ArmDifference, figure: Metric) -> str:
    """Return `+0.031, 95% interval +0.010 to +0.052 over 3 seeds, p = 0.02`."""
    assert each.paired is not None
    assert each.p_holm is not None
    change = each.paired.change
    assert change.low is not None
    assert change.high is not None
    ends = f"{figure.text(change.low, sign=True)} to {figure.text(change.high, sign=True)}"
    adjusted = "" if each.p_holm == each.paired.p else "Holm-adjusted "
    p = p_text(each.p_holm)
    return (
        f"{figure.text(change.mean, sign=True)}, 95% interval {ends} over {change.n} seeds, "
        f"{adjusted}p {p if p.startswith('<') else f'= {p}'}"
    )


def p_text(p: float) -> str:
    """Return a p-value with two digits, the tiny ones as a bound."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def _ranking(arms: Sequence[Arm], figure: Metric) -> str:
    """Say how the first arm ended, and that a ranking alone tests nothing."""
    best = arms[0]
    value = best.figures[figure.key]
    ends = (
        "one seed, no interval"
        if value.n == 1
        else f"{value.n} seeds"
        if value.low is None or value.high is None
        else f"95% interval {figure.text(value.low)} to {figure.text(value.high)} over {value.n} seeds"
    )
    if len(arms) == 1:
        return f"{best.name} ends at an accuracy of {figure.text(value.mean)} ({ends})."
    untested = "" if value.n == 1 else "; a ranking, not a test"
    return f"{best.name} ends with the highest accuracy, {figure.text(value.mean)} ({ends}){untested}."


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def plural(number: int, noun: str) -> str:
    """Return `3 arms`, `1 arm`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


_PROBLEMS = ("task", "evaluation.problems", "evaluation.temperature", "model.prompts")


def report_notes(
    arms: Mapping[str, Sequence[ArmRunData]],
    baseline: str | None,
    differences: Sequence[ArmDifference],
    sets: Sequence[str],
    passing: bool,
    left_out: Sequence[ExcludedRun],
) -> list[str]:
    """Return what a reader must know, a sentence each."""
    records = [record for runs in arms.values() for record in runs]
    return [
        *_about_seeds(arms, left_out),
        *_about_baseline(arms, baseline, differences),
        *_about_steps(arms),
        *_about_settings(arms, records),
        *_about_sets(records, sets, passing),
    ]


def _about_seeds(arms: Mapping[str, Sequence[ArmRunData]], left_out: Sequence[ExcludedRun]) -> Iterable[str]:
    gone = sorted({each.arm for each in left_out if each.arm and each.arm not in arms})
    if gone:
        yield f"No run is left of {_list(gone)}."
    single = [name for name, runs in arms.items() if len(runs) == 1]
    if single:
        yield f"One seed, so no interval: {_list(single)}."
    if len({tuple(record.run.seed for record in runs) for runs in arms.values()}) > 1:
        yield "The arms do not have the same seeds; differences are over those that an arm shares with the baseline."


def _about_baseline(
    arms: Mapping[str, Sequence[ArmRunData]], baseline: str | None, differences: Sequence[ArmDifference]
) -> Iterable[str]:
    if len(arms) < 2:
        return
    if baseline is None:
        yield "No baseline is named, so there are no differences; name one with --baseline ARM."
    elif baseline not in arms:
        yield f"No run of the baseline '{baseline}' is left, so there are no differences."
    elif len(arms) > 2:
        figures = len(dict.fromkeys(each.figure for each in differences))
        yield (
            f"{plural(len(differences), 'comparison')}: {len(arms) - 1} arms against {baseline} in {figures} figures. "
            f"p-values are adjusted over the arms of a figure (Holm), not over the figures."
        )


def _about_steps(arms: Mapping[str, Sequence[ArmRunData]]) -> Iterable[str]:
    unequal = [name for name, runs in arms.items() if len({record.steps for record in runs}) > 1]
    if unequal:
        yield (
            f"Runs of unequal length in {_list(unequal)}: their curves are over the common steps, "
            "final figures are each run's own."
        )
    if len({record.steps for runs in arms.values() for record in runs}) > 1:
        yield "The arms were not all trained for the same number of steps."


def _about_settings(arms: Mapping[str, Sequence[ArmRunData]], records: Sequence[ArmRunData]) -> Iterable[str]:
    for name, runs in arms.items():
        inside = differing_settings(record.settings for record in runs)
        if inside:
            yield f"The runs of {name} differ in more than their seed: {', '.join(inside[:6])}."
    problems = [
        key
        for key in differing_settings(record.settings for record in records)
        if any(key == each or key.startswith(f"{each}.") for each in _PROBLEMS)
    ]
    if problems:
        yield (
            f"The runs differ in {', '.join(problems[:6])}: their accuracies are not of the same problems, "
            "or not drawn alike."
        )


def _about_sets(records: Sequence[ArmRunData], sets: Sequence[str], passing: bool) -> Iterable[str]:
    others = sorted({label for record in records for label in record.sets} - set(sets))
    if others:
        yield f"Not evaluated in every run, and left out: {', '.join(others)}."
    ns = sorted({record.sets[label].n for record in records for label in sets})
    if len(ns) > 1:
        yield f"mean@n is of different numbers of completions a problem: {', '.join(ns)}."
    if not passing:
        yield "No pass@k is common to all runs."


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
