"""Metrics of a report, their means over seeds by variant, and the paired differences from the baseline.

All forms of a report (HTML page, Markdown, CSV, JSON, terminal) are made from `Report` alone. The fields of its classes
are the keys of `bandpo report --format json`. One observation is one seed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from bandpo_cli.evaluation.verdicts import MARGIN, conclude, holm
from bandpo_cli.metric_names import LABELS, STEP
from bandpo_cli.reports.report_record import RunRecord
from bandpo_cli.reports.run_tables import ExcludedRun, RunTables, common_n, percent_text, scores_of
from bandpo_cli.reports.run_variants import ABSENT, differing_settings, format_setting
from bandpo_cli.reports.saturating_fit import SaturatingFit
from bandpo_cli.reports.tuned_settings import Tuning

LEVEL = 0.95

Limits = tuple[float, float]
"""Smallest and largest value that a metric can have."""

SPREAD = (0.1, 0.9)
"""Quantiles of the single steps: a spread is the range of the middle 80% of the steps."""

SECONDS_PER_STEP = "seconds_per_step"
"""The metric for which a report also shows the spread over the steps."""

_NO_LIMITS: Limits = (-math.inf, math.inf)
_ROUNDING = 1e-12  # relative; the order of summation changes a mean by less


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95% interval.

    Attributes:
        low, high: ends of Student's t-interval within the limits of the metric; None for a single seed, and where all
            seeds have the same value: neither shows how far the value of another seed may be.
    """

    n: int
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class PairedTest:
    """Difference between a variant and the baseline over their common seeds.

    Attributes:
        change: variant − baseline, mean over the common seeds.
        p: two-sided p-value of the paired t-test; None where `change` has no interval.
        higher, lower: number of seeds in which the variant's value is greater or smaller.
    """

    change: Estimate
    p: float | None
    higher: int
    lower: int


@dataclass(frozen=True)
class Metric:
    """A metric with one value per run.

    Attributes:
        key: column in leaderboard.csv.
        name: heading in tables.
        about: definition, with the unit.
        compared: whether variants are compared by this metric; tables then show its interval.
        pattern: format specification of a value.
        percent: whether a value is shown in percent.
        unit: unit of a value, also of one that is shown in percent.
        smallest, largest: limits of the values, null for none.
        more_is_better: whether a verdict is `better` or `worse`; else it is `higher` or `lower`.
    """

    key: str
    name: str
    about: str
    compared: bool = True
    pattern: str = ".3f"
    percent: bool = False
    unit: str = "share"
    smallest: float | None = 0.0
    largest: float | None = 1.0
    more_is_better: bool = True

    @property
    def limits(self) -> Limits:
        """Smallest and largest possible value."""
        smallest = -math.inf if self.smallest is None else self.smallest
        return smallest, math.inf if self.largest is None else self.largest

    def text(self, value: float, sign: bool = False) -> str:
        """Return `value` as tables show it, with a plus sign for positive values if `sign`."""
        number = format(100 * value if self.percent else value, ("+" if sign else "") + self.pattern)
        return f"{number}%" if self.percent else number

    def interval(self, estimate: Estimate, sign: bool = False) -> str:
        """Return `0.451 – 0.497`; "" without an interval and for metrics that variants are not compared by."""
        if not self.compared or estimate.low is None or estimate.high is None:
            return ""
        return (" to " if sign else " – ").join(self.text(end, sign) for end in (estimate.low, estimate.high))


