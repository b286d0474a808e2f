"""What came out, in a sentence that claims no more than the seeds allow."""

from __future__ import annotations

from collections.abc import Sequence

from bandpo_cli.reports.sweep.result import Arm, Difference, Figure
from bandpo_cli.reports.sweep.statistics import LEVEL

_MOST_NAMED = 3


def about(arms: Sequence[Arm], sets: Sequence[str]) -> str:
    """Return `3 arms, 9 runs over seeds 0, 1, 2; 100 steps; evaluated on countdown`."""
    seeds = sorted({seed for arm in arms for seed in arm.seeds})
    least, most = min(arm.steps[0] for arm in arms), max(arm.steps[1] for arm in arms)
    runs = sum(len(arm.seeds) for arm in arms)
    listed = ", ".join(map(str, seeds)) if len(seeds) <= 8 else f"{len(seeds)} of them"
    steps = f"{most:,} steps" if least == most else f"{least:,} to {most:,} steps"
    return (
        f"{count(len(arms), 'arm')}, {count(runs, 'run')} over {'seed' if len(seeds) == 1 else 'seeds'} {listed}; "
        f"{steps}; evaluated on {', '.join(sets)}"
    )


def finding(
    arms: Sequence[Arm], baseline: str | None, differences: Sequence[Difference], figure: Figure
) -> str:
    """Return the sentence. `differences` are those of `figure`, the accuracy; `arms` have the most accurate first."""
    if not differences:
        return _ranking(arms, figure)
    tested = [each for each in differences if each.p_holm is not None]
    if not tested:
        return f"{_ranking(arms, figure)[:-1]}; with these seeds no difference from {baseline} can be tested."
    told = sorted(filter(_significant, tested), key=lambda each: -abs(_mean(each)))
    if told:
        return f"Against {baseline}, final accuracy is {_told(told, figure)}{_rest(len(differences) - len(told))}."
    if len(differences) == 1:
        (only,) = tested
        apart = f"{only.arm} and {baseline} cannot be told apart by final accuracy"
        return f"{apart}: the difference is {_evidence(only, figure)}."
    largest = max(tested, key=lambda each: abs(_mean(each)))
    return (
        f"No arm can be told apart from {baseline} by final accuracy; the largest difference is that of "
        f"{largest.arm}: {_evidence(largest, figure)}."
    )


def _told(told: Sequence[Difference], figure: Figure) -> str:
    """Return `higher for a (evidence), c (+0.020) and lower for b (evidence)`, the largest differences first."""
    groups = []
    for word, sign in (("higher", 1), ("lower", -1)):
        group = [each for each in told if sign * _mean(each) > 0]
        words = [f"{each.arm} ({figure.text(_mean(each), sign=True)})" for each in group[1:_MOST_NAMED]]
        if len(group) > _MOST_NAMED:
            words.append(count(len(group) - _MOST_NAMED, "more arm"))
        if group:
            groups.append(f"{word} for {_and([f'{group[0].arm} ({_evidence(group[0], figure)})', *words])}")
    return " and ".join(groups)


def _rest(count: int) -> str:
    """Say that the other arms are not told apart, where there are some."""
    others = "the other arm" if count == 1 else f"the other {count} arms"
    return f"; {others} cannot be told apart from it" if count else ""


def _significant(each: Difference) -> bool:
    return each.p_holm is not None and each.p_holm <= 1 - LEVEL


def _mean(each: Difference) -> float:
    assert each.paired is not None
    return each.paired.change.mean


def _evidence(each: Difference, figure: Figure) -> str:
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


def _ranking(arms: Sequence[Arm], figure: Figure) -> str:
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


def count(number: int, noun: str) -> str:
    """Return `3 arms`, `1 arm`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
