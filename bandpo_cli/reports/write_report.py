"""Writing a report: tables as CSV, JSON and Markdown, the plots, and report.html, which needs no other file or network.

The templates of Markdown and HTML are in `reports/templates`. They call the functions of this module as `texts`.
"""

import base64
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

import numpy as np
import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from bandpo_cli.errors import UserError, plural
from bandpo_cli.evaluation.verdicts import MARGIN, check_margin
from bandpo_cli.metric_names import AXES, STEP, Axis
from bandpo_cli.reports.compare_variants import (
    SPREAD,
    Metric,
    Report,
    Variant,
    VariantDifference,
    compare_variants,
    evaluate_variants,
    report_metrics,
)
from bandpo_cli.reports.controls import control_notes, evaluated_rewards
from bandpo_cli.reports.report_plots import MAX_VARIANTS_PLOTTED, plot_all
from bandpo_cli.reports.report_record import describe_methods, record_runs
from bandpo_cli.reports.run_tables import RunTables, common_sets, entropy_at_equal_accuracy, read_runs
from bandpo_cli.reports.run_variants import MAX_LISTED, Selection, common_start, differing_settings, is_within
from bandpo_cli.reports.saturating_fit import fit_caption, fit_variants
from bandpo_cli.reports.tuned_settings import Tuning, read_tuning
from bandpo_cli.storage.files import write_json, write_text
from bandpo_cli.storage.run_record import describe_environment
from bandpo_cli.storage.sweep_folder import check_baseline

DIFFERENCES_CAPTION = (
    "Variant minus baseline over common seeds, with the 95% interval and the p-value of the paired t-test, and the "
    "p-value adjusted over the variants of the metric (Holm). Detectable: the smallest difference that this number of "
    "seeds shows with a probability of 80%, from the observed spread. More seeds: with this number of further seeds, a "
    "difference of the margin, or its absence, would be shown with a probability of 80%"
)
LEADERBOARD_CAPTION = (
    "Mean over seeds; below it the 95% interval over seeds (Student's t, within the limits of the metric), for two or "
    "more seeds with different values"
)

CAPTIONS = {
    "reward": "Held-out reward over steps",
    "reward_lr": "Held-out reward against learning rate",
    "accuracy": "Held-out accuracy over steps",
    "accuracy_fit": "Held-out accuracy with saturating fits",
    "accuracy_lr": "Held-out accuracy against learning rate",
    "tuning_lr": "Tuning: held-out accuracy or reward against learning rate",
    "entropy": "Entropy of the policy over steps",
    "accuracy_entropy": "Held-out accuracy against entropy",
    "clip_by_probability": "Clip fraction by probability",
}
"""Captions of the plots by file name without suffix, in the order of the report."""

_MAX_NAMED = 3  # variants that the finding names for each verdict

_EVALUATION_KEYS = ("task", "evaluation.problems", "evaluation.temperature", "model.prompts")
"""Settings and sections whose values make the accuracies of two runs incomparable."""


