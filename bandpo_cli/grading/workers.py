"""Worker processes for one function, a grader or tools, and their pool, which assigns answers and enforces deadlines.

A job is one call of the function, on one answer or, if the function takes batches, on several. Each worker holds a few
jobs: it works on the first, and the others wait in its pipe so that it never idles. The deadline runs only for the
first job, from the moment the reply to the job before it arrived. If the deadline passes or the worker exits, the
answers of that job get their verdict, and the other jobs go to another worker.

An asynchronous function has one worker, whose event loop works on all jobs that it holds and ends each at its deadline
(`CallServer`). If this worker exits, or sends no reply because a call blocks the loop, all its jobs end.

Messages are lines of JSON, never pickles. A request is the key of a job and its answers, each a list of arguments. The
first reply, after the import, is `{"batched": ..., "asynchronous": ..., "about": ...}`. A later one is `{"job": key}`
with `"results": [[reward, correct, verdict, has_reward], ...]`, `"timeout": true`, or `"error": ..., "traceback": ...,
"out_of_memory": ...`. Results of tools have another form. `"step": true` restarts the deadline.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import RawIOBase
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from bandpo_cli.errors import ConfigError, RunError, escape_controls, log
from bandpo_cli.grading.calls_and_retries import Loader
from bandpo_cli.processes.ranks import local_rank_count, rank_count
from bandpo_cli.processes.watch import ChildProcess, Wait, progress, python_command
from bandpo_cli.registries import GRADERS, is_custom_grader
from bandpo_cli.storage.run_record import usable_cores
from bandpo_cli.types import GRADER_ERROR, TIMEOUT, Grade

if TYPE_CHECKING:  # a worker, which imports this module, does without pydantic
    from bandpo_cli.config.batch_and_sampling import GradingConfig

IMPORT_TIMEOUT_S = 600.0  # Seconds after which a worker that has not imported its function counts as failed

SPAWN_AFTER_S = 1.0
"""Seconds of grading after which a pool spawns its second and further workers. To import a grader takes about as long,
so that one worker alone ends a shorter batch sooner."""

LOOP_MARGIN_S = 5.0
"""Seconds beyond the deadline after which an event loop that sends no reply counts as blocked."""

MAX_WAIT_S = 0.1
"""Longest wait for the workers in seconds. Between waits, `on_wait` is called, which can end the work, and submitted
answers are assigned."""

MAX_PRINTED_BYTES = 1 << 16
"""What a grader prints beyond this is discarded: prints for every answer of a run would hide all other lines."""

_JOBS_PER_WORKER = 4
_CHUNK_BYTES = 1 << 16

GraderArguments = Sequence[Any]
"""The arguments of a grader function; values that JSON has no form for are sent as text."""

Job = Sequence[int]
"""The answers of one call: indices of a list of answers, or their keys in a pool. Its own key is the first of them."""


class Failure(NamedTuple):
    """The first error of a function, or exit of a worker: one line, the traceback if there is one, and the answers."""

    error: str
    traceback: str
    answers: Sequence[GraderArguments]


OnWait = Callable[[int, str | None], None]
"""Receives the number of graded answers, and the label of the answer that has been in work for the longest time, or
None while no worker is ready."""


def default_workers() -> int:
    """Return the number of workers per grader if `grading.workers` is null: the cores of this rank, at most 8."""
    return min(max(1, usable_cores() // local_rank_count()), 8)


class WorkerPool:
    """A pool of processes that call one function and live until `close`. The results are grades by default.

    A single thread may use it, but another thread may call `submit` and `close`.
    """

    def __init__(self, title: str, loader: Loader, config: GradingConfig, size: int | None = None) -> None:
        """Create an empty pool, which `title` names, of at most `size` workers, by default as many as the settings say.

        An asynchronous function has one worker, with the calls in flight of this rank's part of `grading.concurrency`.
        """
        self._title, self._loader = title, loader
        self.about: Any = None  # what a worker has sent after its import
        self.failure: Failure | None = None
        self.asynchronous = False  # as a worker reports that has imported the function
        self._config, self._batched = config, False
        self._size = size or config.workers or default_workers()
        self._calls = max(1, config.concurrency // rank_count())
        self._workers: list[_Worker] = []
        self._lock, self._is_closed = threading.RLock(), False  # held by the thread that uses the workers
        self._answers: dict[int, tuple[GraderArguments, str]] = {}  # by key, with their labels
        self._key = 0  # of the next answer
        self._submitted: deque[list[Job]] = deque()  # in the form for a function that takes several answers
        self._pending: deque[Job] = deque()
        self._grades: dict[int, Any] = {}
        self._on_wait: Callable[[str | None], None] = lambda label: None
        self._output_left = MAX_PRINTED_BYTES
        self._wait = Wait(title, "grading.deadline ends the call of an answer; an import has 600 seconds")

    def _result(self, fields: Any) -> Any:
        """Return the result of one answer from what a worker has sent."""
        return Grade(*fields)

    def _failed(self, error: str) -> Any:
        """Return the result of an answer whose call has failed."""
        return GRADER_ERROR

    def _late(self) -> Any:
        """Return the result of an answer that took longer than `grading.deadline`."""
        return replace(TIMEOUT, has_reward=self._config.timeout_reward == "wrong")

    def submit(
        self, arguments: Sequence[GraderArguments], labels: Sequence[str], batches: Sequence[Job]
    ) -> range:
        """Queue a call of the function for each list of arguments [N]; return the keys [N] of the answers for `wait`.

        `labels` [N] are names for `on_wait`; `batches` the answers of each call, for a function that takes several.
        """
        keys = range(self._key, self._key + len(arguments))
        self._key = keys.stop
        self._answers.update(zip(keys, zip(arguments, labels, strict=True), strict=True))
        self._submitted.append([[keys[index] for index in batch] for batch in batches])
        return keys

    def wait(self, keys: Sequence[int], on_wait: OnWait = lambda graded, label: None) -> list[Any]:
        """Return the grades [N] of the answers with these keys [N]; call `on_wait` many times per second.

        Raise ConfigError if the function cannot be imported, RunError if the system refuses to start a process.
        """
        missing, graded = [key for key in keys if key not in self._grades], len(self._grades)
        self._on_wait = lambda label: on_wait(len(keys) - len(missing), label)
        self.start()
        more_workers_at = time.monotonic() + SPAWN_AFTER_S
        while missing:
            wanted = 1 if self.asynchronous else min(self._size, len(missing))
            self._poll_once(wanted if time.monotonic() >= more_workers_at else 1)
            if len(self._grades) - graded > len(missing) // 100:  # not for every reply: it takes time
                missing, graded = [key for key in missing if key not in self._grades], len(self._grades)
        return [*self._take(keys).values()]

    def poll(self, seconds: float) -> dict[int, Any]:
        """Return the results that are there, by key, after at most `seconds`; the errors are those of `wait`."""
        self._poll_once(1 if self.asynchronous else self._size, seconds)
        return self._take([*self._grades])

    def start(self) -> None:
        """Wait until one worker has imported the function; raise the same errors as `wait`."""
        while not any(worker.ready for worker in self._workers):
            self._poll_once(1)

    def _take(self, keys: Sequence[int]) -> dict[int, Any]:
        for key in keys:
            del self._answers[key]
        return {key: self._grades.pop(key) for key in keys}

    def spawn(self, count: int = 1) -> None:
        """Spawn workers until `count` are alive, without waiting for their imports; raise RunError after `close`."""
        if self._is_closed:
            raise RunError(f"{self._title}: its worker processes were terminated because the command ends")
        for worker in [worker for worker in self._workers if worker.ready and not worker.jobs]:
            if not self._read(worker):
                self._terminate(worker)  # it exited while it was idle: no answer caused it
        while len(self._workers) < count:
            self._workers.append(_Worker(self._loader, self._config))

    def close(self) -> None:
        """Terminate all workers; a thread that waits for them, and all later calls, raise RunError."""
        self._is_closed = True
        self._terminate_all()

    def _terminate_all(self) -> None:
        with self._lock:
            while self._workers:
                self._terminate(self._workers[-1])

    def _route(self) -> None:
        """Move pending jobs to the queues of the workers that have the state that they continue from."""

    def _poll_once(self, workers: int, most_seconds: float = MAX_WAIT_S) -> None:
        """Spawn workers up to a number, and handle what happens next; after an error, no worker is left."""
        try:
            with self._lock:
                self.spawn(workers)
                self._handle_events(most_seconds)
        except BaseException:  # workers that hold answers cannot be used again, also after Ctrl-C
            self._terminate_all()
            raise

    def _handle_events(self, most_seconds: float) -> None:
        """Assign pending answers, wait for an event, and handle all replies, exits and passed deadlines."""
        poll = select.poll()
        jobs_per_worker = self._calls if self.asynchronous else _JOBS_PER_WORKER
        while self._submitted and any(worker.ready for worker in self._workers):
            batches = self._submitted.popleft()
            self._pending += batches if self._batched else [(key,) for batch in batches for key in batch]
        self._route()
        for worker in self._workers:
            while worker.ready and len(worker.jobs) < jobs_per_worker and (worker.queue or self._pending):
                job = (worker.queue or self._pending).popleft()
                worker.submit(job, [self._answers[key][0] for key in job])
            worker.register(poll)
        working = [worker for worker in self._workers if worker.ready and worker.jobs]
        longest = min(working, key=lambda worker: worker.started_at, default=None)
        self._on_wait(self._answers[next(iter(longest.jobs))][1] if longest else None)
        waited = longest or next((worker for worker in self._workers if not worker.ready), None)
        self._wait.what = f"{self._title} (process {waited and waited.pid})"
        self._wait.restart(waited and waited.started_at)
        self._wait.check()
        seconds = min(map(self._deadline, self._workers)) - time.monotonic()
        poll.poll(max(0, min(seconds, most_seconds)) * 1000 + (most_seconds > 0))
        for worker in [*self._workers]:
            self._print(worker.read_output())
            worker.flush()
            if not self._read(worker):
                self._end(worker, timed_out=False)
            elif time.monotonic() >= self._deadline(worker):
                self._end(worker, timed_out=True)

    def _deadline(self, worker: _Worker) -> float:
        """Return the time, on the monotonic clock, at which the job in work or the import times out."""
        if not worker.ready:
            return worker.started_at + IMPORT_TIMEOUT_S
        limits = [self._config.deadline * len(job) for job in worker.jobs.values()] or [math.inf]
        return worker.started_at + (max(limits) + LOOP_MARGIN_S if self.asynchronous else limits[0])

    def _read(self, worker: _Worker) -> bool:
        """Process the replies of a worker; return False if it will send no more."""
        replies = worker.receive()
        for reply in replies or ():
            progress()
            worker.started_at = time.monotonic()
            if not worker.ready:
                if "error" in reply:
                    raise ConfigError(f"{self._title}: {reply['error']}")
                worker.ready, self._batched = True, reply["batched"]
                self.asynchronous, self.about = reply["asynchronous"], reply["about"]
            elif "step" in reply:
                continue
            elif (job := worker.jobs.pop(reply["job"], None)) is None:
                return False  # a reply without a request
            elif "error" in reply:
                self._store_failure(job, reply["error"], reply["traceback"])
            elif "timeout" in reply:
                self._store(job, [self._late()] * len(job))
            else:
                self._store(job, [*map(self._result, reply["results"])])
            if reply.get("out_of_memory"):
                self._terminate(worker)
                return True
        return replies is not None

    def _store(self, job: Job, results: Sequence[Any]) -> None:
        """Store the results [N] of a job with N answers."""
        self._grades |= zip(job, results, strict=True)

    def _store_failure(self, job: Job, error: str, traceback: str = "") -> None:
        self.failure = self.failure or Failure(error, traceback, [self._answers[key][0] for key in job])
        self._store(job, [self._failed(error)] * len(job))

    def _end(self, worker: _Worker, timed_out: bool) -> None:
        """Remove a worker that exited or whose deadline has passed; the answers in work, if any, get their verdict."""
        in_work = [*worker.jobs][: None if self.asynchronous else 1]
        job = [key for first in in_work for key in worker.jobs.pop(first)]
        end = self._terminate(worker)
        if not worker.ready:
            end = f"needed more than {IMPORT_TIMEOUT_S:g} seconds" if timed_out else end
            raise ConfigError(f"{self._title}: its process {end} while importing '{self._loader.path}'")
        if timed_out:
            self._store(job, [self._late()] * len(job))
        elif job:
            self._store_failure(job, f"the worker process {end}")

    def _terminate(self, worker: _Worker) -> str:
        """Kill a worker and return how it ended; its remaining jobs are the next to be assigned."""
        worker.kill()
        with worker.process:  # closes the pipes
            self._print(worker.read_output())  # once: a process that has left the group may still be printing
        self._workers.remove(worker)
        self._pending.extendleft(reversed([*worker.jobs.values(), *worker.queue]))
        worker.jobs.clear()
        return worker.describe_end()

    def _print(self, output: bytes) -> None:
        """Print what a worker has printed on standard error, up to `MAX_PRINTED_BYTES` of all workers."""
        shown = output[: max(0, self._output_left)].decode(errors="replace")
        if shown and sys.stderr is not None:
            print(escape_controls(shown), end="", file=sys.stderr, flush=True)
        if 0 <= self._output_left < len(output):
            kib = MAX_PRINTED_BYTES >> 10
            log.warning("%s has printed more than %d KiB; the rest is not shown", self._title, kib)
        self._output_left -= len(output)


class GraderWorkers(WorkerPool):
    """The workers of a grader."""

    def __init__(self, grader: str, config: GradingConfig, size: int | None = None) -> None:
        """Create an empty pool; raise ConfigError unless the grader is custom or has a function for workers."""
        if grader in GRADERS and (function := GRADERS[grader].worker) is not None:
            loader = Loader("bandpo_cli.grading.signatures:load_worker", function)
        elif is_custom_grader(grader):
            loader = Loader("bandpo_cli.grading.signatures:load_grader", grader)
        else:
            raise ConfigError(f"grader '{grader}': none of that name{GRADERS.suggestion(grader)}")
        super().__init__(f"grader '{grader}'", loader, config, size)


class _Worker(ChildProcess):
    """A process that serves one function, and the jobs that it holds. No method but `kill` and `wait` blocks."""

    def __init__(self, loader: Loader, config: GradingConfig) -> None:
        """Start the process, whose imports run concurrently with the caller; raise RunError if the system refuses."""
        role = f"worker for {loader.path:.100}".replace("/", "-")
        arguments = [loader, config.deadline, config.memory_gb, config.retries]
        # Every arena of malloc reserves 64 MiB, which count towards the memory limit of a worker with threads.
        variables = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", **os.environ}
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = python_command(role, "bandpo_cli.grading.calls_and_retries:serve", arguments)
        try:
            super().__init__(command, variables, bufsize=0, **pipes)
        except OSError as error:
            raise RunError(f"cannot start a grading process: {error}; lower grading.workers") from error
        for name in pipes:
            os.set_blocking(getattr(self.process, name).fileno(), False)
        self._stdin, self._stdout, self._stderr = (
            cast("RawIOBase", getattr(self.process, name)) for name in pipes
        )
        self.ready = False  # the process has imported the function
        self.jobs: dict[int, Job] = {}  # by key: those that were sent and have no reply yet
        self.queue: deque[Job] = deque()  # those for this worker alone that were not sent yet
        self.conversations: set[int] = set()  # those whose environments the process keeps
        self.started_at = time.monotonic()  # of the process; once it is ready, of the first job or its step
        self._unsent, self._received = bytearray(), b""

    def submit(self, job: Job, arguments: Sequence[GraderArguments]) -> None:
        """Queue the arguments of a job, and write as much as the pipe accepts now."""
        if not self.jobs:
            self.started_at = time.monotonic()
        self.jobs[job[0]] = job
        # Values that JSON has no form for (dates in a row of a data set) are sent as text.
        self._unsent += json.dumps([job[0], arguments], default=str).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write as much as the pipe accepts now; `receive` reports a closed pipe."""
        with contextlib.suppress(BrokenPipeError):
            while self._unsent and (written := self._stdin.write(self._unsent[:_CHUNK_BYTES])):
                del self._unsent[:written]

    def register(self, poll: select.poll) -> None:
        """Let `poll` wait until a pipe is readable or has space for unsent data."""
        poll.register(self._stdout, select.POLLIN)
        if not self._stderr.closed:
            poll.register(self._stderr, select.POLLIN)
        if self._unsent:
            poll.register(self._stdin, select.POLLOUT)

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the replies that have arrived; None if the process ended or sent something that is not JSON."""
        data = self._stdout.read(_CHUNK_BYTES)
        if data is None:  # nothing to read now; the end of the stream is b""
            return []
        *lines, self._received = (self._received + data).split(b"\n")
        with contextlib.suppress(ValueError):
            return [json.loads(line) for line in lines] if data else None
        return None

    def read_output(self) -> bytes:
        """Return what the function has printed since the last call, at most 64 KiB, as much as a pipe holds."""
        output = None if self._stderr.closed else self._stderr.read(_CHUNK_BYTES)
        if output == b"":
            self._stderr.close()
        return output or b""
