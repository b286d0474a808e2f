"""The MLflow run of a sweep: its leaderboard as metrics and as a description, also after a resume."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from bandpo_cli.experiments.sweep_run import sweep_mlflow_run
from bandpo_cli.reports.comparison import Report
from bandpo_cli.sweeps.folder import SweepFolder
from bandpo_cli.tracking.store import Store, sqlite_uri
from tests.reports.sweep_folders import edit_line, report_of, write_sweep


@pytest.fixture
def store(tmp_path: Path, empty_database: Path) -> Store:
    database = Path(shutil.copy(empty_database, tmp_path))
    return Store(sqlite_uri(database), "bandpo", (tmp_path / "files").as_uri())


@pytest.fixture
def sweep(tmp_path: Path) -> SweepFolder:
    """Return a sweep of two variants with the names of methods, `clip` with final accuracies of 0.3 and 0.5."""
    path = write_sweep(tmp_path / "runs" / "methods", {"clip": {0: 0.3, 1: 0.5}, "band": {0: 0.75, 1: 0.25}})
    (path / "plans").mkdir()
    for run in path.glob("*-s?"):
        shutil.copy(run / "config.yaml", path / "plans" / f"{run.name}.yaml")
    return SweepFolder.open(tmp_path / "runs", "methods")


def execute(sweep: SweepFolder, store: Store, report: Report | None) -> Any:
    """Execute the sweep without runs, and return its MLflow run and a client."""
    from mlflow.tracking import MlflowClient

    with sweep_mlflow_run(sweep, store, lambda: report) as run_id:
        assert run_id is not None
    client = MlflowClient(tracking_uri=store.uri, registry_uri=store.uri)
    return client, client.get_run(run_id)


@pytest.mark.slow
def test_the_leaderboard_has_a_prefix_of_its_own_and_a_resume_replaces_it(
    sweep: SweepFolder, store: Store
) -> None:
    """The variant `clip` has the name of a section of the runs' metrics. At step 0 MLflow shows a bar, else a curve."""
    client, run = execute(sweep, store, report_of(sweep.path))
    assert {name.rpartition("/")[0] for name in run.data.metrics} == {"sweep/clip", "sweep/band"}
    assert run.data.metrics["sweep/clip/accuracy"] == pytest.approx((0.3 + 0.5) / 2)
    assert run.data.metrics["sweep/band/accuracy"] == pytest.approx((0.75 + 0.25) / 2)
    (point,) = client.get_metric_history(run.info.run_id, "sweep/clip/accuracy")
    assert point.step == 0
    description = run.data.tags["mlflow.note.content"]
    assert "| band | 2 | 0.500" in description
    assert "| clip (baseline) | 2 | 0.400" in description
    assert {"sweep.yaml", "report"} == {file.path for file in client.list_artifacts(run.info.run_id)}

    edit_line(sweep.path / "clip-s0", -1, **{"eval/countdown/mean_at_16": 0.1})
    _, resumed = execute(sweep, store, report_of(sweep.path))
    assert resumed.info.run_id == run.info.run_id
    assert resumed.data.metrics["sweep/clip/accuracy"] == pytest.approx((0.1 + 0.5) / 2)
    assert "| clip (baseline) | 2 | 0.300" in resumed.data.tags["mlflow.note.content"]


@pytest.mark.slow
def test_a_description_of_the_user_is_kept(sweep: SweepFolder, store: Store) -> None:
    client, run = execute(sweep, store, None)
    assert "mlflow.note.content" not in run.data.tags
    client.set_tag(run.info.run_id, "mlflow.note.content", "the second attempt")
    _, resumed = execute(sweep, store, report_of(sweep.path))
    assert resumed.data.tags["mlflow.note.content"] == "the second attempt"
    assert "sweep/clip/accuracy" in resumed.data.metrics
