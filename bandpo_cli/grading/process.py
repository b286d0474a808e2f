"""The parent's side of one worker process: started apart from everything here, spoken to without ever blocking."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from bandpo_cli.config.run import GradingConfig
from bandpo_cli.errors import RunError

_CHUNK = 1 << 16
# The worker finds modules just as this process does, and runs neither the user's __main__ nor the folder's files.
_BOOT = (
    "import json, sys; name, deadline, memory, sys.path[:] = json.loads(sys.argv[1]); "
    "from bandpo_cli.grading.worker import main; main(name, deadline, memory)"
)


class WorkerProcess:
    """A process that serves one function; lines of JSON in and out, never pickles.

    It is a process group of its own, so that killing it takes whatever the user's function started along, and
    Ctrl-C at the terminal reaches the parent only.
    """

    def __init__(self, function: str, config: GradingConfig) -> None:
        """Start it; imports go on while the caller does other things. Raises RunError when the system refuses."""
        package = str(Path(__file__).resolve().parents[2])
        path = [str(Path(entry).absolute()) for entry in sys.path]
        path = path if package in path else [*path, package]
        arguments = json.dumps([function, config.deadline, config.memory_gb, path])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={"OMP_NUM_THREADS": "1", **os.environ},
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise RunError(
                f"no process for grading could be started: {error}; lower grading.workers"
            ) from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.stdin, self.stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self.stdin.fileno(), False)
        os.set_blocking(self.stdout.fileno(), False)
        self._unsent = bytearray()
        self._received = bytearray()

    @property
    def wants_to_send(self) -> bool:
        """Some of what was queued is still to be written."""
        return bool(self._unsent)

    def send(self, line: bytes) -> None:
        """Queue a line, and write as much as the pipe takes now."""
        self._unsent += line + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write as much as the pipe takes now; a closed pipe shows when reading."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                written = os.write(self.stdin.fileno(), self._unsent[:_CHUNK])
                del self._unsent[:written]

    def receive(self) -> list[dict[str, Any]] | None:
        """The replies that have come, perhaps none; None when the process ended or sent what is no reply."""
        try:
            data = os.read(self.stdout.fileno(), _CHUNK)
        except BlockingIOError:
            return []
        if not data:
            return None
        self._received += data
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        try:
            return [json.loads(line) for line in lines]
        except ValueError:
            return None

    def kill(self) -> str:
        """End the process and all that it started, and say how it ended. A second call does no harm."""
        if self._process.returncode is None:  # not waited for yet, so its number is not another's
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        for pipe in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        return f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
