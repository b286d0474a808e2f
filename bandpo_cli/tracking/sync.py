"""Upload of run folders to trackers, and of evaluations to MLflow; data that a store has are not sent again.

`metrics.jsonl` is the queue of every tracker. `bandpo sync` sends it with a `Sender`, which for MLflow is `RunSender`;
during training the thread of a `SendingCallback` does, for which the training never waits.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bandpo_cli.callbacks import CallbackBase, RunInfo, RunResult, StepReport
from bandpo_cli.config.run import TrackingConfig
from bandpo_cli.errors import UserError, redact_credentials, user_code_location
from bandpo_cli.storage.files import file_digest
from bandpo_cli.storage.run_folder import read_metrics_after, run_artifacts, shell_command
from bandpo_cli.storage.run_record import StoredRun, read_stored_run
from bandpo_cli.tracking.mirror import MlflowMirror, Sent, flat_params, run_tags
from bandpo_cli.tracking.store import (
    LINK,
    Store,
    check_reachable,
    find_link,
    is_redacted,
    is_server,
    link_version,
    new_link,
    read_links,
    run_url,
    send_lock,
    short_error,
    sqlite_path,
    tracking_store,
    write_link,
)
from bandpo_cli.tracking.trackers import TrackerUnavailableError
from bandpo_cli.types import RunStatus
from bandpo_cli.waits import Wait

log = logging.getLogger("bandpo_cli")

RECORDS_PER_CALL = 50
"""Steps that are converted and sent at a time: some thousand values."""

MIN_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 1.0, 30.0
"""The pause after a failure, in seconds: it doubles from the first value up to the second."""

FINAL_RETRIES = 2
"""Number of attempts on a failing store after the end of the run, `MIN_RETRY_DELAY_S` apart."""

FINISH_TIMEOUT_S = 60.0
"""Seconds that the end of a run waits for a store that answers."""

UNREACHABLE_GRACE_S = 1.5
"""Seconds that the end of a run waits for a store that does not answer: it was tried during the run already."""


@dataclass(frozen=True)
class SyncResult:
    """Counts of what a call sent of a run, and of what MLflow already had.

    Attributes:
        metrics: values sent, already there, and conflicting.
        params, tags, files: numbers sent.
        files_there: number of files that MLflow already had unchanged.
        status: status of the MLflow run after the call.
        ended: whether the call set that status.
        writing: whether a process is still writing the run; that process then sends the files and the final status.
    """

    metrics: Sent
    params: int
    tags: int
    files: int
    files_there: int
    status: str
    ended: bool
    writing: bool


class Sender:
    """Base class of senders of a run folder to one tracker.

    Attributes:
        place: the tracker in messages, without secrets.
        clocks: the time at which each step was done, milliseconds since 1970. A process that trains adds its own steps;
            the times of the others are computed from the folder.
    """

    place: str

    def __init__(self) -> None:
        self.clocks: dict[int, int] = {}

    def prepare(self) -> None:
        """Record in the run folder that the run goes to this tracker."""

    def check(self) -> None:
        """Raise OSError if the tracker does not answer, before its package is imported."""

    def address(self) -> str | None:
        """Return the line that announces where the tracker has the run; None for none."""

    def send(self, status: RunStatus | Literal["RUNNING"] | None = None) -> SyncResult:
        """Send what the tracker lacks; see `RunSender.send`."""
        raise NotImplementedError

    def unsent_steps(self) -> list[int]:
        """Return the steps that the tracker has not accepted."""
        raise NotImplementedError

    def unsent_files(self) -> Mapping[str, str]:
        """Return the files of the run that the tracker lacks, by path."""
        raise NotImplementedError


class RunSender(Sender):
    """Sends a run folder to a store. Every call of `send` continues where the last successful one ended.

    A line of `metrics.jsonl` counts as sent once MLflow has accepted its values. A call that fails can be repeated:
    what MLflow has is not sent again.
    """

    def __init__(self, store: Store, folder: Path) -> None:
        super().__init__()
        self._store, self._folder = store, folder
        self.place = f"MLflow at {redact_credentials(store.uri)}"
        self._connection: tuple[MlflowMirror, StoredRun] | None = None  # None after a failure too
        self._run_id = ""
        self._link: tuple[int, int] | None = None
        self._offset = 0  # of the first line of metrics.jsonl that is not sent

    def prepare(self) -> None:
        if not read_links(self._folder):
            new_link(self._folder, self._store)

    def check(self) -> None:
        check_reachable(self._store.uri)

    def address(self) -> str | None:
        return f"MLflow: {run_url(self._folder, self._store)}" if is_server(self._store.uri) else None

    def send(self, status: RunStatus | Literal["RUNNING"] | None = None) -> SyncResult:
        """Send what MLflow lacks: params, tags, metrics and, of a run that has ended, its status and files.

        Args:
            status: status of the run in the process that trains it; None to take it from the folder.

        Raises:
            UserError: the folder is damaged.
            Exception: any error of MLflow and the network.
        """
        with send_lock(self._folder):
            try:
                mirror, run, tags, params = self._connected()
                if status is not None:
                    mirror.reopen()
                metrics = self._send_metrics(mirror)
                if status is None and metrics.new:
                    (self._folder / LINK).touch()  # the tracker of a process that trains notices it
                final = run.status if status is None else None if status == "RUNNING" else status
                ended = final not in (None, mirror.status)
                # The status first: a file that cannot be stored must not leave a run as RUNNING forever.
                if ended:
                    mirror.close(str(final), run.end_ms if status is None else None)
                files = (0, 0) if final is None else self._send_files(mirror)
            except BaseException:
                self._connection = None  # a batch may have arrived: MLflow is asked for what it has
                raise
            finally:
                self._link = link_version(self._folder)
        return SyncResult(metrics, params, tags, *files, mirror.status, ended, writing=final is None)

    def unsent_steps(self) -> list[int]:
        """Return the steps that MLflow has not accepted yet."""
        records, _ = read_metrics_after(self._folder / "metrics.jsonl", self._offset)
        return [record["step"] for record in records]

    def unsent_files(self, sizes: Mapping[str, int] | None = None) -> dict[str, str]:
        """Return the SHA-256, by path in the folder, of files that differ from those at MLflow, which have `sizes`."""
        link = find_link(self._folder, self._store)
        sent = {} if link is None else link.files
        unsent = {}
        for path in run_artifacts(self._folder):
            name, digest = path.relative_to(self._folder).as_posix(), file_digest(path)
            if sent.get(name) != digest or (sizes is not None and sizes.get(name) != path.stat().st_size):
                unsent[name] = digest
        return unsent

    def _connected(self) -> tuple[MlflowMirror, StoredRun, int, int]:
        """Return the MLflow run, the folder when it was read, and the numbers of tags and params that were sent.

        Both are read again after a failure, because MLflow may have lost the run, and where another process has sent
        parts of it.
        """
        unchanged = link_version(self._folder) == self._link
        if self._connection is not None and unchanged:
            return *self._connection, 0, 0
        run = read_stored_run(self._folder, step_durations)
        parent = run.tracking.get("parent")
        tags = run_tags(run.env, None if parent is None else str(parent))
        mirror = MlflowMirror.connect(self._store, self._folder, tags, run.start_ms)
        sent_tags = mirror.send_missing("tags", tags)
        sent_params = mirror.send_missing("params", flat_params(run.config))
        self.clocks = {**run.clocks, **self.clocks}
        if not unchanged or mirror.run_id != self._run_id:
            self._offset = 0
        self._connection, self._run_id = (mirror, run), mirror.run_id
        return mirror, run, sent_tags, sent_params

    def _send_metrics(self, mirror: MlflowMirror) -> Sent:
        total, path = Sent(0, 0, 0), self._folder / "metrics.jsonl"
        while True:
            records, end = read_metrics_after(path, self._offset, RECORDS_PER_CALL)
            if not records:
                return total
            total = Sent(*map(sum, zip(total, mirror.send(records, self.clocks), strict=True)))
            self._offset = end

    def _send_files(self, mirror: MlflowMirror) -> tuple[int, int]:
        """Send the new and changed files; return the numbers of files sent and of files that MLflow already had."""
        files = run_artifacts(self._folder)
        parents = {path.parent.relative_to(self._folder).as_posix().removeprefix(".") for path in files}
        sent: dict[str, str] = {}
        try:
            for name, digest in self.unsent_files(mirror.files(sorted(parents))).items():
                mirror.send_file(self._folder, self._folder / name)
                sent[name] = digest
        finally:
            if sent and (link := find_link(self._folder, self._store)) is not None:
                write_link(self._folder, replace(link, files={**link.files, **sent}))
        return len(sent), len(files) - len(sent)


def step_durations(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a line of metrics.jsonl from which the times of the steps are computed."""
    return {key: line[key] for key in ("step", "time/step", "time/checkpoint") if key in line}


