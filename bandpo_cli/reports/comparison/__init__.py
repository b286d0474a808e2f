"""Reports that compare the variants of a sweep, or of any runs, over seeds. All input is read from run folders."""

from bandpo_cli.reports.comparison.selection import Selection, VariantRun, read_sweep, select_runs
from bandpo_cli.reports.comparison.variants import Report
from bandpo_cli.reports.comparison.write import write_report

__all__ = ["Report", "Selection", "VariantRun", "read_sweep", "select_runs", "write_report"]
