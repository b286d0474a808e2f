"""Outcome of a call with invalid input: accepted, or refused with one printable line, within a deadline."""

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from bandpo_cli.errors import RunError, UserError

DEADLINE_S = 20


class DeadlineExceeded(BaseException):
    """Derived from BaseException, so that no `except Exception` of the tested code can catch it."""


@contextlib.contextmanager
def deadline(seconds: int = DEADLINE_S) -> Iterator[None]:
    """Raise DeadlineExceeded in the body after `seconds`, so that the test reports which input hangs."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise DeadlineExceeded

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check_line(line: str) -> None:
    """Assert that a message is one non-empty line of printable characters."""
    assert line.strip(), "an empty message"
    assert len(line) <= 1100, len(line)
    assert line.isprintable(), line


def accepts(call: Callable[[], Any], what: object = "") -> bool:
    """Return whether a call accepts its input; any exception except a UserError or RunError with one line fails."""
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


def check_both_outcomes(call: Callable[[], object], path: Path, contents: Iterable[bytes]) -> None:
    """Require that a call accepts some contents of a file, refuses others in one line, and writes no other file."""
    others = {other for other in path.parent.iterdir() if other != path}
    accepted = []
    for content in contents:
        path.write_bytes(content)
        accepted.append(accepts(call, content[:2000]))
    assert 0 < sum(accepted) < len(accepted)
    assert {other for other in path.parent.iterdir() if other != path} == others
