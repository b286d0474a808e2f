"""Worker processes of grader functions: a pool that assigns answers and enforces deadlines, and one process of it.

Each worker holds a few answers: it works on one, the others wait in its pipe so that it never idles. The deadline runs
only for the answer in work, from the moment the reply to the answer before it arrived. If the deadline passes or the
worker exits, that one answer gets its verdict and the others go to another worker.
"""

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bandpo_cli.config.run import GradingConfig
from bandpo_cli.errors import ConfigError, RunError
from bandpo_cli.types import GRADER_ERROR, TIMEOUT, Grade

IMPORT_TIMEOUT_S = 600.0
"""Seconds after which a worker that has not imported its function counts as failed."""

_JOBS_PER_WORKER = 4
_CHUNK_BYTES = 1 << 16
# The worker gets the module search path of this process. It runs neither the __main__ of the user nor files of the
# current folder.
_WORKER_SOURCE = (
    "import json, sys; name, deadline, memory, sys.path[:] = json.loads(sys.argv[1]); "
    "from bandpo_cli.grading.worker import main; main(name, deadline, memory)"
)

GraderArguments = Sequence[Any]
"""The arguments of a grader function; values that JSON has no form for are sent as text."""

OnWait = Callable[[int, int | None], None]
"""Receives the number of graded answers, and the index of the answer that has been in work for the longest time, or
None while no worker is ready."""


def _ignore(graded: int, index: int | None) -> None:
    """Do nothing; the default of `on_wait`."""


class WorkerPool:
    """A pool of up to `size` processes that call one function (`module:function`) and live until `close`."""

    def __init__(self, grader: str, function: str, config: GradingConfig, size: int) -> None:
        """Create an empty pool; `run` and `start` spawn the workers.

        Args:
            grader: The name of the grader, for error messages.
            function: The function, as `module:function`.
            config: The deadline in seconds and the memory limit in GiB.
            size: The maximal number of processes.
        """
        self.error: str | None = None
        """The first error of the function, or the first exit of a worker; None if there was none."""
        self._grader, self._function, self._config, self._size = grader, function, config, size
        self._workers: list[_Worker] = []
        self._arguments: Sequence[GraderArguments] = ()
        self._pending: deque[int] = deque()
        self._grades: dict[int, Grade] = {}
        self._on_wait: OnWait = _ignore

    def run(self, arguments: Sequence[GraderArguments], on_wait: OnWait = _ignore) -> list[Grade]:
        """Call the function once per list of arguments.

        Args:
            arguments: The arguments [N].
            on_wait: Called before each wait for the workers, many times per second.

        Returns:
            The grades [N], in the order of `arguments` [N].

        Raises:
            ConfigError: If the function cannot be imported, or its process exits during the import.
            RunError: If the system refuses to start a process.
        """
        self._arguments, self._pending, self._grades = arguments, deque(range(len(arguments))), {}
        self._on_wait = on_wait
        try:
            self._remove_exited_idle()
            while len(self._grades) < len(arguments):
                self._spawn_workers(len(arguments) - len(self._grades))
                self._poll_once()
        except BaseException:  # including Ctrl-C: workers that hold answers cannot be used again
            self.close()
            raise
        return [self._grades[index] for index in range(len(arguments))]

    def start(self) -> None:
        """Wait until one worker has imported the function; raise the same errors as `run`."""
        try:
            self._spawn_workers(1)
            while not any(worker.ready for worker in self._workers):
                self._poll_once()
        except BaseException:
            self.close()
            raise

    def spawn(self) -> None:
        """Spawn one worker, unless there is one, without waiting for its import."""
        self._spawn_workers(1)

    def close(self) -> None:
        """Terminate all workers."""
        while self._workers:
            self._workers.pop().process.kill()

    def _spawn_workers(self, jobs: int) -> None:
        while len(self._workers) < min(self._size, jobs):
            self._workers.append(_Worker(WorkerProcess(self._function, self._config)))

    def _remove_exited_idle(self) -> None:
        """Remove workers that exited between two calls: no answer caused it."""
        for worker in [*self._workers]:
            if not self._read(worker):
                self._terminate(worker)

    def _poll_once(self) -> None:
        """Assign pending answers, wait for an event, and handle all events and passed deadlines."""
        for worker in self._workers:
            while worker.ready and self._pending and len(worker.jobs) < _JOBS_PER_WORKER:
                self._assign(worker, self._pending.popleft())
        self._on_wait(len(self._grades), self._oldest_job())
        events = self._wait()
        for worker in [*self._workers]:
            if events.get(worker.process.stdin.fileno()):
                worker.process.flush()
            if events.get(worker.process.stdout.fileno()) and not self._read(worker):
                self._handle_exit(worker)
        now = time.monotonic()
        for worker in [*self._workers]:
            if now >= self._deadline(worker):
                self._time_out(worker)

    def _assign(self, worker: _Worker, job: int) -> None:
        if not worker.jobs:
            worker.started_at = time.monotonic()
        worker.jobs.append(job)
        # Values that JSON has no form for (dates in a row of a data set) are sent as text.
        worker.process.send(json.dumps(self._arguments[job], default=str).encode())

    def _oldest_job(self) -> int | None:
        """Return the index of the answer that has been in work for the longest time; None if there is none."""
        working = [worker for worker in self._workers if worker.ready and worker.jobs]
        return min(working, key=lambda worker: worker.started_at).jobs[0] if working else None

    def _wait(self) -> dict[int, int]:
        """Wait until a pipe is readable or writable, or a deadline passes; return the events by descriptor."""
        poll = select.poll()
        for worker in self._workers:
            poll.register(worker.process.stdout.fileno(), select.POLLIN)
            if worker.process.has_unsent_data:
                poll.register(worker.process.stdin.fileno(), select.POLLOUT)
        left = min(map(self._deadline, self._workers)) - time.monotonic()
        return dict(poll.poll(max(0, min(left, 60)) * 1000 + 1))

    def _deadline(self, worker: _Worker) -> float:
        """Return the time, on the monotonic clock, at which the answer in work or the import times out."""
        if not worker.ready:
            return worker.started_at + IMPORT_TIMEOUT_S
        return worker.started_at + self._config.deadline if worker.jobs else float("inf")

    def _read(self, worker: _Worker) -> bool:
        """Process the replies of a worker; return False if it will send no more."""
        replies = worker.process.receive()
        for reply in replies or ():
            worker.started_at = time.monotonic()
            if not worker.ready:
                self._mark_ready(worker, reply)
            elif not worker.jobs:
                return False  # a reply without a request
            else:
                self._grades[worker.jobs.popleft()] = self._grade(reply)
            if reply.get("out_of_memory"):
                self._terminate(worker)
                return True
        return replies is not None

    def _mark_ready(self, worker: _Worker, reply: dict[str, Any]) -> None:
        if "error" in reply:
            raise ConfigError(f"grader '{self._grader}': {reply['error']}")
        worker.ready = True

    def _grade(self, reply: dict[str, Any]) -> Grade:
        if "result" in reply:
            reward, correct, verdict = reply["result"]
            return Grade(reward, correct=correct, verdict=verdict)
        self.error = self.error or reply["error"]
        return GRADER_ERROR

    def _handle_exit(self, worker: _Worker) -> None:
        """Remove a worker that exited; the answer in work, if there is one, gets the verdict `grader-error`."""
        exit_status = worker.process.kill()
        if not worker.ready:
            raise ConfigError(
                f"grader '{self._grader}': its process {exit_status} while importing '{self._function}'"
            )
        if worker.jobs:
            self._grades[worker.jobs.popleft()] = GRADER_ERROR
            self.error = self.error or f"the worker process {exit_status}"
        self._terminate(worker)

    def _time_out(self, worker: _Worker) -> None:
        if not worker.ready:
            raise ConfigError(
                f"grader '{self._grader}': importing '{self._function}' took more than {IMPORT_TIMEOUT_S:g} seconds"
            )
        self._grades[worker.jobs.popleft()] = TIMEOUT
        self._terminate(worker)

    def _terminate(self, worker: _Worker) -> None:
        """Kill the worker; its remaining answers are the next to be assigned."""
        worker.process.kill()
        self._workers.remove(worker)
        self._pending.extendleft(reversed(worker.jobs))


