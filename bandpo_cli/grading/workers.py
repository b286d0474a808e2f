"""The parent's side of one worker process: started apart from everything here, spoken to without ever blocking."""

# MERGED: The worker processes of one function: who has which answer, and what becomes of it when its worker does not reply. A worker holds a few answers: one in work, the others in its pipe so that it never waits. The clock runs for the one in work only, from the moment its predecessor's reply came. When it runs out, or the worker dies, that one answer gets its verdict and the others go to another worker.
from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bandpo_cli.config.run import GradingConfig
from bandpo_cli.errors import ConfigError, RunError
from bandpo_cli.types import GRADER_ERROR, TIMEOUT, Grade

_CHUNK = 1 << 16
# The worker finds modules just as this process does, and runs neither the user's __main__ nor the folder's files.
_WORKER_SOURCE = (
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
                [sys.executable, "-P", "-c", _WORKER_SOURCE, arguments],
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
    def has_unsent_data(self) -> bool:
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


IMPORT_TIMEOUT_S = 600.0
"""A worker that has not imported its function by then never will."""
_JOBS_PER_WORKER = 4

GraderArguments = Sequence[Any]


@dataclass
class _Worker:
    process: WorkerProcess
    ready: bool = False
    jobs: deque[int] = field(default_factory=deque)
    since: float = field(default_factory=time.monotonic)
    """When it was started, and once it is ready, when it took up the answer that is in work."""


class WorkerPool:
    """Calls `function` (module:function) for many arguments, in `size` processes that live until `close`."""

    def __init__(self, grader: str, function: str, config: GradingConfig, size: int) -> None:
        """Start nothing yet; `grader` is the name for messages."""
        self.error: str | None = None
        """The first error of the function's, or the first end of a worker's, if there was one."""
        self._grader, self._function, self._config, self._size = grader, function, config, size
        self._workers: list[_Worker] = []
        self._arguments: Sequence[GraderArguments] = ()
        self._pending: deque[int] = deque()
        self._grades: dict[int, Grade] = {}

    def run(self, arguments: Sequence[GraderArguments]) -> list[Grade]:
        """One grade for each list of arguments, in their order.

        Raises:
            ConfigError: the function cannot be imported, or its process does not start.
        """
        self._arguments, self._pending, self._grades = arguments, deque(range(len(arguments))), {}
        try:
            self._dismiss_the_dead()
            while len(self._grades) < len(arguments):
                self._hire(len(arguments) - len(self._grades))
                self._turn()
        except BaseException:  # Ctrl-C among them: workers that hold answers are of no more use
            self.close()
            raise
        return [self._grades[index] for index in range(len(arguments))]

    def start(self) -> None:
        """Wait until one worker has imported the function; raises what `run` does."""
        try:
            self._hire(1)
            while not any(worker.ready for worker in self._workers):
                self._turn()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill all workers."""
        while self._workers:
            self._workers.pop().process.kill()

    def _hire(self, jobs: int) -> None:
        while len(self._workers) < min(self._size, jobs):
            self._workers.append(_Worker(WorkerProcess(self._function, self._config)))

    def _dismiss_the_dead(self) -> None:
        """Replace workers that ended while there was nothing to do: no answer is to blame for it."""
        for worker in [*self._workers]:
            if not self._read(worker):
                self._dismiss(worker)

    def _turn(self) -> None:
        """Hand out answers, wait for something to happen, and deal with all of it."""
        for worker in self._workers:
            while worker.ready and self._pending and len(worker.jobs) < _JOBS_PER_WORKER:
                self._give(worker, self._pending.popleft())
        events = self._wait()
        for worker in [*self._workers]:
            if events.get(worker.process.stdin.fileno()):
                worker.process.flush()
            if events.get(worker.process.stdout.fileno()) and not self._read(worker):
                self._bury(worker)
        now = time.monotonic()
        for worker in [*self._workers]:
            if now >= self._due(worker):
                self._time_out(worker)

    def _give(self, worker: _Worker, job: int) -> None:
        if not worker.jobs:
            worker.since = time.monotonic()
        worker.jobs.append(job)
        # Values that JSON has no form for (dates in a data set's row) arrive as text.
        worker.process.send(json.dumps(self._arguments[job], default=str).encode())

    def _wait(self) -> dict[int, int]:
        """Sleep until a pipe can be read or written, or a deadline is there."""
        poll = select.poll()
        for worker in self._workers:
            poll.register(worker.process.stdout.fileno(), select.POLLIN)
            if worker.process.has_unsent_data:
                poll.register(worker.process.stdin.fileno(), select.POLLOUT)
        left = min(map(self._due, self._workers)) - time.monotonic()
        return dict(poll.poll(max(0, min(left, 60)) * 1000 + 1))

    def _due(self, worker: _Worker) -> float:
        if not worker.ready:
            return worker.since + IMPORT_TIMEOUT_S
        return worker.since + self._config.deadline if worker.jobs else float("inf")

    def _read(self, worker: _Worker) -> bool:
        """Take in what the worker has sent; False when it will send no more."""
        replies = worker.process.receive()
        for reply in replies or ():
            worker.since = time.monotonic()
            if not worker.ready:
                self._welcome(worker, reply)
            elif not worker.jobs:
                return False  # a reply that nobody asked for
            else:
                self._grades[worker.jobs.popleft()] = self._grade(reply)
            if reply.get("spent"):
                self._dismiss(worker)
                return True
        return replies is not None

    def _welcome(self, worker: _Worker, reply: dict[str, Any]) -> None:
        if "error" in reply:
            raise ConfigError(f"grader '{self._grader}': {reply['error']}")
        worker.ready = True

    def _grade(self, reply: dict[str, Any]) -> Grade:
        if "result" in reply:
            reward, correct, verdict = reply["result"]
            return Grade(reward, correct=correct, verdict=verdict)
        self.error = self.error or reply["error"]
        return GRADER_ERROR

    def _bury(self, worker: _Worker) -> None:
        """The worker died: of the answer in work, if there is one."""
        end = worker.process.kill()
        if not worker.ready:
            raise ConfigError(
                f"grader '{self._grader}': its process {end} while it imported '{self._function}'"
            )
        if worker.jobs:
            self._grades[worker.jobs.popleft()] = GRADER_ERROR
            self.error = self.error or f"the worker process {end}"
        self._dismiss(worker)

    def _time_out(self, worker: _Worker) -> None:
        if not worker.ready:
            raise ConfigError(
                f"grader '{self._grader}': importing '{self._function}' took more than {IMPORT_TIMEOUT_S:g} seconds"
            )
        self._grades[worker.jobs.popleft()] = TIMEOUT
        self._dismiss(worker)

    def _dismiss(self, worker: _Worker) -> None:
        """Kill the worker; the answers that it held go first to the next one."""
        worker.process.kill()
        self._workers.remove(worker)
        self._pending.extendleft(reversed(worker.jobs))
