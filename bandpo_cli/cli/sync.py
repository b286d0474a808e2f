"""`bandpo sync`: send trackers what they lack of runs, from their folders; one line per run and tracker."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bandpo_cli.cli import options as opt
from bandpo_cli.cli.console import ExperimentView, open_console, print_line
from bandpo_cli.cli.options import folder_of, one_of
from bandpo_cli.errors import plural
from bandpo_cli.registries import TRACKERS

if TYPE_CHECKING:
    from bandpo_cli.experiments.sync_runs import SyncReport
    from bandpo_cli.tracking.sender import SyncResult

log = logging.getLogger("bandpo_cli")


@opt.documented
def sync(
    runs: Annotated[list[str] | None, opt.argument("RUN...", complete=folder_of("run", "sweep"))] = None,
    all_: Annotated[bool, opt.option(flags=["--all"])] = False,
    tracker: Annotated[
        list[str] | None, opt.option("NAME", "those of the run", complete=one_of(TRACKERS))
    ] = None,
    tracking_uri: Annotated[str | None, opt.option("URI", "where the run was tracked, or would be")] = None,
    runs_dir: opt.RunsDir = opt.RUNS,
) -> None:
    """Send to the trackers all data of runs that they do not have, for example after an outage.

    Reads the run folders only: settings, every metric of every step, files, how the
    run ended. Data that a tracker already has are not sent again, so you can repeat
    the command at any time. A run that is still being written stays RUNNING.

    [bold]bandpo sync first[/bold]  the run in runs/first

    [bold]bandpo sync deltas --tracking-uri http://127.0.0.1:5000[/bold]  a sweep's runs, to a server

    [bold]bandpo sync first --tracker wandb[/bold]  to Weights & Biases

    [bold]bandpo sync --all[/bold]  every run that has a tracker

    Args:
        runs: Runs, by name or folder; a sweep stands for all of its runs.
        all_: Send every run in --runs-dir, including the runs of sweeps.
        tracker: Trackers to send to; repeatable, or several separated by commas.
        tracking_uri: MLflow server or store.
    """
    from bandpo_cli.experiments import sync as sync_runs

    with closing(SyncView(open_console())) as view:
        sync_runs(
            runs or [], all_runs=all_, trackers=opt.split_commas(tracker or []), uri=tracking_uri, runs_dir=runs_dir,
            callbacks=[view],
        )  # fmt: skip


class SyncView(ExperimentView):
    """Console view of a sync: one line per run."""

    def start(self, info: Sequence[Path]) -> None:
        """Note the names of the runs."""
        self._names = deque(path.name for path in info)

    def phase(self, name: str) -> None:
        """Show a spinner with the run that is sent."""
        self.spin(f"sending {self._names[0]} …")

    def step(self, report: SyncReport) -> None:
        """Print what was sent of a run, or why it was skipped; errors are printed at the end."""
        self.spin(None)
        self._names.popleft()
        label = report.name if report.tracker == "mlflow" else f"{report.name}, {report.tracker}"
        if report.skipped is not None:
            print_line(self.console, f"left out: {report.skipped}", label)
        if report.result is not None:
            print_line(self.console, _sync_text(report.result), label)
            if number := report.result.metrics.differing:
                log.warning(
                    f"{plural(number, 'value')} at MLflow {'differs' if number == 1 else 'differ'} from the run "
                    "folder's: steps that a resume did again were sent before, and MLflow changes no value"
                )


def _sync_text(synced: SyncResult) -> str:
    """Return a line with what was sent and what the tracker had already."""
    metrics, status = synced.metrics, f"status {synced.status}"
    sent = {"metric value": metrics.new, "param": synced.params, "tag": synced.tags, "file": synced.files}
    there = {"metric value": metrics.there, "file": synced.files_there}
    new, old = ([plural(number, noun) for noun, number in part.items() if number] for part in (sent, there))
    (new if synced.ended else old).append(status)
    line = f"sent {', '.join(new) or 'nothing'}{'; there already: ' if old else ''}{', '.join(old)}"
    return line + ("; still being written: its files and its status come later" if synced.writing else "")
