"""From runs to a report on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bandpo_cli.errors import UserError, nearest
from bandpo_cli.reports.sweep import finding as words
from bandpo_cli.reports.sweep.find import ArmRun
from bandpo_cli.reports.sweep.measure import by_arm, common_sets, compare_arms, measure_arms, measures
from bandpo_cli.reports.sweep.notes import notes as notes_on
from bandpo_cli.reports.sweep.page import page
from bandpo_cli.reports.sweep.pictures import MOST_DRAWN, draw_all
from bandpo_cli.reports.sweep.result import Report
from bandpo_cli.reports.sweep.runs import LeftOut, RunRecord, read_run
from bandpo_cli.reports.sweep.tables import leaderboard_csv, markdown
from bandpo_cli.tracking.files import write_text


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
    read = [read_run(run) for run in runs]
    left_out = [each for each in read if isinstance(each, LeftOut)]
    records = [each for each in read if isinstance(each, RunRecord)]
    if not records:
        raise UserError(_nothing_left(title, left_out))
    arms = by_arm(records)
    sets = common_sets(records)
    taken = measures(records, sets)
    measured = measure_arms(arms, taken)
    taken = [each for each in taken if any(each.figure.key in arm.figures for arm in measured)]
    ranked = {arm.name: arms[arm.name] for arm in measured}
    differences = compare_arms(ranked, baseline, taken) if baseline in arms and len(arms) > 1 else []
    accuracy = taken[0].figure
    passing = any(each.figure.key.startswith("pass_at_") for each in taken)
    drawn_few = (
        [f"The pictures show the {MOST_DRAWN} most accurate arms and the baseline."]
        if len(arms) > MOST_DRAWN
        else []
    )
    report = Report(
        title=title,
        about=words.about(measured, sets),
        finding=words.finding(
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


def _nothing_left(title: str, left_out: Sequence[LeftOut]) -> str:
    if not left_out:
        return f"{title}: no runs to report on"
    first = left_out[0]
    more = f"; {len(left_out) - 1} more" if len(left_out) > 1 else ""
    return f"{title}: no run can be counted: {first.run}: {first.reason}{more}"


def _write(report: Report, arms: dict[str, list[RunRecord]], out: Path) -> Report:
    """Write the pictures, then what refers to them."""
    out.mkdir(parents=True, exist_ok=True)
    order = [arm.name for arm in report.arms]
    pictures = draw_all(arms, order, report.baseline, report.sets, report.title, out)
    files = {name: out / name for name in ("report.html", "report.md", "leaderboard.csv")}
    report = replace(report, files={**files, **{path.name: path for path in pictures.values()}})
    write_text(files["leaderboard.csv"], leaderboard_csv(report))
    write_text(files["report.md"], markdown(report))
    write_text(files["report.html"], page(report, pictures))
    return report
