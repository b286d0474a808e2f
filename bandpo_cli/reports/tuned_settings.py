"""Tuned settings of a sweep, chosen from the variants of an earlier sweep, and the scores by learning rate."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal, TypeGuard

import pandas as pd

from bandpo_cli.config.layers import flatten
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import ConfigError, UserError, plural
from bandpo_cli.reports.run_tables import RunTables, Score, common_sets, scores_of
from bandpo_cli.reports.run_variants import differing_settings, format_setting, method_name, setting_texts
from bandpo_cli.storage.sweep_folder import PLAN_FILE, SweepFolder, validated

Lines = dict[str, dict[float, list[float]]]
"""Accuracies or rewards by name of the line and learning rate, for the plot against the learning rate."""

_LEARNING_RATE = "optim.lr"
_LR_PART = re.compile(r"(?:^|\s)(?:optim\.)?lr=\S+")
"""The part of a variant's name that gives its learning rate."""


@dataclass(frozen=True)
class TunedVariant:
    """A variant of the tuning sweep. The fields are keys of `bandpo report --format json`.

    Attributes:
        group: the variant of the tuned sweep that it is a candidate for.
        settings: the settings in which the variants of its group differ, by dotted key.
        values: the value of the metric for each tuning seed.
    """

    group: str
    variant: str
    settings: Mapping[str, Any]
    values: Sequence[float]
    chosen: bool = False

    @property
    def mean(self) -> float:
        """The mean over the tuning seeds."""
        return fmean(self.values)

    @property
    def settings_text(self) -> str:
        """The settings, such as `bounds.delta = 0.02, optim.lr = 1e-4`."""
        texts = (f"{key} = {format_setting(value)}" for key, value in self.settings.items())
        return ", ".join(texts) or "its only settings"

    @property
    def values_text(self) -> str:
        """The values by tuning seed, such as `0.300, 0.320`."""
        return ", ".join(f"{value:.3f}" for value in self.values)


@dataclass(frozen=True)
class Tuning:
    """The variants that a sweep's settings were chosen from. The fields are keys of `bandpo report --format json`.

    Attributes:
        sweep: name of the tuning sweep.
        metric: the metric that decides.
        variants: the variants of the tuning sweep, group by group.
    """

    sweep: str
    metric: Literal["accuracy", "reward", "area"]
    seeds: Sequence[int]
    variants: Sequence[TunedVariant]

    @property
    def caption(self) -> str:
        """What the table of the tuning variants shows."""
        seeds = ", ".join(map(str, self.seeds))
        return f"{self.metric} in the sweep {self.sweep}, seeds {seeds}, which no run of this report has"

    @property
    def groups(self) -> dict[str, list[TunedVariant]]:
        """The variants of each group."""
        by_group = defaultdict(list)
        for variant in self.variants:
            by_group[variant.group].append(variant)
        return by_group

    @property
    def chosen(self) -> dict[str, TunedVariant]:
        """The best variant of each group."""
        return {variant.group: variant for variant in self.variants if variant.chosen}

    def check_chosen(self, group: str, config: RunConfig) -> None:
        """Raise ConfigError if the settings of a run differ from those that were chosen for its group."""
        given = flatten(config.model_dump(mode="json"), expand_lists=True)
        for key, value in self.chosen[group].settings.items():
            if (other := given.get(key, value)) != value:
                why = f"{self.sweep} has chosen {format_setting(value)} for {group}"
                again = "remove it from the flags, --config, --set and `fixed`"
                raise ConfigError(f"{key} = {format_setting(other)}: {why}; {again}")

    def notes(self) -> list[str]:
        """Return a line per group: the best variant, its value, and the number of variants that it was chosen from."""
        seeds, groups = plural(len(self.seeds), "seed"), self.groups
        return [
            f"{group}: {best.settings_text}; {self.metric} {best.mean:.3f} over {seeds}, "
            f"the best of {plural(len(groups[group]), 'variant')}"
            for group, best in self.chosen.items()
        ]

    def notes_on_range(self) -> list[str]:
        """Return a sentence on the numbers that were chosen at an end of the values tried; [] for none."""
        ends = []
        for group, best in self.chosen.items():
            for key, value in best.settings.items():
                tried = set(filter(_is_number, (variant.settings.get(key) for variant in self.groups[group])))
                if len(tried) > 1 and value in (min(tried), max(tried)):
                    ends.append(f"{key} = {format_setting(value)} of {group}")
        tried_in = f"Chosen at an end of the values tried in {self.sweep}, beyond which a better one may lie"
        return [f"{tried_in}: {', '.join(ends)}."] if ends else []

    def by_learning_rate(self) -> Lines:
        """Return the values of the variants, a line per group and other tuned settings: `kl delta=0.02`."""
        lines: Lines = defaultdict(dict)
        for variant in self.variants:
            others = {key: value for key, value in variant.settings.items() if key != _LEARNING_RATE}
            texts = [f"{key.rpartition('.')[2]}={format_setting(value)}" for key, value in others.items()]
            if _is_number(rate := variant.settings.get(_LEARNING_RATE)):
                lines[" ".join([variant.group, *texts])][float(rate)] = list(variant.values)
        return lines


