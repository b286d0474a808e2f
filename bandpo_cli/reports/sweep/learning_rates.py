"""Arms that differ only in their learning rate, grouped into one line per method for the plot of final accuracy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from bandpo_cli.reports.sweep.runs import ArmRunData, accuracy_of
from bandpo_cli.reports.sweep.selection import ABSENT, differing_settings, format_setting, method_name

LEARNING_RATE = "optim.lr"

_LR_PART = re.compile(r"(?:^|\s)(?:optim\.)?lr=\S+")
"""The part of an arm's name that gives its learning rate."""


def accuracy_by_learning_rate(
    arms: Mapping[str, Sequence[ArmRunData]], sets: Sequence[str]
) -> dict[str, dict[float, list[float]]]:
    """Return the final accuracies by line and learning rate; {} unless some line has at least two learning rates.

    A line has the runs whose settings are equal except for the learning rate and the seed. Its name is that of its
    arms without `lr=...`, or that of its method where these names differ.

    Args:
        arms: the runs of each arm.
        sets: the evaluation sets whose mean accuracy is used.

    Returns:
        Accuracies of the last evaluations, by name of the line and learning rate; learning rates ascending.
    """
    records = [record for runs in arms.values() for record in runs if _learning_rate(record) > 0]
    keys = [key for key in differing_settings(each.settings for each in records) if key != LEARNING_RATE]
    groups: dict[tuple[str, ...], list[ArmRunData]] = {}
    for record in records:
        others = tuple(format_setting(record.settings.get(key, ABSENT)) for key in keys)
        groups.setdefault(others, []).append(record)
    lines: dict[str, dict[float, list[float]]] = {}
    for group in groups.values():
        line = lines.setdefault(_unused_name(_line_name(group), lines), {})
        for record in sorted(group, key=_learning_rate):
            line.setdefault(_learning_rate(record), []).append(accuracy_of(record, sets)[1][-1])
    return lines if any(len(line) > 1 for line in lines.values()) else {}


def _learning_rate(record: ArmRunData) -> float:
    """Return the learning rate of a run; 0 where its settings have none."""
    value = record.settings.get(LEARNING_RATE)
    return float(value) if isinstance(value, int | float) else 0.0


def _line_name(records: Sequence[ArmRunData]) -> str:
    names = {_LR_PART.sub("", record.run.arm).strip() for record in records}
    name = names.pop() if len(names) == 1 else ""
    return name or method_name(records[0].settings)


def _unused_name(name: str, used: Mapping[str, object]) -> str:
    """Return `name`, or `name #2` and so on if it is used."""
    number, unused = 1, name
    while unused in used:
        number += 1
        unused = f"{name} #{number}"
    return unused