class SendingCallback(CallbackBase):
    """Callback of `train` and `resume` that sends the run to a tracker on a daemon thread, slow imports included.

    Problems are warnings: the run folder has everything. The first failure is reported, and what could not be sent is
    tried again with a growing pause. What is missing at the end of the run is reported with the command that sends it.
    """

    def __init__(self, open_sender: Callable[[Path], Sender], name: str) -> None:
        """Send to the sender that `open_sender` returns for the run folder; `name` names the thread."""
        self._open_sender = open_sender
        self._status: RunStatus | None = None  # set by `end`
        self._reached = self._closed = self._warned = self._announced = False
        self._failures = 0
        self._tries_left = FINAL_RETRIES
        self._wake = threading.Event()  # set when there is something to send
        self._ending = threading.Event()  # set by `end`
        self._thread = threading.Thread(target=self._send_until_closed, name=f"{name}-mirror", daemon=True)

    def start(self, info: RunInfo) -> None:
        """Start the thread, which connects at once.

        This is called after the imports of the training: two threads that import delay each other.
        """
        self._folder = info.folder
        self._sender = self._open_sender(info.folder)
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
        # `bandpo sync` sends the run to this tracker later; the training reports a full disk.
        with suppress(OSError):
            self._sender.prepare()
        while True:
            ending = self._ending.is_set()
            try:
                advice = f"the run continues without it; to send it later: {self._sync_command()}"
                with Wait(self._sender.place, advice):
                    self._send()
                self._failures = 0
            except TrackerUnavailableError as error:
                log.warning(
                    "%s. The run continues without it; to send it later: %s", error, self._sync_command()
                )
                self._closed = True
            except Exception as error:  # noqa: BLE001 - no error of a tracker may reach the training
                self._failures += 1
                self._reached = False
                if ending:
                    self._tries_left -= 1
                if not self._warned:
                    self._warned = True
                    log.warning(
                        f"{self._sender.place} cannot be reached ({short_error(error)}){user_code_location(error)}. "
                        f"The run continues, {self._folder} has everything, and the connection is retried."
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
        """Send the lines that the tracker has not accepted, and after the end of the run its status and files."""
        self._wake.clear()  # before reading the file: a line that is added later wakes the thread again
        status = self._status
        if not self._reached:
            self._sender.check()
            self._reached = True
        self._sender.send(status or "RUNNING")
        if not self._announced:
            self._announced = True
            if address := self._sender.address():
                log.info("%s", address)
        self._closed = status is not None

    def _sync_command(self) -> str:
        return shell_command("sync", self._folder, self._folder.parent)

    def _missing_message(self) -> str:
        """Return a line with what the tracker lacks and the command that sends it."""
        parts: list[str] = []
        with suppress(UserError, OSError):  # a file of the run is gone or damaged: sync names it
            steps, files = self._sender.unsent_steps(), self._sender.unsent_files()
            parts += [f"the metrics of {len(steps)} steps (from step {steps[0]})"] if steps else []
            parts += [f"{len(files)} files"] if files else []
        what = " and ".join(parts) or "the end of the run"
        return (
            f"{self._sender.place} lacks {what}; {self._folder} has everything. "
            f"Send it later with: {self._sync_command()}"
        )


class MlflowTracker(SendingCallback):
    """Callback that sends the run to MLflow; without `tracking.uri` to a store beside the run folder."""

    def __init__(self, config: TrackingConfig) -> None:
        super().__init__(
            lambda folder: RunSender(tracking_store(config, folder.absolute().parent), folder), "mlflow"
        )


def store_for_run(run: StoredRun, uri: str | None, environ: Mapping[str, str] = os.environ) -> Store:
    """Return the store of `run`: `uri`, else the store of its settings, else the store that it was first sent to.

    A run that was never sent has the store that `bandpo train` would use now, in the runs folder that contains a sweep.
    """
    runs_dir = run.path.absolute().parent
    while (runs_dir / "sweep.yaml").is_file():
        runs_dir = runs_dir.parent
    experiment = str(run.tracking.get("experiment") or TrackingConfig().experiment)
    own = run.tracking.get("uri")
    first = next((link.uri for link in read_links(run.path) if link.experiment == experiment), None)
    database = sqlite_path(first or "")
    if is_redacted(first) or (database is not None and not database.exists()):  # its file has moved
        first = None
    config = TrackingConfig.model_construct(uri=uri or own or first, experiment=experiment)
    return tracking_store(config, runs_dir, environ)


def send_evaluation(
    store: Store,
    folder: Path,
    run_folder: Path | None,
    step: int | None,
    metrics: Mapping[str, float],
    params: Mapping[str, object],
    tags: Mapping[str, str],
    files: Sequence[Path],
) -> Path:
    """Send metrics and files of an evaluation, and return the folder that is linked to the MLflow run that has them.

    They are added to the run that made the model where MLflow has that run; else the evaluation gets a run of its own.
    MLflow keeps the values that were sent before: scoring an evaluation again adds new ones.

    Args:
        run_folder: folder of the run that made the model, None without one.
        step: step of the checkpoint; the metrics appear at this step of the run's curves, at 0 for None.
        metrics: values by name; those that are not finite are left out.
        params, tags: of the MLflow run, where the evaluation has one of its own.
        files: files in `folder`; in the run of `run_folder` they are stored under `evals/<evaluation>/`.

    Raises:
        Exception: any error of MLflow and the network.
    """
    with ExitStack() as stack:
        # Links are written under the lock of the sender. The folder of someone else's run is only read.
        for path in filter(None, (folder, run_folder)):
            if os.access(path, os.W_OK):
                stack.enter_context(send_lock(path))
        parent = None if run_folder is None else MlflowMirror.find(store, run_folder)
        mirror = parent or MlflowMirror.connect(store, folder, tags)
        if parent is None:
            mirror.send_missing("params", flat_params(params))
        mirror.send([{"step": step or 0, **metrics}], {}, again=True)
        for file in files:
            mirror.send_file(folder, file, under=f"evals/{folder.name}" if parent else "")
        if parent is None:
            mirror.close("FINISHED")
        return run_folder if parent and run_folder else folder
