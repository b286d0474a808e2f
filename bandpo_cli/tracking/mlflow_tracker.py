"""MLflow from the side: one thread sends what the run folder has, and the training never waits for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bandpo_cli.config.tracking import TrackingConfig
from bandpo_cli.tracking.environment import redact
from bandpo_cli.tracking.mlflow_mirror import MlflowMirror, Record
from bandpo_cli.tracking.mlflow_names import flat_params
from bandpo_cli.tracking.store import Store, tracking_store
from bandpo_cli.tracking.tracker import NullTracker, RunStatus, Tracker

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
"""The pause after a failure: twice the last one, from the first to the longest."""

LAST_TRIES = 2
"""How often a failing store is tried once the run has ended, with `FIRST_WAIT_S` between."""

RECORDS_A_CALL = 50


class MlflowTracker:
    """A `Tracker` that mirrors `folder` in `store` on a daemon thread, MLflow's slow import included.

    The first failure costs one line through `warn`. What could not be sent is kept and tried again with a
    growing pause; what is missing when the time to finish is up is told in one line through `say` (`warn` by
    default). The run folder lacks nothing then. Call `start` when the imports of the training are done: two
    threads that import at once slow each other down.

    Args:
        store: where to send.
        folder: the run folder; the file `mlflow.json` there links it with its MLflow run.
        warn: prints one line; called from the tracker's thread.
        say: prints one line; called by `finish`.
        finish_within_s: the longest that `finish` waits, in seconds.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        warn: Callable[[str], None],
        say: Callable[[str], None] | None = None,
        finish_within_s: float = 30.0,
    ) -> None:
        self._store, self._folder = store, folder
        self._warn, self._say = warn, say or warn
        self._finish_within_s = finish_within_s
        self._about: tuple[str, dict[str, str], dict[str, str]] = ("", {}, {})
        self._mirror: MlflowMirror | None = None
        self._records: deque[Record] = deque()  # append and popleft are atomic: no lock
        self._files: deque[Path] = deque()
        self._status: RunStatus | None = None
        self._closed = False
        self._failures = 0
        self._tries_left = LAST_TRIES
        self._warned = False
        self._news = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mlflow-mirror", daemon=True)

    def start(self, run_name: str, params: Mapping[str, object], tags: Mapping[str, str]) -> None:
        """Start the thread, which connects at once."""
        self._about = (run_name, flat_params(params), dict(tags))
        self._thread.start()

    def log_metrics(self, step: int, record: Mapping[str, object]) -> None:
        """Queue the finite numbers of `record`; takes microseconds."""
        self._records.append(Record.of(step, record))
        self._news.set()

    def finish(self, status: RunStatus, artifacts: Sequence[Path]) -> None:
        """Send the rest, the status and the files within `finish_within_s`; tell what was not sent."""
        self._status = status
        self._files.extend(artifacts)
        self._ending.set()
        self._news.set()
        if self._thread.ident is None:  # never started: MLflow knows nothing of this run
            return
        self._thread.join(self._finish_within_s)
        if not self._closed:
            self._say(self._missing())

    def _work(self) -> None:
        while not self._closed and self._tries_left:
            ending = self._ending.is_set()
            try:
                self._send_all()
                self._failures = 0
            except Exception as error:  # noqa: BLE001 - whatever goes wrong here must not reach the training
                self._fail(error)
                if ending:
                    self._tries_left -= 1
            self._pause()

    def _send_all(self) -> None:
        """Send all there is, oldest first; what was sent leaves the queue only when MLflow has it."""
        self._news.clear()  # before looking: what comes after the look wakes the thread again
        ending = self._ending.is_set()
        if self._mirror is None:
            self._mirror = MlflowMirror.connect(self._store, self._folder, *self._about)
            if not ending:
                self._mirror.reopen()
        while self._records:
            # By index: iterating a deque fails when the training appends to it meanwhile.
            batch = [self._records[index] for index in range(min(RECORDS_A_CALL, len(self._records)))]
            self._mirror.send(batch)
            for _ in batch:
                self._records.popleft()
        if ending:
            self._close(self._mirror)

    def _close(self, mirror: MlflowMirror) -> None:
        # The status first: a file that cannot be stored must not leave a finished run as RUNNING for ever.
        mirror.close(self._status or "FAILED")
        while self._files:
            mirror.send_file(self._folder, self._files[0])
            self._files.popleft()
        self._closed = True

    def _fail(self, error: Exception) -> None:
        self._failures += 1
        self._mirror = None  # connect anew: the next try then asks which steps have arrived
        if not self._warned:
            self._warned = True
            self._warn(
                f"MLflow at {redact(self._store.uri)} cannot be reached ({_brief(error)}). "
                f"The run goes on and {self._folder} has everything; trying again from time to time."
            )

    def _pause(self) -> None:
        if self._closed or not self._tries_left:
            return
        if not self._failures:
            self._news.wait()
        elif self._ending.is_set():
            time.sleep(FIRST_WAIT_S)
        else:
            self._ending.wait(min(FIRST_WAIT_S * 2 ** min(self._failures - 1, 10), LONGEST_WAIT_S))

    def _missing(self) -> str:
        parts = []
        if self._records:
            parts.append(f"the metrics of {len(self._records)} steps (from step {self._records[0].step})")
        if self._files:
            parts.append(f"{len(self._files)} files")
        what = " and ".join(parts) or "the end of the run"
        return f"MLflow at {redact(self._store.uri)} has not got {what}; {self._folder} has everything."


def open_tracker(
    config: TrackingConfig,
    folder: Path,
    warn: Callable[[str], None],
    say: Callable[[str], None] | None = None,
) -> Tracker:
    """Return the tracker that `config` asks for, of the run in `folder`; its parent is the runs folder."""
    if not config.mlflow:
        return NullTracker()
    return MlflowTracker(tracking_store(config, folder.absolute().parent), folder, warn, say)


def _brief(error: Exception) -> str:
    """Return the kind and first line of `error`, without passwords, at most 200 characters."""
    lines = redact(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
