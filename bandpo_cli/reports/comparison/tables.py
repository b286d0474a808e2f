"""Texts of a report: leaderboard.csv, the templates of report.md and report.html, and the cells that they share."""

from __future__ import annotations

import base64
import csv
import io
import sys
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from bandpo_cli.reports.comparison.report_metrics import Metric
from bandpo_cli.reports.comparison.statistics import Estimate, PairedTest
from bandpo_cli.reports.comparison.variants import SPREAD, Report, Variant

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


def value_text(metric: Metric, estimate: Estimate | None) -> str:
    """Return a mean as tables show it; `–` for none."""
    return "–" if estimate is None else metric.text(estimate.mean)


def interval_text(metric: Metric, estimate: Estimate | None, sign: bool = False) -> str:
    """Return `0.451 – 0.497`; '' without an interval and for metrics that variants are not compared by."""
    if not metric.compared or estimate is None or estimate.low is None or estimate.high is None:
        return ""
    between = " to " if sign else " – "
    return between.join(metric.text(end, sign) for end in (estimate.low, estimate.high))


def range_text(metric: Metric, arm: Variant) -> str:
    """Return the interval of a metric of a variant, or the spread of its steps where the metric has one; else ''."""
    spread = arm.spreads.get(metric.key)
    if spread is not None:
        return " – ".join(map(metric.text, spread))
    return interval_text(metric, arm.figures.get(metric.key))


def short_range_text(metric: Metric, arm: Variant) -> str:
    """Return the same for narrow columns: `±0.023`, or `0–0.797` for an interval that ends at a limit of the metric."""
    estimate = arm.figures.get(metric.key)
    if metric.key in arm.spreads or not interval_text(metric, estimate):
        return range_text(metric, arm).replace(" ", "")
    assert estimate is not None
    assert estimate.low is not None
    assert estimate.high is not None
    if estimate.low > metric.limits[0] and estimate.high < metric.limits[1]:
        return f"±{metric.text(estimate.high - estimate.mean)}"
    ends = (estimate.low, estimate.high)
    return "–".join(f"{end:g}" if end in metric.limits else metric.text(end) for end in ends)


def p_text(p: float) -> str:
    """Return a p-value with two or three digits; `< 0.001` below that."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def difference_cells(metric: Metric, pair: PairedTest | None, p_holm: float | None) -> list[str]:
    """Return the cells of a difference: mean, interval, seeds, seeds higher and lower, p-value, adjusted p-value."""
    if pair is None:
        return ["–", "", "0", "", "", ""]
    return [
        metric.text(pair.change.mean, sign=True),
        interval_text(metric, pair.change, sign=True),
        str(pair.change.n),
        f"{pair.higher} / {pair.lower}",
        *("" if p is None else p_text(p) for p in (pair.p, p_holm)),
    ]


def leaderboard_csv(report: Report) -> str:
    """Return one row per variant, highest accuracy first, with unrounded numbers; a missing value is an empty cell.

    The last columns are the quantiles of metrics with a spread: `seconds_per_step_p10`, `seconds_per_step_p90`.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    keys = [metric.key for metric in report.figures]
    spread_keys = [key for key in keys if any(key in arm.spreads for arm in report.arms)]
    columns = [f"{key}{end}" for key in keys for end in ("", "_low", "_high")]
    columns += [f"{key}_p{100 * share:.0f}" for key in spread_keys for share in SPREAD]
    writer.writerow(["arm", "seeds", "steps", *columns])
    for arm in report.arms:
        cells: list[object] = [arm.name, len(arm.seeds), arm.steps[1]]
        for value in map(arm.figures.get, keys):
            cells += ["", "", ""] if value is None else [value.mean, value.low, value.high]
        for key in spread_keys:
            cells += arm.spreads.get(key, ("", ""))
        writer.writerow(cells)
    return out.getvalue()


def render(template: str, report: Report, plots: Mapping[str, Path] | None = None) -> str:
    """Return the report as text of the file `template` in `reports/templates`.

    Args:
        template: report.html (one page with the plots embedded), report.md, or leaderboard.md (its first table).
        plots: PNG files by the names of `CAPTIONS`.
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
    return environment.get_template(template).render(
        report=report, tables=sys.modules[__name__], plots=plots or {}
    )


def escape_markdown(text: str) -> str:
    """Return `text` with Markdown markup escaped, on one line."""
    for mark in "\\`*_<[":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())
