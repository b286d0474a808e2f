"""Outages of trackers: whether a server answers, and the thread that sends a run and tries again, for every tracker.

The run never waits for a tracker before its end, and then only for seconds if the tracker does not answer.
"""

import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from urllib.parse import urlsplit

from bandpo_cli.callbacks import CallbackBase, RunInfo, RunResult, StepReport
from bandpo_cli.config.run import TrackingConfig
from bandpo_cli.errors import UserError, first_line, log, redact_credentials, user_code_location
from bandpo_cli.processes.watch import Wait
from bandpo_cli.storage.run_folder import shell_command
from bandpo_cli.tracking.sender import sender_for
from bandpo_cli.tracking.trackers import TrackerUnavailableError, tracker_class
from bandpo_cli.types import RunStatus

CONNECT_TIMEOUT_S = 10.0  # of `check_reachable`
_DATABASE_PORTS = {"postgresql": 5432, "postgres": 5432, "mysql": 3306, "mariadb": 3306, "mssql": 1433}

MIN_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 1.0, 30.0  # after a failure; it doubles from the first to the second
FINAL_RETRIES = 2  # attempts on a failing store after the end of the run, `MIN_RETRY_DELAY_S` apart
FINISH_TIMEOUT_S = 60.0  # that the end of a run waits for a store that answers
UNREACHABLE_GRACE_S = 1.5  # and for a store that does not answer: it was tried during the run already


def check_reachable(uri: str) -> None:
    """Return when the store `uri` answers, or is of a kind that only MLflow can check (a file, databricks).

    A web server answers with any status below 500, a database server by accepting a connection. This check does not
    import MLflow, which takes seconds of processor time. Raises OSError if there is no answer within
    `CONNECT_TIMEOUT_S`, or a web server answers with an error of its own (5xx).
    """
    try:
        parts = urlsplit(uri)
        scheme, host, port = parts.scheme.partition("+")[0], parts.hostname, parts.port
    except ValueError:  # MLflow reports an invalid address more precisely
        return
    if host is None:
        return
    if scheme in _DATABASE_PORTS:
        socket.create_connection((host, port or _DATABASE_PORTS[scheme]), CONNECT_TIMEOUT_S).close()
    elif scheme in ("http", "https"):
        # The request has no content, so checking the certificate is left to MLflow and its settings.
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        address = f"{scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}/health"
        try:
            urllib.request.urlopen(address, timeout=CONNECT_TIMEOUT_S, context=context).close()
        except urllib.error.HTTPError as error:
            error.close()
            if error.code >= 500:
                raise ConnectionError(f"it answers {error.code} {error.reason}") from None
        except (urllib.error.URLError, HTTPException) as error:
            reason = getattr(error, "reason", None) or f"it does not answer in HTTP ({type(error).__name__})"
            raise ConnectionError(str(reason)) from None


def short_error(error: Exception) -> str:
    """Return the class and first line of an error of a tracker, without credentials, at most 200 characters."""
    return f"{type(error).__name__}: {first_line(redact_credentials(str(error)))}"[:200]


class TrackerCallback(CallbackBase):
    """Callback of `train` and `resume` that sends the run to a tracker on a daemon thread, slow imports included.

    Problems are warnings: the run folder has everything. The first failure is reported, and what could not be sent is
    tried again with a growing pause. What is missing at the end of the run is reported with the command that sends it.
    """

    def __init__(self, name: str, tracking: TrackingConfig) -> None:
        """Send to the tracker `name`. Raises ConfigError if it cannot be used."""
        tracker_class(name)
        self._name, self._tracking = name, tracking
        self._status: RunStatus | None = None  # set by `end`
        self._reached = self._closed = self._announced = False
        self._wake = threading.Event()  # set when there is something to send
        self._ending = threading.Event()  # set by `end`
        self._thread = threading.Thread(target=self._send_until_closed, name=f"{name}-sender", daemon=True)

    def start(self, info: RunInfo) -> None:
        """Start the thread, which connects at once; two threads that import would delay each other before."""
        self._folder = info.folder
        self._sender = sender_for(self._name, info.folder, self._tracking)
        self._sync_command = shell_command("sync", info.folder, info.folder.parent)
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
        if self._thread.ident is None:  # never started: the tracker knows nothing of this run
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
        later = f"to send it later: {self._sync_command}"
        failures, tries_left, warned = 0, FINAL_RETRIES, False
        while True:
            ending = self._ending.is_set()
            try:
                with Wait(self._sender.place, f"the run continues without it; {later}"):
                    self._send()
                failures = 0
            except TrackerUnavailableError as error:
                log.warning("%s. The run continues without it; %s", error, later)
                self._closed = True
            except Exception as error:  # noqa: BLE001 - no error of a tracker may reach the training
                failures, tries_left, self._reached = failures + 1, tries_left - ending, False
                if not warned:
                    warned = True
                    log.warning(
                        f"{self._sender.place} cannot be reached ({short_error(error)}){user_code_location(error)}. "
                        f"The run continues, {self._folder} has everything, and the connection is retried."
                    )
            if self._closed or not tries_left:
                return
            if not failures:
                self._wake.wait()
            elif self._ending.is_set():
                time.sleep(MIN_RETRY_DELAY_S)
            else:
                delay = MIN_RETRY_DELAY_S * 2 ** min(failures - 1, 10)
                self._ending.wait(min(delay, MAX_RETRY_DELAY_S))

    def _send(self) -> None:
        """Send the lines that the tracker has not accepted, and after the end of the run its status and files."""
        self._wake.clear()  # before reading the file: a line that is added later wakes the thread again
        status = self._status
        if not self._reached:
            check_reachable(self._sender.server(record=True))
            self._reached = True
        self._sender.send(status or "RUNNING")
        if not self._announced:
            self._announced = True
            if address := self._sender.address():
                log.info("%s", address)
        self._closed = status is not None

    def _missing_message(self) -> str:
        """Return a line with what the tracker lacks and the command that sends it."""
        parts: list[str] = []
        with suppress(UserError, OSError):  # a file of the run is gone or damaged: sync names it
            steps, files = self._sender.unsent()
            parts += [f"the metrics of {len(steps)} steps (from step {steps[0]})"] if steps else []
            parts += [f"{len(files)} files"] if files else []
        lacks = f"{self._sender.place} lacks {' and '.join(parts) or 'the end of the run'}"
        return f"{lacks}; {self._folder} has everything. Send it later with: {self._sync_command}"
