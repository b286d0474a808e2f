"""MLflow gets the complete record if it can be reached; if not, the run prints one warning."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from bandpo_cli.config.run import TrackingConfig
from bandpo_cli.storage.run_folder import RunFolder, run_artifacts
from bandpo_cli.tracking.link import run_url
from bandpo_cli.tracking.store import Store, tracking_store
from bandpo_cli.tracking.tracker import MlflowCallback, MlflowTracker
from bandpo_cli.types import RunInfo, RunResult, RunStatus, StepReport
from tests.tracking.mlflow_server import MlflowServer, silent_port

PARAMS = {"seed": 3, "bounds": {"method": "band", "delta": 0.05}, **{f"extra_{i}": i for i in range(150)}}
NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens there, so it refuses at once


def _client(uri: str):
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _only_run(uri: str):
    client = _client(uri)
    experiment = client.get_experiment_by_name("bandpo")
    (found,) = client.search_runs([experiment.experiment_id])
    return client, found


def _history(client, run_id: str, key: str) -> list[tuple[int, float]]:
    return sorted((metric.step, metric.value) for metric in client.get_metric_history(run_id, key))


def _mirror(run: RunFolder, store: Store, status: RunStatus = "FINISHED", **options) -> list[str]:
    """Track the three steps of `run` and return the printed lines."""
    lines: list[str] = []
    tracker = MlflowTracker(store, run.path, lines.append, **options)
    tracker.start(run.name, PARAMS, {"mlflow.source.git.commit": "abc"})
    for record in run.read_metrics():
        tracker.log_metrics(record["step"], record)
    tracker.finish(status, run_artifacts(run.path))
    return lines


def _check_complete(uri: str, run: RunFolder, status: str) -> None:
    client, found = _only_run(uri)
    assert found.info.status == status
    assert found.info.run_name == "first"
    assert found.data.params == {
        "seed": "3",
        "bounds.method": "band",
        "bounds.delta": "0.05",
        **{f"extra_{i}": str(i) for i in range(150)},
    }
    assert found.data.tags["mlflow.source.git.commit"] == "abc"
    assert _history(client, found.info.run_id, "train/reward") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    top = [file.path for file in client.list_artifacts(found.info.run_id)]
    assert sorted(top) == ["config.yaml", "env.json", "metrics.jsonl", "samples", "summary.json"]
    samples = client.list_artifacts(found.info.run_id, "samples")
    assert [file.path for file in samples] == ["samples/step-000010.parquet"]


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_a_sqlite_file_in_the_runs_folder_gets_the_complete_record(run, status):
    store = tracking_store(TrackingConfig(), run.path.parent, {})
    assert _mirror(run, store, status) == []
    _check_complete(store.uri, run, status)
    _, found = _only_run(store.uri)
    assert run_url(run.path, store) == (
        f"http://127.0.0.1:5000/#/experiments/{found.info.experiment_id}/runs/{found.info.run_id}/model-metrics"
        "?workflowType=machine_learning"
    )
    assert list(Path.cwd().iterdir()) == []  # no ./mlruns and no ./mlflow.db in the current folder
    assert sorted(path.name for path in run.path.parent.iterdir()) == [
        ".mlflow.db.lock",
        "first",
        "mlartifacts",
        "mlflow.db",
    ]


def test_a_runs_folder_with_blanks_and_special_characters_works(run):
    odd = run.path.parent.parent / "my runs %20 #1 é"
    run.path.parent.rename(odd)
    moved = RunFolder(odd / "first")
    store = tracking_store(TrackingConfig(), odd, {})
    assert _mirror(moved, store) == []
    assert (odd / "mlflow.db").is_file()
    _check_complete(store.uri, moved, "FINISHED")


def test_a_resumed_run_continues_its_mlflow_run_and_sends_no_step_twice(run):
    store = tracking_store(TrackingConfig(), run.path.parent, {})
    _mirror(run, store, "KILLED")
    run.append_metrics({"step": 4, "train/reward": 1.0})
    assert _mirror(run, store) == []
    client, there = _only_run(store.uri)
    assert there.info.status == "FINISHED"
    assert [step for step, _ in _history(client, there.info.run_id, "train/reward")] == [1, 2, 3, 4]


def test_a_run_that_was_deleted_at_mlflow_is_created_again(run):
    store = tracking_store(TrackingConfig(), run.path.parent, {})
    _mirror(run, store)
    client, there = _only_run(store.uri)
    client.delete_run(there.info.run_id)
    assert _mirror(run, store) == []
    _check_complete(store.uri, run, "FINISHED")


def test_a_refused_connection_gives_one_warning_and_a_line_at_the_end(run):
    uri = NOWHERE.replace("//", "//me:secret@")
    warnings = _mirror(run, Store(uri, "bandpo", None), report=(closing := []).append)
    assert len(warnings) == 1
    assert "cannot be reached" in warnings[0]
    assert len(closing) == 1
    assert "3 steps" in closing[0]
    assert "5 files" in closing[0]
    assert closing[0].endswith(f"bandpo sync first --runs-dir {run.path.parent}")
    assert "secret" not in warnings[0] + closing[0]
    assert not any("\n" in line for line in warnings + closing)


@pytest.mark.parametrize("uri", ["nonsense://x", "sqlite:////proc/no/such/folder/x.db", "databricks://none"])
def test_an_invalid_uri_gives_one_warning(run, uri):
    warnings = _mirror(run, Store(uri, "bandpo", None), report=(closing := []).append)
    assert (len(warnings), len(closing)) == (1, 1)


@contextmanager
def _server_with(handler: type[BaseHTTPRequestHandler]):
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_server_that_answers_500_gives_one_warning(run):
    class Broken(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(500)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with _server_with(Broken) as uri:
        warnings = _mirror(run, Store(uri, "bandpo", None), report=(closing := []).append)
    assert (len(warnings), len(closing)) == (1, 1)
    assert "500" in warnings[0]


def test_a_store_that_recovers_gets_every_step_once(run, monkeypatch):
    """Two calls fail, the second one after MLflow has stored the metrics."""
    from bandpo_cli.tracking import tracker
    from bandpo_cli.tracking.mirror import MlflowMirror

    store = tracking_store(TrackingConfig(), run.path.parent, {})
    send, calls = MlflowMirror.send, []

    def flaky(self, records):
        calls.append(len(records))
        if len(calls) == 1:
            raise ConnectionError("gone")
        send(self, records)
        if len(calls) == 2:
            raise TimeoutError("stored, but the answer was lost")

    monkeypatch.setattr(MlflowMirror, "send", flaky)
    monkeypatch.setattr(tracker, "MIN_RETRY_DELAY_S", 0.05)
    monkeypatch.setattr(tracker, "FINAL_RETRIES", 3)
    warnings = _mirror(run, store)
    assert len(warnings) == 1
    _check_complete(store.uri, run, "FINISHED")


HANGING_RUN = """
import sys, time
from pathlib import Path
from bandpo_cli.tracking.tracker import MlflowTracker
from bandpo_cli.tracking.store import Store

