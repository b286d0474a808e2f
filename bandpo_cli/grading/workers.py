"""Worker processes of grader functions: a pool that assigns answers and enforces deadlines, and one process of it.

A job is one call of the function, on one answer or, where the function takes batches, on several. Each worker holds a
few jobs: it works on one, the others wait in its pipe so that it never idles. The deadline runs only for the job in
work, from the moment the reply to the job before it arrived. If the deadline passes or the worker exits, the answers of
that one job get their verdict and the other jobs go to another worker.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bandpo_cli.config.run import GradingConfig
from bandpo_cli.errors import ConfigError, RunError, escape_controls
from bandpo_cli.registries import split_signature
from bandpo_cli.types import GRADER_ERROR, TIMEOUT, Grade

IMPORT_TIMEOUT_S = 600.0
"""Seconds after which a worker that has not imported its function counts as failed."""

SPAWN_AFTER_S = 1.0
"""Seconds of grading after which a pool spawns its second and further workers. To import a grader takes about as long,
so that one worker alone ends a shorter batch sooner."""

MAX_WAIT_S = 0.5
"""Longest wait for the workers in seconds; `on_wait` is called between waits, and can end the work."""

MAX_PRINTED_BYTES = 1 << 16
"""What a grader prints beyond this is discarded: prints for every answer of a run would hide all other lines."""

_JOBS_PER_WORKER = 4
_CHUNK_BYTES = 1 << 16
# The worker gets the module search path of this process. It runs neither the __main__ of the user nor files of the
# current folder.
_WORKER_SOURCE = (
    "import json, sys; *arguments, sys.path[:] = json.loads(sys.argv[1]); "
    "from bandpo_cli.grading.worker import main; main(*arguments)"
)

log = logging.getLogger("bandpo_cli")

GraderArguments = Sequence[Any]
"""The arguments of a grader function; values that JSON has no form for are sent as text."""

Job = Sequence[int]
"""The indices of the answers of one call."""

OnWait = Callable[[int, int | None], None]
"""Receives the number of graded answers, and the index of the answer that has been in work for the longest time, or
None while no worker is ready."""


def _ignore(graded: int, index: int | None) -> None:
    """Do nothing; the default of `on_wait`."""


class WorkerPool:
    """A pool of up to `size` processes that call one function and live until `close`."""

    def __init__(self, grader: str, function: str | None, config: GradingConfig, size: int) -> None:
        """Create an empty pool; `run` and `start` spawn the workers.

        Args:
            grader: The name of the grader.
            function: The function of an entry of `GRADERS`, as `module:function`; None for a custom grader.
            config: The deadline in seconds and the memory limit in GiB.
            size: The maximal number of processes.
        """
        self.error: str | None = None
        """The first error of the function, or the first exit of a worker; None if there was none."""
        self._grader, self._function, self._config, self._size = grader, function, config, size
        self._workers: list[_Worker] = []
        self._batched: bool | None = None  # known once a worker has imported the function
        self._arguments: Sequence[GraderArguments] = ()
        self._batches: Sequence[Job] = ()
        self._pending: deque[Job] = deque()
        self._grades: dict[int, Grade] = {}
        self._on_wait: OnWait = _ignore
        self._wanted = 0
        self._printed_bytes = 0
        self._more_workers_at = math.inf

    def run(
        self,
        arguments: Sequence[GraderArguments],
        on_wait: OnWait = _ignore,
        batches: Sequence[Job] | None = None,
    ) -> list[Grade]:
        """Call the function on each list of arguments.

        Args:
            arguments: The arguments [N].
            batches: The answers of each call of a function that takes several; None for one call per answer. Functions
                that take one answer are called once per answer.
            on_wait: Called before each wait for the workers, many times per second.

        Returns:
            The grades [N], in the order of `arguments` [N].

        Raises:
            ConfigError: If the function cannot be imported, or its process exits during the import.
            RunError: If the system refuses to start a process.
        """
        self._arguments, self._grades, self._on_wait = arguments, {}, on_wait
        self._batches = _one_by_one(arguments) if batches is None else batches
        self._pending = self._jobs()
        try:
            self._remove_exited_idle()
            is_ready = any(worker.ready for worker in self._workers)
            self._more_workers_at = time.monotonic() + SPAWN_AFTER_S if is_ready else math.inf
            while len(self._grades) < len(arguments):
                self._spawn_workers(len(arguments) - len(self._grades))
                self._poll_once()
        except BaseException:  # including Ctrl-C: workers that hold answers cannot be used again
            self.close()
            raise
        return [self._grades[index] for index in range(len(arguments))]

    @property
    def _path(self) -> str:
        """The function, for error messages."""
        return self._function or split_signature(self._grader)[1]

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

    def _jobs(self) -> deque[Job]:
        """Return the jobs of the present answers; none before it is known whether the function takes batches."""
        if self._batched is None:
            return deque()
        return deque(self._batches if self._batched else _one_by_one(self._arguments))

    def _spawn_workers(self, jobs: int) -> None:
        self._wanted = min(self._size, jobs)
        spawned = self._wanted if time.monotonic() >= self._more_workers_at else min(1, self._wanted)
        while len(self._workers) < spawned:
            process = WorkerProcess(self._grader, self._function, self._config, self._print)
            self._workers.append(_Worker(process))

    def _print(self, output: bytes) -> None:
        """Print what a worker has printed on standard error, up to `MAX_PRINTED_BYTES` of all workers."""
        left = MAX_PRINTED_BYTES - self._printed_bytes
        self._printed_bytes += len(output)
        if left > 0 and sys.stderr is not None:
            sys.stderr.write(escape_controls(output[:left].decode(errors="replace")))
            sys.stderr.flush()
        if self._printed_bytes > MAX_PRINTED_BYTES >= self._printed_bytes - len(output):
            kib = MAX_PRINTED_BYTES >> 10
            log.warning("grader '%s' has printed more than %d KiB; the rest is not shown", self._grader, kib)

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
            worker.process.receive_output()
            if events.get(worker.process.stdin.fileno()):
                worker.process.flush()
            if events.get(worker.process.stdout.fileno()) and not self._read(worker):
                self._handle_exit(worker)
        now = time.monotonic()
        for worker in [*self._workers]:
            if now >= self._deadline(worker):
                self._time_out(worker)

    def _assign(self, worker: _Worker, job: Job) -> None:
        if not worker.jobs:
            worker.started_at = time.monotonic()
        worker.jobs.append(job)
        # Values that JSON has no form for (dates in a row of a data set) are sent as text.
        worker.process.send(json.dumps([self._arguments[index] for index in job], default=str).encode())

    def _oldest_job(self) -> int | None:
        """Return the index of the answer that has been in work for the longest time; None if there is none."""
        working = [worker for worker in self._workers if worker.ready and worker.jobs]
        return min(working, key=lambda worker: worker.started_at).jobs[0][0] if working else None

    def _wait(self) -> dict[int, int]:
        """Wait until a pipe is readable or writable, or a deadline passes; return the events by descriptor."""
        poll = select.poll()
        for worker in self._workers:
            poll.register(worker.process.stdout.fileno(), select.POLLIN)
            if not worker.process.stderr.closed:
                poll.register(worker.process.stderr.fileno(), select.POLLIN)
            if worker.process.has_unsent_data:
                poll.register(worker.process.stdin.fileno(), select.POLLOUT)
        until = min(map(self._deadline, self._workers))
        if len(self._workers) < self._wanted:
            until = min(until, self._more_workers_at)
        left = until - time.monotonic()
        return dict(poll.poll(max(0, min(left, MAX_WAIT_S)) * 1000 + 1))

    def _deadline(self, worker: _Worker) -> float:
        """Return the time, on the monotonic clock, at which the job in work or the import times out."""
        if not worker.ready:
            return worker.started_at + IMPORT_TIMEOUT_S
        if not worker.jobs:
            return float("inf")
        return worker.started_at + self._config.deadline * len(worker.jobs[0])

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
                self._finish(worker.jobs.popleft(), reply)
            if reply.get("out_of_memory"):
                self._terminate(worker)
                return True
        return replies is not None

    def _mark_ready(self, worker: _Worker, reply: dict[str, Any]) -> None:
        if "error" in reply:
            raise ConfigError(f"grader '{self._grader}': {reply['error']}")
        worker.ready = True
        self._more_workers_at = min(self._more_workers_at, time.monotonic() + SPAWN_AFTER_S)
        if self._batched is None:
            self._batched = bool(reply["batched"])
            self._pending = self._jobs()

    def _finish(self, job: Job, reply: dict[str, Any]) -> None:
        """Store the grades of the answers of a job."""
        if "error" in reply:
            self.error = self.error or reply["error"]
            self._grades |= dict.fromkeys(job, GRADER_ERROR)
            return
        for index, (reward, correct, verdict, has_reward) in zip(job, reply["results"], strict=True):
            self._grades[index] = Grade(reward, correct=correct, verdict=verdict, has_reward=has_reward)

    def _handle_exit(self, worker: _Worker) -> None:
        """Remove a worker that exited; the answers in work, if there are any, get the verdict `grader-error`."""
        exit_status = worker.process.kill()
        if not worker.ready:
            raise ConfigError(
                f"grader '{self._grader}': its process {exit_status} while importing '{self._path}'"
            )
        if worker.jobs:
            self._grades |= dict.fromkeys(worker.jobs.popleft(), GRADER_ERROR)
            self.error = self.error or f"the worker process {exit_status}"
        self._terminate(worker)

    def _time_out(self, worker: _Worker) -> None:
        if not worker.ready:
            raise ConfigError(
                f"grader '{self._grader}': importing '{self._path}' took more than {IMPORT_TIMEOUT_S:g} seconds"
            )
        grade = replace(TIMEOUT, has_reward=self._config.timeout_reward == "wrong")
        self._grades |= dict.fromkeys(worker.jobs.popleft(), grade)
        self._terminate(worker)

    def _terminate(self, worker: _Worker) -> None:
        """Kill the worker; its remaining jobs are the next to be assigned."""
        worker.process.kill()
        self._workers.remove(worker)
        self._pending.extendleft(reversed(worker.jobs))


def _one_by_one(arguments: Sequence[GraderArguments]) -> list[Job]:
    return [(index,) for index in range(len(arguments))]


class WorkerProcess:
    """A process that serves one function. Messages are lines of JSON, never pickles; no call blocks.

    It leads its own process group, so that killing it also kills the processes that a custom function started, and
    Ctrl-C at the terminal reaches only the parent.
    """

    def __init__(
        self,
        grader: str,
        function: str | None,
        config: GradingConfig,
        on_output: Callable[[bytes], None],
    ) -> None:
        """Start the process; its imports run concurrently with the caller.

        Args:
            grader, function, config: Those of `WorkerPool`.
            on_output: Receives what the function prints.

        Raises:
            RunError: If the system refuses to start a process.
        """
        package = str(Path(__file__).resolve().parents[2])
        path = [str(Path(entry).absolute()) for entry in sys.path]
        path = path if package in path else [*path, package]
        arguments = json.dumps(
            [function or grader, function is None, config.deadline, config.memory_gb, path]
        )
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _WORKER_SOURCE, arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={"OMP_NUM_THREADS": "1", **os.environ},
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise RunError(f"cannot start a grading process: {error}; lower grading.workers") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.stdin, self.stdout, self.stderr = self._process.stdin, self._process.stdout, self._process.stderr
        for pipe in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(pipe.fileno(), False)
        self._on_output = on_output
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

    def receive_output(self) -> None:
        """Pass on what the function has printed, at most 64 KiB, as much as a pipe holds."""
        if self.stderr.closed:
            return
        try:
            output = os.read(self.stderr.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return
        if output:
            self._on_output(output)
        else:
            self.stderr.close()

    def kill(self) -> str:
        """Kill the process and its process group; return how it ended. A second call has no effect."""
        if self._process.returncode is None:  # not waited for yet, so its process id was not reused
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self.receive_output()  # once: a process that has left the group may still be printing
        for pipe in (self.stdin, self.stdout, self.stderr):
            with contextlib.suppress(OSError):
                pipe.close()
        return f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


@dataclass
class _Worker:
    process: WorkerProcess
    ready: bool = False
    jobs: deque[Job] = field(default_factory=deque)
    started_at: float = field(default_factory=time.monotonic)
    """Time of the start of the process; once it is ready, time at which work on the present job began."""
