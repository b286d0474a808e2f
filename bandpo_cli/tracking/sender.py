"""Sender of a run folder to any tracker, for `bandpo sync` and `TrackerCallback`: `metrics.jsonl` is the queue."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bandpo_cli.config.layers import flatten, nest, read_layer
from bandpo_cli.config.run import TrackingConfig
from bandpo_cli.errors import exits_as_errors, redact_credentials
from bandpo_cli.storage.files import file_digest, read_metrics_after, step_of
from bandpo_cli.storage.run_record import StoredRun, read_stored_run, read_summary
from bandpo_cli.tracking.mlflow_store import MLFLOW, Store, tracking_store, ui_text
from bandpo_cli.tracking.mlflow_tracker import mlflow_tracker
from bandpo_cli.tracking.trackers import (
    Point,
    Sent,
    TrackedRun,
    Tracker,
    find_place,
    finite_metrics,
    open_place,
    read_places,
    send_lock,
    tracker_class,
    write_place,
)
from bandpo_cli.types import RunStatus

RECORD_FILES = ("config.yaml", "env.json", "metrics.jsonl", "summary.json")

MAX_SAMPLE_FILES = 20  # of completions that MLflow gets of a run
RECORDS_PER_CALL = 50  # steps that are converted and sent at a time: some thousand values


@dataclass(frozen=True)
class SyncResult:
    """Counts of what a call sent of a run, and of what the tracker already had.

    Attributes:
        metrics: values sent, already there, and conflicting.
        params, tags, files: numbers sent.
        files_there: number of files that the tracker already had unchanged.
        status: status of the run there after the call.
        ended: whether the call set that status.
        writing: whether a process is still writing the run; that process then sends the files and the final status.
    """

    metrics: Sent
    params: int = 0
    tags: int = 0
    files: int = 0
    files_there: int = 0
    status: str = "RUNNING"
    ended: bool = False
    writing: bool = False


class RunSender:
    """Sends a folder to a tracker. Every call of `send` continues where the last successful one ended.

    A line of `metrics.jsonl` counts as sent once the tracker has accepted its values. After an error the tracker is
    opened again, so that a call that fails can be repeated.

    Attributes:
        place: the tracker in messages, without secrets.
        clocks: the time at which each step was done, milliseconds since 1970. A process that trains adds its own steps;
            the times of the others are computed from the folder.
    """

    def __init__(self, name: str, folder: Path, store: Store | None = None) -> None:
        """Send `folder` to the tracker `name`; MLflow needs the store."""
        self._name, self._folder = name, folder
        self._class = tracker_class(name) if store is None else mlflow_tracker(store)
        self._project = None if store is None else store.experiment
        self.place = self._class.title or name
        if store is not None:
            self.place += f" at {store.destination}"
        self.clocks: dict[int, int] = {}
        self._state = None if store is None else store.place(folder)
        self._tracker: Tracker | None = None  # None after a failure too
        self._ended: RunStatus | None = None  # the status of the folder when the tracker was opened
        self._offset = 0  # of the first line of metrics.jsonl that is not sent

    def server(self, record: bool = False) -> str:
        """Return the address that must answer before the tracker's package is imported.

        With `record`, first record in the folder that the run goes to this tracker, for `bandpo sync`.
        """
        project = self._project or _project(read_layer(self._folder / "config.yaml").get("tracking") or {})
        destination = self._class.destination(project)
        if record and not read_places(self._folder, self._name):
            with suppress(OSError):  # the training reports a full disk
                open_place(self._folder, self._name, destination, project)
        return self._class.server(destination)

    def address(self) -> str | None:
        """Return the line that announces where the tracker has the run; None for none."""
        where = self._state.where if self._state else ""
        return f"{self._class.title or self._name}: {where}" if where else None

    def send(self, status: RunStatus | Literal["RUNNING"] | None = None) -> SyncResult:
        """Send what the tracker lacks: settings, metrics and, of a run that has ended, its status and files.

        `status` is that of the run in the process that trains it; without one it is taken from the folder. Raises
        UserError if the folder is damaged, or the user has to do something first; and any error of the tracker and the
        network.
        """
        with self._locked():
            params = tags = 0
            files = run_artifacts(self._folder)
            if self._tracker is None:
                run = read_stored_run(self._folder)
                final, project = status or run.status, self._project or _project(run.tracking)
                if not self._class.compares and final != "RUNNING":
                    if final is None:
                        return SyncResult(Sent(), writing=True)
                    state = open_place(self._folder, self._name, self._class.destination(project), project)
                    last = run.records[-1]["step"] if run.records else -1
                    if (state.step, state.status, state.files) == (last, final, self._digests(files)):
                        return SyncResult(Sent(), files_there=len(files), status=final)
                end_ms = None if status else run.end_ms
                about: dict[str, Any] = {"env": run.env, "start_ms": run.start_ms, "end_ms": end_ms}
                opened = self._open(project, _public_config(run), **about)
                self.clocks, self._offset, self._ended = {**run.clocks, **self.clocks}, 0, run.status
                params, tags = opened.new_params, opened.new_tags
            assert self._tracker is not None
            tracker = self._tracker
            if status is not None:
                tracker.reopen()
            metrics = self._send_metrics(tracker)
            final = status or self._ended
            if final is None or final == "RUNNING":
                return SyncResult(metrics, params, tags, status=tracker.status, writing=True)
            ended = final != tracker.status
            summary = read_summary(self._folder)
            content = {} if summary is None else {**summary.content, "last_step": None}  # metrics have it
            sent = self._finish(final, {k: v for k, v in content.items() if v is not None}, files)
            return SyncResult(metrics, params, tags, sent, len(files) - sent, final, ended)

    def open_sweep(self, project: str, config: Mapping[str, Any], env: Mapping[str, Any]) -> Tracker:
        """Open the run of the sweep in the folder as RUNNING, before the runs of the sweep."""
        with self._locked():
            tracker = self._open(project, config, kind="sweep", env=env)
            tracker.reopen()
            return tracker

    def send_sweep(
        self, project: str, config: Mapping[str, Any], point: Point, status: str, files: Sequence[Path],
        description: str = "",
    ) -> None:  # fmt: skip
        """Send the report of the sweep in the folder as a run of the sweep's group. Raises any error of the tracker.

        The step of `point` is the number of finished runs: a resumed sweep adds a point.
        """
        with self._locked():
            tracker = self._tracker or self._open(project, config, kind="sweep")
            if tracker.compares or point.step > tracker.last_step:
                tracker.log([point])
                self._update(step=point.step)
            tracker.describe(description)
            self._finish(status, point.metrics, files)

    def unsent(self) -> tuple[list[int], list[str]]:
        """Return the steps and the files of the run, by path in its folder, that the tracker lacks."""
        records, _ = read_metrics_after(self._folder / "metrics.jsonl", self._offset)
        last, sent = (self._state.step, self._state.files) if self._state else (-1, {})
        digests = self._digests(run_artifacts(self._folder))
        steps = [record["step"] for record in records if record["step"] > last]
        return steps, [name for name, digest in digests.items() if sent.get(name) != digest]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock for sending, and close the tracker after an error, or if another process has sent the run."""
        with send_lock(self._folder, self._name):
            try:
                known = self._state
                there = known and find_place(self._folder, self._name, known.destination, known.project)
                if self._tracker is not None and there != known:
                    self._tracker.close()
                    self._tracker = None
                with exits_as_errors(self.place):
                    yield
            except BaseException:
                with suppress(Exception):
                    if self._tracker is not None:
                        self._tracker.close()
                self._tracker = None
                raise

    def _update(self, **changes: Any) -> None:
        """Record what the tracker has."""
        assert self._state is not None
        if (state := replace(self._state, **changes)) != self._state:
            write_place(self._folder, self._name, state)
        self._state = state

    def _open(self, project: str, config: Mapping[str, Any], kind: str = "train", **about: Any) -> Tracker:
        """Open the run, which is recorded first: a tracker may have a run whose creation it did not answer."""
        self._state = state = open_place(self._folder, self._name, self._class.destination(project), project)
        sweep = self._folder.absolute() if kind == "sweep" else self._folder.absolute().parent
        group = sweep.name if (sweep / "sweep.yaml").is_file() else None
        # A store that has moved has the files of the first place.
        moved = self._class.compares and not state.remote_id
        files = read_places(self._folder, self._name)[0].files if moved else state.files
        known = {**vars(state), "files": files}
        run = TrackedRun(**known, folder=self._folder, group=group, kind=kind, config=config, **about)
        self._tracker = tracker = self._class(run)
        self._update(
            remote_id=tracker.remote_id, where=tracker.where, step=tracker.last_step, status=tracker.status,
            files=dict(tracker.sent_files) if tracker.compares else state.files,
        )  # fmt: skip
        return tracker

    def _send_metrics(self, tracker: Tracker) -> Sent:
        total = Sent()
        assert self._state is not None
        recorded = -1 if tracker.compares else self._state.step
        while True:
            records, end = read_metrics_after(self._folder / "metrics.jsonl", self._offset, RECORDS_PER_CALL)
            if not records:
                return total
            now = int(time.time() * 1000)
            points = [Point(r["step"], self.clocks.get(r["step"], now), finite_metrics(r)) for r in records]
            unsent = [point for point in points if point.step > recorded]
            there = sum(len(point.metrics) for point in points if point.step <= recorded)
            sent = tracker.log(unsent) if unsent else Sent()
            if sent is None:
                sent = Sent(sum(len(point.metrics) for point in unsent))
            total = Sent(*map(sum, zip(total, sent, Sent(there=there), strict=True)))
            self._update(step=max(self._state.step, points[-1].step))
            self._offset = end

    def _finish(self, status: str, summary: Mapping[str, Any], files: Sequence[Path]) -> int:
        """End the run, and return the number of files that were sent."""
        digests, tracker = self._digests(files), self._tracker
        assert tracker is not None
        try:
            sent = tracker.finish(status, summary, files)
        except BaseException:
            if tracker.compares:  # it sends one file after the other
                self._update(status=tracker.status, files=dict(tracker.sent_files))
            raise
        self._tracker = None
        self._update(status=status, files=digests)
        return len(files) if sent is None else sent

    def _digests(self, files: Sequence[Path]) -> dict[str, str]:
        return {path.relative_to(self._folder).as_posix(): file_digest(path) for path in files}


