"""Writing a report: leaderboard.csv, report.md, the plots, and report.html, which needs no other file or network.

The sentences of a report are its scope, its result, and notes on the limits of the comparison. The templates of
Markdown and HTML are in `reports/templates`. They call the functions of this module as `texts`.
"""

import base64
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

import numpy as np
import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from bandpo_cli.errors import UserError, plural
from bandpo_cli.reports.compare_variants import (
    SPREAD,
    Report,
    Variant,
    VariantDifference,
    compare_variants,
    evaluate_variants,
)
from bandpo_cli.reports.report_metrics import (
    MAX_LISTED,
    Metric,
    entropy_at_equal_accuracy,
    measure,
    shorten_list,
)
from bandpo_cli.reports.report_plots import MAX_VARIANTS_PLOTTED, plot_all
from bandpo_cli.reports.run_tables import common_sets, read_runs
from bandpo_cli.reports.run_variants import Selection, common_start, differing_settings, is_within
from bandpo_cli.reports.statistics import Estimate, PairedTest, p_text
from bandpo_cli.reports.tuned_settings import read_tuning
from bandpo_cli.storage.files import write_text
from bandpo_cli.storage.sweep_folder import check_baseline

LEADERBOARD_CAPTION = (
    "Mean over seeds; below it the 95% interval over seeds (Student's t, within the limits of the metric), for two or "
    "more seeds with different values"
)

CAPTIONS = {
    "reward": "Held-out reward over steps",
    "reward_lr": "Held-out reward against learning rate",
    "accuracy": "Held-out accuracy over steps",
    "accuracy_lr": "Held-out accuracy against learning rate",
    "tuning_lr": "Tuning: held-out accuracy or reward against learning rate",
    "entropy": "Entropy of the policy over steps",
    "accuracy_entropy": "Held-out accuracy against entropy",
    "clip_by_probability": "Share of clipped tokens by probability",
}
"""Captions of the plots by file name without suffix, in the order of the report."""

_MAX_NAMED = 3  # variants that the headline names in each direction

_EVALUATION_KEYS = ("task", "evaluation.problems", "evaluation.temperature", "model.prompts")
"""Settings and sections whose values make the accuracies of two runs incomparable."""


def write_report(selection: Selection, out: Path) -> Report:
    """Compare the variants of a selection and write leaderboard.csv, report.md, report.html and the plots into `out`.

    All results are computed from the run folders. Runs that are failed, unfinished or damaged are excluded and listed
    with the reason. The notes of the selection come before those of the report.

    Raises:
        UserError: all runs are excluded, two runs of a variant have the same seed, the runs share no evaluation set,
            the baseline is not a variant, the plan of the sweep is damaged, or `out` cannot be written to.
    """
    baseline, tuning = selection.baseline, read_tuning(selection.sweep)
    check_baseline(baseline, [run.variant for run in selection.runs if run.variant])
    start = common_start(selection.runs)
    tables = read_runs(selection.runs, start)
    excluded = tables.excluded
    if tables.runs.empty:
        reasons = [f"all runs are excluded: {run.run}: {run.reason}" for run in excluded[:1]]
        reasons += [f"{len(excluded) - 1} more"] if len(excluded) > 1 else []
        raise UserError(f"{selection.title}: {'; '.join(reasons) or 'no runs to report on'}")
    sets = common_sets(tables.runs)
    tables = tables.average(sets)
    equal = entropy_at_equal_accuracy(tables.steps)
    tables.runs["entropy_at_accuracy"] = [equal.values.get(run, np.nan) for run in tables.runs.index]
    metrics = tuple(measure(tables, sets, equal.level))
    evaluated = evaluate_variants(tables, metrics)
    variants = [variant.name for variant in evaluated]
    differences = []
    if baseline is not None and baseline in variants and len(variants) > 1:
        differences = compare_variants(variants, baseline, tables.runs, metrics)
    decisive = [difference for difference in differences if difference.metric == metrics[0].key]
    report = Report(
        title=selection.title,
        about=scope(evaluated, sets),
        finding=headline(evaluated, baseline, decisive, metrics[0]),
        baseline=baseline if baseline in variants else None,
        sets=tuple(sets),
        accuracy_level=equal.level,
        metrics=metrics,
        variants=tuple(evaluated),
        differences=tuple(differences),
        tuning=tuning,
        notes=(),
        excluded=excluded,
        files={},
    )
    all_notes = [*selection.notes, *report_notes(report, tables.runs, baseline, start), *equal.notes]
    all_notes += [] if tuning is None else tuning.notes_on_range()
    if len(variants) > MAX_VARIANTS_PLOTTED:
        best = f"{MAX_VARIANTS_PLOTTED} variants with the highest {metrics[0].name}"
        all_notes += [f"The plots show the {best}, and the baseline."]
    report = replace(report, notes=tuple(all_notes))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        beside = out if out.is_dir() else out.parent
        # All files are written into a temporary folder first: an interrupted report leaves nothing behind.
        with TemporaryDirectory(prefix=".report.", suffix=".tmp", dir=beside) as folder:
            hidden = Path(folder)
            plots = plot_all(tables, report, hidden)
            names = ["report.html", "report.md", "leaderboard.csv", *(path.name for path in plots.values())]
            report = replace(report, files={name: out / name for name in names})
            write_text(hidden / "leaderboard.csv", leaderboard_csv(report))
            for name in ("report.md", "report.html"):
                write_text(hidden / name, render(name, report, plots, token_pages(tables.runs, out)))
            out.mkdir(exist_ok=True)
            for name in names:
                os.replace(hidden / name, out / name)
    except OSError as error:
        raise UserError(f"{out}: cannot be written to: {error.strerror or error}") from error
    return report


