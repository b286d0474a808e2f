"""The MLflow run of a run folder: the calls that send its params, tags, metrics, files and status.

Every call either completes or raises the error of MLflow or the network. Calls can be repeated: an existing run is
continued, and a step that it has is not sent again.

Behaviour of MLflow 3.17, from its source and from tests: its import takes 1 to 2 s and a new SQLite file 2 s more, all
of it processor time; two threads send telemetry unless disabled; a refused connection is retried for 4 minutes; a
metric can be neither changed nor deleted.
"""

from __future__ import annotations

import getpass
import json
import logging
import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from bandpo_cli.config.layers import flatten
from bandpo_cli.errors import redact_credentials
from bandpo_cli.metric_names import HELDOUT_ACCURACY, HELDOUT_REWARD, heldout_mean
from bandpo_cli.storage.run_record import parent_of
from bandpo_cli.tracking.store import KEY_TAG, Link, Store, mlflow_client, new_link, read_links, write_link

log = logging.getLogger("bandpo_cli")

MAX_NAME_CHARS = 250
MAX_PARAM_CHARS = 6000
MAX_TAG_CHARS = 5000
MAX_PARAMS_PER_BATCH = 100
MAX_METRICS_PER_BATCH = 1000
"""MLflow's limits (mlflow/utils/validation.py); for tags the smaller limit of servers before 2.9."""

FIRST_SECTION = "Main"
"""Section of MLflow's charts with copies of `FIRST_METRICS` and the means over the evaluation sets.

MLflow 3.17 makes a section of the charts whose names are equal up to the last `/`, and sorts sections and charts by
code point, in which capital letters are first. Only names decide: a rearrangement stays in the user's browser.
"""

FIRST_METRICS = {
    "train/accuracy": "accuracy",
    "train/reward": "reward",
    "train/entropy": "entropy",
    "clip/active_fraction": "clip_fraction",
}

_BIN = re.compile(r"(?:clip|gradient)/(.+)/p_([0-9.]+)_([0-9.]+)")

_WORDS = {"@": "_at_", "<": "_lt_", ">": "_gt_", "=": "_eq_", "%": "_pct_", "+": "_plus_"}

DESCRIPTION_TAG = "mlflow.note.content"
FORK_TAG = "bandpo.fork"
"""The tag of a fork with RUN@STEP, the checkpoint that it continues."""
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

    def __init__(self, client: Any, run: Any) -> None:
        """Wrap `run`, as the `MlflowClient` returned it."""
        self._client = client
        self.run_id, self.status = str(run.info.run_id), str(run.info.status)
        self.params, self.tags = dict(run.data.params), dict(run.data.tags)
        self._names = set(run.data.metrics)
        self._histories: dict[str, dict[int, float]] = {}  # values by step, of requested metrics

    @classmethod
    def connect(
        cls, store: Store, folder: Path, tags: Mapping[str, str], start_ms: int | None = None
    ) -> MlflowMirror:
        """Return the MLflow run that `folder` is linked to; if there is none, create one.

        A new run has these tags and starts at `start_ms`, milliseconds since 1970; now by default.
        """
        mirror = cls.find(store, folder)
        if mirror is not None:
            return mirror
        client = mlflow_client(store.uri)
        experiment_id = _experiment_id(client, store)
        # The link is written before the run is created: if the answer is lost, the key finds the run.
        link = new_link(folder, store)
        run = client.create_run(experiment_id, start_ms, {**tags, KEY_TAG: link.key}, folder.name)
        mirror = cls(client, run)
        mirror.tags = {}  # `send_missing` counts them
        write_link(folder, replace(link, run_id=mirror.run_id, experiment_id=experiment_id))
        return mirror

    @classmethod
    def find(cls, store: Store, folder: Path) -> MlflowMirror | None:
        """Return the run of `store` that `folder` is linked to; None when there is none or it was deleted there.

        A run that is found by its key is written into the link.
        """
        client = mlflow_client(store.uri)
        for link in sorted(read_links(folder), key=lambda link: not link.is_for(store)):
            if (run := _find_run(client, store, link)) is not None:
                uri, ids = redact_credentials(store.uri), (str(run.info.run_id), str(run.info.experiment_id))
                current = Link(uri, store.experiment, link.key, ids[0], link.files, ids[1])
                if current != link:
                    write_link(folder, current)
                return cls(client, run)
        return None

    def send(
        self, records: Iterable[Mapping[str, Any]], clocks: Mapping[int, int], again: bool = False
    ) -> Sent:
        """Send the values of lines of metrics.jsonl that the run did not have when it was found, in few calls.

        Args:
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

    def describe(self, text: str, heading: str) -> None:
        """Set the run's description to `text`, which begins with `heading`; one with another beginning is kept."""
        if self.tags.get(DESCRIPTION_TAG, heading).startswith(heading):
            self._client.set_tag(self.run_id, DESCRIPTION_TAG, text[:MAX_TAG_CHARS])
            self.tags[DESCRIPTION_TAG] = text

    def send_missing(self, kind: Literal["params", "tags"], texts: Mapping[str, str]) -> int:
        """Send the params or tags that the run lacks, and return how many."""
        from mlflow.entities import Param, RunTag

        there, entity = (self.params, Param) if kind == "params" else (self.tags, RunTag)
        missing = {key: text for key, text in texts.items() if key not in there}
        self._log_batches(kind, [entity(*item) for item in missing.items()])
        there |= missing
        return len(missing)

    def send_file(self, folder: Path, file: Path, under: str = "") -> None:
        """Send `file`, which lies in `folder`, to the same path in the run, or to that path in the folder `under`."""
        parent = (PurePosixPath(under) / file.relative_to(folder).parent.as_posix()).as_posix()
        self._client.log_artifact(self.run_id, str(file), None if parent == "." else parent)

    def files(self, under: Iterable[str] = ("",)) -> dict[str, int]:
        """Return the sizes in bytes of the run's files directly in the folders `under`, by path."""
        listed = (self._client.list_artifacts(self.run_id, folder or None) for folder in under)
        return {file.path: file.file_size for files in listed for file in files if not file.is_dir}

    def reopen(self) -> None:
        """Set the status of a run that had ended to RUNNING."""
        if self.status != "RUNNING":
            self.status = "RUNNING"
            self._client.update_run(self.run_id, status=self.status)

    def close(self, status: str, end_ms: int | None = None) -> None:
        """End the run as FINISHED, FAILED or KILLED at `end_ms`, milliseconds since 1970; now by default."""
        self._client.set_terminated(self.run_id, status, end_ms)
        self.status = status


