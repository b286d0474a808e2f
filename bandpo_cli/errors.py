"""Errors that the command line prints as one line: mistakes of the user (exit code 2) and failed runs (exit code 1).

Also the functions that form their texts.
"""

from __future__ import annotations

import difflib
import errno
import signal
from collections.abc import Iterable

_MAX_MESSAGE_CHARS, _HEAD_CHARS = 1000, 700
"""Length of a message, and the part of a longer one that is kept at its beginning."""

_CUT = " ... "


def one_line(text: str) -> str:
    """Return `text` as one printable line: no control characters, at most 1,000 characters.

    A message quotes input: file names, lines of downloaded files. Those may contain anything.
    """
    shortened = _shorten(text.strip())  # first, since a quoted file may have many megabytes
    return _shorten("".join(map(_escape_unprintable, shortened)))


def _escape_unprintable(char: str) -> str:
    if char.isprintable():
        return char
    return " " if char in "\n\r\t" else char.encode("unicode_escape").decode()


def _shorten(text: str) -> str:
    """Cut out the middle: the beginning names the mistake, the end what to type instead."""
    if len(text) <= _MAX_MESSAGE_CHARS:
        return text
    tail_chars = _MAX_MESSAGE_CHARS - _HEAD_CHARS - len(_CUT)
    return text[:_HEAD_CHARS] + _CUT + text[-tail_chars:]


class UserError(Exception):
    """A mistake in the input of the user: printed as one line without a traceback, exit code 2."""

    def __init__(self, line: str) -> None:
        super().__init__(one_line(line))


class RunError(Exception):
    """A run that cannot continue, without a mistake of the user: one line, exit code 1. The run folder is intact."""

    def __init__(self, line: str) -> None:
        super().__init__(one_line(line))


class GraderFailedError(RunError):
    """A grader that failed on every answer of a training step or an evaluation. The message has its first error."""


class SignalExit(SystemExit):
    """End of the program by a signal. The exit code is 128 plus the number of the signal, as shells report it."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number

    def __str__(self) -> str:
        return f"stopped by {signal_name(self.number)}"


def signal_name(number: int) -> str:
    """Return `Ctrl-C` for SIGINT, and the name of any other signal."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


class ConfigError(UserError):
    """An invalid setting. The message names the key, the value and what is allowed."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the closest of `allowed`, or an empty string when none is close."""
    # The time of the search grows with the square of the length: a long name would take minutes.
    matches = difflib.get_close_matches(name[:100], list(allowed), n=1, cutoff=0.5)
    return f" (did you mean '{matches[0]}'?)" if matches else ""


def plural(number: int, noun: str) -> str:
    """Return `3 arms`, `1 arm`, `1,024 arms`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_line(error: BaseException | str, max_chars: int = 200) -> str:
    """Return the first non-empty line of an error's text, cut to `max_chars`; its class name where it has no text."""
    lines = (line for line in map(str.strip, str(error).splitlines()) if line)
    return next(lines, "" if isinstance(error, str) else type(error).__name__)[:max_chars]


_MESSAGES_BY_ERRNO = {
    errno.ENOSPC: "no space is left on the disk; free some, then continue",
    errno.EDQUOT: "the disk quota is used up; free some space, then continue",
    errno.EFBIG: "the file size limit is reached (ulimit -f)",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "not permitted",
    errno.EIO: "the disk reports an input/output error",
    errno.EMFILE: "too many files are open (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine",
    errno.EAGAIN: "the limit on processes and threads is reached (ulimit -u)",
    errno.ENOMEM: "out of memory",
}


def system_error_message(error: OSError) -> str | None:
    """Return one line for an error of the operating system (disk full, ...), with the file; None for other errors."""
    message = _MESSAGES_BY_ERRNO.get(error.errno) if error.errno is not None else None
    if message is None:
        return None
    return message if error.filename is None else f"{error.filename}: {message}"
