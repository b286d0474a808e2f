"""The MLflow run of a sweep: its leaderboard as metrics and as a description, also after a resume."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from bandpo_cli.reports.compare_variants import Report
from bandpo_cli.storage.sweep_folder import SweepFolder
from bandpo_cli.sweeps.sweep_run import open_mlflow_run, send_report
from bandpo_cli.tracking.mlflow_store import Store, sqlite_uri
from tests.reports.sweep_folders import edit_line, report_of, write_sweep


def execute(sweep: SweepFolder, store: Store, report: Report) -> Any:
    """Execute the sweep without runs, and return its MLflow run and a client."""
    from mlflow.tracking import MlflowClient

    sender, run_id = open_mlflow_run(sweep, store)
    assert sender is not None
    assert run_id is not None
    send_report(sender, store.experiment, sweep, "FINISHED", report)
    client = MlflowClient(tracking_uri=store.uri, registry_uri=store.uri)
    return client, client.get_run(run_id)


@pytest.mark.slow
def test_the_leaderboard_and_a_description_after_a_resume(tmp_path, empty_database):
    """The variant `clip` has the name of a section of the runs' metrics. At step 0 MLflow shows a bar, else a curve."""
    database = Path(shutil.copy(empty_database, tmp_path))
    store = Store(sqlite_uri(database), "bandpo", (tmp_path / "files").as_uri())
    path = write_sweep(tmp_path / "runs" / "methods", {"clip": {0: 0.3, 1: 0.5}, "band": {0: 0.75, 1: 0.25}})
    (path / "plans").mkdir()
    for folder in path.glob("*-s?"):
        shutil.copy(folder / "config.yaml", path / "plans" / f"{folder.name}.yaml")
    sweep = SweepFolder.open(tmp_path / "runs", "methods")
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

    client.set_tag(run.info.run_id, "mlflow.note.content", "the second attempt")
    _, again = execute(sweep, store, report_of(sweep.path))
    assert again.data.tags["mlflow.note.content"] == "the second attempt"
