"""What may come of bad input: it is taken, or refused in one clean line, in bounded time."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from bandpo_cli.errors import RunError, UserError

DEADLINE_S = 20


class TooLong(BaseException):
    """No Exception: code that catches all of those must not take it for one of the input's."""


def _ring(number: int, frame: FrameType | None) -> None:
    raise TooLong


@contextlib.contextmanager
def deadline(seconds: int = DEADLINE_S) -> Iterator[None]:
    """End what hangs, so that the test says which input it was."""
    before = signal.signal(signal.SIGALRM, _ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check_line(line: str) -> None:
    """Assert that a message is one line that a terminal shows as it is."""
    assert line.strip(), "an empty message"
    assert len(line) <= 1100, len(line)
    assert line.isprintable(), line


def taken(call: Callable[[], Any], what: object = "") -> bool:
    """Tell whether a call takes its input. Anything but a UserError with one clean line fails the test."""
    try:
        with deadline():
            call()
    except (UserError, RunError) as error:
        check_line(str(error))
        return False
    except BaseException as error:
        error.add_note(f"input: {what!r:.2000}")
        raise
    return True