def write_report(
    selection: Selection, out: Path, margin: float = MARGIN, axis: Axis = STEP, fit: bool = False
) -> Report:
    """Compare the variants of a selection and write the files of the report into `out`.

    All results are computed from the run folders. Runs that are failed, unfinished or damaged are excluded and listed
    with the reason. The notes of the selection come before those of the report.

    Args:
        margin: margin of equivalence, in units of accuracy.
        axis: what the runs are compared at equal amounts of, and the axis of the plots.
        fit: fit a saturating curve to the accuracies of each variant.

    Raises:
        ConfigError: the margin is not between 0 and 1.
        UserError: all runs are excluded, two runs of a variant have the same seed, the runs share no evaluation set,
            the baseline is not a variant, the plan of the sweep is damaged, no variant has enough
            evaluations for a fit, or `out` cannot be written to.
    """
    check_margin(margin)
    baseline, tuning = selection.baseline, read_tuning(selection.sweep)
    check_baseline(baseline, [run.variant for run in selection.runs if run.variant])
    start = common_start(selection.runs)
    tables = read_runs(selection.runs, start, axis)
    excluded = tables.excluded
    if tables.runs.empty:
        reasons = [f"all runs are excluded: {run.run}: {run.reason}" for run in excluded[:1]]
        reasons += [f"{len(excluded) - 1} more"] if len(excluded) > 1 else []
        raise UserError(f"{selection.title}: {'; '.join(reasons) or 'no runs to report on'}")
    sets = common_sets(tables.runs)
    tables = tables.average(sets)
    equal = entropy_at_equal_accuracy(tables.steps)
    tables.runs["entropy_at_accuracy"] = [equal.values.get(run, np.nan) for run in tables.runs.index]
    metrics = report_metrics(tables, sets, equal.level)
    variants = evaluate_variants(tables, metrics)
    names, notes = [variant.name for variant in variants], [*selection.notes]
    if baseline is None and len(names) > 1:
        baseline = next(run.variant for run in selection.runs if run.variant in names)
        notes.append(f"The baseline is the first variant, {baseline}; --baseline VARIANT names another one.")
    compared = baseline if baseline in names else None
    differences = [] if compared is None else compare_variants(names, compared, tables.runs, metrics, margin)
    notes += [*_notes(variants, sets, tables.runs, baseline, start), *equal.notes]
    notes += [*control_notes(tables, margin), *([] if tuning is None else tuning.notes_on_range())]
    if len(names) > MAX_VARIANTS_PLOTTED:
        best = f"{MAX_VARIANTS_PLOTTED} variants with the highest {metrics[0].name}"
        notes.append(f"The plots show the {best}, and the baseline.")
    fits = fit_variants(tables.steps["accuracy"], tables.steps["amount"], names) if fit else []
    shared, runs = record_runs(tables.runs, tables.steps["seconds"], [metric.key for metric in metrics])
    report = Report(
        title=selection.title,
        about=_about(variants, sets, tables),
        finding=_finding(variants, compared, differences, metrics[0], axis),
        baseline=compared,
        sets=tuple(sets),
        accuracy_level=equal.level,
        metrics=tuple(metrics),
        variants=tuple(variants),
        differences=tuple(differences),
        tuning=tuning,
        notes=tuple(notes),
        excluded=excluded,
        files={},
        fits=tuple(fits),
        settings=shared,
        runs=runs,
        environment=describe_environment(),
        methods=describe_methods(
            shared, runs, sets, _statistics(compared, differences, tuning, margin, axis if fits else None)
        ),
        margin=margin,
        axis=axis.name,
        axis_level=tables.level,
    )
    return _write_files(report, tables, out)


