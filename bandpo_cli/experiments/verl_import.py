"""Import of runs of verl: a run folder from an exported job and its MLflow run, for reports on both engines.

verl 0.9.1 logs with `utils/tracking.py`; MLflow has its names with `_at_` for @. docs/metrics.md compares the metrics.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bandpo_cli.config.layers import read_layer, resolve, to_yaml
from bandpo_cli.errors import RunError, UserError, first_line, redact_credentials
from bandpo_cli.exports.verl_files import CONFIG_FILE, VERL_VERSION
from bandpo_cli.paths import path_exists
from bandpo_cli.storage.files import write_json
from bandpo_cli.storage.run_folder import VERL_FILE, RunFolder, check_name, unused_name
from bandpo_cli.tracking.mirror import mlflow_client
from bandpo_cli.tracking.store import check_reachable, short_error, sqlite_path, sqlite_uri

NAMES = {
    "critic/score/mean": "train/reward",
    "response_length/mean": "train/response_length",
    "actor/pg_clipfrac": "clip/active_fraction",
    "actor/band_upper_fraction": "clip/upper_fraction",
    "actor/band_lower_fraction": "clip/lower_fraction",
    "actor/band_outside_fraction": "clip/outside_fraction",
    "actor/grad_norm": "optim/grad_norm",
    "actor/lr": "optim/lr",
    "timing_s/step": "time/step",
    "timing_s/gen": "time/sample",
    "timing_s/update_actor": "time/update",
    "timing_s/testing": "time/eval",
    "timing_s/save_checkpoint": "time/checkpoint",
}
"""Names here of verl's metrics that mean the same; the clipped shares are means over micro-batches there."""

TOKEN_MEANS = {"actor/entropy": "train/entropy", "actor/kl_loss": "kl/ref"}
"""Metrics that verl aggregates like the loss: the same only where that is the mean over tokens."""

_EVALUATION = re.compile(r"val-core/(.+)/acc/mean_at_(\d+)")


@dataclass(frozen=True)
class VerlImport:
    """An imported run.

    Attributes:
        folder: the run folder.
        status: how the run ended, as in its summary.
        last_step: its last step.
        steps: number of steps of the complete run.
        left_out: verl's metrics of the policy and of evaluations that have no counterpart here.
    """

    folder: Path
    status: str
    last_step: int
    steps: int
    left_out: tuple[str, ...]


def import_verl(
    job: Path | str,
    *,
    name: str | None = None,
    uri: str | None = None,
    run_id: str | None = None,
    runs_dir: Path | str = "runs",
    environ: Mapping[str, str] = os.environ,
) -> VerlImport:
    """Write a run folder with the settings of an exported job and the metrics of its MLflow run.

    Args:
        job: folder of `export_verl`, with its config.yaml.
        name: name of the run folder; None for the name of the job's folder.
        uri: MLflow server or store; None for the store of the job: MLFLOW_TRACKING_URI, its settings, its mlflow.db.
        run_id: the MLflow run; None for the last one with the name of the job's folder.
        runs_dir: the folder of run folders.

    Raises:
        UserError: the folder is no exported job, MLflow has no such run, or the name is taken.
        RunError: the store does not answer.
    """
    job, runs_dir = Path(job), Path(runs_dir)
    if not path_exists(job / CONFIG_FILE):
        raise UserError(f"{job}: no config.yaml; name a folder of `bandpo export verl`")
    config = resolve([read_layer(job / CONFIG_FILE, "settings of the job")])
    store = uri or environ.get("MLFLOW_TRACKING_URI") or config.tracking.uri
    store = store or sqlite_uri((job / "mlflow.db").absolute())
    _check_store(store)
    job_name = job.resolve().name
    target = check_name(name or job_name, runs_dir)
    if path_exists(runs_dir / target):
        raise UserError(f"{runs_dir / target} exists already; try --name {unused_name(target, runs_dir)}")
    try:
        client = mlflow_client(store)
        run = client.get_run(run_id) if run_id else _find_run(client, config.tracking.experiment, job_name)
        records, left_out = _read_metrics(client, run, config.objective.aggregation)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever MLflow and the network raise ends as one line
        is_missing = getattr(error, "error_code", "") in (
            "RESOURCE_DOES_NOT_EXIST",
            "INVALID_PARAMETER_VALUE",
        )
        kind = UserError if is_missing else RunError
        raise kind(f"MLflow at {redact_credentials(store)}: {short_error(error)}") from None
    found_id = run.info.run_id
    if not records:
        raise UserError(f"MLflow run {found_id} at {redact_credentials(store)}: it has no metrics of verl")
    last = records[-1]["step"]
    status = run.info.status
    if status == "FINISHED":  # verl ends an MLflow run as FINISHED also where the training failed
        status = "FINISHED" if last >= config.steps else "FAILED"
    elif status == "RUNNING":
        status = "KILLED"
    folder = RunFolder.create(runs_dir, target)
    folder.write_config(to_yaml(config))
    for record in records:
        folder.append_metrics(record)
    folder.write_summary({"status": status, "steps": last})
    about = {"verl": VERL_VERSION, "uri": redact_credentials(store), "run_id": found_id, "left_out": left_out}
    write_json(folder.path / VERL_FILE, about)
    return VerlImport(folder.path, status, last, config.steps, left_out)


def _check_store(uri: str) -> None:
    """Raise an error for a database file that does not exist, which MLflow would create, or a server that is down."""
    database = sqlite_path(uri)
    if database is not None and not path_exists(database):
        raise UserError(f"{database}: no such MLflow store; give it with --tracking-uri")
    try:
        check_reachable(uri)
    except OSError as error:
        raise RunError(f"MLflow at {redact_credentials(uri)}: {first_line(error)}") from None


def _find_run(client: Any, experiment: str, name: str) -> Any:
    """Return the last run of a name.

    Raises:
        UserError: there is no such experiment, or no such run in it.
    """
    existing = client.get_experiment_by_name(experiment)
    if existing is None:
        raise UserError(f"MLflow has no experiment '{experiment}'; give the store with --tracking-uri")
    runs = client.search_runs([existing.experiment_id], order_by=["attributes.start_time DESC"])
    named = [run for run in runs if run.info.run_name == name]
    if not named:
        names = ", ".join(sorted({str(run.info.run_name) for run in runs})) or "none"
        raise UserError(
            f"experiment '{experiment}' has no run '{name}' (its runs: {names:.300}); choose a run with --run ID"
        )
    return named[0]


def _read_metrics(client: Any, run: Any, aggregation: str) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return the metrics of each step of a run by the names of this package, and the names that have no counterpart."""
    records: dict[int, dict[str, Any]] = {}
    left_out = []
    for key in sorted(run.data.metrics):
        name = _own_name(key, aggregation)
        if name is None:
            if key.startswith(("actor/", "val-core/")):
                left_out.append(key)
            continue
        for value in client.get_metric_history(run.info.run_id, key):
            if math.isfinite(value.value):
                records.setdefault(value.step, {"step": value.step})[name] = value.value
    return [records[step] for step in sorted(records)], tuple(left_out)


def _own_name(name: str, aggregation: str) -> str | None:
    """Return the name here of a metric of verl at MLflow; None for one that means something else or is unknown.

    Args:
        name: the metric at MLflow.
        aggregation: `objective.aggregation` of the run.
    """
    evaluation = _EVALUATION.fullmatch(name)
    if evaluation is not None:
        return f"eval/{evaluation[1]}/mean_at_{evaluation[2]}"
    if name in TOKEN_MEANS:
        return TOKEN_MEANS[name] if aggregation == "token-mean" else None
    return NAMES.get(name)
