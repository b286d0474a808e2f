"""Writing a report: leaderboard.csv, report.md, the plots, and report.html, which needs no other file or network.

The templates of Markdown and HTML are in `reports/templates`. They call the functions of this module as `texts`.
"""

import base64
import csv
import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from jinja2 import Environment, PackageLoader, StrictUndefined

from bandpo_cli.errors import UserError
from bandpo_cli.reports.comparison.findings import headline, report_notes, scope
from bandpo_cli.reports.comparison.plots import MAX_VARIANTS_PLOTTED, plot_all
from bandpo_cli.reports.comparison.report_metrics import (
    Metric,
    common_sets,
    entropy_at_equal_accuracy,
    measure,
)
from bandpo_cli.reports.comparison.runs import ExcludedRun, VariantRunData, read_variant_run
from bandpo_cli.reports.comparison.selection import VariantRun
from bandpo_cli.reports.comparison.statistics import Estimate, PairedTest, p_text
from bandpo_cli.reports.comparison.tuning import Tuning
from bandpo_cli.reports.comparison.variants import (
    SPREAD,
    Report,
    Variant,
    compare_variants,
    evaluate_variants,
    group_by_variant,
)
from bandpo_cli.storage.files import write_text
from bandpo_cli.sweeps.plan import check_baseline

LEADERBOARD_CAPTION = (
    "Mean over seeds; below it the 95% interval over seeds (Student's t, within the limits of the metric), for two or "
    "more seeds with different values"
)

CAPTIONS = {
    "accuracy": "Held-out accuracy over steps",
    "accuracy_lr": "Held-out accuracy against learning rate",
    "tuning_lr": "Tuning: held-out accuracy against learning rate",
    "entropy": "Entropy of the policy over steps",
    "accuracy_entropy": "Held-out accuracy against entropy",
    "clip_by_probability": "Share of clipped tokens by probability",
}
"""Captions of the plots by file name without suffix, in the order of the report."""


def write_report(
    runs: Sequence[VariantRun],
    title: str,
    baseline: str | None,
    out: Path,
    notes: Sequence[str] = (),
    tuning: Tuning | None = None,
) -> Report:
    """Compare the variants of `runs` and write leaderboard.csv, report.md, report.html and the plots into `out`.

    All results are computed from the run folders. Runs that are failed, unfinished or damaged are excluded and listed
    with the reason.

    Args:
        runs: the runs with their variants and seeds.
        title: heading of the report.
        baseline: the variant that the others are compared with; None for no comparison.
        out: folder to write to; it is created if needed.
        notes: sentences to place before the report's own notes.
        tuning: the variants that the settings of `runs` were chosen from; None for settings that no sweep chose.

    Raises:
        UserError: all runs are excluded, two runs of a variant have the same seed, the runs share no evaluation set,
            `baseline` is not a variant, or `out` cannot be written to.
    """
    check_baseline(baseline, [run.arm for run in runs if run.arm])
    read = [read_variant_run(run) for run in runs]
    excluded = tuple(run for run in read if isinstance(run, ExcludedRun))
    records = [run for run in read if isinstance(run, VariantRunData)]
    if not records:
        reasons = [f"all runs are excluded: {run.run}: {run.reason}" for run in excluded[:1]]
        reasons += [f"{len(excluded) - 1} more"] if len(excluded) > 1 else []
        raise UserError(f"{title}: {'; '.join(reasons) or 'no runs to report on'}")
    arms = group_by_variant(records)
    sets = common_sets(records)
    equal = entropy_at_equal_accuracy(arms, sets)
    measured = measure(arms, sets, equal)
    metrics = tuple(metric for metric, _ in measured)
    evaluated = evaluate_variants(arms, measured)
    differences = []
    if baseline is not None and baseline in arms and len(arms) > 1:
        differences = compare_variants([arm.name for arm in evaluated], baseline, measured)
    in_accuracy = [difference for difference in differences if difference.figure == "accuracy"]
    report = Report(
        title=title,
        about=scope(evaluated, sets),
        finding=headline(evaluated, baseline, in_accuracy, metrics[0]),
        baseline=baseline if baseline in arms else None,
        sets=tuple(sets),
        accuracy_level=equal.level,
        figures=metrics,
        arms=tuple(evaluated),
        differences=tuple(differences),
        tuning=tuning,
        notes=(),
        left_out=excluded,
        files={},
    )
    all_notes = [*notes, *report_notes(report, arms, baseline), *equal.notes]
    all_notes += [] if tuning is None else tuning.notes_on_range()
    if len(arms) > MAX_VARIANTS_PLOTTED:
        all_notes += [f"The plots show the {MAX_VARIANTS_PLOTTED} most accurate variants and the baseline."]
    report = replace(report, notes=tuple(all_notes))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        beside = out if out.is_dir() else out.parent
        # All files are written into a temporary folder first: an interrupted report leaves nothing behind.
        with TemporaryDirectory(prefix=".report.", suffix=".tmp", dir=beside) as folder:
            hidden = Path(folder)
            plots = plot_all(arms, report, hidden)
            names = ["report.html", "report.md", "leaderboard.csv", *(path.name for path in plots.values())]
            report = replace(report, files={name: out / name for name in names})
            write_text(hidden / "leaderboard.csv", leaderboard_csv(report))
            for name in ("report.md", "report.html"):
                write_text(hidden / name, render(name, report, plots))
            out.mkdir(exist_ok=True)
            for name in names:
                os.replace(hidden / name, out / name)
    except OSError as error:
        raise UserError(f"{out}: cannot be written to: {error.strerror or error}") from error
    return report