def choose(
    sweep: str, by: Literal["accuracy", "area"], tables: RunTables, groups: Mapping[str, str]
) -> Tuning:
    """Return the variants with their values, the best of each group chosen; of equal variants the first.

    Args:
        sweep: name of the tuning sweep.
        by: the metric that decides; more is better. The reward takes the place of the accuracy if rewards are not just
            0 and 1.
        tables: the runs, with the same seeds for every variant.
        groups: the group of each variant.

    Raises:
        UserError: the runs share no evaluation set, or have no value of the metric.
    """
    metric = by if by == "area" else scores_of(tables)[0]
    runs = tables.average(common_sets(tables.runs)).runs
    candidates: list[TunedVariant] = []
    for group, of_group in runs.groupby(runs.index.get_level_values("variant").map(groups), sort=False):
        differing = differing_settings(of_group["settings"])
        members = []
        for name, of_variant in of_group.groupby(level="variant", sort=False):
            if of_variant[metric].isna().any():
                raise UserError(f"{sweep}: {name} has no {metric}: it was evaluated only once")
            first = of_variant["settings"].iloc[0]
            settings = {key: first[key] for key in differing if key in first}
            members.append(TunedVariant(str(group), str(name), settings, of_variant[metric].tolist()))
        best = max(members, key=lambda member: member.mean)
        candidates += [replace(member, chosen=member is best) for member in members]
    return Tuning(sweep, metric, sorted(set(runs.index.get_level_values("seed").tolist())), candidates)


def read_tuning(sweep: SweepFolder | None) -> Tuning | None:
    """Return how the settings of a sweep were chosen, from its plan; None for given settings, and for no sweep."""
    if sweep is None or "tuning" not in sweep.plan:
        return None
    return validated(Tuning, sweep.plan["tuning"], sweep.path / PLAN_FILE, "tuning")


def by_learning_rate(runs: pd.DataFrame, score: Score) -> Lines:
    """Return the last accuracies or rewards of the runs, the learning rates ascending.

    A line has the runs whose settings are equal except for the learning rate and the seed. Its name is the name of its
    variants without `lr=...`, or the name of its method where these names differ; a second line of a name ends with `
    #2`.
    """
    table = runs.reset_index()
    table["rate"] = [settings.get(_LEARNING_RATE) for settings in table["settings"]]
    table = table[[_is_number(rate) and rate > 0 for rate in table["rate"]]].astype({"rate": float})
    keys = [key for key in differing_settings(table["settings"]) if key != _LEARNING_RATE]
    lines: Lines = {}
    stems: Counter[str] = Counter()
    for _, group in table.groupby(table["settings"].map(lambda run: setting_texts(run, keys)), sort=False):
        names = {_LR_PART.sub("", variant).strip() for variant in group["variant"]}
        stem = (names.pop() if len(names) == 1 else "") or method_name(group["settings"].iloc[0])
        stems[stem] += 1
        name = stem if stems[stem] == 1 else f"{stem} #{stems[stem]}"
        by_rate: dict[Any, list[float]] = group.groupby("rate")[score].agg(list).to_dict()
        lines[name] = by_rate
    return lines


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
