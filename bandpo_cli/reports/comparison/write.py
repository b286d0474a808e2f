"""Writing a report: leaderboard.csv, report.md, the plots, and report.html, which needs no other file or network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bandpo_cli.errors import UserError, nearest
from bandpo_cli.reports.comparison import tables
from bandpo_cli.reports.comparison.findings import headline, report_notes, scope
from bandpo_cli.reports.comparison.plots import MAX_VARIANTS_PLOTTED, plot_all
from bandpo_cli.reports.comparison.report_metrics import (
    common_k,
    common_sets,
    entropy_at_equal_accuracy,
    report_metrics,
    run_values,
)
from bandpo_cli.reports.comparison.runs import ExcludedRun, VariantRunData, read_variant_run
from bandpo_cli.reports.comparison.selection import VariantRun
from bandpo_cli.reports.comparison.tuning import Tuning
from bandpo_cli.reports.comparison.variants import (
    Report,
    VariantDifference,
    compare_variants,
    evaluate_variants,
    group_by_variant,
)
from bandpo_cli.storage.files import write_text


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

    Returns:
        The content of the report, with the paths of the written files.

    Raises:
        UserError: all runs are excluded, two runs of a variant have the same seed, the runs share no evaluation set,
            `baseline` is not a variant, or `out` cannot be written to.
    """
    planned = dict.fromkeys(run.arm for run in runs)
    if baseline is not None and baseline not in planned:
        raise UserError(
            f"baseline = {baseline!r}: no variant of that name{nearest(baseline, planned)}; variants: "
            f"{', '.join(planned)}"
        )
    read = [read_variant_run(run) for run in runs]
    excluded = tuple(run for run in read if isinstance(run, ExcludedRun))
    records = [run for run in read if isinstance(run, VariantRunData)]
    if not records:
        more = f"; {len(excluded) - 1} more" if len(excluded) > 1 else ""
        why = f"all runs are excluded: {excluded[0].run}: {excluded[0].reason}{more}" if excluded else ""
        raise UserError(f"{title}: {why or 'no runs to report on'}")
    arms = group_by_variant(records)
    sets, equal = common_sets(records), entropy_at_equal_accuracy(arms, common_sets(records))
    level = equal.level.accuracy if equal.level is not None and equal.values else None
    k = common_k(records, sets)
    values = {
        name: {record.run.seed: run_values(record, sets, k, equal) for record in members}
        for name, members in arms.items()
    }
    metrics = report_metrics(records, sets, level)
    evaluated = evaluate_variants(arms, values, metrics)
    metrics = [metric for metric in metrics if any(metric.key in arm.figures for arm in evaluated)]
    differences: list[VariantDifference] = []
    if baseline in arms and len(arms) > 1:
        differences = compare_variants([arm.name for arm in evaluated], values, str(baseline), metrics)
    in_accuracy = [difference for difference in differences if difference.figure == "accuracy"]
    all_notes = [*notes, *report_notes(arms, baseline, differences, sets, bool(k), excluded, equal)]
    if tuning is not None:
        all_notes += tuning.notes_on_range()
    if len(arms) > MAX_VARIANTS_PLOTTED:
        all_notes.append(
            f"The plots show the {MAX_VARIANTS_PLOTTED} most accurate variants and the baseline."
        )
    report = Report(
        title=title,
        about=scope(evaluated, sets),
        finding=headline(evaluated, baseline, in_accuracy, metrics[0]),
        baseline=baseline if baseline in arms else None,
        sets=tuple(sets),
        accuracy_level=level,
        figures=tuple(metrics),
        arms=tuple(evaluated),
        differences=tuple(differences),
        tuning=tuning,
        notes=tuple(all_notes),
        left_out=excluded,
        files={},
    )
    try:
        return _write_files(report, arms, out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written to: {error.strerror or error}") from error


def _write_files(report: Report, arms: dict[str, list[VariantRunData]], out: Path) -> Report:
    """Write all files into a temporary folder, then move them to `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out if out.is_dir() else out.parent
    with TemporaryDirectory(prefix=".report.", suffix=".tmp", dir=beside) as folder:
        hidden = Path(folder)
        plots = plot_all(arms, report, hidden)
        names = ["report.html", "report.md", "leaderboard.csv", *(path.name for path in plots.values())]
        report = replace(report, files={name: out / name for name in names})
        write_text(hidden / "leaderboard.csv", tables.leaderboard_csv(report))
        write_text(hidden / "report.md", tables.render("report.md", report, plots))
        write_text(hidden / "report.html", tables.render("report.html", report, plots))
        out.mkdir(exist_ok=True)
        for name in names:
            os.replace(hidden / name, out / name)
    return report