def run_artifacts(folder: Path) -> list[Path]:
    """Return the files of the run in `folder` that MLflow gets; checkpoints and token tables are not among them.

    They are `RECORD_FILES`, custom code, the evaluations, the plots and the completions. Of more than
    `MAX_SAMPLE_FILES` files of completions, MLflow gets that many: those of the first, the last and the latest
    evaluated steps.
    """
    files = [folder / name for name in RECORD_FILES if (folder / name).is_file()]
    files += sorted(folder.glob("*.py"))
    evaluations = sorted((folder / "evals").glob("step-*.json"))
    plots = sorted((folder / "plots").glob("*.png"))
    samples = sorted((folder / "samples").glob("step-*.parquet"))
    if len(samples) > MAX_SAMPLE_FILES:
        evaluated = {step_of(path) for path in evaluations}
        between = [path for path in samples[1:-1] if step_of(path) in evaluated]
        samples = [samples[0], *between[-(MAX_SAMPLE_FILES - 2) :], samples[-1]]
    return files + evaluations + plots + samples


def sender_for(name: str, folder: Path, tracking: TrackingConfig) -> RunSender:
    """Return the sender of the run in `folder` to the tracker `name`, MLflow with the store of its settings."""
    store = tracking_store(tracking, folder.absolute().parent) if name == MLFLOW else None
    return RunSender(name, folder, store)


def tracker_rows(tracking: TrackingConfig, folder: Path) -> list[tuple[str, str]]:
    """Return the name of each tracker of a run and where it has the run, of those that have it, MLflow always."""
    rows = []
    for name in tracking.names:
        if name == MLFLOW:
            rows.append(("MLflow", ui_text(folder, tracking_store(tracking, folder.absolute().parent))))
        else:
            rows += [(name, place.where) for place in read_places(folder, name)[-1:] if place.where]
    return rows


def _project(tracking: Mapping[str, Any]) -> str:
    return str(tracking.get("experiment") or TrackingConfig().experiment)


def _public_config(run: StoredRun) -> dict[str, Any]:
    """Return the settings of a run, nested, and its environment, with passwords in addresses redacted."""
    environment = {key: run.env[key] for key in ("command", "git", "versions") if key in run.env}
    flat = flatten({**run.config, "environment": environment}, keep_empty=True)
    return nest({key: redact_credentials(v) if isinstance(v, str) else v for key, v in flat.items()})
