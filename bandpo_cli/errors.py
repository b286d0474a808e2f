"""The one family of errors that are the user's to mend. The command line prints them in a line, exit code 2."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable

_MAX_MESSAGE_CHARS = 1000


def one_line(text: str) -> str:
    """Return `text` as one line that a terminal shows as it is: no control characters, 1,000 characters at most.

    A message repeats what the user gave: names of files, lines of a file from elsewhere. Those may hold anything.
    """
    shown = "".join(map(_escape_unprintable, _shorten(text.strip())))
    return _shorten(shown)


def _escape_unprintable(letter: str) -> str:
    if letter.isprintable():
        return letter
    return " " if letter in "\n\r\t" else letter.encode("unicode_escape").decode()


def _shorten(text: str) -> str:
    """Leave out the middle: the beginning says where the mistake is, the end what to type instead."""
    return (
        text if len(text) <= _MAX_MESSAGE_CHARS else f"{text[:700]} ... {text[-(_MAX_MESSAGE_CHARS - 705) :]}"
    )


class UserError(Exception):
    """A mistake in what the user gave: printed as one line without a traceback, exit code 2."""

    def __init__(self, line: str) -> None:
        super().__init__(one_line(line))


class RunError(Exception):
    """A run that cannot go on, through no mistake of the user's: one line, exit code 1. The run folder is whole."""

    def __init__(self, line: str) -> None:
        super().__init__(one_line(line))


class ConfigError(UserError):
    """A setting that cannot be used. The message names the key, the value and what is allowed."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the closest of `allowed`, or an empty string when none is close."""
    matches = difflib.get_close_matches(name[:100], list(allowed), n=1, cutoff=0.5)  # long ones take minutes
    return f" (did you mean '{matches[0]}'?)" if matches else ""


_MESSAGES_BY_ERRNO = {
    errno.ENOSPC: "no room is left on the disk; make some, and go on",
    errno.EDQUOT: "the disk quota is used up; make room, and go on",
    errno.EFBIG: "files may not grow that far here (ulimit -f)",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "not permitted",
    errno.EIO: "the disk reports an input/output error",
    errno.EMFILE: "too many files are open (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine",
    errno.EAGAIN: "no further process or thread may be started (ulimit -u)",
    errno.ENOMEM: "out of memory",
}


def system_error_message(error: OSError) -> str | None:
    """Return one line for an error of the operating system (disk full, ...), with the file; None for other errors."""
    trouble = _MESSAGES_BY_ERRNO.get(error.errno) if error.errno is not None else None
    if trouble is None:
        return None
    return trouble if error.filename is None else f"{error.filename}: {trouble}"
