"""Tracking of a run folder in tests, as `bandpo train` does it, and what MLflow has then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bandpo_cli.callbacks import RunInfo, RunResult, StepReport
from bandpo_cli.config.run import TrackingConfig
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tracking.store import Store
from bandpo_cli.tracking.tracker import MlflowTracker
from bandpo_cli.types import RunStatus


def start_tracker(store: Store, folder: Path) -> MlflowTracker:
    """Return a tracker whose thread sends to `store`."""
    config = TrackingConfig.model_construct(uri=store.uri, experiment=store.experiment)
    tracker = MlflowTracker(config)
    tracker.start(RunInfo(folder, {}, {}, 3, 0, (), None))
    return tracker


def report(step: int) -> StepReport:
    return StepReport(step, {}, None)


def track(store: Store, folder: RunFolder, status: RunStatus = "FINISHED") -> None:
    """Track all steps of a run."""
    tracker = start_tracker(store, folder.path)
    for record in folder.read_metrics():
        tracker.step(report(record["step"]))
    tracker.end(RunResult(folder.path, status, []))


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