tracker = MlflowTracker(Store(sys.argv[1], "bandpo", None), Path(sys.argv[2]), print)
tracker.start("first", {"seed": 1}, {})
for step in range(200):
    tracker.log_metrics(step, {"step": step, "train/reward": 1.0})
    time.sleep(0.01)
tracker.finish("FINISHED", [])
print("mlflow" in sys.modules, tracker._thread.is_alive())
"""


@pytest.mark.slow
def test_a_store_that_never_answers_delays_neither_steps_nor_the_end_of_the_process(run):
    with silent_port() as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-c", HANGING_RUN, uri, str(run.path)],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    line, state = done.stdout.splitlines()
    assert "200 steps" in line
    # MLflow was not imported, and neither finish nor the process waited for the check's timeout of 10 s.
    assert state == "False True"


@pytest.mark.slow
def test_tracking_in_a_new_process_prints_nothing_and_sends_no_telemetry(run):
    """MLflow's migrations, telemetry threads and log lines are suppressed."""
    code = (
        "import sys, threading; from pathlib import Path\n"
        "from bandpo_cli.config.run import TrackingConfig\n"
        "from bandpo_cli.tracking.store import tracking_store\n"
        "from bandpo_cli.tracking.tracker import MlflowTracker\n"
        "run = Path(sys.argv[1])\n"
        "tracker = MlflowTracker(tracking_store(TrackingConfig(), run.parent), run, print)\n"
        "tracker.start('first', {}, {}); tracker.log_metrics(1, {'a': 1.0}); tracker.finish('FINISHED', [])\n"
        "assert [t.name for t in threading.enumerate()] == ['MainThread'], threading.enumerate()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run.path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_runs_that_start_together_share_a_new_database(run):
    """The first runs of a sweep create the SQLite file and the experiment at the same time."""
    folders = [RunFolder.create(run.path.parent, f"job-{i}") for i in range(4)]
    code = (
        "import sys; from pathlib import Path\n"
        "from bandpo_cli.config.run import TrackingConfig\n"
        "from bandpo_cli.tracking.store import tracking_store\n"
        "from bandpo_cli.tracking.tracker import MlflowTracker\n"
        "run = Path(sys.argv[1])\n"
        "tracker = MlflowTracker(tracking_store(TrackingConfig(), run.parent), run, print)\n"
        "tracker.start('x', {}, {}); [tracker.log_metrics(i, {'a': 1.0}) for i in range(100)]\n"
        "tracker.finish('FINISHED', [])\n"
    )
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(folder.path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for folder in folders
    ]
    assert [job.communicate()[0] for job in jobs] == [""] * 4
    store = tracking_store(TrackingConfig(), run.path.parent, {})
    client = _client(store.uri)
    runs = client.search_runs([client.get_experiment_by_name("bandpo").experiment_id])
    assert [there.info.status for there in runs] == ["FINISHED"] * 4
    assert all(len(_history(client, there.info.run_id, "a")) == 100 for there in runs)


@pytest.mark.slow
def test_a_real_server_gets_the_complete_record_through_http(run, tmp_path):
    server = MlflowServer(tmp_path / "server")
    try:
        server.start()
        store = tracking_store(TrackingConfig(uri=server.uri), run.path.parent, {})
        assert _mirror(run, store, announce=(announced := []).append) == []
        _check_complete(server.uri, run, "FINISHED")
        _, found = _only_run(server.uri)
        address = (
            f"{server.uri}/#/experiments/{found.info.experiment_id}/runs/{found.info.run_id}/model-metrics"
        )
        assert announced == [f"MLflow: {address}?workflowType=machine_learning"]
    finally:
        server.stop()


def test_the_callback_sends_steps_and_status(run):
    callback = MlflowCallback(TrackingConfig())
    callback.start(RunInfo(run.path, PARAMS, {}, 2, 0, (), None))
    for record in run.read_metrics():
        callback.step(StepReport(record["step"], record, None))
    callback.end(RunResult(run.path, "FINISHED", run.read_metrics()))
    assert (run.path.parent / "mlflow.db").exists()
    assert (run.path / "mlflow.json").exists()


def test_finishing_a_run_that_never_started_prints_nothing(run):
    printed: list[str] = []
    MlflowTracker(Store(NOWHERE, "bandpo", None), run.path, printed.append).finish("FAILED", [])
    assert printed == []


def test_a_missing_database_gives_one_warning_and_no_output_of_mlflow(run, capfd):
    """MLflow itself would retry for 25 minutes, and hold its own lock meanwhile."""
    store = Store(f"sqlite:///{run.path}/no/such/folder/x.db", "bandpo", None)
    (run.path / "no").write_text("a file where the folder should be")
    warnings = _mirror(run, store, report=(closing := []).append)
    assert (len(warnings), len(closing)) == (1, 1)
    assert capfd.readouterr().err == ""


def test_a_run_that_was_killed_while_it_created_the_database_does_not_affect_later_runs(run):
    half = run.path.parent / ".mlflow.db.new"
    half.write_bytes(b"SQLite format 3\0 truncated")
    store = tracking_store(TrackingConfig(), run.path.parent, {})
    assert _mirror(run, store) == []
    _check_complete(store.uri, run, "FINISHED")
    assert not half.exists()
