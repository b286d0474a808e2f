"""The report as rows: leaderboard.csv, report.md, and the cells that the other forms share."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from bandpo_cli.reports.sweep.arms import ArmDifference, Metric, Report
from bandpo_cli.reports.sweep.findings import p_text
from bandpo_cli.reports.sweep.statistics import Estimate

CAPTIONS = {
    "accuracy": "Held-out accuracy over steps",
    "entropy": "Entropy of the policy over steps",
    "accuracy_entropy": "Accuracy against entropy",
    "clip_by_probability": "Share of clipped tokens by their probability",
}
DIFFERENCE_HEADS = (
    "figure",
    "arm",
    "difference",
    "95% interval",
    "seeds",
    "higher / lower",
    "p",
    "p, Holm",
    "",
)


def value_text(figure: Metric, estimate: Estimate | None) -> str:
    """Return a mean as tables have it."""
    return "–" if estimate is None else figure.text(estimate.mean)


def interval_text(figure: Metric, estimate: Estimate | None, sign: bool = False) -> str:
    """Return `0.451 – 0.497`, '' where there is no interval or the figure is beside the point."""
    if not figure.compared or estimate is None or estimate.low is None or estimate.high is None:
        return ""
    between = " to " if sign else " – "
    return between.join(figure.text(end, sign) for end in (estimate.low, estimate.high))


def half_width(figure: Metric, estimate: Estimate | None) -> str:
    """Return `±0.023`, the distance from the mean to either end; '' as for `interval_text`."""
    if not figure.compared or estimate is None or estimate.high is None:
        return ""
    return f"±{figure.text(estimate.high - estimate.mean)}"


def difference_cells(report: Report, each: ArmDifference) -> list[str]:
    """Return the cells under `DIFFERENCE_HEADS`."""
    figure, pair = report.figure(each.figure), each.paired
    if pair is None:
        return [figure.name, each.arm, "–", "", "0", "", "", "", each.verdict]
    return [
        figure.name,
        each.arm,
        figure.text(pair.change.mean, sign=True),
        interval_text(figure, pair.change, sign=True),
        str(pair.change.n),
        f"{pair.higher} / {pair.lower}",
        "" if pair.p is None else p_text(pair.p),
        "" if each.p_holm is None else p_text(each.p_holm),
        each.verdict,
    ]


def leaderboard_csv(report: Report) -> str:
    """Return a row an arm, the most accurate first; plain numbers, empty where there is none."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    keys = [figure.key for figure in report.figures]
    ends = ("", "_low", "_high")
    writer.writerow(["arm", "seeds", "steps", *(f"{key}{end}" for key in keys for end in ends)])
    for arm in report.arms:
        cells: list[object] = [arm.name, len(arm.seeds), arm.steps[1]]
        for key in keys:
            value = arm.figures.get(key)
            cells += ["", "", ""] if value is None else [value.mean, value.low, value.high]
        writer.writerow(cells)
    return out.getvalue()


def leaderboard_metrics(report: Report) -> dict[str, float]:
    """Return the leaderboard as plain figures: `clip/accuracy`, and the ends of its interval where it has one."""
    figures = {}
    for arm in report.arms:
        for key, value in arm.figures.items():
            for end, number in (("", value.mean), ("_low", value.low), ("_high", value.high)):
                if number is not None:
                    figures[f"{arm.name}/{key}{end}"] = number
    return figures


def markdown(report: Report) -> str:
    """Return `report.md`: the same tables, the pictures by their path beside it."""
    parts = [f"# {_plain(report.title)}", f"{_plain(report.about)}.", f"**{_plain(report.finding)}**"]
    parts += [
        "## Leaderboard",
        _leaderboard(report),
        "Mean over seeds, below it the 95% interval (Student's t).",
    ]
    parts += ["\n".join(f"- {figure.name}: {figure.about}" for figure in report.figures)]
    if report.differences:
        parts += [f"## Differences from {_plain(report.baseline or '')}", "By common seeds; paired t-test."]
        parts.append(
            _table(DIFFERENCE_HEADS, (difference_cells(report, each) for each in report.differences))
        )
    for name, caption in CAPTIONS.items():
        if f"{name}.png" in report.files:
            parts += [f"## {caption}", f"![{caption}]({name}.png)"]
    if report.notes:
        parts += ["## Notes", "\n".join(f"- {_plain(note)}" for note in report.notes)]
    if report.left_out:
        rows = ([each.run, each.arm, str(each.seed), each.reason] for each in report.left_out)
        parts += ["## Left out", _table(("run", "arm", "seed", "why"), rows)]
    settings = list(report.arms[0].settings)
    if settings:
        rows = ([arm.name, *(arm.settings[key] for key in settings)] for arm in report.arms)
        parts += ["## Settings in which the arms differ", _table(("arm", *settings), rows)]
    return "\n\n".join(parts) + "\n"


def _leaderboard(report: Report) -> str:
    rows = []
    for arm in report.arms:
        cells = [f"{arm.name} (baseline)" if arm.name == report.baseline else arm.name, str(len(arm.seeds))]
        for figure in report.figures:
            value = arm.figures.get(figure.key)
            cells.append("<br>".join(filter(None, (value_text(figure, value), interval_text(figure, value)))))
        rows.append(cells)
    return _table(("arm", "seeds", *(figure.name for figure in report.figures)), rows, raw=True)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], raw: bool = False) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell, raw) for cell in line)} |" for line in lines)


def _cell(text: str, raw: bool) -> str:
    return _plain(text.replace("<br>", "\0") if raw else text).replace("|", "\\|").replace("\0", "<br>")


def _plain(text: str) -> str:
    """Take from a text what Markdown would read as markup."""
    for mark in "\\`*_<[":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())


def _relative_to_cwd(path: Path) -> str:
    """Return `path` as short as it can be typed from here."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
