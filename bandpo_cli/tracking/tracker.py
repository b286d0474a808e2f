"""What a run tells of itself to a tracker: three calls, none of which may stop or hold up the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]
"""How a run ended, in MLflow's words. KILLED: stopped from outside, by Ctrl-C or a signal."""


class Tracker(Protocol):
    """A mirror of the run folder, best effort: no call raises for the tracker's own troubles."""

    def start(self, run_name: str, params: Mapping[str, object], tags: Mapping[str, str]) -> None:
        """Tell of the run: its resolved config as `params` (nested), `run_tags(env)` as `tags`."""

    def log_metrics(self, step: int, record: Mapping[str, object]) -> None:
        """Tell of one step, after the run folder has its record."""

    def finish(self, status: RunStatus, artifacts: Sequence[Path]) -> None:
        """Tell how the run ended and send its files, `run_artifacts(folder)`. To be called in every case."""


class NullTracker:
    """Tells nobody."""

    def start(self, run_name: str, params: Mapping[str, object], tags: Mapping[str, str]) -> None:
        """Do nothing."""

    def log_metrics(self, step: int, record: Mapping[str, object]) -> None:
        """Do nothing."""

    def finish(self, status: RunStatus, artifacts: Sequence[Path]) -> None:
        """Do nothing."""


def status_of(error: BaseException | None) -> RunStatus:
    """Return how a run ended that left its loop by `error`, None for one that reached its end.

    Ctrl-C and an exit asked for by a signal handler (SystemExit) are KILLED, any other exception is FAILED.
    """
    if error is None:
        return "FINISHED"
    return "KILLED" if isinstance(error, KeyboardInterrupt | SystemExit) else "FAILED"
