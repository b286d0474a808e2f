"""MLflow tracker of a training run: a thread sends what the run folder has, and training never waits for it."""

import logging
import threading
import time
from contextlib import suppress

from bandpo_cli.callbacks import CallbackBase, RunInfo, RunResult, StepReport
from bandpo_cli.config.run import TrackingConfig
from bandpo_cli.errors import UserError, redact_credentials
from bandpo_cli.storage.run_folder import sync_command
from bandpo_cli.tracking.store import (
    check_reachable,
    is_server,
    new_link,
    read_links,
    run_url,
    short_error,
    tracking_store,
)
from bandpo_cli.tracking.sync import RunSender
from bandpo_cli.types import RunStatus

log = logging.getLogger("bandpo_cli")

MIN_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 1.0, 30.0
"""The pause after a failure, in seconds: it doubles from the first value up to the second."""

FINAL_RETRIES = 2
"""Number of attempts on a failing store after the end of the run, `MIN_RETRY_DELAY_S` apart."""

FINISH_TIMEOUT_S = 60.0
"""Seconds that the end of a run waits for a store that answers."""

UNREACHABLE_GRACE_S = 1.5
"""Seconds that the end of a run waits for a store that does not answer: it was tried during the run already."""


class MlflowTracker(CallbackBase):
    """Callback of `train` and `resume` that sends the run to MLflow on a daemon thread, MLflow's slow import included.

    Problems are warnings: the run folder has everything. The first failure is reported, and what could not be sent is
    tried again with a growing pause. What is missing at the end of the run is reported with the command that sends it.
    """

    def __init__(self, config: TrackingConfig) -> None:
        self._config = config
        self._status: RunStatus | None = None  # set by `end`
        self._reached = self._closed = self._warned = self._announced = False
        self._failures = 0
        self._tries_left = FINAL_RETRIES
        self._wake = threading.Event()  # set when there is something to send
        self._ending = threading.Event()  # set by `end`
        self._thread = threading.Thread(target=self._send_until_closed, name="mlflow-mirror", daemon=True)

    def start(self, info: RunInfo) -> None:
        """Start the thread, which connects at once.

        The store of a run without `tracking.uri` lies beside the run folder. This is called after the imports of the
        training: two threads that import delay each other.
        """
        self._folder = info.folder
        self._store = tracking_store(self._config, info.folder.absolute().parent)
        self._sender = RunSender(self._store, self._folder)
        self._thread.start()

    def step(self, report: StepReport) -> None:
        """Let the thread send the line of the step, which is in metrics.jsonl; takes microseconds."""
        self._sender.clocks[report.step] = int(time.time() * 1000)
        self._wake.set()

    def end(self, result: RunResult) -> None:
        """Send the rest, the status and the files within `FINISH_TIMEOUT_S`; report what was not sent."""
        self._status = result.status
        self._ending.set()
        self._wake.set()
        if self._thread.ident is None:  # never started: MLflow knows nothing of this run
            return
        begin = answered = now = time.monotonic()
        while self._thread.is_alive() and now < min(begin + FINISH_TIMEOUT_S, answered + UNREACHABLE_GRACE_S):
            self._thread.join(0.05)
            now = time.monotonic()
            answered = now if self._reached else answered
        if not self._closed:
            log.warning("%s", self._missing_message())

    def _send_until_closed(self) -> None:
        """Send what is new until the run is closed, or until the last retry after its end; the thread's target."""
        # `bandpo sync` sends the run to this store later; the training reports a full disk.
        with suppress(OSError):
            if not read_links(self._folder):
                new_link(self._folder, self._store)
        while True:
            ending = self._ending.is_set()
            try:
                self._send()
                self._failures = 0
            except Exception as error:  # noqa: BLE001 - no error of MLflow may reach the training
                self._failures += 1
                self._reached = False
                if ending:
                    self._tries_left -= 1
                if not self._warned:
                    self._warned = True
                    log.warning(
                        "MLflow at %s cannot be reached (%s). The run continues, %s has everything, and the "
                        "connection is retried.",
                        redact_credentials(self._store.uri),
                        short_error(error),
                        self._folder,
                    )
            if self._closed or not self._tries_left:
                return
            if not self._failures:
                self._wake.wait()
            elif self._ending.is_set():
                time.sleep(MIN_RETRY_DELAY_S)
            else:
                delay = MIN_RETRY_DELAY_S * 2 ** min(self._failures - 1, 10)
                self._ending.wait(min(delay, MAX_RETRY_DELAY_S))

    def _send(self) -> None:
        """Send the lines that MLflow has not accepted, and after the end of the run its status and files."""
        self._wake.clear()  # before reading the file: a line that is added later wakes the thread again
        status = self._status
        if not self._reached:
            check_reachable(self._store.uri)
            self._reached = True
        self._sender.send(status or "RUNNING")
        if not self._announced:
            self._announced = True
            if is_server(self._store.uri):
                log.info("MLflow: %s", run_url(self._folder, self._store))
        self._closed = status is not None

    def _missing_message(self) -> str:
        """Return a line with what MLflow lacks and the command that sends it."""
        parts: list[str] = []
        with suppress(UserError, OSError):  # a file of the run is gone or damaged: sync names it
            steps, files = self._sender.unsent_steps(), self._sender.unsent_files()
            parts += [f"the metrics of {len(steps)} steps (from step {steps[0]})"] if steps else []
            parts += [f"{len(files)} files"] if files else []
        what = " and ".join(parts) or "the end of the run"
        return (
            f"MLflow at {redact_credentials(self._store.uri)} lacks {what}; {self._folder} has everything. "
            f"Send it later with: {sync_command(self._folder, self._folder.parent)}"
        )
