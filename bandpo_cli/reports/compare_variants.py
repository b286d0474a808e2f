"""Estimates of the metrics by variant, comparisons with the baseline, and the `Report` that holds the results.

All forms of a report (HTML page, Markdown, CSV, JSON, terminal) are made from `Report` alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from bandpo_cli.reports.report_metrics import SECONDS_PER_STEP, Metric
from bandpo_cli.reports.run_tables import ExcludedRun, RunTables
from bandpo_cli.reports.run_variants import ABSENT, differing_settings, format_setting
from bandpo_cli.reports.statistics import LEVEL, Estimate, PairedTest, estimate, holm, paired_test
from bandpo_cli.reports.tuned_settings import Tuning

SPREAD = (0.1, 0.9)  # quantiles of the single steps: a spread is the range of the middle 80% of the steps


@dataclass(frozen=True)
class Variant:
    """The runs that differ only in their seed. The fields are keys of `bandpo report --format json`.

    Attributes:
        name: name of the variant.
        seeds: seeds of the runs that are included.
        steps: smallest and largest number of steps of these runs.
        settings: the settings in which the variants differ, as a user would type them.
        metrics: mean and interval over seeds by key of the metric; only the metrics for which the runs have values.
        spreads: range of the middle 80% of the steps of all runs, by key of the metric; only for the seconds per step.
    """

    name: str
    seeds: tuple[int, ...]
    steps: tuple[int, int]
    settings: Mapping[str, str]
    metrics: Mapping[str, Estimate]
    spreads: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class VariantDifference:
    """Difference between a variant and the baseline in one metric. The fields are keys of `--format json`.

    Attributes:
        variant: name of the variant.
        metric: key of the metric.
        paired: comparison over the common seeds; None without a common seed.
        p_holm: p-value adjusted over the variants compared in this metric; None without a test.
        verdict: conclusion in words.
    """

    variant: str
    metric: str
    paired: PairedTest | None
    p_holm: float | None
    verdict: str

    @property
    def change(self) -> Estimate:
        """The mean difference, for a comparison with a common seed."""
        assert self.paired is not None
        return self.paired.change


@dataclass(frozen=True)
class Report:
    """Results of comparing variants. The fields are keys of `bandpo report --format json`.

    Attributes:
        title: what was compared, such as the name of a sweep.
        about: numbers of variants, seeds and steps in one line.
        finding: the result in one sentence.
        baseline: the variant that the others are compared with; None for no comparison.
        sets: evaluation sets that all runs have. With several sets, a metric without a set's name is the plain mean.
        accuracy_level: held-out accuracy of the metric `entropy_at_accuracy`; None without this metric.
        metrics: the metrics; the first is the accuracy, or the reward if rewards are not just 0 and 1.
        variants: highest value of the first metric first.
        differences: ordered by metric, then by variant.
        tuning: the variants that the settings were chosen from; None for settings that no sweep chose.
        notes: sentences about limits of the comparison.
        excluded: excluded runs.
        files: written files by name.
    """

    title: str
    about: str
    finding: str
    baseline: str | None
    sets: tuple[str, ...]
    accuracy_level: float | None
    metrics: tuple[Metric, ...]
    variants: tuple[Variant, ...]
    differences: tuple[VariantDifference, ...]
    tuning: Tuning | None
    notes: tuple[str, ...]
    excluded: tuple[ExcludedRun, ...]
    files: Mapping[str, Path]

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values that `json.dumps` accepts."""
        return {**asdict(self), "files": {name: str(path) for name, path in self.files.items()}}


def evaluate_variants(tables: RunTables, metrics: Sequence[Metric]) -> list[Variant]:
    """Return the variants with the estimates of their metrics, the highest value of the first metric first."""
    keys = differing_settings(tables.runs["settings"])
    seconds = tables.steps["seconds"].dropna()
    evaluated = []
    for name, runs in tables.runs.groupby(level="variant", sort=False):
        estimates = {metric.key: estimate(runs[metric.key], metric.limits) for metric in metrics}
        of_steps = seconds[seconds.index.get_level_values("variant") == name]
        texts = {
            key: [format_setting(settings.get(key, ABSENT)) for settings in runs["settings"]] for key in keys
        }
        evaluated.append(
            Variant(
                name=str(name),
                seeds=tuple(runs.index.get_level_values("seed").tolist()),
                steps=(int(runs["steps"].min()), int(runs["steps"].max())),
                settings={key: " or ".join(dict.fromkeys(values)) for key, values in texts.items()},
                metrics={key: value for key, value in estimates.items() if value is not None},
                spreads={SECONDS_PER_STEP: of_steps.quantile(SPREAD).tolist()} if len(of_steps) > 1 else {},
            )
        )
    return sorted(evaluated, key=lambda variant: -variant.metrics[metrics[0].key].mean)


def compare_variants(
    order: Sequence[str], baseline: str, runs: pd.DataFrame, metrics: Sequence[Metric]
) -> list[VariantDifference]:
    """Return the difference of each variant in `order` from the baseline in each metric with `compared`.

    p-values are adjusted over the variants, separately for each metric.
    """
    differences = []
    for metric in metrics:
        if not metric.compared:
            continue
        values = runs[metric.key].unstack("seed")
        changes = values - values.loc[baseline]
        pairs = {name: paired_test(changes.loc[name], metric.limits) for name in order if name != baseline}
        tested = {name: pair.p for name, pair in pairs.items() if pair is not None and pair.p is not None}
        adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
        for name, pair in pairs.items():
            has_values = values.loc[[name, baseline]].notna().any(axis=1).all()
            missing = "no common seed" if has_values else "no value"
            conclusion = missing if pair is None else verdict(pair.change, adjusted.get(name))
            differences.append(VariantDifference(name, metric.key, pair, adjusted.get(name), conclusion))
    return differences


def verdict(change: Estimate, p_holm: float | None) -> str:
    """Return the conclusion that a difference from the baseline allows, in words."""
    if change.n == 1:
        return "one seed: no test"
    if change.low is None or change.high is None:
        equal = "the same difference in every seed: no interval"
        return equal if change.mean else "no difference in any seed"
    if change.low <= 0 <= change.high:
        return "not significant"
    direction = "higher" if change.mean > 0 else "lower"
    significant = p_holm is not None and p_holm <= 1 - LEVEL
    return direction if significant else f"{direction}, but not after Holm's adjustment"
