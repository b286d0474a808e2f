"""MLflow as a tracker. Behaviour of MLflow 3.17, from its source and from tests:

- Its import takes 1 to 2 s and a new SQLite file 2 s more, all of it processor time. Two threads send telemetry unless
  disabled. A refused connection is retried for 4 minutes.
- A metric can be neither changed nor deleted, so a step of a metric that MLflow has is not sent again.
- A run and an experiment are found by their identifiers, and a run whose creation was not answered by `KEY_TAG`.
"""

import getpass
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal

from bandpo_cli.config.layers import flatten
from bandpo_cli.errors import log, redact_credentials
from bandpo_cli.storage.files import file_digest
from bandpo_cli.storage.run_record import parent_of
from bandpo_cli.tracking.mlflow_store import MLFLOW, Store, is_server, mlflow_client, run_address
from bandpo_cli.tracking.trackers import (
    Point,
    Sent,
    TrackedRun,
    Tracker,
    finite_metrics,
    mlflow_name,
    open_place,
    read_places,
    send_lock,
    write_place,
)

MAX_PARAM_CHARS = 6000
MAX_TAG_CHARS = 5000
MAX_PARAMS_PER_BATCH = 100
MAX_METRICS_PER_BATCH = 1000
"""MLflow's limits (mlflow/utils/validation.py); for tags the smaller limit of servers before 2.9."""

KEY_TAG = "bandpo.run"
"""The tag with `TrackedRun.id`, which finds a run whose creation was not answered, or whose store has moved."""
DESCRIPTION_TAG = "mlflow.note.content"
FORK_TAG = "bandpo.fork"
"""The tag of a fork with RUN@STEP, the checkpoint that it continues."""
EXPERIMENT_KIND_TAG = "mlflow.experimentKind"
MODEL_TRAINING = "custom_model_development"
"""The kind of experiment that MLflow's pages call "Machine learning"; they infer one for experiments without it."""


