"""What a reader must know to read the figures right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bandpo_cli.reports.sweep.finding import count
from bandpo_cli.reports.sweep.result import Difference
from bandpo_cli.reports.sweep.runs import LeftOut, RunRecord
from bandpo_cli.reports.sweep.settings import differing

_PROBLEMS = ("task", "evaluation.problems", "evaluation.temperature", "model.prompts")


def notes(
    arms: Mapping[str, Sequence[RunRecord]],
    baseline: str | None,
    differences: Sequence[Difference],
    sets: Sequence[str],
    passing: bool,
    left_out: Sequence[LeftOut],
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


def _about_seeds(arms: Mapping[str, Sequence[RunRecord]], left_out: Sequence[LeftOut]) -> Iterable[str]:
    gone = sorted({each.arm for each in left_out if each.arm and each.arm not in arms})
    if gone:
        yield f"No run is left of {_list(gone)}."
    single = [name for name, runs in arms.items() if len(runs) == 1]
    if single:
        yield f"One seed, so no interval: {_list(single)}."
    if len({tuple(record.run.seed for record in runs) for runs in arms.values()}) > 1:
        yield "The arms do not have the same seeds; differences are over those that an arm shares with the baseline."


def _about_baseline(
    arms: Mapping[str, Sequence[RunRecord]], baseline: str | None, differences: Sequence[Difference]
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
            f"{count(len(differences), 'comparison')}: {len(arms) - 1} arms against {baseline} in {figures} figures. "
            f"p-values are adjusted over the arms of a figure (Holm), not over the figures."
        )


def _about_steps(arms: Mapping[str, Sequence[RunRecord]]) -> Iterable[str]:
    unequal = [name for name, runs in arms.items() if len({record.steps for record in runs}) > 1]
    if unequal:
        yield (
            f"Runs of unequal length in {_list(unequal)}: their curves are over the common steps, "
            "final figures are each run's own."
        )
    if len({record.steps for runs in arms.values() for record in runs}) > 1:
        yield "The arms were not all trained for the same number of steps."


def _about_settings(arms: Mapping[str, Sequence[RunRecord]], records: Sequence[RunRecord]) -> Iterable[str]:
    for name, runs in arms.items():
        inside = differing(record.settings for record in runs)
        if inside:
            yield f"The runs of {name} differ in more than their seed: {', '.join(inside[:6])}."
    problems = [
        key
        for key in differing(record.settings for record in records)
        if any(key == each or key.startswith(f"{each}.") for each in _PROBLEMS)
    ]
    if problems:
        yield (
            f"The runs differ in {', '.join(problems[:6])}: their accuracies are not of the same problems, "
            "or not drawn alike."
        )


def _about_sets(records: Sequence[RunRecord], sets: Sequence[str], passing: bool) -> Iterable[str]:
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
