"""MLflow gets the complete record, in its units and limits; if it cannot be reached, the run prints one warning."""

import logging
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from bandpo_cli.config.run import TrackingConfig
from bandpo_cli.processes import watch
from bandpo_cli.storage.files import wait_for_lock
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tracking import outages
from bandpo_cli.tracking.mlflow_store import Store, create_sqlite_store, tracking_store, ui_text
from bandpo_cli.tracking.mlflow_tracker import MlflowTracker
from bandpo_cli.tracking.sender import RunSender
from bandpo_cli.tracking.trackers import Point, Sent, finite_metrics
from bandpo_cli.types import RunStatus
from tests.processes.checks import wait_for
from tests.storage.test_run_folder import holder
from tests.tracking.tracked import (
    check_complete,
    client_of,
    end_tracker,
    history,
    runs_at,
    start_tracker,
    track,
    write_settings,
)  # fmt: skip

NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens there, so it refuses at once


@pytest.fixture
def run(run, caplog, monkeypatch):
    """Return the run of the storage tests with more settings; messages are recorded, and retries are immediate."""
    caplog.set_level(logging.INFO, "bandpo_cli")
    monkeypatch.setattr(outages, "MIN_RETRY_DELAY_S", 0.05)
    write_settings(run)
    return run


@pytest.fixture
def mirror(caplog):
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
    page = f"http://127.0.0.1:5000/#/experiments/{first.experiment_id}/runs/{first.run_id}/model-metrics"
    assert ui_text(run.path, store).splitlines()[1] == f"{page}?workflowType=machine_learning"
    assert list(Path.cwd().iterdir()) == []  # no ./mlruns and no ./mlflow.db in the current folder
    names = {".mlflow.db.lock", "first", "mlartifacts", "mlflow.db"}
    assert {path.name for path in run.path.parent.iterdir()} == names
    assert mirror(run, store) == []
    assert check_complete(store.uri, "FINISHED").run_id == first.run_id  # no step is sent twice
    client_of(store.uri).delete_run(first.run_id)
    assert mirror(run, store) == []
    assert check_complete(store.uri, "FINISHED").run_id != first.run_id


def test_a_folder_with_special_characters_and_a_database_that_a_killed_run_left_half_created(run, mirror):
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


KIND = "mlflow.experimentKind"


@pytest.fixture
def store(tmp_path):
    return tracking_store(TrackingConfig(), tmp_path, {})


@pytest.fixture
def client(store):
    create_sqlite_store(store.uri)
    return client_of(store.uri)


@pytest.mark.parametrize(
    ("existing", "kind"),
    [
        (None, "custom_model_development"),  # one of those that MLflow's pages know
        ({"mine": "1"}, "custom_model_development"),
        ({KIND: "genai_development"}, "genai_development"),
        ({KIND: ""}, ""),
    ],
)
def test_an_experiment_is_of_model_training_unless_a_user_chose_a_kind(store, client, run, existing, kind):
    if existing is not None:
        client.create_experiment("bandpo", store.artifact_location, tags=existing)
    RunSender("mlflow", run.path, store).send()
    assert {**(existing or {}), KIND: kind}.items() <= client.get_experiment_by_name("bandpo").tags.items()


def test_a_server_that_refuses_the_kind_gets_the_run(store, client, run, monkeypatch):
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    def refuse(self: Any, *_: Any) -> None:
        raise MlflowException("no permission")

    client.create_experiment("bandpo", store.artifact_location)
    monkeypatch.setattr(MlflowClient, "set_experiment_tag", refuse)
    RunSender("mlflow", run.path, store).send()
    assert KIND not in client.get_experiment_by_name("bandpo").tags
    assert list(runs_at(store.uri)) == ["first"]


class Client:
    """Stand-in for MLflow's client that records the calls of `log_batch`."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[str, float, int, int]]] = []

    def log_batch(self, run_id: str, metrics: list[Any], synchronous: bool) -> None:
        assert (run_id, synchronous) == ("run", True)
        self.batches.append([(metric.key, metric.value, metric.timestamp, metric.step) for metric in metrics])


def tracker_of(client: Client) -> MlflowTracker:
    """Return the tracker of a run that has no metrics."""
    tracker = MlflowTracker.__new__(MlflowTracker)
    tracker._client, tracker.run_id, tracker._names, tracker._histories = client, "run", set(), {}
    return tracker


def test_a_metric_has_its_step_and_its_time_and_no_call_has_more_metrics_than_mlflow_allows():
    """The time is in milliseconds; MLflow refuses a batch of more than 1000 metrics."""
    client = Client()
    records = [{"step": 3, "eval/a/mean@16": 0.5, "ratio/max": None}, {"step": 4, "eval/a/mean@16": 0.75}]
    points = [Point(record["step"], record["step"] * 1000, finite_metrics(record)) for record in records]
    assert tracker_of(client).send(points) == Sent(new=2, there=0, differing=0)
    assert client.batches == [[("eval/a/mean_at_16", 0.5, 3000, 3), ("eval/a/mean_at_16", 0.75, 4000, 4)]]
    client.batches.clear()
    names = [f"m{index}" for index in range(30)]
    points = [Point(step, 0, dict.fromkeys(names, 0.5)) for step in range(70)]
    assert tracker_of(client).send(points).new == 2100
    assert list(map(len, client.batches)) == [1000, 1000, 100]
    sent = [(key, step) for batch in client.batches for key, _, _, step in batch]
    assert sent == [(name, step) for step in range(70) for name in names]


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_named(run, monkeypatch, caplog):
    """It accepts the connection and sends nothing; its password is not in the line."""
    monkeypatch.setattr(watch, "stall_after", 0.3)
    monkeypatch.setattr(outages, "UNREACHABLE_GRACE_S", 0.1)
    write_settings(run)
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://user:word@127.0.0.1:{server.getsockname()[1]}"
        tracker = start_tracker(Store(uri, "bandpo", None), run.path)
        wait_for(lambda: caplog.messages)
        end_tracker(tracker, run)
    line = caplog.messages[0]
    assert line.startswith("waiting for MLflow at http://***@127.0.0.1:")
    assert "to send it later: bandpo sync" in line
    assert "word" not in line


@pytest.mark.slow
def test_a_lock_of_another_process_is_named_and_acquired_after_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(watch, "stall_after", 0.3)
    acquired = []

    def acquire() -> None:
        with wait_for_lock(tmp_path / ".lock"):
            acquired.append(True)

    with holder(tmp_path):
        thread = Thread(target=acquire)
        thread.start()
        wait_for(lambda: caplog.messages)
        assert not acquired
    thread.join(60)
    assert acquired
    assert caplog.messages[0].startswith(f"waiting for the lock {tmp_path / '.lock'} since ")
