"""Event loop of a worker process with an asynchronous function: concurrent calls, deadlines and retries."""

import asyncio
import json
import os
import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from threading import Thread
from typing import Any

from bandpo_cli.grading.signatures import BatchGrader, as_json
from bandpo_cli.types import Grade

BACKOFF_S = 0.5
"""Mean wait before the first retry, in seconds; each further wait is twice as long. The jitter, up to a half of it,
spreads the retries of calls that failed at the same time."""

MAX_THREADS = 64
"""Threads for functions that call blocking code in `asyncio.to_thread`. Each reserves 8 MiB for its stack."""


@dataclass
class CallServer:
    """Serves requests, several at a time. The parent process limits the number of calls in flight.

    Args:
        grader: The asynchronous grader.
        reply: Sends the outcome of a call.
        describe_error: Returns the outcome for an exception.
        set_alarm: Called with the longest time until the next reply, in seconds; None if no call is in flight.
        deadline: Seconds per answer; a call that takes N answers has N times as long, including its retries.
        retries: Further calls after an exception.
    """

    grader: BatchGrader
    reply: Callable[..., None]
    describe_error: Callable[[BaseException, BatchGrader], dict[str, Any]]
    set_alarm: Callable[[float | None], None]
    deadline: float
    retries: int
    # Of the calls in flight, in seconds.
    _limits: dict[asyncio.Task[None], float] = field(default_factory=dict)
    _has_failed: bool = False

    async def serve(self, requests: Iterable[bytes]) -> None:
        """Start a task for each line of `requests`, a key and answers [N] in JSON; at their end, end the process."""
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(MAX_THREADS))

        def read() -> None:
            for line in requests:
                loop.call_soon_threadsafe(self._start, *json.loads(line))
            os._exit(0)  # the parent has ended, and the calls in flight with it

        Thread(target=read, daemon=True).start()
        await loop.create_future()

    def _start(self, key: int, answers: Sequence[Any]) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(key, answers))
        self._limits[task] = self.deadline * len(answers)
        self.set_alarm(max(self._limits.values()))
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[None]) -> None:
        del self._limits[task]
        self.set_alarm(max(self._limits.values(), default=None))

    async def _answer(self, key: int, answers: Sequence[Any]) -> None:
        """Call the function, within the deadline, and send the outcome."""
        try:
            async with asyncio.timeout(self.deadline * len(answers)) as timeout:
                grades = await self._grade(answers, timeout)
            outcome: dict[str, Any] = {"results": [*map(as_json, grades)]}
        except BaseException as error:  # noqa: BLE001  (sys.exit in a custom function is an error like any other)
            outcome = self.describe_error(error, self.grader)
            if self._has_failed:
                outcome["traceback"] = ""  # the first one is reported; a pipe holds only a few
            self._has_failed = self._has_failed or not timeout.expired()
        self.reply(job=key, **({"timeout": True} if timeout.expired() else outcome))

    async def _grade(self, answers: Sequence[Any], timeout: asyncio.Timeout) -> list[Grade]:
        """Call the function until it returns grades; raise the last exception."""
        for attempt in count():
            try:
                return await self.grader.call(answers)
            except Exception:
                wait = BACKOFF_S * 2**attempt * random.uniform(0.5, 1.5)
                is_late = asyncio.get_running_loop().time() + wait >= (timeout.when() or 0)
                if attempt == self.retries or is_late or timeout.expired():
                    raise
            await asyncio.sleep(wait)
        raise AssertionError("the loop ends by a return or an exception")
