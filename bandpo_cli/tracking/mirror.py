"""The MLflow run of a run folder: the calls that send its params, tags, metrics, files and status.

Every call either completes or raises the error of MLflow or the network. Calls can be repeated: an existing run is
continued, and a step that it has is not sent again.

Behaviour of MLflow 3.17, from its source and from tests: its import takes 1 to 2 s and a new SQLite file 2 s more, all
of it processor time; two threads send telemetry unless disabled; a refused connection is retried for 4 minutes; a
metric can be neither changed nor deleted.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

from bandpo_cli.errors import redact_credentials
from bandpo_cli.tracking.names import (
    MAX_METRICS_PER_BATCH,
    MAX_PARAMS_PER_BATCH,
    MAX_TAG_CHARS,
    finite_metrics,
)
from bandpo_cli.tracking.store import KEY_TAG, Store, create_sqlite_store, new_link, read_links, write_link

log = logging.getLogger("bandpo_cli")

_MLFLOW_VARIABLES = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # its address shows the run among GenAI evaluations
    "MLFLOW_LOGGING_LEVEL": "WARNING",  # otherwise each new database prints its migrations to stderr
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the tracker retries itself, and knows when the run ends
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}

DESCRIPTION_TAG = "mlflow.note.content"

EXPERIMENT_KIND_TAG = "mlflow.experimentKind"
MODEL_TRAINING = "custom_model_development"
"""The kind of experiment that MLflow's pages call "Machine learning"; they infer one for experiments without it."""


class Sent(NamedTuple):
    """Numbers of metric values.

    Attributes:
        new: sent now.
        there: not sent, because MLflow already has a value of the metric at that step.
        differing: of `there`, those for which MLflow has another value, which stays.
    """

    new: int
    there: int
    differing: int


class MlflowMirror:
    """A run at MLflow.

    Attributes:
        run_id: MLflow's id of the run.
        status: MLflow's status of the run: RUNNING, FINISHED, ...
        params, tags: those that MLflow has.
    """

    def __init__(self, client: Any, run_id: str, existing: Any = None) -> None:
        """Wrap the run `run_id`.

        Args:
            client: an `MlflowClient`.
            existing: the run as MLflow returned it; None for one that was just created.
        """
        self._client = client
        self.run_id = run_id
        self.status = "RUNNING" if existing is None else str(existing.info.status)
        self.params: dict[str, str] = {} if existing is None else dict(existing.data.params)
        self.tags: dict[str, str] = {} if existing is None else dict(existing.data.tags)
        self._unconfirmed: set[str] = set() if existing is None else set(existing.data.metrics)
        self._known_values: dict[str, dict[int, float]] = {}

    @classmethod
    def connect(
        cls, store: Store, folder: Path, tags: Mapping[str, str], start_ms: int | None = None
    ) -> MlflowMirror:
        """Return the MLflow run that `folder` is linked to; if there is none, create one with these tags.

        Args:
            tags: those of a new run; an existing one keeps its own.
            start_ms: start of a new run, milliseconds since 1970; now by default.
        """
        mirror = cls.find(store, folder)
        if mirror is not None:
            return mirror
        client = mlflow_client(store.uri)
        experiment_id = _experiment_id(client, store)
        # The link is written before the run is created: if the answer is lost, the key finds the run.
        link = new_link(folder, store)
        created = client.create_run(experiment_id, start_ms, {**tags, KEY_TAG: link.key}, folder.name)
        run_id = str(created.info.run_id)
        write_link(folder, replace(link, run_id=run_id, experiment_id=experiment_id))
        return cls(client, run_id)

    @classmethod
    def find(cls, store: Store, folder: Path) -> MlflowMirror | None:
        """Return the run of `store` that `folder` is linked to; None when there is none or it was deleted there.

        A run that is found by its key is written into the link.
        """
        client = mlflow_client(store.uri)
        for link in sorted(read_links(folder), key=lambda link: not link.is_for(store)):
            linked_id = link.run_id if link.is_for(store) else None
            run_id = linked_id or _run_id_by_key(client, store, link.key)
            existing = None if run_id is None else _active_run(client, run_id)
            if run_id is not None and existing is not None:
                experiment_id = str(existing.info.experiment_id)
                if (run_id, experiment_id) != (linked_id, link.experiment_id):
                    link = replace(link, uri=redact_credentials(store.uri), experiment=store.experiment)
                    write_link(folder, replace(link, run_id=run_id, experiment_id=experiment_id))
                return cls(client, run_id, existing)
        return None

    def exists(self) -> bool:
        """Return whether MLflow still has the run: it may have been deleted, or its database replaced."""
        return _active_run(self._client, self.run_id) is not None

    def send(
        self, records: Iterable[Mapping[str, Any]], clocks: Mapping[int, int], again: bool = False
    ) -> Sent:
        """Send the values of `records` that the run lacks, in as few calls as MLflow allows.

        Args:
            records: lines of metrics.jsonl: metrics by name, and `step`.
            clocks: the time of each step, milliseconds since 1970; now for a step that is not in it.
            again: send all values, also where the run has one at that step: MLflow shows the latest one.
        """
        from mlflow.entities import Metric

        metrics: dict[tuple[str, int], Any] = {}
        there = differing = 0
        now = int(time.time() * 1000)
        for record in records:
            step = record["step"]
            for name, value in finite_metrics(record).items():
                known = {} if again else self._history(name)
                if step in known:
                    there += 1
                    differing += known[step] != value
                else:
                    metrics.setdefault((name, step), Metric(name, value, clocks.get(step, now), step))
        for batch in _batches(metrics.values(), MAX_METRICS_PER_BATCH):
            self._send_batch(batch)
        return Sent(len(metrics), there, differing)

    def describe(self, text: str, heading: str) -> None:
        """Set the run's description to `text`, which begins with `heading`; one with another beginning is kept."""
        if self.tags.get(DESCRIPTION_TAG, heading).startswith(heading):
            self._client.set_tag(self.run_id, DESCRIPTION_TAG, text[:MAX_TAG_CHARS])
            self.tags[DESCRIPTION_TAG] = text

    def send_params(self, params: Mapping[str, str]) -> int:
        """Send the params that the run lacks, and return how many."""
        from mlflow.entities import Param

        missing = {key: value for key, value in params.items() if key not in self.params}
        for batch in _batches(missing.items(), MAX_PARAMS_PER_BATCH):
            self._client.log_batch(self.run_id, params=[Param(*item) for item in batch], synchronous=True)
            self.params.update(batch)
        return len(missing)

    def send_tags(self, tags: Mapping[str, str]) -> int:
        """Send the tags that the run lacks, and return how many."""
        from mlflow.entities import RunTag

        missing = {key: value for key, value in tags.items() if key not in self.tags}
        if missing:
            self._client.log_batch(
                self.run_id, tags=[RunTag(*item) for item in missing.items()], synchronous=True
            )
        self.tags.update(missing)
        return len(missing)

    def send_file(self, folder: Path, file: Path, under: str = "") -> None:
        """Send `file`, which lies in `folder`, to the same path in the run, or to that path in the folder `under`."""
        parent = (PurePosixPath(under) / file.relative_to(folder).parent.as_posix()).as_posix()
        self._client.log_artifact(self.run_id, str(file), None if parent == "." else parent)

    def files(self, under: Iterable[str] = ("",)) -> dict[str, int]:
        """Return the sizes in bytes of the run's files directly in the folders `under`, by path."""
        return {
            file.path: file.file_size
            for folder in under
            for file in self._client.list_artifacts(self.run_id, folder or None)
            if not file.is_dir
        }

    def reopen(self) -> None:
        """Set the status of a run that had ended to RUNNING."""
        if self.status != "RUNNING":
            self._client.update_run(self.run_id, status="RUNNING")
            self.status = "RUNNING"

    def close(self, status: str, end_ms: int | None = None) -> None:
        """End the run as FINISHED, FAILED or KILLED at `end_ms`, milliseconds since 1970; now by default."""
        self._client.set_terminated(self.run_id, status, end_ms)
        self.status = status

    def _send_batch(self, batch: list[Any]) -> None:
        names = {metric.key for metric in batch}
        try:
            self._client.log_batch(self.run_id, metrics=batch, synchronous=True)
        except BaseException:
            # The batch may have arrived: before these metrics are sent again, their history is requested.
            self._unconfirmed |= names
            for name in names:
                self._known_values.pop(name, None)
            raise
        for metric in batch:
            if metric.key in self._known_values:
                self._known_values[metric.key][metric.step] = metric.value
            else:
                self._unconfirmed.add(metric.key)

    def _history(self, name: str) -> dict[int, float]:
        """Return the run's values of `name` by step; requested from MLflow only where it may have unknown ones."""
        if name not in self._known_values:
            metrics = self._client.get_metric_history(self.run_id, name) if name in self._unconfirmed else []
            self._known_values[name] = {metric.step: metric.value for metric in metrics}
        return self._known_values[name]


