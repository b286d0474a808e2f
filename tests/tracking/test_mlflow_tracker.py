"""MLflow gets the complete record if it can be reached; if not, the run prints one warning."""

import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from bandpo_cli.callbacks import RunResult
from bandpo_cli.config.run import TrackingConfig
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tracking import outages
from bandpo_cli.tracking.mlflow_store import Store, tracking_store, ui_text
from bandpo_cli.tracking.mlflow_tracker import MlflowTracker
from bandpo_cli.tracking.outages import TrackerCallback
from bandpo_cli.types import RunStatus
from tests.tracking.tracked import check_complete, client_of, history, runs_at, track, write_settings

NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens there, so it refuses at once


@pytest.fixture
def run(run: RunFolder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Return the run of the storage tests with more settings; messages are recorded, and retries are immediate."""
    caplog.set_level(logging.INFO, "bandpo_cli")
    monkeypatch.setattr(outages, "MIN_RETRY_DELAY_S", 0.05)
    write_settings(run)
    return run


@pytest.fixture
def mirror(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Return a function that tracks the three steps of a run and returns the messages."""

    def mirror(run: RunFolder, store: Store, status: RunStatus = "FINISHED") -> list[str]:
        caplog.clear()
        track(store, run, status)
        return [record.getMessage() for record in caplog.records if record.name == "bandpo_cli"]

    return mirror


@pytest.mark.slow
def test_a_sqlite_file_in_the_runs_folder_gets_the_complete_record(run, mirror):
    """Two runs of the process: a failed one, which is resumed and then deleted at MLflow and created again."""
    store = tracking_store(TrackingConfig(), run.path.parent, {})
    assert mirror(run, store, "FAILED") == []
    first = check_complete(store.uri, "FAILED")
    assert ui_text(run.path, store).splitlines()[1] == (
        f"http://127.0.0.1:5000/#/experiments/{first.experiment_id}/runs/{first.run_id}/model-metrics"
        "?workflowType=machine_learning"
    )
    assert list(Path.cwd().iterdir()) == []  # no ./mlruns and no ./mlflow.db in the current folder
    assert {path.name for path in run.path.parent.iterdir()} == {
        ".mlflow.db.lock", "first", "mlartifacts", "mlflow.db",
    }  # fmt: skip
    assert mirror(run, store) == []
    assert check_complete(store.uri, "FINISHED").run_id == first.run_id  # no step is sent twice
    client_of(store.uri).delete_run(first.run_id)
    assert mirror(run, store) == []
    assert check_complete(store.uri, "FINISHED").run_id != first.run_id


def test_a_runs_folder_with_special_characters_and_a_database_that_a_killed_run_left_half_created(
    run, mirror
):
    odd = run.path.parent.parent / "my runs %20 #1 é"
    run.path.parent.rename(odd)
    half = odd / ".mlflow.db.new"
    half.write_bytes(b"SQLite format 3\0 truncated")
    store = tracking_store(TrackingConfig(), odd, {})
    assert mirror(RunFolder(odd / "first"), store, "KILLED") == []
    assert (odd / "mlflow.db").is_file()
    assert not half.exists()
    check_complete(store.uri, "KILLED")


def test_a_refused_connection_gives_a_warning_and_a_line_at_the_end(run, mirror):
    warning, closing = mirror(run, Store(NOWHERE.replace("//", "//me:secret@"), "bandpo", None))
    assert "cannot be reached" in warning
    assert "the metrics of 3 steps (from step 1) and 5 files" in closing
    assert closing.endswith(f"bandpo sync first --runs-dir {run.path.parent}")
    assert "secret" not in warning + closing
    assert "\n" not in warning + closing


@pytest.mark.parametrize("uri", ["nonsense://x", "sqlite:///{run}/config.yaml/x.db"])
def test_an_invalid_uri_gives_a_warning_and_no_output_of_mlflow(run, mirror, uri, capfd):
    """MLflow itself would retry a database for 25 minutes, and hold its own lock meanwhile."""
    assert len(mirror(run, Store(uri.format(run=run.path), "bandpo", None))) == 2
    assert capfd.readouterr().err == ""


def test_a_server_that_answers_500_gives_one_warning(run, mirror):
    class Broken(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(500)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Broken) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        warning, _ = mirror(run, Store(f"http://127.0.0.1:{server.server_port}", "bandpo", None))
        server.shutdown()
    assert "500" in warning


def test_a_store_that_recovers_gets_every_step_once(run, mirror, monkeypatch):
    """Two calls fail, the second one after MLflow has stored the metrics."""
    store = tracking_store(TrackingConfig(), run.path.parent, {})
    send, calls = MlflowTracker.send, []

    def flaky(self, points):
        calls.append(len(points))
        if len(calls) == 1:
            raise ConnectionError("gone")
        sent = send(self, points)
        if len(calls) == 2:
            raise TimeoutError("stored, but the answer was lost")
        return sent

    monkeypatch.setattr(MlflowTracker, "send", flaky)
    monkeypatch.setattr(outages, "FINAL_RETRIES", 3)
    assert len(mirror(run, store)) == 1
    check_complete(store.uri, "FINISHED")


TRACKED_RUN = """
import sys, threading
from pathlib import Path
from bandpo_cli.config.run import TrackingConfig
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tracking.outages import TrackerCallback
from bandpo_cli.callbacks import RunInfo, RunResult, StepReport

folder, uri = RunFolder(Path(sys.argv[1])), sys.argv[2] or None
tracker = TrackerCallback("mlflow", TrackingConfig(uri=uri))
tracker.start(RunInfo(folder.path, {}, {}, 3, 0, (), None))
for step in range(100, 120):
    folder.append_metrics({"step": step, "a": 1.0})
    tracker.step(StepReport(step, {}, None))
tracker.end(RunResult(folder.path, "FINISHED", []))
print("mlflow" in sys.modules, [thread.name for thread in threading.enumerate()])
"""


def _track_in_a_process(folder: RunFolder, uri: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", TRACKED_RUN, str(folder.path), uri]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_store_that_never_answers_delays_neither_steps_nor_the_end_of_the_process(run):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        process = _track_in_a_process(run, f"http://127.0.0.1:{silent.getsockname()[1]}")
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "23 steps" in err
    assert err.count("\n") == 1
    # MLflow was not imported, and neither finish nor the process waited for the check's timeout of 10 s.
    assert out == "False ['MainThread', 'mlflow-sender', 'waits']\n"


@pytest.mark.slow
def test_runs_that_start_together_share_a_new_database_and_print_nothing_of_mlflow(run):
    """The first runs of a sweep create the SQLite file and the experiment at the same time. MLflow's migrations,
    telemetry threads and log lines are suppressed."""
    folders = [RunFolder.create(run.path.parent, f"job-{number}") for number in range(2)]
    for folder in folders:
        folder.write_config("seed: 3\n")
    jobs = [_track_in_a_process(folder) for folder in folders]
    assert [job.communicate() for job in jobs] == [("True ['MainThread', 'waits']\n", "")] * 2
    store = tracking_store(TrackingConfig(), run.path.parent, {})
    runs = runs_at(store.uri)
    assert [there.info.status for there in runs.values()] == ["FINISHED"] * 2
    assert all(len(history(store.uri, there.info.run_id, "a")) == 20 for there in runs.values())


def test_finishing_a_run_that_never_started_prints_nothing(run, caplog):
    TrackerCallback("mlflow", TrackingConfig(uri=NOWHERE)).end(RunResult(run.path, "FAILED", []))
    assert caplog.messages == []
