"""One run's record at MLflow, call by call: for the tracker's thread, and for sending a run later.

Every call either does its work or raises what MLflow and the network raise. Doing it twice does no harm: a
run that is there is gone on with, and a step that it has is not sent again.

What MLflow 3.17 does, by its source and by trial: its import takes 1 to 2 s and a new SQLite file 2 s more,
all on the processor; two threads call home unless told not to; a refused connection is tried for 4 minutes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from bandpo_cli.tracking.environment import redact
from bandpo_cli.tracking.files import write_json
from bandpo_cli.tracking.mlflow_names import MAX_METRICS_A_BATCH, MAX_PARAMS_A_BATCH, finite_metrics
from bandpo_cli.tracking.sqlite_store import prepare_store
from bandpo_cli.tracking.store import Store

LINK = "mlflow.json"
"""The file in the run folder that names the MLflow run which mirrors it, so that a resume goes on with it."""

_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",  # else each new database tells of its migrations on stderr
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the tracker tries again itself, and knows when the run ends
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


@dataclass(frozen=True)
class Record:
    """The metrics of one step, with the clock of when they were taken (milliseconds since 1970)."""

    step: int
    metrics: Mapping[str, float]
    clock_ms: int

    @classmethod
    def of(cls, step: int, record: Mapping[str, object]) -> Record:
        """Return the finite numbers of `record`, stamped now."""
        return cls(step, finite_metrics(record), int(time.time() * 1000))


class MlflowMirror:
    """A run at MLflow.

    Attributes:
        run_id: MLflow's own name for the run.
    """

    def __init__(self, client: Any, run_id: str, fresh: bool) -> None:
        self._client = client
        self.run_id = run_id
        self._fresh = fresh
        self._seen: dict[str, set[int]] = {}

    @classmethod
    def connect(
        cls, store: Store, folder: Path, run_name: str, params: Mapping[str, str], tags: Mapping[str, str]
    ) -> MlflowMirror:
        """Make the run that mirrors `folder`, or go on with the one that `folder` is linked to.

        Params that the run has already stay as they are (MLflow allows no change).
        """
        client = _client(store.uri)
        run_id = _linked_run(client, store, folder)
        if run_id is None:
            run_id = _new_run(client, store, run_name, tags)
            write_json(folder / LINK, {**_link(store), "run_id": run_id})
            mirror = cls(client, run_id, fresh=True)
            mirror._send_params(params)
            return mirror
        there = client.get_run(run_id).data.params
        mirror = cls(client, run_id, fresh=False)
        mirror._send_params({key: value for key, value in params.items() if key not in there})
        return mirror

    @classmethod
    def find(cls, store: Store, folder: Path) -> MlflowMirror | None:
        """Return the run that mirrors `folder`, None where there is none; nothing of it is changed.

        What is sent is added, whatever the run has at that step: a later evaluation does not replace an earlier one.
        """
        client = _client(store.uri)
        run_id = _linked_run(client, store, folder)
        return None if run_id is None else cls(client, run_id, fresh=True)

    def send(self, records: Iterable[Record]) -> None:
        """Send the metrics of `records` that the run does not have yet, in as few calls as MLflow allows."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, record.clock_ms, record.step)
            for record in records
            for name, value in record.metrics.items()
            if record.step not in self._steps(name)
        ]
        for batch in _batches(metrics, MAX_METRICS_A_BATCH):
            self._client.log_batch(self.run_id, metrics=batch, synchronous=True)
            for metric in batch:
                self._steps(metric.key).add(metric.step)

    def send_file(self, folder: Path, file: Path, under: str = "") -> None:
        """Send `file`, which lies in `folder`, under the same path, below `under` if that is given."""
        place = (PurePosixPath(under) / file.relative_to(folder).parent.as_posix()).as_posix()
        self._client.log_artifact(self.run_id, str(file), None if place == "." else place)

    def reopen(self) -> None:
        """Show a run that had ended as running again."""
        self._client.update_run(self.run_id, status="RUNNING")

    def close(self, status: str) -> None:
        """End the run as FINISHED, FAILED or KILLED."""
        self._client.set_terminated(self.run_id, status)

    def _send_params(self, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        for batch in _batches(params.items(), MAX_PARAMS_A_BATCH):
            self._client.log_batch(self.run_id, params=[Param(*item) for item in batch], synchronous=True)

    def _steps(self, name: str) -> set[int]:
        """Return the steps of `name` that the run has; asked of MLflow once a name, when resumed."""
        if name not in self._seen:
            history = [] if self._fresh else self._client.get_metric_history(self.run_id, name)
            self._seen[name] = {metric.step for metric in history}
        return self._seen[name]


def _client(uri: str) -> Any:
    for key, value in _QUIET.items():
        os.environ.setdefault(key, value)
    import mlflow.store.db.utils
    from mlflow.tracking import MlflowClient

    # A database that is away is tried ten times by MLflow, for 25 minutes and three lines on stderr each: it has
    # no setting for that. The tracker tries again itself.
    mlflow.store.db.utils.MAX_RETRY_COUNT = 0
    prepare_store(uri)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _link(store: Store) -> dict[str, str]:
    return {"uri": redact(store.uri), "experiment": store.experiment}


def _linked_run(client: Any, store: Store, folder: Path) -> str | None:
    """Return the run of `store` that mirrors `folder`; None when there was none or it is deleted there."""
    from mlflow.exceptions import MlflowException

    try:
        link = json.loads((folder / LINK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    run_id = link.pop("run_id", None)
    if run_id is None or link != _link(store):
        return None
    try:
        alive = client.get_run(run_id).info.lifecycle_stage == "active"
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return str(run_id) if alive else None


def _new_run(client: Any, store: Store, run_name: str, tags: Mapping[str, str]) -> str:
    return str(client.create_run(_experiment(client, store), tags=dict(tags), run_name=run_name).info.run_id)


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
