"""The report as one HTML file that needs nothing beside it: no script, no network, pictures inside."""

# MERGED: From runs to a report on disk.
from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from bandpo_cli.errors import UserError, nearest
from bandpo_cli.reports.sweep import findings as words
from bandpo_cli.reports.sweep import tables
from bandpo_cli.reports.sweep.arms import (
    Report,
    arm_metrics,
    common_sets,
    compare_arms,
    evaluate_arms,
    group_by_arm,
)
from bandpo_cli.reports.sweep.findings import report_notes as notes_on
from bandpo_cli.reports.sweep.plots import MAX_ARMS_PLOTTED, plot_all
from bandpo_cli.reports.sweep.runs import ArmRunData, ExcludedRun, read_arm_run
from bandpo_cli.reports.sweep.selection import ArmRun
from bandpo_cli.reports.sweep.tables import leaderboard_csv, markdown
from bandpo_cli.storage.files import write_text


def html_page(report: Report, pictures: Mapping[str, Path]) -> str:
    """Return the page; `pictures` are PNG files by the names of `tables.CAPTIONS`."""
    environment = Environment(
        loader=PackageLoader("bandpo_cli.reports"),
        autoescape=True,  # names of arms and runs are the user's
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = [
        (caption, base64.b64encode(pictures[name].read_bytes()).decode())
        for name, caption in tables.CAPTIONS.items()
        if name in pictures
    ]
    differences = [
        (
            report.figure(key),
            [
                (each, tables.difference_cells(report, each))
                for each in report.differences
                if each.figure == key
            ],
        )
        for key in dict.fromkeys(each.figure for each in report.differences)
    ]
    return environment.get_template("report.html").render(
        report=report, tables=tables, pictures=shown, differences=differences
    )


def write_report(
    runs: Sequence[ArmRun], title: str, baseline: str | None, out: Path, notes: Sequence[str] = ()
) -> Report:
    """Compare the arms of `runs` and write leaderboard.csv, report.md, report.html and the pictures into `out`.

    Everything is computed from the run folders. Runs that cannot be counted are listed with the reason.

    Args:
        baseline: the arm that the others are compared with; None for no comparison.
        notes: sentences to put before the report's own.

    Raises:
        UserError: no run is left, two runs are the same seed of an arm, they share no evaluation set, `baseline` is
            no arm, or `out` cannot be written to.
    """
    _check_baseline(runs, baseline)
    read = [read_arm_run(run) for run in runs]
    left_out = [each for each in read if isinstance(each, ExcludedRun)]
    records = [each for each in read if isinstance(each, ArmRunData)]
    if not records:
        raise UserError(_nothing_left(title, left_out))
    arms = group_by_arm(records)
    sets = common_sets(records)
    taken = arm_metrics(records, sets)
    measured = evaluate_arms(arms, taken)
    taken = [each for each in taken if any(each.figure.key in arm.figures for arm in measured)]
    ranked = {arm.name: arms[arm.name] for arm in measured}
    differences = compare_arms(ranked, baseline, taken) if baseline in arms and len(arms) > 1 else []
    accuracy = taken[0].figure
    passing = any(each.figure.key.startswith("pass_at_") for each in taken)
    drawn_few = (
        [f"The pictures show the {MAX_ARMS_PLOTTED} most accurate arms and the baseline."]
        if len(arms) > MAX_ARMS_PLOTTED
        else []
    )
    report = Report(
        title=title,
        about=words.scope(measured, sets),
        finding=words.headline(
            measured, baseline, [each for each in differences if each.figure == accuracy.key], accuracy
        ),
        baseline=baseline if baseline in arms else None,
        sets=tuple(sets),
        figures=tuple(each.figure for each in taken),
        arms=tuple(measured),
        differences=tuple(differences),
        notes=(*notes, *notes_on(arms, baseline, differences, sets, passing, left_out), *drawn_few),
        left_out=tuple(left_out),
        files={},
    )
    try:
        return _write(report, arms, out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written to: {error.strerror or error}") from error


def _check_baseline(runs: Sequence[ArmRun], baseline: str | None) -> None:
    known = dict.fromkeys(run.arm for run in runs)
    if baseline is not None and baseline not in known:
        raise UserError(
            f"baseline = {baseline!r}: no arm of that name{nearest(baseline, known)}; arms: {', '.join(known)}"
        )


def _nothing_left(title: str, left_out: Sequence[ExcludedRun]) -> str:
    if not left_out:
        return f"{title}: no runs to report on"
    first = left_out[0]
    more = f"; {len(left_out) - 1} more" if len(left_out) > 1 else ""
    return f"{title}: no run can be counted: {first.run}: {first.reason}{more}"


def _write(report: Report, arms: dict[str, list[ArmRunData]], out: Path) -> Report:
    """Write the pictures, then what refers to them."""
    out.mkdir(parents=True, exist_ok=True)
    order = [arm.name for arm in report.arms]
    pictures = plot_all(arms, order, report.baseline, report.sets, report.title, out)
    files = {name: out / name for name in ("report.html", "report.md", "leaderboard.csv")}
    report = replace(report, files={**files, **{path.name: path for path in pictures.values()}})
    write_text(files["leaderboard.csv"], leaderboard_csv(report))
    write_text(files["report.md"], markdown(report))
    write_text(files["report.html"], html_page(report, pictures))
    return report
