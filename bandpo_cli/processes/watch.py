"""Watch of processes: children and their end, waits that take too long, stacks of all processes of a command.

The processes of a command share a folder in which each has a file, which it locks until its end. At SIGUSR1 a process
writes its stacks there (faulthandler, so also in native code). The leader, which the user has started, prints what is
written in the folder. When it receives the signal, it sends it to the others.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from bandpo_cli.errors import describe_exit, log, one_line, redact_credentials

FOLDER_VARIABLE = "BANDPO_STACKS"  # the folder, whose name is bandpo-<id of the leader>-<random>
LOOK_S = 1.0  # longest time between two looks at the waits and the files
ANSWER_S = 5.0  # that a process has to write its stacks; a stopped one writes none
MIN_STUCK_S = 3600.0  # least limit of a wait for a rank: one rank may sample far longer than the others
WORK_FACTOR = 1.5  # work is reported later than the waits for answers in it, which are more precise

PARENT_PID_VARIABLE = "BANDPO_PARENT_PID"  # environment variable of a `ChildProcess`
PARENT_INTERVAL_S = 0.1  # between two looks at the parent
KILLED_S = 5.0  # that a process has to end after SIGKILL
OUTPUT_BYTES = 1 << 14  # at the end of an output in which its last line is looked for


stall_after = 600.0
"""`tracking.stall_after` of this process: seconds without progress after which a wait is reported; 0 for never."""

_waits: list[Wait] = []
_progress_at = _reported_at = 0.0
_thread: threading.Thread | None = None
_folder: TemporaryDirectory[str] | None = None  # of the leader
_file: IO[bytes] | None = None  # of this process
_is_main = True  # it prints its own reports
_leads = False


@dataclass(eq=False)
class Wait:
    """A wait for an answer, or work of this process: a context manager that reports its body if it takes too long."""

    what: str | Callable[[], str]  # a function is called at every look after the first second
    advice: str
    is_work: bool = False  # `progress` restarts it, and it is not reported if another wait was reported since
    since: float = field(default_factory=time.monotonic)
    mark: object = None
    reported_at: float = 0.0

    def __enter__(self) -> None:
        _waits.append(self)
        _start_thread()

    def __exit__(self, *_: object) -> None:
        _waits.remove(self)

    def restart(self, mark: object) -> None:
        """Measure the wait from now on if `mark` is None or not that of the last call."""
        if mark is None or mark != self.mark:
            self.mark, self.since = mark, time.monotonic()

    def check(self) -> None:
        """Warn, once, if the wait takes too long."""
        global _reported_at
        now, since = time.monotonic(), max(self.since, _progress_at if self.is_work else 0.0)
        limit = stall_after * (WORK_FACTOR if self.is_work else 1.0)
        what = self.what if isinstance(self.what, str) or now - since < min(LOOK_S, limit) else self.what()
        if not 0 < limit <= now - since or since < (_reported_at if self.is_work else self.reported_at):
            return
        self.reported_at = _reported_at = now
        clock = time.strftime("%H:%M:%S", time.localtime(time.time() - now + since))
        line = f"waiting for {what} since {clock} ({timedelta(seconds=round(now - since))}): {self.advice}"
        if folder := os.environ.get(FOLDER_VARIABLE):
            line += f"; kill -USR1 {folder.split('-')[-2]} prints where every process is"
        line = one_line(redact_credentials(line))
        if _is_main or _leads or _file is None:
            log.warning("%s", line)
        else:  # the leader prints it
            _file.write(f"warning: {line}\n".encode())


def progress() -> None:
    """Note that the work of this process makes progress."""
    global _progress_at
    _progress_at = time.monotonic()


def stuck_after() -> timedelta:
    """Return the longest wait for a rank, after which the run ends."""
    return timedelta(seconds=max(MIN_STUCK_S, 6 * stall_after))


def register(role: str, leads: bool = False, is_main: bool = True) -> None:
    """Let SIGUSR1 write the stacks of this process; the leader makes the folder. Without one, use standard error."""
    global _file, _folder, _is_main, _leads
    _is_main, _leads = is_main, leads
    faulthandler.register(signal.SIGUSR1, sys.__stderr__ or 2)
    folder = os.environ.get(FOLDER_VARIABLE)
    with suppress(OSError):  # the disk is full, or the folder is gone
        if leads:
            _folder = TemporaryDirectory("", f"bandpo-{os.getpid()}-", folder, ignore_cleanup_errors=True)
            os.environ[FOLDER_VARIABLE] = folder = _folder.name
            _start_thread()
        if folder is not None:
            _file = open(Path(folder, f"{role}.{os.getpid()}"), "ab", buffering=0)  # noqa: SIM115
            faulthandler.register(signal.SIGUSR1, _file)
            fcntl.flock(_file, fcntl.LOCK_EX)  # from now on others may send the signal


def read_stacks(folder: Path) -> list[str]:
    """Send SIGUSR1 to the processes of a command; return what each of them writes, below its role and id."""
    sizes, deadline = _send(folder), time.monotonic() + ANSWER_S
    while time.monotonic() < deadline and any(path.stat().st_size == size for path, size in sizes.items()):
        time.sleep(0.05)
    time.sleep(0.1)  # the last one may still be writing
    return [_written(path, size) for path, size in sizes.items()]


def _send(folder: Path, answered: Collection[Path] = ()) -> dict[Path, int]:
    """Send SIGUSR1 to the other processes in a folder, of a sweep's runs to the leaders; return the sizes before."""
    sizes = {}
    for path in {*folder.glob("*.*"), *folder.glob("*/bandpo.*")} - {*answered}:
        with suppress(OSError), path.open("rb") as file:
            try:  # a process that has ended holds no lock, and its id may be that of any other process
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                sizes[path] = path.stat().st_size
                os.kill(int(path.suffix[1:]), signal.SIGUSR1)
    return sizes


