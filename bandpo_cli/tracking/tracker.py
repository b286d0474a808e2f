"""MLflow tracker of a training run: one thread sends what the run folder has; training never waits for it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bandpo_cli.config.run import TrackingConfig
from bandpo_cli.errors import UserError, redact_credentials
from bandpo_cli.storage.files import file_digest
from bandpo_cli.storage.run_folder import run_artifacts, sync_command
from bandpo_cli.storage.run_record import read_records
from bandpo_cli.tracking.link import link_version, new_link, read_links, record_sent_files, run_url, send_lock
from bandpo_cli.tracking.mirror import RECORDS_PER_CALL, MetricRecord, MlflowMirror
from bandpo_cli.tracking.names import flat_params, run_tags
from bandpo_cli.tracking.store import Store, check_reachable, is_server, short_error, tracking_store
from bandpo_cli.types import CallbackBase, RunInfo, RunResult, RunStatus, StepReport

log = logging.getLogger("bandpo_cli")

MIN_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 1.0, 30.0
"""The pause after a failure, in seconds: it doubles from the first value up to the second."""

FINAL_RETRIES = 2
"""Number of attempts on a failing store after the end of the run, `MIN_RETRY_DELAY_S` apart."""

CONNECT_TIMEOUT_S = 10.0
"""Timeout of the connection check of a server, in seconds."""

UNREACHABLE_GRACE_S = 1.5
"""Seconds that the end of a run waits for a store that does not answer: it was tried during the run already."""


class MlflowTracker:
    """Mirror `folder` in `store` on a daemon thread, MLflow's slow import included.

    The first failure is reported in one line through `warn`. What could not be sent is queued and tried again with a
    growing pause. What is missing when `finish` times out is reported in one line through `report` (`warn` by default),
    with the command that sends it later; the run folder has everything. For a resumed run, steps that MLflow lacks are
    sent from the folder. Call `start` after the imports of the training: two threads that import delay each other.

    Args:
        store: where to send.
        folder: the run folder; the file `mlflow.json` there links it with its MLflow run.
        warn: prints one line; called from the tracker's thread.
        report: prints one line; called by `finish`.
        announce: prints the address of the run once it is known, where the store is a server; called from the
            tracker's thread.
        finish_timeout_s: seconds that `finish` waits for a store that answers; for one that does not, it waits
            `UNREACHABLE_GRACE_S`.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        warn: Callable[[str], None],
        report: Callable[[str], None] | None = None,
        finish_timeout_s: float = 60.0,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        self._store, self._folder = store, folder
        self._warn, self._report = warn, report or warn
        self._finish_timeout_s = finish_timeout_s
        self._announce = announce
        self._run_name = ""
        self._params: dict[str, str] = {}
        self._tags: dict[str, str] = {}
        self._mirror: MlflowMirror | None = None
        self._link: tuple[int, int] | None = None
        self._records: deque[MetricRecord] = deque()  # append and popleft are atomic: no lock
        self._files: deque[Path] = deque()
        self._status: RunStatus | None = None
        self._reached = self._closed = self._warned = False
        self._failures = 0
        self._tries_left = FINAL_RETRIES
        self._wake = threading.Event()  # set when there is something to send
        self._ending = threading.Event()  # set by `finish`
        self._thread = threading.Thread(target=self._send_until_closed, name="mlflow-mirror", daemon=True)

    def start(self, run_name: str, params: Mapping[str, object], tags: Mapping[str, str]) -> None:
        """Start the thread, which connects at once."""
        self._run_name, self._params, self._tags = run_name, flat_params(params), dict(tags)
        self._thread.start()

    def log_metrics(self, step: int, record: Mapping[str, object]) -> None:
        """Queue the finite numbers of `record`; takes microseconds."""
        self._records.append(MetricRecord.of(step, record))
        self._wake.set()

    def finish(self, status: RunStatus, artifacts: Sequence[Path]) -> None:
        """Send the rest, the status and the files within `finish_timeout_s`; report what was not sent."""
        self._status = status
        self._files.extend(artifacts)
        self._ending.set()
        self._wake.set()
        if self._thread.ident is None:  # never started: MLflow knows nothing of this run
            return
        self._wait()
        if not self._closed:
            self._report(self._missing_message())

    def _wait(self) -> None:
        """Wait for the end of the thread, but only `UNREACHABLE_GRACE_S` for a store that does not answer."""
        begin = answered = time.monotonic()
        while self._thread.is_alive():
            now = time.monotonic()
            if self._reached:
                answered = now
            if now - begin >= self._finish_timeout_s or now - answered >= UNREACHABLE_GRACE_S:
                return
            self._thread.join(0.05)

    def _send_until_closed(self) -> None:
        """Send what is queued until the run is closed, or until the last retry after its end; the thread's target."""
        self._note_store()
        while not self._closed and self._tries_left:
            ending = self._ending.is_set()
            try:
                self._send_all()
                self._failures = 0
            except Exception as error:  # noqa: BLE001 - no error of MLflow may reach the training
                self._fail(error)
                if ending:
                    self._tries_left -= 1
            self._pause()

    def _note_store(self) -> None:
        """Write the store into the run folder, so that `bandpo sync` can send the run there later."""
        try:
            if not read_links(self._folder):
                new_link(self._folder, self._store)
        except OSError:  # the training reports a full disk
            pass

    def _send_all(self) -> None:
        """Send the queue, oldest record first; a record leaves it only when MLflow has accepted it."""
        self._wake.clear()  # before reading the queue: a record that is added later wakes the thread again
        ending = self._ending.is_set()
        if not self._reached:
            check_reachable(self._store.uri, CONNECT_TIMEOUT_S)
            self._reached = True
        with send_lock(self._folder):
            try:
                mirror = self._connected()
                if not ending:
                    mirror.reopen()
                while self._records:
                    # By index: iterating a deque fails when the training appends to it meanwhile.
                    batch = [
                        self._records[index] for index in range(min(RECORDS_PER_CALL, len(self._records)))
                    ]
                    mirror.send(batch)
                    for _ in batch:
                        self._records.popleft()
                if ending:
                    self._close(mirror)
            finally:
                self._link = link_version(self._folder)

    def _connected(self) -> MlflowMirror:
        """Return the mirror; connect again if MLflow lost the run or `bandpo sync` sent parts of it."""
        known = self._mirror if link_version(self._folder) == self._link else None
        if known is not None and (not self._failures or known.exists()):
            return known
        self._mirror = None
        mirror = MlflowMirror.connect(self._store, self._folder, self._run_name, self._params, self._tags)
        url = run_url(self._folder, self._store) if is_server(self._store.uri) else None
        if url is not None and self._announce is not None:
            self._announce(f"MLflow: {url}")
            self._announce = None
        backlog = self._backlog()
        for start in range(0, len(backlog), RECORDS_PER_CALL):
            mirror.send(backlog[start : start + RECORDS_PER_CALL])
        self._mirror = mirror
        return mirror

    def _backlog(self) -> list[MetricRecord]:
        """Return the steps that the folder has and the queue lacks: those before a resume."""
        queued = {self._records[index].step for index in range(len(self._records))}
        try:
            return [
                MetricRecord.of(each.step, each.line, each.clock_ms)
                for each in read_records(self._folder)
                if each.step not in queued
            ]
        except (UserError, OSError):
            return []

    def _close(self, mirror: MlflowMirror) -> None:
        """Send the final status and the files."""
        # The status first: a file that cannot be stored must not leave a finished run as RUNNING forever.
        mirror.close(self._status or "FAILED")
        sent: dict[str, str] = {}
        try:
            while self._files:
                file = self._files[0]
                found = file_digest(file)
                mirror.send_file(self._folder, file)
                sent[file.relative_to(self._folder).as_posix()] = found
                self._files.popleft()
        finally:
            record_sent_files(self._folder, self._store, sent)
        self._closed = True

    def _fail(self, error: Exception) -> None:
        """Note a failure; the first one is reported."""
        self._failures += 1
        self._reached = False
        if not self._warned:
            self._warned = True
            self._warn(
                f"MLflow at {redact_credentials(self._store.uri)} cannot be reached ({short_error(error)}). "
                f"The run continues, {self._folder} has everything, and the connection is retried."
            )

    def _pause(self) -> None:
        """Wait until there is something to send, or until the next retry."""
        if self._closed or not self._tries_left:
            return
        if not self._failures:
            self._wake.wait()
        elif self._ending.is_set():
            time.sleep(MIN_RETRY_DELAY_S)
        else:
            self._ending.wait(min(MIN_RETRY_DELAY_S * 2 ** min(self._failures - 1, 10), MAX_RETRY_DELAY_S))

    def _missing_message(self) -> str:
        """Return a line with what MLflow lacks and the command that sends it."""
        parts = []
        if self._records:
            parts.append(f"the metrics of {len(self._records)} steps (from step {self._records[0].step})")
        if self._files:
            parts.append(f"{len(self._files)} files")
        what = " and ".join(parts) or "the end of the run"
        return (
            f"MLflow at {redact_credentials(self._store.uri)} lacks {what}; {self._folder} has everything. "
            f"Send it later with: {sync_command(self._folder, self._folder.parent)}"
        )


class MlflowCallback(CallbackBase):
    """Callback of `train` and `resume` that sends the run to MLflow with an `MlflowTracker`.

    Problems are logged as warnings and never raised: the run folder has everything.
    """

    def __init__(self, config: TrackingConfig) -> None:
        self._config = config
        self._tracker: MlflowTracker | None = None

    def start(self, info: RunInfo) -> None:
        """Start the tracker's thread. The store of a run without `tracking.uri` lies beside the run folder."""
        store = tracking_store(self._config, info.folder.absolute().parent)
        self._tracker = MlflowTracker(store, info.folder, log.warning, announce=log.info)
        self._tracker.start(info.folder.name, info.config, run_tags(info.env, info.parent))

    def step(self, report: StepReport) -> None:
        """Queue the metrics of one step."""
        if self._tracker is not None:
            self._tracker.log_metrics(report.step, report.record)

    def end(self, result: RunResult) -> None:
        """Send the rest, the status and the files of the run folder."""
        if self._tracker is not None:
            self._tracker.finish(result.status, run_artifacts(result.folder))
