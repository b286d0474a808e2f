"""A worker process: imports the function that its pool names, and serves requests until the pool ends.

`grading.workers` has the messages, and the parent's side. `CallServer` is the event loop of an asynchronous function.
"""

import json
import os
import random
import resource
import signal
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from bandpo_cli.errors import user_code_location
from bandpo_cli.grading.signatures import BatchGrader, as_json
from bandpo_cli.registries import load_attribute, split_signature

if TYPE_CHECKING:
    import asyncio  # imported where it is used, since few functions are asynchronous

ALARM_MARGIN_S = 10.0
"""Seconds that a worker whose parent is gone may work beyond twice the deadline, before an alarm ends it. The thread
that watches the parent does not run while native code, such as a regular expression, holds the interpreter's lock."""

BACKOFF_S = 0.5
"""Mean wait before the first retry, in seconds; each further wait is twice as long. The jitter, up to a half of it,
spreads the retries of calls that failed at the same time."""

MAX_THREADS = 64
"""Threads for functions that call blocking code in `asyncio.to_thread`. Each reserves 8 MiB for its stack."""

PAGES = Path("/proc/self/statm")
MAX_TRACEBACK_CHARS = 20_000


class Loader(NamedTuple):
    """How a worker gets its function: `function`, as module:name, takes `argument` and returns a `BatchGrader`."""

    function: str
    argument: Any

    @property
    def path(self) -> str:
        """The custom function, or the function of this package, in messages."""
        paths = [self.argument] if isinstance(self.argument, str) else self.argument
        return ", ".join(split_signature(path)[1] for path in paths)


def serve(loader: Sequence[Any], deadline: float, memory_gb: float, retries: int) -> None:
    """Serve requests for the function of a `Loader`, in a worker process, until standard input closes.

    The parent enforces the `deadline` in seconds per answer, too; `memory_gb` is in addition to what the imports use.
    """
    # The protocol leaves descriptors 0 and 1, so that print() and input() in custom code cannot disturb it.
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def reply(**values: Any) -> None:
        print(json.dumps(values), file=replies, flush=True)

    def end_step(key: int) -> None:
        set_alarm(deadline)
        reply(job=key, step=True)

    try:
        function, argument = loader
        grader: BatchGrader = load_attribute(function)(argument)
    except ValueError as error:
        reply(error=str(error))
        return
    _limit_memory(memory_gb)
    reply(batched=grader.batched, asynchronous=grader.asynchronous, about=grader.about)
    if grader.asynchronous:
        import asyncio

        asyncio.run(CallServer(grader, reply, deadline, retries).serve(requests))
    for line in requests:
        key, answers = json.loads(line)
        set_alarm(deadline * len(answers))
        try:
            grades = grader.grade(answers, partial(end_step, key))
            outcome: dict[str, Any] = {"results": [*map(as_json, grades)]}
            json.dumps(outcome)  # messages of an environment may have other values than those of JSON
        except BaseException as error:  # noqa: BLE001  (sys.exit in a custom function is an error like any other)
            outcome = describe_error(error, grader)
        set_alarm(None)
        reply(job=key, **outcome)


class CallServer:
    """Concurrent calls of an asynchronous function. The parent process limits the number of calls in flight."""

    def __init__(
        self, grader: BatchGrader, reply: Callable[..., None], deadline: float, retries: int
    ) -> None:
        """Serve no request yet; `deadline` holds for all calls of an answer, of which there are `retries` + 1."""
        self._grader, self._reply, self._deadline, self._retries = grader, reply, deadline, retries
        self._limits: dict[asyncio.Task[None], float] = {}  # of the calls in flight, in seconds
        self._has_failed = False

    async def serve(self, requests: Iterable[bytes]) -> None:
        """Start a task for each line of `requests`, a key and answers [N] in JSON; at their end, end the process."""
        import asyncio
        from concurrent.futures import ThreadPoolExecutor

        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(MAX_THREADS))

        def start(key: int, answers: Sequence[Any]) -> None:
            limit = self._deadline * len(answers)
            task = loop.create_task(self._answer(key, answers, limit))
            self._limits[task] = limit
            task.add_done_callback(end)
            set_alarm(max(self._limits.values()))

        def end(task: asyncio.Task[None]) -> None:
            del self._limits[task]
            set_alarm(max(self._limits.values(), default=None))

        def read() -> None:
            for line in requests:
                loop.call_soon_threadsafe(start, *json.loads(line))
            os._exit(0)  # the parent has ended, and the calls in flight with it

        Thread(target=read, daemon=True).start()
        await loop.create_future()

    async def _answer(self, key: int, answers: Sequence[Any], limit: float) -> None:
        """Call the function until it returns grades, or the retries or `limit` seconds are over; send the outcome."""
        import asyncio

        try:
            async with asyncio.timeout(limit) as timeout:
                for attempt in count():
                    try:
                        grades = await self._grader.call(answers)
                        break
                    except Exception:
                        wait = BACKOFF_S * 2**attempt * random.uniform(0.5, 1.5)
                        is_late = asyncio.get_running_loop().time() + wait >= (timeout.when() or 0)
                        if attempt == self._retries or is_late or timeout.expired():
                            raise
                    await asyncio.sleep(wait)
            outcome: dict[str, Any] = {"results": [*map(as_json, grades)]}
        except BaseException as error:  # noqa: BLE001  (sys.exit in a custom function is an error like any other)
            outcome = describe_error(error, self._grader)
            if self._has_failed:
                outcome["traceback"] = ""  # the first one is reported; a pipe holds only a few
            self._has_failed = self._has_failed or not timeout.expired()
        self._reply(job=key, **({"timeout": True} if timeout.expired() else outcome))


def set_alarm(limit: float | None) -> None:
    """Let an alarm end this process, whatever code runs, if the work takes much longer than `limit` seconds."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0 if limit is None else 2 * limit + ALARM_MARGIN_S)


def describe_error(error: BaseException, grader: BatchGrader) -> dict[str, Any]:
    """Return the reply about an error of the function."""
    message = f"{type(error).__name__}: {error!s:.300}"
    if isinstance(error, MemoryError):  # a traceback may need more memory than is left
        return {"error": message, "traceback": "", "out_of_memory": True}
    import traceback  # not at module level, since few functions fail

    text = "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARS:]
    return {"error": message + (user_code_location(error) or grader.location), "traceback": text}


def _limit_memory(memory_gb: float) -> None:
    """Limit the address space to the present size plus `memory_gb` GiB, and disable core files."""
    # Without /proc (macOS) the present size is not known, and a limit below it ends the worker.
    if PAGES.exists():
        used = int(PAGES.read_text().split()[0]) * resource.getpagesize()
        limit, (_, hard) = used + int(memory_gb * 2**30), resource.getrlimit(resource.RLIMIT_AS)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