@dataclass(frozen=True)
class Variant:
    """The runs that differ only in their seed.

    Attributes:
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
    """Difference between a variant and the baseline in one metric.

    Attributes:
        metric: key of the metric.
        paired: comparison over the common seeds; None without a common seed.
        p_holm: p-value adjusted over the variants compared in this metric; None without a test.
        verdict, detectable, p_equivalent, further: as in `Conclusion`.
    """

    variant: str
    metric: str
    paired: PairedTest | None
    p_holm: float | None
    verdict: str
    detectable: float | None = None
    p_equivalent: float | None = None
    further: int | None = None


@dataclass(frozen=True)
class Report:
    """Results of comparing variants.

    Attributes:
        title: what was compared, such as the name of a sweep.
        about: numbers of variants, seeds and steps in one line.
        finding: the result in one sentence.
        baseline: the variant that the others are compared with; None for no comparison.
        sets: evaluation sets that all runs have. With several sets, a metric without a set's name is the plain mean.
        accuracy_level: held-out accuracy of the metric `entropy_at_accuracy`; None without this metric.
        metrics: the first is the accuracy, or the reward if rewards are not just 0 and 1.
        variants: highest value of the first metric first.
        differences: ordered by metric, then by variant.
        margin: margin of equivalence, in units of accuracy.
        axis, axis_level: the value of `--x`, and the amount of it at which the runs are compared; None for steps.
        tuning: the variants that the settings were chosen from; None for settings that no sweep chose.
        notes: sentences about limits of the comparison.
        files: written files by name.
        fits: saturating fits of the variants; empty without `--fit`.
        settings: the settings that all runs share, by dotted key, without those that have no effect on the results.
        runs: the runs that are not excluded, with the other settings.
        environment: command, versions, commit and hardware that made the report, as in env.json.
        methods: a paragraph about the methods, made from the records.
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
    fits: tuple[SaturatingFit, ...]
    settings: Mapping[str, Any]
    runs: tuple[RunRecord, ...]
    environment: Mapping[str, Any]
    methods: str
    margin: float = MARGIN
    axis: str = STEP.name
    axis_level: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values that `json.dumps` accepts."""
        return {**asdict(self), "files": {name: str(path) for name, path in self.files.items()}}


def report_metrics(tables: RunTables, sets: Sequence[str], level: float | None) -> list[Metric]:
    """Return the metrics that at least one run has a value of, the mean over several sets first.

    The first metrics are those of `scores_of`; only they are compared in a single set, not its area and pass@k.

    Args:
        tables: the runs with their means over `sets`.
        level: the accuracy of the entropy at equal accuracy.
    """
    runs, n, compared = tables.runs, common_n(tables.runs, sets), scores_of(tables)
    passes = [key for key in runs.columns if key.startswith("pass_at_") and "/" not in key]
    complete = [int(key.removeprefix("pass_at_")) for key in passes if runs[key].notna().all()]
    k = max(complete, default=None)  # None has no values
    over = f"mean over {len(sets)} evaluation sets of " if len(sets) > 1 else ""
    moment, place, span = "of the last evaluation", "", "steps"
    if tables.level is not None:
        place, span = f" at {tables.axis.text(tables.level)}", tables.axis.label
        moment = f"{place[1:]}, the most that all runs reach, linear between evaluations"
    under = f"mean@{n}" if compared[0] == "accuracy" else "the mean reward"
    unlimited: dict[str, Any] = {"unit": "reward", "smallest": None, "largest": None}
    scores = {
        "reward": Metric("reward", f"held-out reward{place}", f"mean reward {moment}", **unlimited),
        "accuracy": Metric("accuracy", f"held-out accuracy{place}", f"mean@{n} {moment}"),
        "area": Metric("area", "area", f"area under {under} over the {span}, divided by the {span}"),
        "pass": Metric(f"pass_at_{k}", f"pass@{k}{place}", f"pass@{k} {moment}"),
    }
    if "reward" in compared:
        scores["area"] = replace(scores["area"], **unlimited)
    means = {key: replace(metric, about=over + metric.about) for key, metric in scores.items()}
    reached = percent_text(level or 0.0)
    at_accuracy = (
        f"entropy when {over}mean@{n} first reaches {reached}, nats per token: the highest level that all runs reach, "
        "without variants and runs whose best value is under half of the best variant's; linear between evaluations"
    )
    share = "share of tokens with zero gradient, mean over the run"
    seconds = (
        "seconds per step, without evaluations and checkpoints; the range covers the middle 80% of all steps"
    )
    entropy = partial(Metric, largest=None, unit="nats", more_is_better=False)
    shown = partial(Metric, compared=False, pattern=".2f")
    metrics = [
        *(means[key] for key in compared),
        means["area"],
        entropy("entropy", "entropy", "mean over the last tenth of the steps, nats per token"),
        entropy("entropy_at_accuracy", f"entropy at {reached} accuracy", at_accuracy),
        means["pass"],
        shown("clipped", LABELS["clip/active_fraction"].name, share, percent=True),
        shown(SECONDS_PER_STEP, "s/step", seconds, largest=None, unit="s"),
    ]
    for label in sets if len(sets) > 1 else ():
        for key in (*compared, "area", "pass"):
            metric = replace(scores[key], compared=key in compared)
            metrics.append(replace(metric, key=f"{metric.key}/{label}", name=f"{metric.name}, {label}"))
    return [metric for metric in metrics if metric.key in runs and runs[metric.key].notna().any()]


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
    order: Sequence[str], baseline: str, runs: pd.DataFrame, metrics: Sequence[Metric], margin: float = MARGIN
) -> list[VariantDifference]:
    """Return the difference of each variant in `order` from the baseline in each metric with `compared`.

    p-values are adjusted over the variants, separately for each metric. The margin of equivalence applies to the
    metrics in units of accuracy.
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
        words = ("better", "worse") if metric.more_is_better else ("higher", "lower")
        for name, pair in pairs.items():
            p = adjusted.get(name)
            if pair is None:
                has_values = values.loc[[name, baseline]].notna().any(axis=1).all()
                missing = "no common seed" if has_values else "no value"
                differences.append(VariantDifference(name, metric.key, None, None, missing))
                continue
            within = margin if metric.limits == (0.0, 1.0) else None  # in units of accuracy
            conclusion = conclude(_known(changes.loc[name]), p, within, words=words, family=len(tested))
            differences.append(VariantDifference(name, metric.key, pair, p, *astuple(conclusion)))
    return differences