def value_text(metric: Metric, estimate: Estimate | None) -> str:
    """Return a mean as tables show it; `–` for none."""
    return "–" if estimate is None else metric.text(estimate.mean)


def range_text(metric: Metric, arm: Variant) -> str:
    """Return the interval of a metric of a variant, or the spread of its steps where the metric has one; else ''."""
    if metric.key in arm.spreads:
        return " – ".join(map(metric.text, arm.spreads[metric.key]))
    return metric.interval(arm.figures[metric.key]) if metric.key in arm.figures else ""


def short_range_text(metric: Metric, arm: Variant) -> str:
    """Return the same for narrow columns: `±0.023`, or `0–0.797` for an interval that ends at a limit of the metric."""
    text = range_text(metric, arm)
    if not text or metric.key in arm.spreads:
        return text.replace(" ", "")
    estimate = arm.figures[metric.key]
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
    return [
        metric.text(pair.change.mean, sign=True),
        metric.interval(pair.change, sign=True),
        str(pair.change.n),
        f"{pair.higher} / {pair.lower}",
        *("" if p is None else p_text(p) for p in (pair.p, p_holm)),
    ]


def leaderboard_csv(report: Report) -> str:
    """Return one row per variant, highest accuracy first, with unrounded numbers; a missing value is an empty cell.

    The last columns are the quantiles of metrics with a spread: `seconds_per_step_p10`, `seconds_per_step_p90`.
    """
    keys = [metric.key for metric in report.figures]
    spreads = [key for key in keys if any(key in arm.spreads for arm in report.arms)]
    columns = ["arm", "seeds", "steps", *(f"{key}{end}" for key in keys for end in ("", "_low", "_high"))]
    columns += [f"{key}_p{100 * share:.0f}" for key in spreads for share in SPREAD]
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for arm in report.arms:
        row: dict[str, object] = {"arm": arm.name, "seeds": len(arm.seeds), "steps": arm.steps[1]}
        for key, value in arm.figures.items():
            row |= {key: value.mean, f"{key}_low": value.low, f"{key}_high": value.high}
        for key, ends in arm.spreads.items():
            row |= {f"{key}_p{100 * share:.0f}": end for share, end in zip(SPREAD, ends, strict=True)}
        writer.writerow(row)
    return out.getvalue()


def render(template: str, report: Report, plots: Mapping[str, Path] | None = None) -> str:
    """Return the report as text of a file in `reports/templates`; `plots` are PNG files by the names of `CAPTIONS`."""
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
    return environment.get_template(template).render(report=report, texts=texts, plots=plots or {})


def escape_markdown(text: str) -> str:
    """Return `text` with Markdown markup escaped, on one line."""
    return " ".join(re.sub(r"[\\`*_<\[]", r"\\\g<0>", text).split())
