"""Import of runs of verl: a run folder from an exported job and its MLflow run, for reports on both engines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bandpo_cli.config.layers import read_layer, resolve, to_yaml
from bandpo_cli.errors import RunError, UserError, first_line, redact_credentials
from bandpo_cli.exports.verl_files import CONFIG_FILE, VERL_VERSION
from bandpo_cli.paths import path_exists
from bandpo_cli.storage.files import write_json
from bandpo_cli.storage.run_folder import VERL_FILE, RunFolder, check_name, unused_name
from bandpo_cli.tracking.store import check_reachable, sqlite_path, sqlite_uri
from bandpo_cli.tracking.tracker import CONNECT_TIMEOUT_S
from bandpo_cli.tracking.verl_runs import VerlRun, read_verl_run


@dataclass(frozen=True)
class VerlImport:
    """An imported run.

    Attributes:
        folder: the run folder.
        status: how the run ended, as in its summary.
        last_step: its last step.
        steps: number of steps of the complete run.
        left_out: verl's metrics without a counterpart here.
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
        name: name of the run folder; None for that of the job's folder.
        uri: MLflow server or store; None for that of the job: MLFLOW_TRACKING_URI, its settings, its mlflow.db.
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
    found = read_verl_run(store, config.tracking.experiment, job_name, run_id, config.objective.aggregation)
    last = int(found.records[-1]["step"])
    status = _status(found, last, config.steps)
    folder = RunFolder.create(runs_dir, target)
    folder.write_config(to_yaml(config))
    for record in found.records:
        folder.append_metrics({**record, "step": int(record["step"])})
    folder.write_summary({"status": status, "steps": last})
    about = {
        "verl": VERL_VERSION,
        "uri": redact_credentials(store),
        "run_id": found.run_id,
        "left_out": found.left_out,
    }
    write_json(folder.path / VERL_FILE, about)
    return VerlImport(folder.path, status, last, config.steps, found.left_out)


def _check_store(uri: str) -> None:
    """Raise an error for a database file that does not exist, which MLflow would create, or a server that is down."""
    database = sqlite_path(uri)
    if database is not None and not path_exists(database):
        raise UserError(f"{database}: no such MLflow store; give it with --tracking-uri")
    try:
        check_reachable(uri, CONNECT_TIMEOUT_S)
    except OSError as error:
        raise RunError(f"MLflow at {redact_credentials(uri)}: {first_line(error)}") from None


def _status(run: VerlRun, last: int, steps: int) -> str:
    """Return the status of a run: verl ends an MLflow run as FINISHED also where the training failed."""
    if run.status == "FINISHED":
        return "FINISHED" if last >= steps else "FAILED"
    return "KILLED" if run.status == "RUNNING" else run.status