def scope(variants: Sequence[Variant], sets: Sequence[str]) -> str:
    """Return `3 variants, 9 runs over seeds 0, 1, 2; 100 steps; evaluated on countdown`."""
    seeds = sorted({seed for variant in variants for seed in variant.seeds})
    least, most = min(variant.steps[0] for variant in variants), max(variant.steps[1] for variant in variants)
    runs = plural(sum(len(variant.seeds) for variant in variants), "run")
    steps = f"{most:,} steps" if least == most else f"{least:,} to {most:,} steps"
    listed = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    over = listed if len(seeds) <= 8 else f"{len(seeds)} seeds"
    return f"{plural(len(variants), 'variant')}, {runs} over {over}; {steps}; evaluated on {', '.join(sets)}"


def headline(
    variants: Sequence[Variant],
    baseline: str | None,
    differences: Sequence[VariantDifference],
    metric: Metric,
) -> str:
    """Return the result in one sentence, which claims no more than the tests support.

    Args:
        variants: highest value of `metric` first.
        baseline: name of the baseline; None for no comparison.
        metric: the first of the report, held-out accuracy or reward.
        differences: the differences in `metric`.
    """
    tested = [difference for difference in differences if difference.p_holm is not None]
    if not tested:
        untested = f"; with these seeds no difference from {baseline} can be tested" if differences else ""
        return f"{_ranking(variants, metric)}{untested}."
    tested.sort(key=lambda difference: -abs(difference.change.mean))
    groups, rest = [], len(differences)
    for word in ("higher", "lower"):
        group = [difference for difference in tested if difference.verdict == word]
        texts = [
            f"{item.variant} ({_evidence(item, metric, item is group[0])})" for item in group[:_MAX_NAMED]
        ]
        if len(group) > _MAX_NAMED:
            texts.append(plural(len(group) - _MAX_NAMED, "more variant"))
        if texts:
            groups.append(f"{word} for {' and '.join(filter(None, [', '.join(texts[:-1]), texts[-1]]))}")
        rest -= len(group)
    if groups:
        others = "the other variant does" if rest == 1 else f"the other {rest} variants do"
        more = f"; {others} not differ significantly from it" if rest else ""
        return f"Against {baseline}, final {metric.name} is {' and '.join(groups)}{more}."
    largest, evidence = tested[0].variant, _evidence(tested[0], metric)
    if len(differences) == 1:
        equal = f"do not differ significantly in final {metric.name}"
        return f"{largest} and {baseline} {equal}: the difference is {evidence}."
    equal = f"No variant differs significantly from {baseline} in final {metric.name}"
    return f"{equal}; the largest difference has {largest}: {evidence}."


