"""Tables of a report: leaderboard.csv, report.md, and the cell texts that all forms of a report share."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from bandpo_cli.reports.sweep.arms import SPREAD, Arm, ArmDifference, Report
from bandpo_cli.reports.sweep.findings import p_text
from bandpo_cli.reports.sweep.metrics import Metric
from bandpo_cli.reports.sweep.statistics import Estimate
from bandpo_cli.reports.sweep.tuning import TunedArm, Tuning

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

DIFFERENCE_HEADS = (
    "metric",
    "arm",
    "difference",
    "95% interval",
    "seeds",
    "higher / lower",
    "p",
    "p, Holm",
    "",
)


TUNING_HEADS = ("method", "settings", "mean", "values by seed", "")


def tuning_caption(tuning: Tuning) -> str:
    """Return what the table of a report's tuning shows."""
    seeds = ", ".join(map(str, tuning.seeds))
    return f"{tuning.metric} in the sweep {tuning.sweep}, seeds {seeds}, which no run of this report has"


def tuning_cells(arm: TunedArm) -> list[str]:
    """Return the cells of a row under `TUNING_HEADS`."""
    values = ", ".join(f"{value:.3f}" for value in arm.values)
    return [arm.group, arm.settings_text, f"{arm.mean:.3f}", values, "chosen" if arm.chosen else ""]


def value_text(metric: Metric, estimate: Estimate | None) -> str:
    """Return a mean as tables show it; `–` for none."""
    return "–" if estimate is None else metric.text(estimate.mean)


def interval_text(metric: Metric, estimate: Estimate | None, sign: bool = False) -> str:
    """Return `0.451 – 0.497`; '' without an interval and for metrics that arms are not compared by."""
    if not metric.compared or estimate is None or estimate.low is None or estimate.high is None:
        return ""
    between = " to " if sign else " – "
    return between.join(metric.text(end, sign) for end in (estimate.low, estimate.high))


def range_text(metric: Metric, arm: Arm) -> str:
    """Return the interval of a metric of an arm, or the spread of its steps where the metric has one; else ''."""
    spread = arm.spreads.get(metric.key)
    if spread is not None:
        return " – ".join(map(metric.text, spread))
    return interval_text(metric, arm.figures.get(metric.key))


def short_range_text(metric: Metric, arm: Arm) -> str:
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


def difference_cells(report: Report, difference: ArmDifference) -> list[str]:
    """Return the cells of a row under `DIFFERENCE_HEADS`."""
    metric, pair = report.metric(difference.figure), difference.paired
    if pair is None:
        return [metric.name, difference.arm, "–", "", "0", "", "", "", difference.verdict]
    return [
        metric.name,
        difference.arm,
        metric.text(pair.change.mean, sign=True),
        interval_text(metric, pair.change, sign=True),
        str(pair.change.n),
        f"{pair.higher} / {pair.lower}",
        "" if pair.p is None else p_text(pair.p),
        "" if difference.p_holm is None else p_text(difference.p_holm),
        difference.verdict,
    ]


def leaderboard_csv(report: Report) -> str:
    """Return one row per arm, highest accuracy first, with unrounded numbers; a missing value is an empty cell.

    The last columns are the quantiles of metrics with a spread: `seconds_per_step_p10`, `seconds_per_step_p90`.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    keys = [metric.key for metric in report.figures]
    ends = ("", "_low", "_high")
    spread_keys = [key for key in keys if any(key in arm.spreads for arm in report.arms)]
    quantiles = [f"{key}_p{100 * share:.0f}" for key in spread_keys for share in SPREAD]
    writer.writerow(["arm", "seeds", "steps", *(f"{key}{end}" for key in keys for end in ends), *quantiles])
    for arm in report.arms:
        cells: list[object] = [arm.name, len(arm.seeds), arm.steps[1]]
        for key in keys:
            value = arm.figures.get(key)
            cells += ["", "", ""] if value is None else [value.mean, value.low, value.high]
        for key in spread_keys:
            cells += arm.spreads.get(key, ("", ""))
        writer.writerow(cells)
    return out.getvalue()


def markdown(report: Report) -> str:
    """Return the text of `report.md`, which links to the plots in the same folder."""
    parts = [
        f"# {_escape(report.title)}",
        f"{_escape(report.about)}.",
        f"**{_escape(report.finding)}**",
    ]
    parts += [
        "## Leaderboard",
        leaderboard_markdown(report),
        f"{LEADERBOARD_CAPTION}.",
    ]
    parts += ["\n".join(f"- {metric.name}: {metric.about}" for metric in report.figures)]
    if report.differences:
        parts += [
            f"## Differences from {_escape(report.baseline or '')}",
            "Arm minus baseline over common seeds; paired t-test.",
        ]
        parts.append(
            _table(DIFFERENCE_HEADS, (difference_cells(report, each) for each in report.differences))
        )
    if report.tuning is not None:
        parts += ["## Tuned settings", f"{_escape(tuning_caption(report.tuning))}."]
        parts.append(_table(TUNING_HEADS, map(tuning_cells, report.tuning.arms)))
    for name, caption in CAPTIONS.items():
        if f"{name}.png" in report.files:
            parts += [f"## {caption}", f"![{caption}]({name}.png)"]
    if report.notes:
        parts += ["## Notes", "\n".join(f"- {_escape(note)}" for note in report.notes)]
    if report.left_out:
        rows = ([each.run, each.arm, str(each.seed), each.reason] for each in report.left_out)
        parts += ["## Excluded runs", _table(("run", "arm", "seed", "reason"), rows)]
    settings = list(report.arms[0].settings)
    if settings:
        rows = ([arm.name, *(arm.settings[key] for key in settings)] for arm in report.arms)
        parts += ["## Settings in which the arms differ", _table(("arm", *settings), rows)]
    return "\n\n".join(parts) + "\n"


def leaderboard_markdown(report: Report) -> str:
    rows = []
    for arm in report.arms:
        cells = [f"{arm.name} (baseline)" if arm.name == report.baseline else arm.name, str(len(arm.seeds))]
        for metric in report.figures:
            value = arm.figures.get(metric.key)
            cells.append("<br>".join(filter(None, (value_text(metric, value), range_text(metric, arm)))))
        rows.append(cells)
    return _table(("arm", "seeds", *(metric.name for metric in report.figures)), rows, breaks=True)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], breaks: bool = False) -> str:
    """Return a Markdown table. With `breaks`, `<br>` in a cell is a line break instead of text."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell, breaks) for cell in line)} |" for line in lines)


def _cell(text: str, breaks: bool) -> str:
    return _escape(text.replace("<br>", "\0") if breaks else text).replace("|", "\\|").replace("\0", "<br>")


def _escape(text: str) -> str:
    """Return `text` with Markdown markup escaped, on one line."""
    for mark in "\\`*_<[":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())