class WorkerProcess:
    """A process that serves one function. Messages are lines of JSON, never pickles; no call blocks.

    It leads its own process group, so that killing it also kills the processes that a custom function started, and
    Ctrl-C at the terminal reaches only the parent.
    """

    def __init__(self, function: str, config: GradingConfig) -> None:
        """Start the process; its imports run concurrently with the caller.

        Raises:
            RunError: If the system refuses to start a process.
        """
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
            raise RunError(f"cannot start a grading process: {error}; lower grading.workers") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.stdin, self.stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self.stdin.fileno(), False)
        os.set_blocking(self.stdout.fileno(), False)
        self._unsent = bytearray()
        self._received = bytearray()

    @property
    def has_unsent_data(self) -> bool:
        """Whether queued data remains to be written."""
        return bool(self._unsent)

    def send(self, line: bytes) -> None:
        """Queue a line, and write as much as the pipe accepts now."""
        self._unsent += line + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write as much as the pipe accepts now; `receive` reports a closed pipe."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                written = os.write(self.stdin.fileno(), self._unsent[:_CHUNK_BYTES])
                del self._unsent[:written]

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the replies that have arrived; None if the process ended or sent something that is not JSON."""
        try:
            data = os.read(self.stdout.fileno(), _CHUNK_BYTES)
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
        """Kill the process and its process group; return how it ended. A second call has no effect."""
        if self._process.returncode is None:  # not waited for yet, so its process id was not reused
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        for pipe in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        return f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


@dataclass
class _Worker:
    process: WorkerProcess
    ready: bool = False
    jobs: deque[int] = field(default_factory=deque)
    started_at: float = field(default_factory=time.monotonic)
    """Time of the start of the process; once it is ready, time at which work on the present answer began."""