def mlflow_client(uri: str) -> Any:
    """Return an `MlflowClient` of the store `uri`, without telemetry and retries; a missing SQLite file is created."""
    for key, value in _MLFLOW_VARIABLES.items():
        os.environ.setdefault(key, value)
    import mlflow.store.db.utils
    from mlflow.tracking import MlflowClient

    # MLflow tries a database that does not answer ten times, over 25 minutes, with three lines on stderr each time.
    # There is no setting for this. The tracker retries itself.
    mlflow.store.db.utils.MAX_RETRY_COUNT = 0
    create_sqlite_store(uri)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _run_id_by_key(client: Any, store: Store, key: str) -> str | None:
    """Return the id of the run with this key: one whose creation was not answered, or whose store has moved."""
    experiment = client.get_experiment_by_name(store.experiment)
    if experiment is None or not key:
        return None
    runs = client.search_runs([experiment.experiment_id], f"tags.`{KEY_TAG}` = '{key}'")
    return str(runs[0].info.run_id) if runs else None


def _active_run(client: Any, run_id: str) -> Any:
    """Return the run from MLflow, None when it is deleted or does not exist."""
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return run if run.info.lifecycle_stage == "active" else None


def _experiment_id(client: Any, store: Store) -> str:
    """Return the id of the experiment, created if there is none; another run may create it at the same time.

    An experiment without a kind becomes one of model training; a kind that a user has chosen is not changed.
    """
    from mlflow.exceptions import MlflowException

    existing = client.get_experiment_by_name(store.experiment)
    if existing is None:
        try:
            tags = {EXPERIMENT_KIND_TAG: MODEL_TRAINING}
            return str(client.create_experiment(store.experiment, store.artifact_location, tags))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        existing = client.get_experiment_by_name(store.experiment)
    if EXPERIMENT_KIND_TAG not in existing.tags:
        try:
            client.set_experiment_tag(existing.experiment_id, EXPERIMENT_KIND_TAG, MODEL_TRAINING)
        except MlflowException as error:  # no permission, for example: the run is sent all the same
            log.debug("MLflow did not accept the kind of the experiment %s: %s", store.experiment, error)
    return str(existing.experiment_id)


_Item = TypeVar("_Item")


def _batches(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    """Yield `items` in lists of at most `size`."""
    remaining = iter(items)
    while batch := list(islice(remaining, size)):
        yield batch
