"""Outages of a real MLflow server during a run: no record is lost, and none is sent twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bandpo_cli.callbacks import RunResult
from bandpo_cli.storage import run_folder
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tracking import store as stores
from bandpo_cli.tracking.mirror import finite_metrics
from bandpo_cli.tracking.store import Store
from bandpo_cli.tracking.sync import RunSender
from bandpo_cli.tracking.tracker import MlflowTracker
from tests.tracking.mlflow_server import MlflowServer, Triple, silent_port
from tests.tracking.tracked import report, start_tracker

pytestmark = pytest.mark.slow
STEPS, STEP_S = 40, 0.15
KEYS = 20


@pytest.fixture(scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    server = MlflowServer(tmp_path_factory.mktemp("server"))
    yield server
    server.stop(signal.SIGKILL)


@pytest.fixture
def server(one_server: MlflowServer) -> MlflowServer:
    """Return a running server. Starting one takes seconds, so all tests share it, each with its own run name."""
    one_server.start()
    return one_server


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> RunFolder:
    folder = RunFolder.create(tmp_path / "runs", run_folder.slug(request.node.name))
    folder.write_config("seed: 3\n")
    folder.write_env({"versions": {"python": "3.11"}})
    return folder


def expected(folder: RunFolder) -> Counter[Triple]:
    return Counter(
        (key, record["step"], value)
        for record in folder.read_metrics()
        for key, value in finite_metrics(record).items()
    )


def log(tracker: MlflowTracker, folder: RunFolder, step: int) -> None:
    metrics = {f"train/metric_{i}": step + i / 7 for i in range(KEYS)}
    record = {"step": step, **metrics, "time/step": STEP_S}
    folder.append_metrics(record)
    tracker.step(report(step))


def track_steps(folder: RunFolder, uri: str, events: dict[int, Callable[[], object]], first: int = 1) -> None:
    """Log `STEPS` steps as a run does, call the `events` before their steps, and finish."""
    tracker = start_tracker(Store(uri, "bandpo", None), folder.path)
    for step in range(first, STEPS + 1):
        events.get(step, lambda: None)()
        log(tracker, folder, step)
        time.sleep(STEP_S)
    folder.write_summary({"status": "FINISHED", "steps": STEPS})
    tracker.end(RunResult(folder.path, "FINISHED", []))


def check_complete(
    name: str, folder: RunFolder, on_time: Counter[Triple], live: Counter[Triple], end: Counter[Triple]
) -> None:
    """Print how many records were sent during the outage, later, and by sync; check that none is lost or sent twice."""
    wanted = expected(folder)
    print(
        f"\n{name:<34} {len(wanted):>5} records: {len(set(wanted) & set(on_time)):>5} before the end of the outage, "
        f"{len(set(live) - set(on_time)):>4} later by the run itself, "
        f"{len(set(end) - set(live)):>4} by sync, {len(set(wanted) - set(end))} lost"
    )
    assert end == wanted  # equal as multisets: no duplicates


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_is_killed_and_restarted_during_the_run(
    server: MlflowServer, folder: RunFolder, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    before: list[Counter[Triple]] = []

    def end() -> None:
        wait_for(lambda: bool(server.metrics(folder.name)))
        server.stop(number)

    def restart() -> None:
        before.append(server.metrics(folder.name))
        server.start()

    track_steps(folder, server.uri, {12: end, 20: restart})
    live = server.metrics(folder.name)
    check_complete(f"{signal.Signals(number).name}, back before the end", folder, before[0], live, live)
    assert 0 < len(before[0]) < len(live)
    assert server.statuses(folder.name) == ["FINISHED"]
    assert len(caplog.messages) == 1
    assert "cannot be reached" in caplog.messages[0]


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set timeouts of seconds, so that a stopped server is detected quickly."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    monkeypatch.setattr(stores, "CONNECT_TIMEOUT_S", 2.0)


def stop_server(server: MlflowServer, folder: RunFolder) -> Callable[[], None]:
    def act() -> None:
        wait_for(lambda: bool(server.metrics(folder.name)))
        server.send(signal.SIGSTOP)

    return act


@pytest.mark.usefixtures("short_timeouts")
def test_a_server_that_is_stopped_for_longer_than_the_request_timeout(
    server: MlflowServer, folder: RunFolder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server handles the request in its socket after it continues, long after the tracker's timeout."""
    before: list[Counter[Triple]] = []

    def continue_server() -> None:
        wait_for(lambda: bool(caplog.messages))
        before.append(server.metrics(folder.name))
        server.send(signal.SIGCONT)

    track_steps(folder, server.uri, {12: stop_server(server, folder), 36: continue_server})
    live = server.metrics(folder.name)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
    end = sync(server, folder)
    check_complete("SIGSTOP, SIGCONT before the end", folder, before[0], live, end)
    assert server.statuses(folder.name) == ["FINISHED"]
    assert 1 <= len(caplog.messages) <= 2


def sync(server: MlflowServer, folder: RunFolder) -> Counter[Triple]:
    """Sync, check that a second sync sends nothing, and return the metrics at the server.

    A server that was stopped handles the requests left in its sockets at any time after it continues, also during
    the sync: how many records the sync finds there is not determined, but that it sends none of those again is.
    """
    sent = RunSender(Store(server.uri, "bandpo", None), folder.path).send().metrics
    assert (sent.new + sent.there, sent.differing) == (sum(expected(folder).values()), 0)
    again = RunSender(Store(server.uri, "bandpo", None), folder.path).send()
    assert (again.metrics.new, again.files, again.ended) == (0, 0, False)
    return server.metrics(folder.name)


