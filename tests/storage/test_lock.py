"""Run lock: a second process is refused with the id of the first, and the lock never outlives its process."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from bandpo_cli.errors import UserError
from bandpo_cli.storage import files
from bandpo_cli.storage.files import run_lock

HOLD = (
    "import os, sys, time; from pathlib import Path\n"
    "from bandpo_cli.storage.files import run_lock\n"
    "with run_lock(Path(sys.argv[1])):\n"
    "    if sys.argv[2] == 'fork' and os.fork() == 0:\n"
    "        time.sleep(20); os._exit(0)\n"
    "    print('held', flush=True); time.sleep(20)\n"
)


@contextmanager
def holder(folder: Path, how: str = "single") -> Iterator[subprocess.Popen[str]]:
    """Start a process that holds the lock of `folder` within the body; kill it and its children afterwards."""
    command = [sys.executable, "-c", HOLD, str(folder), how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def test_a_second_process_is_refused_with_a_message_that_names_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "ACQUIRE_TIMEOUT_S", 0.01)
    with holder(tmp_path) as process, pytest.raises(UserError) as error, run_lock(tmp_path):
        pytest.fail("two processes have the lock")
    line = str(error.value)
    assert f"process {process.pid} on {socket.gethostname()}" in line
    assert tmp_path.name in line
    assert "\n" not in line


@pytest.mark.parametrize("how", ["single", "fork"])
def test_a_killed_process_releases_the_lock_even_if_its_child_lives(tmp_path, how):
    with holder(tmp_path, how) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with run_lock(tmp_path):  # raises where the lock is still held
            assert process.returncode == -signal.SIGKILL


def test_the_lock_is_released_at_the_end_and_when_the_body_fails(tmp_path):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), run_lock(tmp_path):
            raise ZeroDivisionError


def test_a_folder_that_is_not_writable_raises(tmp_path):
    with pytest.raises(UserError, match="cannot be written to"), run_lock(tmp_path / "nowhere"):
        pytest.fail("there is no such folder")
