"""A real MLflow server that is killed or stopped during a run: no value is lost, and none is sent twice."""

import logging
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

import pytest

from bandpo_cli.config.run import TrackingConfig
from bandpo_cli.storage import run_folder
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tracking import outages
from bandpo_cli.tracking.mlflow_store import Store, tracking_store
from bandpo_cli.tracking.sender import RunSender
from bandpo_cli.tracking.trackers import finite_metrics
from tests.processes.checks import wait_for
from tests.tracking.tracked import check_complete, end_tracker, report, start_tracker, track, write_settings

pytestmark = pytest.mark.slow
STEPS = 12
Values = Counter[tuple[str, int, float]]
"""Metrics as (key, step, value), each with the number of times that it is stored."""


class MlflowServer:
    """`mlflow server` on a free port, with its SQLite file and artifacts in `folder`."""

    def __init__(self, folder: Path, empty_database: Path) -> None:
        self.folder = folder
        shutil.copyfile(empty_database, folder / "server.db")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, or continue it if it is stopped, and wait until it answers."""
        if self._process is None:
            command = [sys.executable, "-m", "mlflow", "server", "--port", str(self.port), "--workers", "1",
                       "--backend-store-uri", f"sqlite:///{self.folder}/server.db",
                       "--artifacts-destination", str(self.folder / "files")]  # fmt: skip
            with (self.folder / "server.log").open("ab") as log:
                self._process = subprocess.Popen(
                    command, stdout=log, stderr=log, cwd=self.folder, start_new_session=True,
                    env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                )  # fmt: skip
        self.send(signal.SIGCONT)
        wait_for(self._answers)

    def send(self, number: int) -> None:
        """Send a signal to the server and its worker."""
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self._process.wait()
        self._process = None

    def _answers(self) -> bool:
        assert self._process.poll() is None, (self.folder / "server.log").read_text()
        try:
            urlopen(f"{self.uri}/health", timeout=1.0).close()
        except (OSError, HTTPException):
            return False
        return True

    def values(self, run: str) -> Values:
        """Return the metrics of a run in the database, whether or not the server runs."""
        query = "SELECT key, step, value FROM metrics JOIN runs USING (run_uuid) WHERE name = ?"
        return Counter(self._query(query, run))

    def status(self, run: str) -> str:
        ((status,),) = self._query("SELECT status FROM runs WHERE name = ?", run)
        return str(status)

    def _query(self, query: str, run: str) -> list[tuple]:
        uri = f"file:{self.folder}/server.db?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=30)) as database:
            return list(database.execute(query, (run,)))


@pytest.fixture(scope="module")
def one_server(tmp_path_factory, empty_database):
    server = MlflowServer(tmp_path_factory.mktemp("server"), empty_database)
    yield server
    server.kill()


@pytest.fixture
def server(one_server, monkeypatch):
    """Return the running server, which all tests share; retries are frequent, and a stopped server is noticed soon."""
    one_server.start()
    monkeypatch.setattr(outages, "CONNECT_TIMEOUT_S", 2.0)
    monkeypatch.setattr(outages, "MAX_RETRY_DELAY_S", 0.2)
    monkeypatch.setattr(outages, "MIN_RETRY_DELAY_S", 0.2)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    return one_server


@pytest.fixture
def folder(tmp_path, request):
    folder = RunFolder.create(tmp_path / "runs", run_folder.slug(request.node.name))
    folder.write_config("seed: 3\n")
    folder.write_env({"versions": {"python": "3.11"}})
    return folder


def expected(folder: RunFolder) -> Values:
    rows = [(record["step"], finite_metrics(record)) for record in folder.read_metrics()]
    return Counter((key, step, value) for step, row in rows for key, value in row.items())


def track_steps(folder: RunFolder, server: MlflowServer, events: Mapping[int, Callable[[], object]]) -> None:
    """Track a run as `bandpo train` does, with `events` before their steps."""
    tracker = start_tracker(Store(server.uri, "bandpo", None), folder.path)
    for step in range(1, STEPS + 1):
        events.get(step, lambda: None)()
        folder.append_metrics({"step": step, **{f"train/metric_{i}": step + i / 7 for i in range(20)}})
        tracker.step(report(step))
    folder.write_summary({"status": "FINISHED", "steps": STEPS})
    end_tracker(tracker, folder)


def interrupt(server: MlflowServer, folder: RunFolder, act: Callable[[], object]) -> Callable[[], None]:
    """Return an event that calls `act` when the server has values of the run."""

    def event() -> None:
        wait_for(lambda: server.values(folder.name))
        act()

    return event


def sync(server: MlflowServer, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sync twice, and require that the second sync sends nothing and that the server has every value once.

    A server that was stopped handles the requests left in its sockets at any time after it continues, also during
    the sync. The number of values that the sync sends is therefore not determined.
    """
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
    store = Store(server.uri, "bandpo", None)
    first, again = (RunSender("mlflow", folder.path, store).send() for _ in range(2))
    assert (first.metrics.new + first.metrics.there, first.metrics.differing) == (20 * STEPS, 0)
    assert (again.metrics.new, again.files, again.ended) == (0, 0, False)
    assert (server.values(folder.name), server.status(folder.name)) == (expected(folder), "FINISHED")


def test_a_server_gets_the_complete_record_and_the_run_prints_its_address(server, run, caplog):
    caplog.set_level(logging.INFO, "bandpo_cli")
    write_settings(run)
    track(tracking_store(TrackingConfig(uri=server.uri), run.path.parent, {}), run)
    info = check_complete(server.uri, "FINISHED")
    address = f"{server.uri}/#/experiments/{info.experiment_id}/runs/{info.run_id}/model-metrics"
    assert caplog.messages == [f"MLflow: {address}?workflowType=machine_learning"]


def test_a_server_that_is_killed_and_restarted_during_the_run(server, folder, caplog, monkeypatch):
    monkeypatch.setattr(outages, "UNREACHABLE_GRACE_S", 60.0)  # the restarted server may be slow
    before = []

    def restart() -> None:
        wait_for(lambda: caplog.messages)
        before.append(server.values(folder.name))
        server.start()

    track_steps(folder, server, {4: interrupt(server, folder, server.kill), 8: restart})
    assert server.values(folder.name) == expected(folder)
    assert 0 < len(before[0]) <= 3 * 20
    assert server.status(folder.name) == "FINISHED"
    (message,) = caplog.messages
    assert "cannot be reached" in message


def test_a_server_that_is_stopped_at_the_end_gets_the_rest_by_sync(server, folder, caplog, monkeypatch):
    stop = interrupt(server, folder, lambda: server.send(signal.SIGSTOP))
    track_steps(folder, server, {4: stop, STEPS: lambda: wait_for(lambda: caplog.messages)})
    assert len(caplog.messages) == 2
    assert f"bandpo sync {folder.name}" in caplog.messages[1]
    server.start()
    sync(server, folder, monkeypatch)
