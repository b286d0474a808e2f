"""Errors that the command line prints as one line, the functions that form their texts, and failures after the end."""

import difflib
import errno
import logging
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

log = logging.getLogger("bandpo_cli")
"""The logger of the package."""

_MAX_MESSAGE_CHARS = 1000

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""C0 without tab and newline, DEL, C1, separators of lines, and the characters that change the direction of a text."""


def escape_controls(text: str, as_json: bool = False) -> str:
    """Return `text` with its control characters as escapes such as `\\x1b` and `\\u202e`: a terminal would obey them.

    Tabs and newlines are kept. JSON has one form of escapes only, such as `\\u001b`.
    """
    escape = "\\u{:04x}".format if as_json else lambda code: chr(code).encode("unicode_escape").decode()
    return _CONTROLS.sub(lambda match: escape(ord(match[0])), text)


REDACTED = "***"

_SECRETS = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(://)[^\s/?#]*(?=@)",  # user and password
        r"(://)[^\s/?#@:]*:(?!\d*(?:[/?#\s]|$))[^\s@]{0,1024}+(?=@)",  # a password with one of /?#, and no port
        r"(://[^\s?#]{0,1024}+\?)[^\s=&#'\"]+(?=[&#\s'\"]|$)",  # a query without keys
        r"(://[^\s#]{0,1024}+#)(?!/)[^\s'\"]+",  # a fragment
        r"([?&;](?!(?:charset|connect_timeout|driver|mode|sslmode|timeout|workflowtype)=)[\w.-]+=)[^&;#\s'\"]*",
    )
]
"""Parts of addresses that may be secrets, after a group that is kept. The limits keep the time linear."""


def redact_credentials(text: str) -> str:
    """Return `text` with every part of an address that may be a secret as `***`: the user, the query, the fragment.

    Pages of MLflow, whose fragment begins with `#/`, stay. An error message may quote a query without the address.
    """
    for pattern in _SECRETS:
        text = pattern.sub(rf"\1{REDACTED}", text)
    return text


def has_secret(uri: str) -> bool:
    """Return whether an address may contain a secret. A user name alone is one for a web server, not for a database."""
    address = re.sub(r"^((?!https?:)[\w+]+://)[^:/@\s?#]+@", r"\1", uri)
    return redact_credentials(address) != address


def one_line(text: str) -> str:
    """Return `text` as one printable line of at most 1,000 characters; it may quote files that contain anything."""
    shortened = re.sub(r"[\n\r\t]", " ", _shorten(text.strip()))  # a quoted file may have many megabytes
    return _shorten("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shortened))


def excerpt(text: str, chars: int) -> str:
    """Return a text on one line; of a longer text the first `chars` characters, with …"""
    line = " ".join(text[: 4 * chars].split())  # a text may have many megabytes
    return line if len(line) <= chars else f"{line[: chars - 2]} …"


def _shorten(text: str) -> str:
    """Cut out the middle: the beginning names the mistake, the end what to type instead."""
    return text if len(text) <= _MAX_MESSAGE_CHARS else f"{text[:700]} ... {text[-295:]}"


class _OneLineError(Exception):
    """An error whose message is one printable line without credentials."""

    def __init__(self, line: str) -> None:
        super().__init__(one_line(redact_credentials(line)))


class UserError(_OneLineError):
    """A mistake in the input of the user: printed as one line without a traceback, exit code 2."""


class RunError(_OneLineError):
    """A run that cannot continue, without a mistake of the user: one line, exit code 1. The run folder is intact."""


class LostRankError(RunError):
    """A rank that has lost the connection to another one: the process of the other one has ended."""


class GraderFailedError(RunError):
    """A grader that failed on every answer of a training step or an evaluation. The message has its first error."""


class SignalExit(SystemExit):
    """End of the program by a signal. The exit code is 128 plus the number of the signal, as shells report it."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number

    def __str__(self) -> str:
        return f"stopped by {signal_name(self.number)}"


class EngineMemoryError(MemoryError):
    """The engine process of a rank (`sampling.engine_process`) has run out of memory."""