def _evidence(difference: VariantDifference, metric: Metric, in_full: bool = True) -> str:
    """Return `+0.031`, `in_full` followed by `, 95% interval +0.010 to +0.052 over 3 seeds, p = 0.02`."""
    change, pair, p_holm = difference.change, difference.paired, difference.p_holm
    mean = metric.text(change.mean, sign=True)
    if not in_full or pair is None or p_holm is None:
        return mean
    p = ("" if p_holm == pair.p else "Holm-adjusted ") + f"p = {p_text(p_holm)}".replace("= <", "<")
    return f"{mean}, 95% interval {metric.interval(change, sign=True)} over {change.n} seeds, {p}"


def _ranking(variants: Sequence[Variant], metric: Metric) -> str:
    """Return a sentence on the highest final value of `metric`; it adds that a ranking is no test.

    Variants whose values are equal as printed are named together.
    """
    value = variants[0].metrics[metric.key]
    seeds = f"{value.n} seeds" if value.n > 1 else "one seed, no interval"
    if interval := metric.interval(value):
        seeds = f"95% interval {interval.replace(' – ', ' to ')} over {seeds}"
    mean = metric.text(value.mean)
    if len(variants) == 1:
        return f"{variants[0].name} ends at a {metric.name} of {mean} ({seeds})"
    untested = "; a ranking, not a test" if value.n > 1 else ""
    tied = [
        variant.name for variant in variants if value_text(metric, variant.metrics.get(metric.key)) == mean
    ]
    if len(tied) > 1:
        seeds = "means over seeds" if value.n > 1 else "one seed, no interval"
        return f"{shorten_list(tied)} end with the highest {metric.name}, {mean} each ({seeds}){untested}"
    return f"{variants[0].name} ends with the highest {metric.name}, {mean} ({seeds}){untested}"


def report_notes(report: Report, runs: pd.DataFrame, baseline: str | None, start: int) -> Iterator[str]:
    """Yield what limits the comparison, one sentence per note; all runs of the baseline may have been excluded."""
    members = {str(name): rows for name, rows in runs.groupby(level="variant", sort=False)}
    if len({variant.seeds for variant in report.variants}) > 1:
        yield "The variants do not have the same seeds; each is compared over the seeds that the baseline has too."
    if len(members) > 1 and baseline is None:
        yield "No baseline was given, so there are no differences; choose one with --baseline VARIANT."
    elif len(members) > 1 and baseline not in members:
        yield f"All runs of the baseline '{baseline}' were excluded, so there are no differences."
    if unequal := [name for name, of_variant in members.items() if of_variant["steps"].nunique() > 1]:
        common = "curves cover the common steps; final metrics are taken at the last step of each run"
        yield f"Runs of unequal length in {shorten_list(unequal)}: {common}."
    elif runs["steps"].nunique() > 1:
        yield "The numbers of steps of the runs differ."
    parents = [settings.get("fork") for settings in runs["settings"]]
    for parent in dict.fromkeys(filter(None, parents)):
        if start:
            yield f"All runs are forks of {parent}: metrics and curves begin at step {start}."
        else:
            forks = plural(parents.count(parent), "run")
            yield f"Forks of {parent} ({forks}) share its record: differences and intervals come from later steps."
    for name, of_variant in members.items():
        if keys := differing_settings(of_variant["settings"]):
            yield f"The runs of {name} differ in more than their seed: {', '.join(keys[:MAX_LISTED])}."
    differing = differing_settings(runs["settings"])
    if incomparable := [key for key in differing if is_within(key, _EVALUATION_KEYS)]:
        from_others = "their held-out accuracies come from different problems or different sampling"
        yield f"The runs differ in {', '.join(incomparable[:MAX_LISTED])}: {from_others}."
    if others := sorted({label for n in runs["n"] for label in n} - set(report.sets)):
        yield f"Excluded, because not every run was evaluated on these sets: {', '.join(others)}."
    if len(ns := sorted({n[label] for n in runs["n"] for label in report.sets})) > 1:
        yield f"The number of completions per problem differs between the values of mean@n: {', '.join(ns)}."


def value_text(metric: Metric, estimate: Estimate | None) -> str:
    """Return a mean as tables show it; `–` for none."""
    return "–" if estimate is None else metric.text(estimate.mean)