def estimate(values: ArrayLike, limits: Limits = _NO_LIMITS) -> Estimate | None:
    """Return the mean of `values` with its t-interval; None for no values.

    The interval is the part of Student's t-interval within `limits`. The mean that it estimates is within them too, so
    the coverage stays the same. An interval on the logit scale would be for another mean, and undefined where a seed
    has the value 0 or 1.

    Args:
        values: [n], one value per seed; NaN for a seed without a value.
        limits: smallest and largest value that the metric can have, such as 0 and 1 for a share.
    """
    known = _known(values)
    if not known.size:
        return None
    mean = float(known.mean())
    if not _varies(known):
        return Estimate(known.size, mean, None, None)
    half = float(_half_width(known))
    return Estimate(known.size, mean, max(mean - half, limits[0]), min(mean + half, limits[1]))


def paired_test(changes: ArrayLike, limits: Limits = _NO_LIMITS) -> PairedTest | None:
    """Return the paired comparison of a variant with the baseline; None without a common seed.

    Pairing removes what a seed changes in both variants alike, such as the order of the problems.

    Args:
        changes: [n], variant − baseline, one value per seed; NaN for a seed that one of them does not have.
        limits: limits of the metric; those of its differences follow from them.
    """
    known, widest = _known(changes), limits[1] - limits[0]
    if (change := estimate(known, (-widest, widest))) is None:
        return None
    p = float(stats.ttest_1samp(known, 0.0).pvalue) if _varies(known) else None
    return PairedTest(change, p, int(np.sum(known > 0)), int(np.sum(known < 0)))


def interval_band(values_RS: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return the lower and upper edge of the band over R runs at each of S steps, two arrays of shape [S].

    The band is the 95% t-interval of the mean. Two runs have their range instead, since the interval with one degree
    of freedom (12.7 standard errors) would fill the plot. A single run has none: None.
    """
    if len(values_RS) < 2:
        return None
    if len(values_RS) == 2:
        return values_RS.min(axis=0), values_RS.max(axis=0)
    half = _half_width(values_RS)
    return values_RS.mean(axis=0) - half, values_RS.mean(axis=0) + half


def _half_width(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return half the width of the t-interval of the mean over the first dimension."""
    half: NDArray[np.float64] = stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * stats.sem(values)
    return half


def _known(values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    return array[~np.isnan(array)]


def _varies(values: NDArray[np.float64]) -> bool:
    """Return whether there are two values that differ by more than rounding: only then is there an interval."""
    return values.size > 1 and bool(np.ptp(values) > _ROUNDING * np.abs(values).max())
