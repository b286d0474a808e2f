"""Fan-out of callback events."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from bandpo_cli.types import Callback, Info, Report, Result


class Dispatcher(Callback[Info, Report, Result]):
    """Forward each event to several callbacks, in their order.

    `end` reaches all of them, also when one raises.
    """

    def __init__(self, callbacks: Sequence[Callback[Info, Report, Result]]) -> None:
        self._callbacks = tuple(callbacks)

    def start(self, info: Info) -> None:
        """Forward the start."""
        for callback in self._callbacks:
            callback.start(info)

    def phase(self, name: str) -> None:
        """Forward the name of the work that begins."""
        for callback in self._callbacks:
            callback.phase(name)

    def step(self, report: Report) -> None:
        """Forward one step."""
        for callback in self._callbacks:
            callback.step(report)

    def end(self, result: Result) -> None:
        """Forward the result."""
        with ExitStack() as stack:
            for callback in reversed(self._callbacks):
                stack.callback(callback.end, result)
