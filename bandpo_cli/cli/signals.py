"""Signal handlers of a training run: the first SIGINT or SIGTERM waits for the step, the second ends the run."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from bandpo_cli.types import CallbackBase

_DEFERRED = b"stopping: the step is finished and a checkpoint written first; once more to drop the step\n"


class StopSignals(CallbackBase):
    """Handlers of SIGINT and SIGTERM inside the `with` block; the earlier handlers are restored after it.

    A signal raises SystemExit with the exit code that shells use (130, 143). Between the events `start` and
    `phase("close")` of a run, the first signal only sets `requested`. Outside the main thread, where Python allows no
    handlers, nothing is installed.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._deferring = False
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has arrived."""
        return self._received is not None

    @property
    def exit_code(self) -> int:
        """128 plus the number of the last signal; 0 when none has arrived."""
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

    def start(self, info: Any) -> None:
        """Let the first signal only set `requested`."""
        self._deferring = True

    def phase(self, name: str) -> None:
        """Let every signal end the program from the phase `close` on."""
        if name == "close":
            self._deferring = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self._received is None
        self._received = number
        if first and self._deferring:
            os.write(
                2, _DEFERRED
            )  # not print: this signal may have interrupted one, and its buffer is locked
            return
        os.write(2, b"stopped\n")
        raise SystemExit(self.exit_code)
