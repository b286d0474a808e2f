"""Ctrl-C and SIGTERM: the first one lets the running step end, the second ends the run at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_DEFERRED = b"stopping: the step is finished and a checkpoint written first; once more to drop the step\n"


class StopSignals:
    """Handlers of SIGINT and SIGTERM while it is entered; those of before are put back.

    A signal ends the program by SystemExit with the exit code that shells give it (130, 143). Within `deferred` the
    first one is only noted. Outside of the main thread, where Python allows no handlers, nothing is done.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._deferring = False
        self._before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        """A signal has come."""
        return self._received is not None

    @property
    def exit_code(self) -> int:
        """The exit code for the signal that has come, 0 when none has."""
        return 0 if self._received is None else 128 + self._received

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only note the first signal within the body."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self._received is None
        self._received = number
        if first and self._deferring:
            os.write(2, _DEFERRED)  # printing could meet a print that this signal has interrupted
            return
        os.write(2, b"stopped\n")
        raise SystemExit(self.exit_code)
