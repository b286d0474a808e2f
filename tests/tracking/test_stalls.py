"""A tracker that does not answer, and a lock that another process holds, are named."""

import socket
from threading import Thread

import pytest

from bandpo_cli.processes import watch
from bandpo_cli.storage.files import wait_for_lock
from bandpo_cli.tracking import outages
from bandpo_cli.tracking.mlflow_store import Store
from tests.processes.checks import wait_for
from tests.storage.test_lock import holder
from tests.tracking.tracked import end_tracker, start_tracker, write_settings


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
