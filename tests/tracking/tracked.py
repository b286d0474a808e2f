"""Tracking of a run folder in tests, as `bandpo train` does it, and what MLflow has then."""

import json
from pathlib import Path
from typing import Any

from bandpo_cli.callbacks import RunInfo, RunResult, StepReport
from bandpo_cli.config.run import TrackingConfig
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tracking.mlflow_store import Store
from bandpo_cli.tracking.mlflow_tracker import flat_params
from bandpo_cli.tracking.outages import TrackerCallback
from bandpo_cli.types import RunStatus

PARAMS = {"seed": 3, "bounds": {"method": "band", "delta": 0.05}, **{f"extra_{i}": i for i in range(150)}}


def write_settings(folder: RunFolder) -> None:
    """Give a run more settings than a call of MLflow takes, and a commit."""
    folder.write_config(json.dumps(PARAMS))
    folder.write_env({"git": {"commit": "abc", "dirty": False}})


def start_tracker(store: Store, folder: Path) -> TrackerCallback:
    """Return a tracker whose thread sends to `store`."""
    config = TrackingConfig.model_construct(uri=store.uri, experiment=store.experiment)
    tracker = TrackerCallback("mlflow", config)
    tracker.start(RunInfo(folder, {}, {}, 3, 0, (), None))
    return tracker


def report(step: int) -> StepReport:
    return StepReport(step, {}, None)


def end_tracker(tracker: TrackerCallback, folder: RunFolder, status: RunStatus = "FINISHED") -> None:
    tracker.end(RunResult(folder.path, status, []))


def track(store: Store, folder: RunFolder, status: RunStatus = "FINISHED") -> None:
    """Track all steps of a run."""
    tracker = start_tracker(store, folder.path)
    for record in folder.read_metrics():
        tracker.step(report(record["step"]))
    end_tracker(tracker, folder, status)


def client_of(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def runs_at(uri: str) -> dict[str, Any]:
    """Return the runs of the experiment `bandpo` by name."""
    client = client_of(uri)
    runs = client.search_runs([client.get_experiment_by_name("bandpo").experiment_id])
    return {run.info.run_name: run for run in runs}


def history(uri: str, run_id: str, key: str) -> list[tuple[int, float]]:
    """Return the values of a metric after their steps."""
    return sorted((metric.step, metric.value) for metric in client_of(uri).get_metric_history(run_id, key))


def check_complete(uri: str, status: str) -> Any:
    """Require that MLflow has one run with all that a folder of `write_settings` has, and return its `info`."""
    client = client_of(uri)
    run = runs_at(uri)["first"]
    assert run.info.status == status
    assert run.data.params == flat_params(PARAMS)
    assert run.data.tags["mlflow.source.git.commit"] == "abc"
    assert history(uri, run.info.run_id, "train/reward") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    top = [file.path for file in client.list_artifacts(run.info.run_id)]
    assert sorted(top) == ["config.yaml", "env.json", "metrics.jsonl", "samples", "summary.json"]
    samples = client.list_artifacts(run.info.run_id, "samples")
    assert [file.path for file in samples] == ["samples/step-000010.parquet"]
    return run.info
