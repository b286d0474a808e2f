"""Console view of `bandpo sync`: one line per run."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bandpo_cli.cli.console import ExperimentView, print_line
from bandpo_cli.errors import plural
from bandpo_cli.experiments.sync_runs import SyncReport
from bandpo_cli.tracking.sync import SyncResult

log = logging.getLogger("bandpo_cli")


class SyncView(ExperimentView):
    """Console view of a sync: one line per run."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._names: deque[str] = deque()

    def start(self, info: Sequence[Path]) -> None:
        """Note the names of the runs."""
        self._names.extend(path.name for path in info)

    def phase(self, name: str) -> None:
        """Show a spinner with the run that is sent."""
        self.spin(f"sending {self._names[0]} …")

    def step(self, report: SyncReport) -> None:
        """Print what was sent of a run, or why it was skipped; errors are printed at the end."""
        self.spin(None)
        self._names.popleft()
        if report.skipped is not None:
            print_line(self.console, f"left out: {report.skipped}", report.name)
        if report.result is not None:
            print_line(self.console, _sync_text(report.result), report.name)
            if number := report.result.metrics.differing:
                log.warning(
                    f"{plural(number, 'value')} at MLflow {'differs' if number == 1 else 'differ'} from the run "
                    "folder's: steps that a resume did again were sent before, and MLflow changes no value"
                )


def _sync_text(synced: SyncResult) -> str:
    """Return a line with what was sent and what MLflow had already."""

    def counts(**numbers: int) -> list[str]:
        return [plural(number, noun.replace("_", " ")) for noun, number in numbers.items() if number]

    sent = counts(metric_value=synced.metrics.new, param=synced.params, tag=synced.tags, file=synced.files)
    there = counts(metric_value=synced.metrics.there, file=synced.files_there)
    (sent if synced.ended else there).append(f"status {synced.status}")
    line = f"sent {', '.join(sent) or 'nothing'}"
    if there:
        line += f"; there already: {', '.join(there)}"
    return line + ("; still being written: its files and its status come later" if synced.writing else "")