def _written(path: Path, start: int) -> str:
    text = path.read_bytes()[start:].decode(errors="replace")
    return f"{path.stem} (process {path.suffix[1:]}):\n{text or 'no answer: it may be stopped'}"


def _start_thread() -> None:
    global _thread
    if _thread is None or not _thread.is_alive():  # a forked process has none
        _thread = threading.Thread(target=_look, name="waits", daemon=True)
        with suppress(RuntimeError):  # the system limits the number of threads
            _thread.start()


def _look() -> None:
    """Check the waits, the innermost first; as the leader, print what processes have written since the last look."""
    printed: dict[Path, int] = {}
    while True:
        time.sleep(min(LOOK_S, stall_after / 4 or LOOK_S))
        for wait in reversed([*_waits]):
            with suppress(Exception):  # such as of the ranks' store
                wait.check()
        folder = os.environ.get(FOLDER_VARIABLE, "--")
        if folder.split("-")[-2] == str(os.getpid()) and _file is not None:
            with suppress(OSError):
                sizes = {path: path.stat().st_size for path in Path(folder).rglob("*.*")}
                grown = [path for path, size in sizes.items() if size > printed.get(path, 0)]
                if Path(_file.name) in grown:
                    _send(Path(folder), grown)
                for path in sorted(grown):
                    output = sys.stderr if _is_main else sys.__stderr__  # ranks of torchrun discard theirs
                    print(_written(path, printed.get(path, 0)), file=output, flush=True)
                printed = sizes


class ChildProcess:
    """A process that leads its own process group, which Ctrl-C at the terminal does not reach.

    The methods may be called from several threads. What a process that has ended leaves in its group is killed. `code`
    is its exit code, or minus the number of the signal that killed it; None before `poll` or `wait` has found its end.
    """

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], may_leave: bool = False, **options: Any
    ) -> None:
        """Start the process with environment variables and options of `subprocess.Popen`, such as its streams.

        Raise OSError if the system refuses. With `may_leave`, a process with exit code 0 may leave others.
        """
        self.code: int | None = None
        self._may_leave, self._lock = may_leave, threading.RLock()
        variables = {**variables, PARENT_PID_VARIABLE: str(os.getpid())}
        self.process = subprocess.Popen(command, env=variables, start_new_session=True, **options)
        self.pid = self.process.pid

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        with self._lock:
            if self.code is None and (code := self.process.poll()) is not None:
                if code or not self._may_leave:
                    self.send(signal.SIGKILL)
                self.code = code
        return self.code

    def wait(self, seconds: float = math.inf) -> bool:
        """Wait for the end of the process; return whether it has ended."""
        if seconds == math.inf:
            self.process.wait()
        deadline = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.code is not None

    def send(self, number: int, to_group: bool = True) -> None:
        """Send a signal to the process, by default also to those that it has started; do nothing after its end."""
        with self._lock, suppress(ProcessLookupError, PermissionError):
            if self.code is None:  # else its id may be that of another process
                (os.killpg if to_group else os.kill)(self.pid, number)

    def kill(self) -> None:
        """Kill the process and those that it has started, and wait for its end."""
        self.send(signal.SIGKILL)
        if not self.wait(KILLED_S):  # it waits for a device
            self.code = -signal.SIGKILL

    def describe_end(self, output: IO[bytes] | None = None) -> str:
        """Return how the process has ended, and the last line that it has written to the file `output`."""
        end, last = describe_exit(self.code or 0), ""
        if output is not None:
            start = max(0, os.fstat(output.fileno()).st_size - OUTPUT_BYTES)
            text = os.pread(output.fileno(), OUTPUT_BYTES, start).decode(errors="replace")
            last = text.strip().rpartition("\n")[2].strip()
        return f"{end} (its last output: {last})" if last else end


def python_command(
    role: str, function: str, arguments: Sequence[object], ignored: Sequence[int] = ()
) -> list[str]:
    """Return the command of a process that calls the function "module:name", and exits when its parent ends.

    The process gets the module search path of this one, and ignores some signals. It runs neither the __main__ of the
    user nor files of the current folder. JSON must have a form for the arguments. `role` names it in its stacks.
    """
    package = str(Path(__file__).resolve().parents[2])
    path = [str(Path(entry).absolute()) for entry in sys.path]
    path = path if package in path else [*path, package]
    call = json.dumps([role, function, arguments, ignored, path])
    return [sys.executable, "-P", "-c", _CHILD_SOURCE, call]


_CHILD_SOURCE = (
    "import json, sys; *call, sys.path[:] = json.loads(sys.argv[1]); "
    "from bandpo_cli.processes.watch import run_child; run_child(*call)"
)


def run_child(role: str, function: str, arguments: Sequence[Any], ignored: Sequence[int]) -> None:
    """Call the function of `python_command` in its process, which watches its parent before it imports more."""
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    exit_with_parent()
    register(role)
    module, _, name = function.partition(":")
    getattr(import_module(module), name)(*arguments)


def exit_with_parent() -> None:
    """Start a thread that kills this process, and its group, when the parent that started it as `ChildProcess` ends.

    Two processes must not write to one run: a resumed sweep starts its unfinished runs again.
    """
    # Removed from the environment, since child processes of this one have another parent.
    parent = int(os.environ.pop(PARENT_PID_VARIABLE))

    def kill_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_INTERVAL_S)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill_with_parent, name="parent-watch", daemon=True).start()
