"""Reports that compare the arms of a sweep, or of any runs, over seeds. All input is read from run folders."""

from bandpo_cli.reports.sweep.arms import Report
from bandpo_cli.reports.sweep.selection import ArmRun, Selection, read_sweep, select_runs
from bandpo_cli.reports.sweep.tuning import read_tuning
from bandpo_cli.reports.sweep.write import write_report

__all__ = ["ArmRun", "Report", "Selection", "read_sweep", "read_tuning", "select_runs", "write_report"]
