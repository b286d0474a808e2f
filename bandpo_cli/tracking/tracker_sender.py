"""Upload of run folders and reports of sweeps to the trackers beside MLflow.

`<tracker>.json` in the folder has the identifier of the run at the tracker and what the tracker has accepted: `step`,
`status` and `files` (SHA-256 by path), at `destination`; `where` is its address.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from uuid import uuid4

from bandpo_cli.config.layers import flatten, nest, read_layer
from bandpo_cli.config.run import TrackingConfig
from bandpo_cli.custom_code import exits_as_errors
from bandpo_cli.errors import redact_credentials
from bandpo_cli.storage.files import file_digest, wait_for_lock, write_json
from bandpo_cli.storage.run_folder import read_metrics_after, run_artifacts
from bandpo_cli.storage.run_record import StoredRun, read_stored_run, read_summary
from bandpo_cli.tracking.mirror import Sent, finite_metrics
from bandpo_cli.tracking.store import check_reachable
from bandpo_cli.tracking.sync import RECORDS_PER_CALL, Sender, SendingCallback, SyncResult, step_durations
from bandpo_cli.tracking.trackers import Point, TrackedRun, Tracker, tracker_class
from bandpo_cli.types import RunStatus


def tracker_callback(name: str) -> SendingCallback:
    """Return the callback that sends a run to the tracker `name`. Raises ConfigError if it cannot be used."""
    tracker_class(name)
    return SendingCallback(lambda folder: TrackerSender(name, folder), name)


class TrackerSender(Sender):
    """Sends a folder to a tracker. A run that another process is writing is left to that process."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__()
        self._folder, self._class = folder, tracker_class(name)
        self.place = self._class.title or name
        self._path = folder / f"{name.replace(':', '.')}.json"
        self._lock = folder / f".{self._path.stem}.lock"
        self._state: dict[str, Any] = {}
        self._tracker: Tracker | None = None
        self._offset = 0  # of the first line of metrics.jsonl that is not sent

    def check(self) -> None:
        """Raise OSError if the tracker has an address on the network that does not answer."""
        if self._tracker is None:
            config = read_layer(self._folder / "config.yaml").get("tracking") or {}
            parts = urlsplit(self._class.destination(_project(config)))
            if parts.scheme in ("http", "https"):
                check_reachable(f"{parts.scheme}://{parts.netloc}")

    def address(self) -> str | None:
        """Return the title of the tracker and where the run is."""
        where = self._state.get("where")
        return f"{self.place}: {where}" if where else None

    def send(self, status: RunStatus | Literal["RUNNING"] | None = None) -> SyncResult:
        with wait_for_lock(self._lock), self._closed_on_error():
            run = None if self._tracker else read_stored_run(self._folder, step_durations)
            if status is None and run is not None:
                status = run.status or "RUNNING"
                if run.status is None:
                    return SyncResult(Sent(0, 0, 0), 0, 0, 0, 0, status, False, writing=True)
            ended, files = status != "RUNNING", run_artifacts(self._folder)
            digests = (
                {str(path.relative_to(self._folder)): file_digest(path) for path in files} if ended else {}
            )
            if run is not None:
                self._read_state(_project(run.tracking))
                last = run.records[-1]["step"] if run.records else -1
                if (last, status, digests) == tuple(map(self._state.get, ("step", "status", "files"))):
                    return SyncResult(Sent(0, 0, 0), 0, 0, 0, len(files), str(status), False, writing=False)
                self._open(_project(run.tracking), _public_config(run))
                self.clocks, self._offset = {**run.clocks, **self.clocks}, 0
            assert self._tracker is not None
            sent = self._send_metrics(self._tracker)
            if ended:
                summary = read_summary(self._folder)
                content = {} if summary is None else {**summary.content, "last_step": None}  # metrics have it
                self._finish(str(status), {k: v for k, v in content.items() if v is not None}, files)
                self._update(files=digests)
            return SyncResult(sent, 0, 0, len(digests), 0, str(status), ended, writing=not ended)

    def send_sweep(
        self, project: str, config: Mapping[str, Any], point: Point, status: str, files: Sequence[Path]
    ) -> None:
        """Send the report of the sweep in the folder as a run of the sweep's group. Raises any error of the tracker.

        The step of `point` is the number of finished runs: a resumed sweep adds a point.
        """
        with wait_for_lock(self._lock), self._closed_on_error():
            self._read_state(project)
            tracker = self._open(project, config, "sweep")
            if point.step > tracker.last_step:
                tracker.log([point])
                self._update(step=point.step)
            self._finish(status, point.metrics, files)

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            with exits_as_errors(self.place):
                yield
        except BaseException:
            if self._tracker is not None:
                with suppress(Exception):
                    self._tracker.close()
            self._tracker = None
            raise

    def _update(self, **changes: Any) -> None:
        self._state |= changes
        write_json(self._path, self._state)

    def _read_state(self, project: str) -> None:
        """Read `<tracker>.json`; keep only the identifier if the last call sent the run to another destination.

        The identifier is written before it is used: a tracker may have a run whose creation it did not answer.
        """
        destination = self._class.destination(project)
        with suppress(OSError, ValueError):
            self._state = dict(json.loads(self._path.read_text(encoding="utf-8")))
        if self._state.get("destination") != destination:
            self._state = {"id": self._state.get("id") or uuid4().hex[:16]}
            self._update(destination=destination)

    def _open(self, project: str, config: Mapping[str, Any], kind: str = "train") -> Tracker:
        sweep = self._folder.absolute() if kind == "sweep" else self._folder.absolute().parent
        group = sweep.name if (sweep / "sweep.yaml").is_file() else None
        about = self._state["id"], project, group, kind, config, self._state.get("step", -1)
        self._tracker = tracker = self._class(TrackedRun(self._folder, *about))
        self._update(where=tracker.where, step=tracker.last_step, status="RUNNING")
        return tracker

    def _send_metrics(self, tracker: Tracker) -> Sent:
        new = there = 0
        while True:
            records, end = read_metrics_after(self._folder / "metrics.jsonl", self._offset, RECORDS_PER_CALL)
            if not records:
                return Sent(new, there, 0)
            now, last = int(time.time() * 1000), self._state["step"]
            points = [Point(r["step"], self.clocks.get(r["step"], now), finite_metrics(r)) for r in records]
            unsent = [point for point in points if point.step > last]
            if unsent:
                tracker.log(unsent)
                self._update(step=unsent[-1].step)
            new += sum(len(point.metrics) for point in unsent)
            there += sum(len(point.metrics) for point in points if point.step <= last)
            self._offset = end

    def _finish(self, status: str, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        assert self._tracker is not None
        self._tracker.finish(status, summary, files)
        self._tracker = None
        self._update(status=status)

    def unsent_steps(self) -> list[int]:
        records, _ = read_metrics_after(self._folder / "metrics.jsonl", self._offset)
        return [record["step"] for record in records if record["step"] > self._state.get("step", -1)]

    def unsent_files(self) -> dict[str, str]:
        """Return all files of the run: they are sent together at its end."""
        return dict.fromkeys(map(str, run_artifacts(self._folder)), "")


def _project(tracking: Mapping[str, Any]) -> str:
    return str(tracking.get("experiment") or TrackingConfig().experiment)


def _public_config(run: StoredRun) -> dict[str, Any]:
    """Return the settings of a run, nested, and its environment, with passwords in addresses redacted."""
    environment = {key: run.env[key] for key in ("command", "git", "versions") if key in run.env}
    flat = flatten({**run.config, "environment": environment}, keep_empty=True)
    return nest({key: redact_credentials(v) if isinstance(v, str) else v for key, v in flat.items()})


def tracker_places(names: Sequence[str], folder: Path) -> list[tuple[str, str]]:
    """Return the name of each tracker and where it has the run in `folder`, of those that have it."""
    places: dict[str, str] = {}
    for name in names:
        with suppress(OSError, ValueError, KeyError, TypeError):
            places[name] = json.loads((folder / f"{name.replace(':', '.')}.json").read_text())["where"]
    return [*places.items()]
