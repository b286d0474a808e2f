"""One run's record at MLflow, call by call: for the tracker's thread, and for sending a run later.

Every call either does its work or raises what MLflow and the network raise. Doing it twice does no harm: a
run that is there is gone on with, and a step that it has is not sent again.

What MLflow 3.17 does, by its source and by trial: its import takes 1 to 2 s and a new SQLite file 2 s more,
all on the processor; two threads call home unless told not to; a refused connection is tried for 4 minutes;
a metric can neither be changed nor taken back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

from bandpo_cli.storage.environment import redact_credentials
from bandpo_cli.tracking.link import KEY_TAG, new_link, read_links, write_link
from bandpo_cli.tracking.names import MAX_METRICS_PER_BATCH, MAX_PARAMS_PER_BATCH, finite_metrics
from bandpo_cli.tracking.store import Store, create_sqlite_store

_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",  # else each new database tells of its migrations on stderr
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the tracker tries again itself, and knows when the run ends
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


@dataclass(frozen=True)
class MetricRecord:
    """The metrics of one step, with the clock of when they were taken (milliseconds since 1970)."""

    step: int
    metrics: Mapping[str, float]
    clock_ms: int

    @classmethod
    def of(cls, step: int, record: Mapping[str, object], clock_ms: int | None = None) -> MetricRecord:
        """Return the finite numbers of `record`, stamped now if no clock is given."""
        return cls(step, finite_metrics(record), int(time.time() * 1000) if clock_ms is None else clock_ms)


class Sent(NamedTuple):
    """Metric values by what became of them.

    Attributes:
        new: sent now.
        there: already there for their step.
        differing: of `there`, those of which MLflow has another value at that step and keeps it.
    """

    new: int
    there: int
    differing: int


class MlflowMirror:
    """A run at MLflow.

    Attributes:
        run_id: MLflow's own name for the run.
        status: how MLflow shows the run: RUNNING, FINISHED, ...
    """

    def __init__(self, client: Any, run_id: str, there: Any = None) -> None:
        """`there` is the run as MLflow has it; without it everything that is sent counts as new."""
        self._client = client
        self.run_id = run_id
        self.status = "RUNNING" if there is None else str(there.info.status)
        self.params: dict[str, str] = {} if there is None else dict(there.data.params)
        self.tags: dict[str, str] = {} if there is None else dict(there.data.tags)
        self._uncertain: set[str] = set() if there is None else set(there.data.metrics)
        self._seen: dict[str, dict[int, float]] = {}

    @classmethod
    def connect(
        cls,
        store: Store,
        folder: Path,
        run_name: str,
        params: Mapping[str, str],
        tags: Mapping[str, str],
        start_ms: int | None = None,
    ) -> MlflowMirror:
        """Make the run that mirrors `folder`, or go on with the one that `folder` is linked to.

        Params that the run has already stay as they are (MLflow allows no change). A new run begins at `start_ms`,
        milliseconds since 1970, or now.
        """
        client = _client(store.uri)
        mirror = _linked(cls, client, store, folder) or _make(
            cls, client, store, folder, run_name, tags, start_ms
        )
        mirror.send_params(params)
        return mirror

    @classmethod
    def find(cls, store: Store, folder: Path) -> MlflowMirror | None:
        """Return the run that mirrors `folder`, None where there is none; nothing of it is changed.

        What is sent is added, whatever the run has at that step: a later evaluation does not replace an earlier one.
        """
        client = _client(store.uri)
        found = _linked(cls, client, store, folder)
        return None if found is None else cls(client, found.run_id)

    def is_there(self) -> bool:
        """Tell whether MLflow still has the run: it may have been deleted, or the database begun anew."""
        return _active_run(self._client, self.run_id) is not None

    def send(self, records: Iterable[MetricRecord]) -> Sent:
        """Send the metrics of `records` that the run does not have yet, in as few calls as MLflow allows."""
        from mlflow.entities import Metric

        metrics: dict[tuple[str, int], Any] = {}
        there = differing = 0
        for record in records:
            for name, value in record.metrics.items():
                seen = self._history(name)
                if record.step in seen:
                    there += 1
                    differing += seen[record.step] != value
                else:
                    metrics.setdefault((name, record.step), Metric(name, value, record.clock_ms, record.step))
        for batch in _batches(metrics.values(), MAX_METRICS_PER_BATCH):
            self._send_batch(batch)
        return Sent(len(metrics), there, differing)

    def send_params(self, params: Mapping[str, str]) -> int:
        """Send the params that the run has not got, and return how many."""
        from mlflow.entities import Param

        missing = {key: value for key, value in params.items() if key not in self.params}
        for batch in _batches(missing.items(), MAX_PARAMS_PER_BATCH):
            self._client.log_batch(self.run_id, params=[Param(*item) for item in batch], synchronous=True)
            self.params.update(batch)
        return len(missing)

    def send_tags(self, tags: Mapping[str, str]) -> int:
        """Send the tags that the run has not got, and return how many."""
        from mlflow.entities import RunTag

        missing = {key: value for key, value in tags.items() if key not in self.tags}
        if missing:
            self._client.log_batch(
                self.run_id, tags=[RunTag(*item) for item in missing.items()], synchronous=True
            )
        self.tags.update(missing)
        return len(missing)

    def send_file(self, folder: Path, file: Path, under: str = "") -> None:
        """Send `file`, which lies in `folder`, under the same path, below `under` if that is given."""
        place = (PurePosixPath(under) / file.relative_to(folder).parent.as_posix()).as_posix()
        self._client.log_artifact(self.run_id, str(file), None if place == "." else place)

    def files(self, under: Iterable[str] = ("",)) -> dict[str, int]:
        """Return the sizes in bytes of the files that the run has directly in the folders `under`, by path."""
        return {
            each.path: each.file_size
            for folder in under
            for each in self._client.list_artifacts(self.run_id, folder or None)
            if not each.is_dir
        }

    def reopen(self) -> None:
        """Show a run that had ended as running again."""
        if self.status != "RUNNING":
            self._client.update_run(self.run_id, status="RUNNING")
            self.status = "RUNNING"

    def close(self, status: str, end_ms: int | None = None) -> None:
        """End the run as FINISHED, FAILED or KILLED, at `end_ms` (milliseconds since 1970) or now."""
        self._client.set_terminated(self.run_id, status, end_ms)
        self.status = status

    def _send_batch(self, batch: list[Any]) -> None:
        names = {metric.key for metric in batch}
        try:
            self._client.log_batch(self.run_id, metrics=batch, synchronous=True)
        except BaseException:
            # Whether it has arrived, nobody knows: before these are sent again, MLflow is asked.
            self._uncertain |= names
            for name in names:
                self._seen.pop(name, None)
            raise
        for metric in batch:
            self._history(metric.key)[metric.step] = metric.value

    def _history(self, name: str) -> dict[int, float]:
        """Return the values of `name` that the run has, by step; asked of MLflow only where it may know more."""
        if name not in self._seen:
            asked = self._client.get_metric_history(self.run_id, name) if name in self._uncertain else []
            self._seen[name] = {metric.step: metric.value for metric in asked}
        return self._seen[name]


def _client(uri: str) -> Any:
    for key, value in _QUIET.items():
        os.environ.setdefault(key, value)
    import mlflow.store.db.utils
    from mlflow.tracking import MlflowClient

    # A database that is away is tried ten times by MLflow, for 25 minutes and three lines on stderr each: it has
    # no setting for that. The tracker tries again itself.
    mlflow.store.db.utils.MAX_RETRY_COUNT = 0
    create_sqlite_store(uri)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _linked(cls: type[MlflowMirror], client: Any, store: Store, folder: Path) -> MlflowMirror | None:
    """Return the run of `store` that mirrors `folder`; None when there was none or it is deleted there."""
    links = read_links(folder)
    for link in sorted(links, key=lambda each: not each.fits(store)):
        run_id = link.run_id if link.fits(store) else None
        run_id = run_id or _by_key(client, store, link.key)
        there = None if run_id is None else _active_run(client, run_id)
        if run_id is not None and there is not None:
            if (link.run_id, link.fits(store)) != (run_id, True):
                write_link(
                    folder,
                    replace(
                        link, uri=redact_credentials(store.uri), experiment=store.experiment, run_id=run_id
                    ),
                )
            return cls(client, run_id, there)
    return None


def _make(
    cls: type[MlflowMirror],
    client: Any,
    store: Store,
    folder: Path,
    run_name: str,
    tags: Mapping[str, str],
    start_ms: int | None,
) -> MlflowMirror:
    experiment = _experiment(client, store)
    link = new_link(folder, store)  # before the run is made: where the answer gets lost, the key finds it
    made = client.create_run(experiment, start_ms, {**tags, KEY_TAG: link.key}, run_name)
    write_link(folder, replace(link, run_id=str(made.info.run_id)))
    return cls(client, str(made.info.run_id), made)


def _by_key(client: Any, store: Store, key: str) -> str | None:
    """Return the run with this key: one whose making was not answered, or of a store that has moved."""
    experiment = client.get_experiment_by_name(store.experiment)
    if experiment is None or not key:
        return None
    found = client.search_runs([experiment.experiment_id], f"tags.`{KEY_TAG}` = '{key}'")
    return str(found[0].info.run_id) if found else None


def _active_run(client: Any, run_id: str) -> Any:
    """Return the run as MLflow has it, None when it is deleted or was never there."""
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return run if run.info.lifecycle_stage == "active" else None


def _experiment(client: Any, store: Store) -> str:
    """Return the id of the experiment, made when there is none; another run may make it at the same time."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(store.experiment)
    if found is None:
        try:
            return str(client.create_experiment(store.experiment, artifact_location=store.artifact_location))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        found = client.get_experiment_by_name(store.experiment)
    return str(found.experiment_id)


_Item = TypeVar("_Item")


def _batches(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    remaining = iter(items)
    while batch := list(islice(remaining, size)):
        yield batch