def range_text(metric: Metric, variant: Variant) -> str:
    """Return the interval of a metric of a variant, or the spread of its steps where the metric has one; else ''."""
    if metric.key in variant.spreads:
        return " – ".join(map(metric.text, variant.spreads[metric.key]))
    return metric.interval(variant.metrics[metric.key]) if metric.key in variant.metrics else ""


def short_range_text(metric: Metric, variant: Variant) -> str:
    """Return the same for narrow columns: `±0.023`, or `0–0.797` for an interval that ends at a limit of the metric."""
    text = range_text(metric, variant)
    if not text or metric.key in variant.spreads:
        return text.replace(" ", "")
    estimate = variant.metrics[metric.key]
    assert estimate.low is not None
    assert estimate.high is not None
    if estimate.low > metric.limits[0] and estimate.high < metric.limits[1]:
        return f"±{metric.text(estimate.high - estimate.mean)}"
    ends = (estimate.low, estimate.high)
    return "–".join(f"{end:g}" if end in metric.limits else metric.text(end) for end in ends)


def difference_cells(metric: Metric, pair: PairedTest | None, p_holm: float | None) -> list[str]:
    """Return the cells of a difference: mean, interval, seeds, seeds higher and lower, p-value, adjusted p-value."""
    if pair is None:
        return ["–", "", "0", "", "", ""]
    change, ps = pair.change, ("" if p is None else p_text(p) for p in (pair.p, p_holm))
    texts = metric.text(change.mean, sign=True), metric.interval(change, sign=True)
    return [*texts, str(change.n), f"{pair.higher} / {pair.lower}", *ps]


def leaderboard_csv(report: Report) -> str:
    """Return one row per variant, the best first, with unrounded numbers; a missing value is an empty cell.

    The last columns are the quantiles of metrics with a spread: `seconds_per_step_p10`, `seconds_per_step_p90`.
    """
    rows = []
    for variant in report.variants:
        row: dict[str, object] = {
            "variant": variant.name,
            "seeds": len(variant.seeds),
            "steps": variant.steps[1],
        }
        for key in (metric.key for metric in report.metrics):
            ends = {"": "mean", "_low": "low", "_high": "high"}
            value = variant.metrics.get(key)
            row |= {f"{key}{suffix}": getattr(value, end, None) for suffix, end in ends.items()}
        for key, spread in variant.spreads.items():
            row |= {f"{key}_p{100 * share:.0f}": end for share, end in zip(SPREAD, spread, strict=True)}
        rows.append(row)
    return str(pd.DataFrame(rows).to_csv(index=False, lineterminator="\n"))


def token_pages(runs: pd.DataFrame, out: Path) -> dict[str, str]:
    """Return links, relative to `out`, to the last page of `bandpo view` in the folder of each run that has one."""
    folders = zip(runs.index, runs["folder"], strict=True)
    pages = {run: sorted((folder / "view").glob("step-*.html")) for run, folder in folders}
    return {
        f"{variant}, seed {seed}": quote(os.path.relpath(files[-1], out))
        for (variant, seed), files in pages.items()
        if files
    }


def render(
    template: str,
    report: Report,
    plots: Mapping[str, Path] | None = None,
    pages: Mapping[str, str] | None = None,
) -> str:
    """Return the report as text of a file in `reports/templates`.

    Args:
        plots: PNG files by the names of `CAPTIONS`.
        pages: links to pages of `bandpo view` by the name of the run.
    """
    environment = Environment(
        loader=PackageLoader("bandpo_cli.reports"),
        autoescape=template.endswith(".html"),  # names of variants and runs are user input
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "base64": lambda path: base64.b64encode(path.read_bytes()).decode(),
        "cell": lambda text: escape_markdown(text).replace("|", "\\|"),
        "markdown": escape_markdown,
    }
    texts = sys.modules[__name__]
    return environment.get_template(template).render(
        report=report, texts=texts, plots=plots or {}, pages=pages or {}
    )


def escape_markdown(text: str) -> str:
    """Return `text` with Markdown markup escaped, on one line."""
    return " ".join(re.sub(r"[\\`*_<\[]", r"\\\g<0>", text).split())