class MlflowTracker(Tracker):
    """A run at the MLflow store of the subclass that `mlflow_tracker` returns.

    Attributes:
        run_id: MLflow's id of the run.
    """

    title = "MLflow"
    compares = True
    store: ClassVar[Store]
    sent_files: dict[str, str]

    @classmethod
    def destination(cls, project: str) -> str:
        return cls.store.destination

    @classmethod
    def server(cls, destination: str) -> str:
        """Return the tracking URI: databases are tried as well."""
        return cls.store.uri

    def __init__(self, run: TrackedRun, create: bool = True) -> None:
        """Find the run, or create it, with the settings and tags that it lacks.

        With `create` False, an existing run is not changed, and LookupError is raised if there is none.
        """
        super().__init__(run)
        self.sent_files = dict(run.files)
        self._client = mlflow_client(self.store.uri)
        parent = (run.config.get("tracking") or {}).get("parent") if run.kind == "train" else None
        tags = run_tags(run.env, None if parent is None else str(parent))
        found = self._find()
        if found is None:
            if not create:
                raise LookupError(f"MLflow has no run {run.name}")
            experiment_id = _experiment_id(self._client, self.store)
            there = {**tags, KEY_TAG: run.id}
            found = self._client.create_run(experiment_id, run.start_ms, there, run.name)
            self.new_tags, self.last_step, self.sent_files = len(tags), -1, {}
        self.run_id, self.status = str(found.info.run_id), str(found.info.status)
        self.remote_id = f"experiments/{found.info.experiment_id}/runs/{self.run_id}"
        self.where = str(run_address(self.store, self.remote_id)) if is_server(self.store.uri) else ""
        self._params, self._tags = dict(found.data.params), dict(found.data.tags)
        self._names = set(found.data.metrics)
        self._histories: dict[str, dict[int, float]] = {}  # values by step, of requested metrics
        if create:
            self.new_tags += self._send_missing("tags", tags)
            settings = {key: value for key, value in run.config.items() if key != "environment"}
            self.new_params = self._send_missing("params", flat_params(settings))

    def _find(self) -> Any:
        """Return the run; None if it does not exist or was deleted.

        A run whose creation was not answered, or whose store has moved, is found by its key.
        """
        from mlflow.exceptions import MlflowException

        if self.run.remote_id:
            try:
                run = self._client.get_run(self.run.remote_id.rpartition("/")[2])
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
            else:
                return run if run.info.lifecycle_stage == "active" else None
        if (experiment := self._client.get_experiment_by_name(self.store.experiment)) is None:
            return None
        runs = self._client.search_runs([experiment.experiment_id], f"tags.`{KEY_TAG}` = '{self.run.id}'")
        return runs[0] if runs else None

    def reopen(self) -> None:
        if self.status != "RUNNING":
            self.status = "RUNNING"
            self._client.update_run(self.run_id, status=self.status)

    def log(self, points: Sequence[Point]) -> Sent:
        """Send the values that MLflow lacked when the run was opened; for a sweep all, at step 0.

        At step 0 MLflow shows a metric as a bar and not as a curve of one point. A resume sends values again; of
        several at the same step MLflow shows the latest.
        """
        if self.run.kind == "sweep":
            return self.send([point._replace(step=0) for point in points], again=True)
        sent = self.send(points)
        self.last_step = max(self.last_step, points[-1].step)
        return sent

    def send(self, points: Sequence[Point], again: bool = False) -> Sent:
        """Send values in few calls; with `again` also those of which the run has one at that step."""
        from mlflow.entities import Metric

        metrics: dict[tuple[str, int], Any] = {}
        there = differing = 0
        for step, time_ms, values in points:
            for name, value in values.items():
                known = {} if again else self._history(name)
                if step in known:
                    there += 1
                    differing += known[step] != value
                else:
                    metrics.setdefault((name, step), Metric(name, value, time_ms, step))
        self._log_batches("metrics", [*metrics.values()], MAX_METRICS_PER_BATCH)
        return Sent(len(metrics), there, differing)

    def _log_batches(self, kind: str, items: list[Any], size: int = MAX_PARAMS_PER_BATCH) -> None:
        for start in range(0, len(items), size):
            self._client.log_batch(self.run_id, synchronous=True, **{kind: items[start : start + size]})

    def _history(self, name: str) -> dict[int, float]:
        """Return the values of a metric by step that the run had when it was found; requested once."""
        if name in self._names and name not in self._histories:
            metrics = self._client.get_metric_history(self.run_id, name)
            self._histories[name] = {metric.step: metric.value for metric in metrics}
        return self._histories.get(name, {})

    def _send_missing(self, kind: Literal["params", "tags"], texts: Mapping[str, str]) -> int:
        """Send the params or tags that the run lacks, and return how many."""
        from mlflow.entities import Param, RunTag

        there, entity = (self._params, Param) if kind == "params" else (self._tags, RunTag)
        missing = {key: text for key, text in texts.items() if key not in there}
        self._log_batches(kind, [entity(*item) for item in missing.items()])
        return len(missing)

    def describe(self, text: str) -> None:
        """Set the run's description; one whose first line is not that of `text` was written by hand and is kept."""
        if text and self._tags.get(DESCRIPTION_TAG, text).startswith(text.partition("\n")[0]):
            self._client.set_tag(self.run_id, DESCRIPTION_TAG, text[:MAX_TAG_CHARS])

    def finish(self, status: str, summary: Mapping[str, Any], files: Sequence[Path]) -> int:
        """Set the status, then send the files that MLflow lacks: of another size there, or of another SHA-256 now.

        The status first: a file that cannot be stored must not leave a run as RUNNING forever.
        """
        if status != self.status:
            self._client.set_terminated(self.run_id, status, self.run.end_ms)
            self.status = status
        names = {file: file.relative_to(self.run.folder).as_posix() for file in files}
        sizes = {}
        for folder in sorted({name.rpartition("/")[0] for name in names.values()}):
            for there in self._client.list_artifacts(self.run_id, folder or None):
                sizes[there.path] = None if there.is_dir else there.file_size
        sent = 0
        for file, name in names.items():
            digest = file_digest(file)
            if self.sent_files.get(name) != digest or sizes.get(name) != file.stat().st_size:
                self.send_file(file, self.run.folder)
                self.sent_files[name] = digest
                sent += 1
        return sent

    def send_file(self, file: Path, folder: Path, under: str = "") -> None:
        """Send `file`, which lies in `folder`, to the same path in the run, or to that path in the folder `under`."""
        parent = (PurePosixPath(under) / file.relative_to(folder).parent.as_posix()).as_posix()
        self._client.log_artifact(self.run_id, str(file), None if parent == "." else parent)


