"""Tuned settings of a sweep: the arms of an earlier sweep, their values there, and the best arm of each group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeGuard

from pydantic import TypeAdapter, ValidationError

from bandpo_cli.config.yaml_loader import read_yaml
from bandpo_cli.errors import UserError, plural
from bandpo_cli.reports.sweep.learning_rates import LEARNING_RATE
from bandpo_cli.reports.sweep.metrics import arm_metrics, common_sets
from bandpo_cli.reports.sweep.runs import ArmRunData
from bandpo_cli.reports.sweep.selection import PLAN_FILE, differing_settings, format_setting

TUNING_KEY = "tuning"
"""The key of `sweep.yaml` with the tuned settings."""


@dataclass(frozen=True)
class TunedArm:
    """An arm of the tuning sweep. The fields are keys of `bandpo report --format json`.

    Attributes:
        group: the group that the arm belongs to, which is an arm of the tuned sweep.
        arm: name of the arm.
        settings: the settings in which the arms of its group differ, by dotted key.
        values: the value of the metric for each tuning seed.
        chosen: whether the arm is the best of its group.
    """

    group: str
    arm: str
    settings: Mapping[str, Any]
    values: Sequence[float]
    chosen: bool = False

    @property
    def mean(self) -> float:
        """Mean of the values over the tuning seeds."""
        return fmean(self.values)

    @property
    def settings_text(self) -> str:
        """The settings, such as `bounds.delta = 0.02, optim.lr = 1e-4`."""
        texts = [f"{key} = {format_setting(value)}" for key, value in self.settings.items()]
        return ", ".join(texts) or "its only settings"

    @property
    def values_text(self) -> str:
        """The values by tuning seed, such as `0.300, 0.320`."""
        return ", ".join(f"{value:.3f}" for value in self.values)


@dataclass(frozen=True)
class Tuning:
    """The arms that a sweep's settings were chosen from. The fields are keys of `bandpo report --format json`.

    Attributes:
        sweep: name of the tuning sweep.
        metric: the metric that decides, `accuracy` or `area` of the report.
        seeds: the tuning seeds.
        arms: the arms of the tuning sweep, group by group.
    """

    sweep: str
    metric: Literal["accuracy", "area"]
    seeds: Sequence[int]
    arms: Sequence[TunedArm]

    @property
    def caption(self) -> str:
        """What the table of the tuning arms shows."""
        seeds = ", ".join(map(str, self.seeds))
        return f"{self.metric} in the sweep {self.sweep}, seeds {seeds}, which no run of this report has"

    @property
    def groups(self) -> dict[str, list[TunedArm]]:
        """The arms of each group."""
        groups: dict[str, list[TunedArm]] = {}
        for arm in self.arms:
            groups.setdefault(arm.group, []).append(arm)
        return groups

    def chosen(self, group: str) -> TunedArm:
        """Return the best arm of a group."""
        return next(arm for arm in self.groups[group] if arm.chosen)

    def notes(self) -> list[str]:
        """Return a line per group: the best arm, its value, and the number of arms that it was chosen from."""
        lines = []
        for group, arms in self.groups.items():
            best = self.chosen(group)
            lines.append(
                f"{group}: {best.settings_text}; {self.metric} {best.mean:.3f} over "
                f"{plural(len(self.seeds), 'seed')}, the best of {plural(len(arms), 'arm')}"
            )
        return lines

    def notes_on_range(self) -> list[str]:
        """Return a sentence on the numbers that were chosen at an end of the values tried; [] for none."""
        ends = []
        for group, arms in self.groups.items():
            for key, value in self.chosen(group).settings.items():
                tried = {arm.settings[key] for arm in arms if _is_number(arm.settings.get(key))}
                if len(tried) > 1 and value in (min(tried), max(tried)):
                    ends.append(f"{key} = {format_setting(value)} of {group}")
        if not ends:
            return []
        listed = ", ".join(ends)
        return [
            f"Chosen at an end of the values tried in {self.sweep}, beyond which a better one may lie: {listed}."
        ]

    def as_plan(self) -> dict[str, Any]:
        """Return the key of `sweep.yaml` and its entry; `read_tuning` turns it back."""
        plain = asdict(self)
        return {TUNING_KEY: {**plain, "arms": list(plain["arms"]), "seeds": list(self.seeds)}}


def accuracy_by_learning_rate(tuning: Tuning) -> dict[str, dict[float, list[float]]]:
    """Return the values of the tuning arms by line and learning rate, a line per group and other tuned settings.

    A line's name is the group's, followed by the other tuned settings: `kl delta=0.02`.
    """
    lines: dict[str, dict[float, list[float]]] = {}
    for arm in tuning.arms:
        rate = arm.settings.get(LEARNING_RATE)
        if not _is_number(rate):
            continue
        others = (
            f"{key.rpartition('.')[2]}={format_setting(value)}"
            for key, value in arm.settings.items()
            if key != LEARNING_RATE
        )
        lines.setdefault(" ".join([arm.group, *others]), {})[float(rate)] = list(arm.values)
    return lines


def choose(
    sweep: str,
    metric: Literal["accuracy", "area"],
    groups: Mapping[str, Mapping[str, Sequence[ArmRunData]]],
) -> Tuning:
    """Return the arms with their values, the best of each group chosen; of equal arms the first.

    Args:
        sweep: name of the tuning sweep.
        metric: the metric that decides, of which more is better.
        groups: the runs of each arm of each group, with the same seeds for every arm.

    Raises:
        UserError: the runs share no evaluation set, or have no value of the metric.
    """
    records = [record for arms in groups.values() for runs in arms.values() for record in runs]
    value_of = next(
        each.value for each in arm_metrics(records, common_sets(records)) if each.metric.key == metric
    )
    listed: list[TunedArm] = []
    for group, arms in groups.items():
        differing = differing_settings(record.settings for runs in arms.values() for record in runs)
        values = {name: [value_of(record) for record in runs] for name, runs in arms.items()}
        for name, found in values.items():
            if None in found:
                raise UserError(f"{sweep}: {name} has no {metric}: it was evaluated only once")
        means = {name: fmean(value for value in found if value is not None) for name, found in values.items()}
        best = max(means, key=lambda name: means[name])
        listed += [
            TunedArm(
                group,
                name,
                {key: runs[0].settings[key] for key in differing if key in runs[0].settings},
                [value for value in values[name] if value is not None],
                chosen=name == best,
            )
            for name, runs in arms.items()
        ]
    seeds = sorted({record.run.seed for record in records})
    return Tuning(sweep, metric, seeds, listed)


def read_tuning(folder: Path) -> Tuning | None:
    """Return the tuned settings of the sweep in `folder`; None for a sweep without.

    Raises:
        UserError: `sweep.yaml` is damaged.
    """
    path = folder / PLAN_FILE
    plan = read_yaml(path, str(path))
    if not isinstance(plan, dict) or TUNING_KEY not in plan:
        return None
    try:
        return TypeAdapter(Tuning).validate_python(plan[TUNING_KEY])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, (TUNING_KEY, *first["loc"])))
        raise UserError(f"{path}: {place}: {first['msg']}") from None


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