def is_received(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised from, was raised on another rank: its `received` is set."""
    return error is not None and ("received" in error.__dict__ or is_received(error.__cause__))


def raised_by_signal(error: BaseException) -> bool:
    """Return whether a signal handler raised an exception, and not the code that the signal interrupted."""
    from dis import opname

    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    instruction, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code in handlers:
            return True
        instruction = "".join(opname[byte] for byte in code.co_code[trace.tb_lasti :][:1])  # none in Cython
        trace = trace.tb_next
    # Python's own handler of Ctrl-C has no frame: it interrupts any instruction, but hardly a `raise`.
    is_raised = instruction == "RAISE_VARARGS" and user_code_location(error)
    return isinstance(error, SignalExit) or (isinstance(error, KeyboardInterrupt) and not is_raised)


def signal_name(number: int) -> str:
    """Return `Ctrl-C` for SIGINT, and the name of any other signal."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def describe_exit(code: int) -> str:
    """Return how a process ended: `was killed by SIGKILL (...)` for the code -9, or `ended with exit code 1`."""
    if code >= 0:
        return f"ended with exit code {code}"
    why = " (as the system does when memory runs out)" if code == -signal.SIGKILL else ""
    name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
    return f"was killed by {name}{why}"


class ConfigError(UserError):
    """An invalid setting. The message names the key, the value and what is allowed."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the closest of `allowed`, or an empty string when none is close."""
    # The time of the search grows with the square of the length: a long name would take minutes.
    by_lower = {choice.lower(): choice for choice in allowed}
    matches = difflib.get_close_matches(name[:100].lower(), list(by_lower), n=1, cutoff=0.5)
    return f" (did you mean '{by_lower[matches[0]]}'?)" if matches else ""


def unknown_choice(value: object, allowed: Iterable[str]) -> str:
    """Return `unknown (did you mean 'x'?); allowed: x, y` for a value that is not one of `allowed`."""
    names = list(allowed)
    return f"unknown{nearest(str(value), names)}; allowed: {', '.join(names)}"


def plural(number: int, noun: str) -> str:
    """Return `3 variants`, `1 variant`, `1,024 variants`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def first_line(error: BaseException | str, max_chars: int = 200) -> str:
    """Return the first non-empty line of an error's text, cut to `max_chars`; its class name where it has no text."""
    lines = (line for line in map(str.strip, str(error).splitlines()) if line)
    return next(lines, "" if isinstance(error, str) else type(error).__name__)[:max_chars]


def user_code_location(error: BaseException) -> str:
    """Return ` (rewards.py:12, in judge)`, the innermost line of an error in a user's own file, or ""."""
    import sysconfig  # not at module level, since every command imports this module
    import traceback

    paths = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    folders = (f"{path}/" for path in (Path(__file__).parent, *paths))
    others = (*folders, "<")  # Python's own frozen modules are <frozen ...>
    places = [
        (frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(others)
    ]
    if not places:
        return ""
    code, line = places[-1]
    return f" ({_place(code.co_filename, line, code.co_name)})"


def definition_location(target: Any) -> str:
    """Return ` (rewards.py:12, in judge)`, where a user's function or class is defined; "" for one in C."""
    import inspect

    target = inspect.unwrap(target)
    try:
        _, line = inspect.getsourcelines(target)
        return f" ({_place(inspect.getfile(target), line, target.__name__)})"
    except (AttributeError, OSError, TypeError):
        return ""


@contextmanager
def exits_as_errors(what: str = "custom code") -> Iterator[None]:
    """Raise RunError, which begins with `what`, for SystemExit, KeyboardInterrupt and the like from custom code.

    An exception that a signal handler raises passes. The body must not yield: GeneratorExit would be its end.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or raised_by_signal(error):
            raise
        about = f"{type(error).__name__}: {first_line(error)}{user_code_location(error)}"
        raise RunError(f"{what}: {about}") from error


@contextmanager
def user_code(what: str, target: object) -> Iterator[None]:
    """Raise ConfigError, which begins with `what`, for an exception of the body; RunError for SystemExit.

    It ends with the line of the user's code that raised the exception, else of the definition of `target`, the user's
    function or class: then the body has found a mistake in what `target` returned.
    """
    try:
        yield
    except BaseException as error:
        if raised_by_signal(error):
            raise
        message, location = first_line(error, 400), user_code_location(error)
        message = f"{type(error).__name__}: {message}" if location else message
        kind = ConfigError if isinstance(error, Exception) else RunError
        raise kind(f"{what}: {message}{location or definition_location(target)}") from error


def _place(filename: str, line: int, name: str) -> str:
    """Return `rewards.py:12, in judge`; the file is relative to the current folder if it lies in it."""
    file = Path(filename)
    relative = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    return f"{relative}:{line}" + ("" if name == "<module>" else f", in {name}")


_OUT_OF_MEMORY_TEXTS = (
    "out of memory",  # CUDA's driver and runtime, also from vLLM's sleeping allocator and its worker processes
    "OutOfMemoryError",  # a type that a worker process reports as text
    "can't allocate memory",  # torch's allocator on a CPU
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""Parts of the message of a RuntimeError that mean that a device has too little memory."""


def find_out_of_memory(error: BaseException) -> BaseException | None:
    """Return the failed allocation of Python, torch or vLLM that is or caused `error`, wrapped or not."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        known = isinstance(cause, RuntimeError) and any(text in str(cause) for text in _OUT_OF_MEMORY_TEXTS)
        # By name, since torch is not imported here.
        if known or isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError":
            return cause
        seen.append(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return None


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


def system_error_message(error: BaseException) -> str | None:
    """Return one line for an error of the operating system (disk full, ...), with the file; None for other errors."""
    if not isinstance(error, OSError) or error.errno not in _MESSAGES_BY_ERRNO:
        return None
    message = _MESSAGES_BY_ERRNO[error.errno]
    return f"{error.filename}: {message}" if error.filename else message


@contextmanager
def warn_on_failure(what: str) -> Iterator[None]:
    """Log an exception of the body as a warning that begins with `what`, and continue."""
    try:
        yield
    except Exception as failure:  # noqa: BLE001 - it is reported, and must not replace another error
        text = system_error_message(failure) or f"{type(failure).__name__}: {first_line(failure)}"
        log.warning("%s: %s", what, one_line(text))


@contextmanager
def closed_at_end(what: str, close: Callable[[], None]) -> Iterator[None]:
    """Call `close` when the body ends, with or without an error; a failure to close `what` is logged as a warning."""
    try:
        yield
    finally:
        with warn_on_failure(f"{what} could not be closed"):
            close()