def mlflow_tracker(store: Store) -> type[MlflowTracker]:
    """Return the tracker of runs at `store`."""
    return type("MlflowTracker", (MlflowTracker,), {"store": store})


def send_evaluation(
    store: Store,
    folder: Path,
    run_folder: Path | None,
    step: int | None,
    metrics: Mapping[str, float],
    params: Mapping[str, object],
    env: Mapping[str, Any],
    files: Sequence[Path],
) -> Path:
    """Send metrics and files of an evaluation, and return the folder that is linked to the MLflow run that has them.

    They are added to the run that made the model where MLflow has that run, files under `evals/<evaluation>/`; else the
    evaluation gets a run of its own, with `params` and `env`. MLflow keeps the values that were sent before. Raises any
    error of MLflow and the network.

    Args:
        run_folder: folder of the run that made the model, None without one.
        step: step of the checkpoint; the metrics appear at this step of the run's curves, at 0 for None.
        metrics: values by name; those that are not finite are left out.
    """
    point = Point(step or 0, int(time.time() * 1000), finite_metrics(metrics))
    with ExitStack() as stack:
        # The state files are written under the lock of the sender. The folder of someone else's run is only read.
        for path in filter(None, (folder, run_folder)):
            if os.access(path, os.W_OK):
                stack.enter_context(send_lock(path, MLFLOW))
        place, under, tracker = folder, "", None
        if run_folder is not None and read_places(run_folder, MLFLOW):
            with suppress(LookupError):  # MLflow does not have the run
                tracker = _open_run(store, run_folder, {}, {}, create=False)
                place, under = run_folder, f"evals/{folder.name}"
        tracker = tracker or _open_run(store, folder, params, env)
        tracker.send([point], again=True)
        for file in files:
            tracker.send_file(file, folder, under)
        if place == folder:
            tracker.finish("FINISHED", {}, [])
        return place


def _open_run(
    store: Store, folder: Path, params: Mapping[str, object], env: Mapping[str, Any], create: bool = True
) -> MlflowTracker:
    place = open_place(folder, MLFLOW, store.destination, store.experiment, write=create)
    run = TrackedRun(**vars(place), folder=folder, group=None, kind="evaluation", config=params, env=env)
    tracker = mlflow_tracker(store)(run, create)
    if tracker.remote_id != place.remote_id:
        write_place(folder, MLFLOW, replace(place, remote_id=tracker.remote_id))
    return tracker


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


def flat_params(config: Mapping[str, object]) -> dict[str, str]:
    """Return `config` as `a.b.c` → text: strings unchanged, anything else as JSON, at most 6000 characters.

    Passwords in addresses are redacted.
    """
    params = {}
    for key, value in flatten(config, keep_empty=True).items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        params[mlflow_name(key)] = redact_credentials(text)[:MAX_PARAM_CHARS]
    return params


def run_tags(env: Mapping[str, Any], parent: str | None = None) -> dict[str, str]:
    """Return the tags of a run: MLflow's own (source, user, commit, id of its parent), package versions, `FORK_TAG`."""
    tags = {"mlflow.source.name": str(env.get("command", "bandpo")), "mlflow.source.type": "LOCAL"}
    tags["mlflow.user"] = "unknown"
    with suppress(ImportError, KeyError, OSError):  # a container may have no entry for the user
        tags["mlflow.user"] = getpass.getuser()
    found = {"mlflow.parentRunId": parent, FORK_TAG: parent_of(env)}
    if git := env.get("git"):
        found |= {"mlflow.source.git.commit": git["commit"], "git.dirty": json.dumps(git["dirty"])}
    found |= {f"version.{package}": version for package, version in env.get("versions", {}).items()}
    tags |= {key: value for key, value in found.items() if value is not None}
    return {key: value[:MAX_TAG_CHARS] for key, value in tags.items()}
