"""Weights & Biases and trackio themselves: W&B in its offline mode, trackio with its local store.

The records of a .wandb file are read with wandb's own protocol buffers. The file is a log in LevelDB's format, whose
reader wandb no longer has in Python.
"""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("wandb")
pytest.importorskip("trackio")

from bandpo_cli.experiments import sync
from bandpo_cli.metric_names import is_clock_metric
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tracking.mlflow_store import tracking_store
from bandpo_cli.tracking.outages import TrackerCallback
from bandpo_cli.tracking.sender import RunSender
from bandpo_cli.tracking.trackers import Point, finite_metrics, read_places
from tests.cli.train_runs import SMALL
from tests.integrations.wandb_server import WandbServer
from tests.processes.checks import wait_for
from tests.storage.conftest import run
from tests.tracking.tracked import RunInfo, RunResult, TrackingConfig, client_of

__all__ = ["run"]

Values = Counter[tuple[str, int, float]]
"""Metrics as (name, step, value), each with the number of times that it is stored."""

BLOCK = 32768


@pytest.fixture(autouse=True)
def _local(tmp_path, monkeypatch):
    """Keep W&B offline and trackio in a temporary folder, in this process and in its children."""
    from trackio import sqlite_storage, utils

    for module in (utils, sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr(utils, "ARTIFACTS_DIR", tmp_path / "trackio" / "artifacts")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", f"{tmp_path}/trackio")
    monkeypatch.setenv("HOME", f"{tmp_path}")
    unset = "WANDB_API_KEY WANDB_PROJECT MLFLOW_TRACKING_URI TRACKIO_SPACE_ID TRACKIO_SERVER_URL"
    for name in unset.split():
        monkeypatch.delenv(name, raising=False)


def sent_step(folder: Path, name: str) -> int:
    """Return the last step that a tracker has accepted, -1 for none."""
    return max((place.step for place in read_places(folder, name)), default=-1)


def wandb_records(folder: Path) -> Iterator[Any]:
    """Yield the records of the one .wandb file of a run folder."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    content, position, data = file.read_bytes(), 7, b""  # after the header of the file
    while position + 7 <= len(content):
        if BLOCK - position % BLOCK < 7:  # the end of a block has no record
            position += BLOCK - position % BLOCK
            continue
        size, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        data = (data if kind in (3, 4) else b"") + content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a complete record, or the last part of one
            yield Record.FromString(data)


def row_of(history: Any) -> dict[str, str]:
    """Return the values of a record of the history, as JSON."""
    return {item.nested_key[0] if item.nested_key else item.key: item.value_json for item in history.item}


def wandb_values(folder: Path) -> Values:
    values = Counter()
    for record in wandb_records(folder):
        row = row_of(record.history)
        values.update((name, int(row["_step"]), float(text)) for name, text in row.items() if name[0] != "_")
    return values


def trackio_rows(project: str = "bandpo") -> list[dict[str, Any]]:
    """Return the rows of a project by trackio's own query."""
    from trackio.sqlite_storage import SQLiteStorage

    if not SQLiteStorage.get_project_db_path(project).exists():
        return []
    query = "SELECT run_name, step, timestamp, metrics FROM metrics ORDER BY id"
    return [*SQLiteStorage.query_project(project, query)["rows"]]


def trackio_values(name: str) -> Values:
    rows = [(row["step"], json.loads(row["metrics"])) for row in trackio_rows() if row["run_name"] == name]
    return Counter((key, step, value) for step, row in rows for key, value in row.items())


def mlflow_values(folder: Path) -> Values:
    client = client_of(tracking_store(TrackingConfig(), folder.parent, {}).uri)
    run_id = read_places(folder, "mlflow")[0].remote_id.rpartition("/")[2]
    histories = [client.get_metric_history(run_id, name) for name in client.get_run(run_id).data.metrics]
    return Counter((metric.key, metric.step, metric.value) for history in histories for metric in history)


def expected(folder: Path) -> Values:
    rows = [(record["step"], finite_metrics(record)) for record in RunFolder(folder).read_metrics()]
    return Counter((name, step, value) for step, row in rows for name, value in row.items())


def names_and_values(values: Values) -> tuple[Values, Counter[tuple[str, int]]]:
    """Return the values that do not depend on the clock, and the names and steps of all values.

    Of the steps that a resume repeats, MLflow and trackio keep the times of the first process.
    """
    return (
        Counter({key: count for key, count in values.items() if not is_clock_metric(key[0])}),
        Counter({(name, step): count for (name, step, _), count in values.items()}),
    )


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_has_equal_metrics_at_all_trackers(tmp_path):
    runs = tmp_path / "runs"
    folder = runs / "first"
    command = [sys.executable, "-m", "bandpo_cli", "train", "--runs-dir", str(runs)]
    trackers = ["--tracker", "mlflow,wandb", "--tracker", "trackio"]
    started = [*command, "--name", "first", *SMALL[:-1], *trackers, "--steps", "50"]
    with subprocess.Popen(started, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: sent_step(folder, "trackio") >= 2 and sent_step(folder, "wandb") >= 2)
        wait_for(lambda: [*folder.glob("checkpoints/step-*[2-9]")] and [*folder.glob("wandb/offline-run-*")])
        process.send_signal(signal.SIGKILL)
    steps = str(1 + RunFolder(folder).read_metrics()[-1]["step"])
    command += ["--resume", "first", "--steps", steps]
    resumed = subprocess.run(command, capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stderr
    assert "warning" not in resumed.stderr
    assert f"wandb sync {folder}/wandb/offline-run-" in resumed.stdout
    assert wandb_values(folder) == expected(folder)
    record = names_and_values(expected(folder))
    assert names_and_values(trackio_values("first")) == record
    assert names_and_values(mlflow_values(folder)) == record
    again = sync(["first"], runs_dir=runs)
    assert [report.tracker for report in again] == ["mlflow", "wandb", "trackio"]
    assert [(report.result.metrics.new, report.result.files) for report in again] == [(0, 0)] * 3


@pytest.mark.slow
def test_settings_summary_files_and_times_are_where_a_user_looks_first(run):
    run.write_config("tracking: {uri: 'http://user:secret@host'}\noptim: {lr: 0.1}\n")
    run.write_summary({"status": "KILLED", "steps": 3, "last_eval": {"step": 3}})
    (run.path.parent / "sweep.yaml").touch()
    os.utime(run.path / "metrics.jsonl", (1e9, 1e9))
    for name in ("wandb", "trackio"):
        RunSender(name, run.path).send()
    from trackio.sqlite_storage import SQLiteStorage

    (state,) = read_places(run.path, "trackio")
    config = SQLiteStorage.get_run_config("bandpo", run_id=state.id)
    assert {key: config[key] for key in ("optim.lr", "_Group", "status", "summary.steps", "tracking.uri")} == {
        "optim.lr": 0.1, "_Group": "runs", "status": "KILLED", "summary.steps": 3, "tracking.uri": "http://***@host",
    }  # fmt: skip
    (artifact,) = SQLiteStorage.get_run_artifacts("bandpo", run_id=state.id, run_name="first")["output"]
    assert (artifact["name"], artifact["type"]) == ("first", "train")
    assert trackio_rows()[-1]["timestamp"].startswith("2001-09-09T01:46:40")
    records = {record.WhichOneof("record_type"): record for record in wandb_records(run.path)}
    started = records["run"].run
    settings = {item.key: json.loads(item.value_json) for item in started.config.update}
    assert (started.project, started.run_group, started.job_type) == ("bandpo", "runs", "train")
    assert (settings["optim"], settings["tracking"]) == ({"lr": 0.1}, {"uri": "http://***@host"})
    assert settings["environment"] == {"versions": {"python": "3.11"}}
    updates = [record.summary.update for record in wandb_records(run.path)]
    summary = {item.key: item.value_json for update in updates for item in update}
    assert summary["status"] == '"KILLED"'
    assert json.loads(summary["last_eval"]) == {"step": 3}
    files = {item.path for record in wandb_records(run.path) for item in record.files.files}
    assert {"config.yaml", "metrics.jsonl", "summary.json", "samples/step-000010.parquet"} <= files
    assert records["exit"].exit.exit_code == 255
    assert float(row_of(records["history"].history)["_timestamp"]) == 1e9


@pytest.mark.slow
def test_the_report_of_a_sweep_is_a_run_of_its_group_and_a_resume_adds_a_point(tmp_path):
    folder = tmp_path / "deltas"
    (folder / "report").mkdir(parents=True)
    (folder / "sweep.yaml").touch()
    for name in ("report.html", "report.md"):
        (folder / "report" / name).write_text("leaderboard")
    files = [folder / "sweep.yaml", *sorted((folder / "report").iterdir())]
    for finished, accuracy in ((2, 0.5), (4, 0.75), (4, 0.75)):
        point = Point(finished, 10**12, {"sweep/kl 0.05/accuracy": accuracy})
        for name in ("wandb", "trackio"):
            RunSender(name, folder).send_sweep("bandpo", {"runs": 4}, point, "FINISHED", files)
    rows = [json.loads(row["metrics"]) for row in trackio_rows()]
    assert [value for row in rows if (value := row.get("sweep/kl 0.05/accuracy"))] == [0.5, 0.75]
    assert [row["report"]["_value"] for row in rows if "report" in row] == ["leaderboard"]
    records = [*wandb_records(folder)]
    started = next(record.run for record in records if record.run.run_id)
    assert (started.run_group, started.job_type) == ("deltas", "sweep")
    (logged,) = [row_of(record.history) for record in records if record.history.item]
    assert (logged["sweep/kl 0.05/accuracy"], logged["_step"]) == ("0.75", "4")
    assert any(name.startswith("report") for name in logged)


def test_wandb_without_a_login_is_one_warning(run, monkeypatch, caplog, capfd):
    import wandb

    wandb.teardown()  # the settings of this process are read again
    monkeypatch.setenv("WANDB_MODE", "online")
    tracker = TrackerCallback("wandb", TrackingConfig())
    tracker.start(RunInfo(run.path, {}, {}, 3, 0, (), None))
    tracker.end(RunResult(run.path, "FINISHED", []))
    (message,) = [record.message for record in caplog.records if record.name == "bandpo_cli"]
    advice = "W&B has no API key; type wandb login or set WANDB_API_KEY, or WANDB_MODE=offline"
    assert message.startswith(advice)
    assert f"bandpo sync first --runs-dir {run.path.parent}" in message
    assert capfd.readouterr() == ("", "")
    wandb.teardown()


TRAINING = """
import os, sys, time
from pathlib import Path
from bandpo_cli.tracking.sender import RunSender
RunSender("wandb", Path(sys.argv[1])).send("RUNNING")
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("uploaded", [0, 3])
def test_an_online_run_continues_after_the_last_step_that_the_server_has(run, monkeypatch, uploaded):
    """wandb-core uploads the first steps after 15 s; a process that is killed before has uploaded none."""
    import wandb

    wandb.teardown()
    with closing(WandbServer()) as server:
        for name, value in (("MODE", "online"), ("API_KEY", "0" * 40), ("BASE_URL", server.url)):
            monkeypatch.setenv(f"WANDB_{name}", value)
        with subprocess.Popen([sys.executable, "-c", TRAINING, str(run.path)]) as process:
            wait_for(lambda: sent_step(run.path, "wandb") == 3)
            wait_for(lambda: len(server.history) >= uploaded)
            process.kill()
        assert len(server.history) == uploaded
        for step in (4, 5):
            run.append_metrics({"step": step, "train/reward": step / 4})
        sent = RunSender("wandb", run.path).send("FINISHED").metrics
        assert (sent.new, sent.there) == (10 - 2 * uploaded, 2 * uploaded)
        stored = {row["_step"]: row["train/reward"] for row in server.history}
        assert stored == {step: step / 4 for step in range(1, 6)}
        assert server.exit_code == 0
        assert {"config.yaml", "metrics.jsonl", "samples/step-000010.parquet"} <= server.files
    wandb.teardown()
