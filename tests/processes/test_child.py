"""Child processes: their end, what they leave, and the end of their parent."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bandpo_cli.processes.watch import ChildProcess
from tests.processes.checks import check_ended, has_ended, wait_for

LEAVES = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"


def start(code: str, **options: Any) -> ChildProcess:
    return ChildProcess([sys.executable, "-c", code], os.environ, stdout=subprocess.PIPE, **options)


def read_line(child: ChildProcess) -> bytes:
    return child.process.stdout.readline()


@pytest.mark.parametrize("code", [0, 3])
def test_what_an_ended_process_leaves_is_killed_unless_it_may_leave_it(code):
    kept = start(f"{LEAVES}; raise SystemExit({code})", may_leave=True)
    killed = start(f"{LEAVES}; raise SystemExit({code})")
    pids = [int(read_line(child)) for child in (kept, killed)]
    assert kept.wait()
    assert killed.wait()
    assert [kept.code, killed.code] == [code, code]
    check_ended(pids[1:] if code == 0 else pids)
    if code == 0:
        os.kill(pids[0], signal.SIGKILL)


@pytest.mark.parametrize("in_time", [True, False])
def test_a_killed_process_ends_with_its_children_and_its_id_gets_no_further_signal(in_time, monkeypatch):
    """It counts as killed, too, if it does not end in time, as one that waits for a device."""
    child = start(f"{LEAVES}; import time; time.sleep(600)")
    left = int(read_line(child))
    assert not child.wait(0)
    assert child.poll() is None
    if not in_time:
        monkeypatch.setattr(child, "wait", lambda seconds: False)
    child.kill()
    check_ended([left])
    assert child.describe_end() == "was killed by SIGKILL (as the system does when memory runs out)"
    child.send(signal.SIGKILL)
    child.process.wait()


def test_the_end_has_the_last_line_of_the_output():
    with tempfile.TemporaryFile() as output:
        code = "print('x' * 10**6); print('no memory'); raise SystemExit(4)"
        child = ChildProcess([sys.executable, "-c", code], os.environ, stdout=output)
        child.wait()
        assert child.describe_end(output) == "ended with exit code 4 (its last output: no memory)"
        assert child.describe_end() == "ended with exit code 4"


PARENT = """
import os, signal, sys, time
from bandpo_cli.processes.watch import ChildProcess, python_command
child = ChildProcess(python_command("role", "tests.processes.busy:work", [sys.argv[1]], [signal.SIGTERM]), os.environ)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_working_process_and_its_children_end_when_the_parent_is_killed(tmp_path):
    """It ignores the signals that it is told to ignore, and runs no file of the current folder."""
    (tmp_path / "json.py").write_text("raise ImportError('the folder shadows the standard library')")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-P", "-c", PARENT, str(tmp_path / "pids")]
    parent = subprocess.Popen(command, cwd=tmp_path, env=environment)
    wait_for((tmp_path / "pids").exists)
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    try:
        os.kill(pids[0], signal.SIGTERM)
        time.sleep(0.1)
        assert not has_ended(pids[0])
        parent.kill()
        parent.wait()
        check_ended(pids)
    finally:  # a process that does not end by itself would use a core forever
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
