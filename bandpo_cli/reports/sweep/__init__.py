"""One report over many runs: arms compared over seeds, from the run folders alone."""

from bandpo_cli.reports.sweep.arms import Report
from bandpo_cli.reports.sweep.selection import ArmRun, Selection, read_sweep, select_runs
from bandpo_cli.reports.sweep.write import write_report

__all__ = ["ArmRun", "Report", "Selection", "read_sweep", "select_runs", "write_report"]