def _write_files(report: Report, tables: RunTables, out: Path) -> Report:
    """Write the files of a report into `out`, and return the report with their paths."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        beside = out if out.is_dir() else out.parent
        # All files are written into a temporary folder first: an interrupted report leaves nothing behind.
        with TemporaryDirectory(prefix=".report.", suffix=".tmp", dir=beside) as folder:
            hidden = Path(folder)
            plots = plot_all(tables, report, hidden)
            files = ["report.html", "report.md", "report.json", "leaderboard.csv"]
            files += [path.name for path in plots.values()]
            report = replace(report, files={name: out / name for name in files})
            write_text(hidden / "leaderboard.csv", _leaderboard_csv(report))
            write_json(hidden / "report.json", report.as_json())
            for name in ("report.md", "report.html"):
                write_text(hidden / name, render(name, report, plots, _token_pages(tables.runs, out)))
            out.mkdir(exist_ok=True)
            for name in files:
                os.replace(hidden / name, out / name)
    except OSError as error:
        raise UserError(f"{out}: cannot be written to: {error.strerror or error}") from error
    return report


def _about(variants: Sequence[Variant], sets: Sequence[str], tables: RunTables) -> str:
    """Return `3 variants, 9 runs over seeds 0, 1, 2; 100 steps; evaluated on countdown`."""
    seeds = sorted({seed for variant in variants for seed in variant.seeds})
    least, most = min(variant.steps[0] for variant in variants), max(variant.steps[1] for variant in variants)
    runs = plural(sum(len(variant.seeds) for variant in variants), "run")
    steps = plural(most, "step") if least == most else f"{least:,} to {most:,} steps"
    if tables.level is not None:  # a run may have more steps; its scores are those at this amount
        steps = f"compared at {tables.axis.text(tables.level)}, after {steps}"
    listed = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    over = listed if len(seeds) <= 8 else f"{len(seeds)} seeds"
    return f"{plural(len(variants), 'variant')}, {runs} over {over}; {steps}; evaluated on {', '.join(sets)}"


def _finding(
    variants: Sequence[Variant],
    baseline: str | None,
    differences: Sequence[VariantDifference],
    metric: Metric,
    axis: Axis = STEP,
) -> str:
    """Return the result in one sentence, which claims no more than the tests support.

    Args:
        variants: highest value of `metric` first.
        metric: the first of the report, held-out accuracy or reward.
    """
    tested = [
        (item, item.paired, item.p_holm)
        for item in differences
        if item.metric == metric.key and item.paired is not None and item.p_holm is not None
    ]
    if not tested:
        if len(variants) == 1:
            return f"{variants[0].name} is the only variant, so nothing is compared."
        seeds = (
            "two common seeds with different values"
            if baseline is not None
            else "finished runs of the baseline"
        )
        return f"Which variant has the higher {metric.name} is undecided: a test needs {seeds}."
    tested.sort(key=lambda row: -abs(row[1].change.mean))
    groups: dict[str, list[str]] = {}
    for item, pair, p_holm in tested:
        p = ("" if p_holm == pair.p else "Holm-adjusted ") + f"p = {p_text(p_holm)}".replace("= <", "<")
        interval = f"95% interval {metric.interval(pair.change, sign=True)} over {pair.change.n} seeds"
        evidence = f"{metric.text(pair.change.mean, sign=True)}, {interval}, {p}"
        name, _, further = item.verdict.partition(": ")
        if name == "undecided" and item.detectable is not None:
            further = f"; about {further} would decide" if further else ""
            evidence += f"; {metric.text(item.detectable)} could have been shown{further}"
        groups.setdefault(name, []).append(f"{item.variant} ({evidence})")

    def listed(names: Sequence[str]) -> str:
        texts = [*names[:_MAX_NAMED]]
        texts += [plural(len(names) - _MAX_NAMED, "more variant")] if len(names) > _MAX_NAMED else []
        return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))

    undecided = groups.pop("undecided", [])
    clauses = [
        f"{name} for {listed(groups[name])}"
        for name in sorted(groups, key=lambda name: (name.startswith("equivalent"), name))
    ]
    clauses = [f"is {' and '.join(clauses)}"] if clauses else []
    clauses += [f"is undecided for {listed(undecided)}"] if undecided else []
    name = f"final {metric.name}" if axis == STEP else metric.name
    return f"Against {baseline}, {name} {', and '.join(clauses)}."


def _notes(
    variants: Sequence[Variant], sets: Sequence[str], runs: pd.DataFrame, baseline: str | None, start: int
) -> Iterator[str]:
    """Yield what limits the comparison, one sentence per note; all runs of the baseline may have been excluded."""
    if len({variant.seeds for variant in variants}) > 1:
        yield "The variants do not have the same seeds; each is compared over the seeds that the baseline has too."
    if baseline is not None and len(variants) > 1 and baseline not in {variant.name for variant in variants}:
        yield f"All runs of the baseline '{baseline}' were excluded, so nothing is compared."
    parents = [settings["fork"] for settings in runs["settings"] if settings.get("fork")]
    for parent in dict.fromkeys(parents):
        if start:
            yield f"All runs are forks of {parent}: metrics and curves begin at step {start}."
        else:
            forks = plural(parents.count(parent), "run")
            yield f"Forks of {parent} ({forks}) share its record: differences and intervals come from later steps."
    for name, of_variant in runs["settings"].groupby(level="variant", sort=False):
        if keys := differing_settings(of_variant):
            yield f"The runs of {name} differ in more than their seed: {', '.join(keys[:MAX_LISTED])}."
    differing = [key for key in differing_settings(runs["settings"]) if is_within(key, _EVALUATION_KEYS)]
    if len({*map(evaluated_rewards, runs["settings"])}) == 1:
        differing = [key for key in differing if not is_within(key, ("task.rewards",))]
    if differing:
        from_others = "their held-out accuracies come from different problems or different sampling"
        yield f"The runs differ in {', '.join(differing[:MAX_LISTED])}: {from_others}."
    if others := sorted({label for n in runs["n"] for label in n} - set(sets)):
        yield f"Excluded, because not every run was evaluated on these sets: {', '.join(others)}."


def _statistics(
    baseline: str | None,
    differences: Sequence[VariantDifference],
    tuning: Tuning | None,
    margin: float,
    axis: Axis | None,
) -> str:
    """Return the sentences of the methods on intervals, tests and fits; `axis` is that of the fits, None for none."""
    tests = (
        f"Variants were compared with {baseline} over common seeds by paired t-tests, with p-values adjusted over the "
        f"variants of a metric by Holm's method; equivalence within ±{margin:g} of held-out accuracy, "
        "by two one-sided t-tests"
    )
    sentences = ["Metrics are means over seeds, with 95% intervals of Student's t for two or more seeds"]
    sentences += [tests] if any(item.p_holm is not None for item in differences) else []
    sentences += [f"Settings were chosen by {tuning.caption}"] if tuning is not None else []
    versions = f"Statistics: scipy {version('scipy')}, statsmodels {version('statsmodels')}"
    sentences += [versions] if axis is None else [fit_caption(axis), versions]
    return "".join(f"{sentence}. " for sentence in sentences).strip()


def captions(report: Report) -> dict[str, str]:
    """Return the captions of the plots of a report by file name without suffix."""
    over = f"over {AXES[report.axis].label}"
    return {name: caption.replace("over steps", over) for name, caption in CAPTIONS.items()}


def leaderboard_caption(report: Report) -> str:
    """Return the caption of the leaderboard; at equal compute it says what is compared at how much of it."""
    if report.axis_level is None:
        return LEADERBOARD_CAPTION
    level = AXES[report.axis].text(report.axis_level)
    return (
        f"At equal compute: the scores are those at {level}, the most that all runs reach, linear between evaluations; "
        f"other metrics are of the steps up to there. {LEADERBOARD_CAPTION}"
    )


def value_text(metric: Metric, variant: Variant) -> str:
    """Return the mean of a metric of a variant as tables show it; `–` for none."""
    return metric.text(variant.metrics[metric.key].mean) if metric.key in variant.metrics else "–"


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


def difference_cells(metric: Metric, difference: VariantDifference) -> list[str]:
    """Return the cells of a difference: mean, interval, seeds, seeds higher and lower, p-values, detectable size."""
    pair, detectable = difference.paired, difference.detectable
    if pair is None:
        return ["–", "", "0", "", "", "", ""]
    change, ps = pair.change, ("" if p is None else p_text(p) for p in (pair.p, difference.p_holm))
    texts = metric.text(change.mean, sign=True), metric.interval(change, sign=True)
    shown = "" if detectable is None else metric.text(detectable)
    return [*texts, str(change.n), f"{pair.higher} / {pair.lower}", *ps, shown]


def p_text(p: float) -> str:
    """Return a p-value with two or three digits; `< 0.001` below that."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def _leaderboard_csv(report: Report) -> str:
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


def _token_pages(runs: pd.DataFrame, out: Path) -> dict[str, str]:
    """Return links, relative to `out`, to the last page of `bandpo view` in the folder of each run that has one."""
    links = {}
    for (variant, seed), folder in zip(runs.index, runs["folder"], strict=True):
        if files := sorted((folder / "view").glob("step-*.html")):
            links[f"{variant}, seed {seed}"] = quote(os.path.relpath(files[-1], out))
    return links


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