def _find_run(client: Any, store: Store, link: Link) -> Any:
    """Return the run of a link, None if it does not exist or was deleted.

    A run whose creation was not answered, or whose store has moved, is found by its key.
    """
    from mlflow.exceptions import MlflowException

    if link.run_id and link.is_for(store):
        try:
            run = client.get_run(link.run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run if run.info.lifecycle_stage == "active" else None
    if not link.key or (experiment := client.get_experiment_by_name(store.experiment)) is None:
        return None
    runs = client.search_runs([experiment.experiment_id], f"tags.`{KEY_TAG}` = '{link.key}'")
    return runs[0] if runs else None


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


def mlflow_name(name: str) -> str:
    """Return `name` as a legal MLflow name: ASCII letters, digits, `_ - . /` and blanks, at most 250 characters.

    `@ < > = % +` become words (`mean@16` is `mean_at_16`), any other character `_`; then path parts that are
    empty, `.` or `..` are removed. A legal name is unchanged. Two names can collide (`a[b]` and `a(b)`).
    """
    spelled = re.sub(r"[@<>=%+]", lambda match: _WORDS[match[0]], name)
    plain = re.sub(r"[^A-Za-z0-9_\-. /]", "_", spelled)
    parts = [part for part in plain.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:MAX_NAME_CHARS].rstrip("/") or "unnamed"


def finite_metrics(record: Mapping[str, object]) -> dict[str, float]:
    """Return the finite numbers of `record` by the names that MLflow gets, without `step`.

    Copies of `FIRST_METRICS` and the means of held-out accuracy and reward over the evaluation sets are added under
    `FIRST_SECTION`.
    """
    named = {_sortable_name(key): value for key, value in record.items() if key != "step"}
    first = {name: record.get(key) for key, name in FIRST_METRICS.items()}
    if "time/step" in record:  # a step of training, and not `bandpo eval` of its checkpoint
        first["heldout_accuracy"] = heldout_mean(record, HELDOUT_ACCURACY)
        first["heldout_reward"] = heldout_mean(record, HELDOUT_REWARD)
    named |= {f"{FIRST_SECTION}/{name}": value for name, value in first.items()}
    return {
        mlflow_name(name): float(value)
        for name, value in named.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _sortable_name(key: str) -> str:
    """Return the name of a metric of one bin in a section for all bins, after those of the run; others unchanged.

    The edges have three decimals or more, so that the bins are in the order of their probabilities:
    `clip/token_share/p_0_0.001` is `vs_probability/token_share_p_0.000_0.001`, `gradient/weight_min/positive/p_0.5_0.9`
    is `vs_probability/weight_min_positive_p_0.500_0.900`.
    """
    match = _BIN.fullmatch(key)
    if match is None:
        return key
    metric, *edges = match.groups()
    low, high = (f"{whole}.{decimals:0<3}" for whole, _, decimals in (edge.partition(".") for edge in edges))
    return f"vs_probability/{metric.replace('/', '_')}_p_{low}_{high}"


def flat_params(config: Mapping[str, object]) -> dict[str, str]:
    """Return `config` as `a.b.c` → text: strings unchanged, anything else as JSON, at most 6000 characters.

    Passwords in addresses are redacted.
    """
    settings = flatten(config, keep_empty=True).items()
    texts = {
        key: value if isinstance(value, str) else json.dumps(value, default=str) for key, value in settings
    }
    return {mlflow_name(key): redact_credentials(text)[:MAX_PARAM_CHARS] for key, text in texts.items()}


def run_tags(env: Mapping[str, Any], parent: str | None = None) -> dict[str, str]:
    """Return the tags of a run: MLflow's own (source, user, commit, id of its parent), package versions, `FORK_TAG`."""
    try:
        user = getpass.getuser()
    except (ImportError, KeyError, OSError):  # a container may have no entry for the user
        user = "unknown"
    tags = {"mlflow.source.name": str(env.get("command", "bandpo")), "mlflow.source.type": "LOCAL"}
    tags["mlflow.user"] = user
    if parent is not None:
        tags["mlflow.parentRunId"] = parent
    if forked_from := parent_of(env):
        tags[FORK_TAG] = forked_from
    if git := env.get("git"):
        tags |= {"mlflow.source.git.commit": git["commit"], "git.dirty": json.dumps(git["dirty"])}
    tags |= {f"version.{package}": version for package, version in env.get("versions", {}).items()}
    return {key: value[:MAX_TAG_CHARS] for key, value in tags.items()}