@pytest.mark.usefixtures("short_timeouts")
def test_a_server_that_is_stopped_at_the_end_of_the_run_gets_the_rest_by_sync(
    server: MlflowServer, folder: RunFolder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = {15: stop_server(server, folder), STEPS: lambda: wait_for(lambda: bool(caplog.messages))}
    track_steps(folder, server.uri, events)
    assert len(caplog.messages) == 2
    assert f"bandpo sync {folder.name}" in caplog.messages[1]
    before = server.metrics(folder.name)
    server.send(signal.SIGCONT)
    wait_for(lambda: server.answers())
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
    end = sync(server, folder)
    check_complete("SIGSTOP until after the run", folder, before, before, end)
    assert server.statuses(folder.name) == ["FINISHED"]


def test_a_server_that_does_not_run_during_the_whole_run(
    server: MlflowServer, folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    server.stop()
    track_steps(folder, server.uri, {})
    assert len(caplog.messages) == 2
    assert f"the metrics of {STEPS} steps (from step 1)" in caplog.messages[1]
    server.start()
    end = sync(server, folder)
    check_complete("not running", folder, Counter(), Counter(), end)
    assert server.statuses(folder.name) == ["FINISHED"]


def test_a_run_that_is_killed_and_resumed_has_one_record_per_step(
    server: MlflowServer, folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """The first process dies while the server is down; the second resumes after step 20 and repeats five steps."""
    first = start_tracker(Store(server.uri, "bandpo", None), folder.path)
    for step in range(1, 26):
        if step == 22:
            wait_for(lambda: max((step for _, step, _ in server.metrics(folder.name)), default=0) == 21)
            server.stop(signal.SIGKILL)
        log(first, folder, step)
    first._tries_left = 0  # its thread ends without sending anything, like that of a killed process
    server.start()
    assert server.statuses(folder.name) == ["RUNNING"]
    RunSender(Store(server.uri, "bandpo", None), folder.path).send()
    assert server.statuses(folder.name) == ["KILLED"]
    folder.roll_back(20)
    seen: list[list[str]] = []

    def check_running() -> None:
        wait_for(lambda: server.statuses(folder.name) != ["KILLED"])
        seen.append(server.statuses(folder.name))

    track_steps(folder, server.uri, {30: check_running}, first=21)
    assert len(caplog.messages) <= 1  # of the first process
    assert seen == [["RUNNING"]]
    assert server.statuses(folder.name) == ["FINISHED"]
    assert server.metrics(folder.name) == expected(folder)


def wait_for(holds: Callable[[], bool]) -> None:
    for _ in range(1200):
        if holds():
            return
        time.sleep(0.1)
    raise AssertionError("the condition did not hold within two minutes")


TRAIN = [
    "train", "--steps", "30", "--set", "sampling.prompts=4", "--set", "sampling.samples=4",
    "--set", "optim.updates=2", "--set", "evaluation.problems=4", "--set", "evaluation.samples=4",
    "--set", "evaluation.k=[1,4]", "--set", "evaluation.every=10",
]  # fmt: skip


BANDPO = [sys.executable, "-m", "bandpo_cli"]
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"} | {
    "OMP_NUM_THREADS": "1"
}


def test_bandpo_train_loses_nothing_when_the_server_is_killed_and_restarted(
    server: MlflowServer, tmp_path: Path
) -> None:
    command = [*BANDPO, *TRAIN, "--name", "killed", "--tracking-uri", server.uri]
    with (tmp_path / "train.log").open("w") as out:
        run = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out, env=ENVIRONMENT)
        wait_for(lambda: bool(server.metrics("killed")) or run.poll() is not None)
        server.stop(signal.SIGKILL)
        before = server.metrics("killed")
        server.start()
        assert run.wait(300) == 0, (tmp_path / "train.log").read_text()
    folder = RunFolder(tmp_path / "runs" / "killed")
    live = server.metrics("killed")
    synced = RunSender(Store(server.uri, "bandpo", None), folder.path).send()
    end = server.metrics("killed")
    check_complete("bandpo train, SIGKILL and back", folder, before, live, end)
    assert len(folder.read_metrics()) == 31
    assert server.statuses("killed") == ["FINISHED"]
    assert synced.metrics.differing == 0
    assert (tmp_path / "train.log").read_text().count("cannot be reached") <= 1


def test_bandpo_train_is_complete_although_its_server_never_answers(
    server: MlflowServer, tmp_path: Path
) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*BANDPO, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=ENVIRONMENT
        )

    with silent_port() as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = run(*TRAIN, "--name", "unanswered", "--tracking-uri", uri)
    assert done.returncode == 0, done.stderr
    assert " ".join(done.stdout.split()).count("bandpo sync unanswered") == 1
    first, second = (run("sync", "unanswered", "--tracking-uri", server.uri) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "status FINISHED" in first.stdout
    assert "sent nothing" in second.stdout
    folder = RunFolder(tmp_path / "runs" / "unanswered")
    end = server.metrics("unanswered")
    check_complete("bandpo train, never answered", folder, Counter(), Counter(), end)
