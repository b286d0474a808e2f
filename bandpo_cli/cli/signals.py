"""Signal handlers: of a training run, where a first signal waits for the end of the step, and of a sweep."""

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Self

from bandpo_cli.callbacks import CallbackBase
from bandpo_cli.errors import SignalExit, signal_name
from bandpo_cli.processes.ranks import is_main_process, launched_ranks, rank_count

STOPPED = "stopped"  # printed where a signal ends the program at once

_REPEATED: dict[int, int] = {signal.SIGPROF: signal.SIGINT, signal.SIGIO: signal.SIGTERM}
FORWARDED: Mapping[int, int] = {signal.SIGUSR2: signal.SIGINT, signal.SIGVTALRM: signal.SIGTERM, **_REPEATED}
"""The signals that the ranks of `--nproc` receive from their parent process, and what the parent has received, the last
two if not for the first time: Python calls a handler once for all signals of a number that arrive in native code. A
cluster sends SIGTERM to all processes of a job, so the ranks ignore SIGINT and SIGTERM. SIGUSR1 prints stacks."""


def stop_signals() -> list[int]:
    """Return SIGINT, SIGTERM, and SIGHUP, which a closed terminal sends, unless `nohup` lets the program ignore it."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


@contextmanager
def signal_handlers(handlers: Mapping[int, Any]) -> Iterator[None]:
    """Install handlers by number of the signal; the earlier ones are restored at the end."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(eq=False)
class StopSignals(CallbackBase):
    """Handlers of SIGINT, SIGTERM and SIGHUP inside the `with` block; the earlier handlers are restored after it.

    A signal raises `SignalExit`. Between the events `start` and `phase("close")` of a run, the first SIGINT and the
    first SIGTERM only make `is_requested` return True: a cluster sends SIGTERM to all processes of a job, and a sweep
    among them sends its runs SIGINT, which together ask for one thing. A repeated SIGHUP is ignored: a closed terminal
    sends several. Outside the main thread, where Python allows no handlers, nothing is installed.

    A rank of `--nproc` listens to its parent process alone (`FORWARDED`). torchrun sends SIGTERM to the other ranks
    when one has ended; from `phase("close")` on it is ignored there, so that the summary of the run is written.
    """

    on_every_rank = True

    silent: bool = False  # True: a live display shows the request
    _received: list[int] = field(default_factory=list)
    _deferring: bool = False
    _closing: bool = False
    _stack: ExitStack = field(default_factory=ExitStack)

    def is_requested(self) -> bool:
        """Return whether a signal has arrived."""
        return bool(self._received)

    @property
    def exit_code(self) -> int:
        """128 plus the number of the last signal; 0 when none has arrived."""
        return 128 + self._received[-1] if self._received else 0

    @property
    def sender(self) -> str | None:
        """Name of the first signal, `Ctrl-C` for SIGINT; None when none has arrived."""
        return signal_name(self._received[0]) if self._received else None

    @property
    def request(self) -> str:
        """What the last signal asks for, when it is the first of its kind."""
        name = signal_name(self._received[-1])
        again = f"{'press' if name == 'Ctrl-C' else 'send'} {name} again"
        return f"stopping after this step and its checkpoint; {again} to abort the step"

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handlers: dict[int, Any] = dict.fromkeys(stop_signals(), self._handle)
            if launched_ranks() is not None:
                # Unlike SIG_IGN, a function is not inherited by the programs that this process starts.
                handlers = dict.fromkeys(handlers, lambda *_: None) | dict.fromkeys(FORWARDED, self._handle)
            self._stack.enter_context(signal_handlers(handlers))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, info: Any) -> None:
        """Let the first signal only make `is_requested` return True."""
        self._deferring = True

    def phase(self, name: str) -> None:
        """Let every signal end the program from the phase `close` on."""
        if name == "close":
            self._deferring, self._closing = False, True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._closing and rank_count() > 1 and launched_ranks() is None:
            return
        is_repeated, number = number in _REPEATED, FORWARDED.get(number, number)
        repeated = is_repeated or number in self._received
        if number == signal.SIGHUP and repeated:
            return
        self._received.append(number)
        deferred = self._deferring and not repeated
        if not self.silent and is_main_process():
            write_line(self.request if deferred else STOPPED)
        if not deferred:
            raise SignalExit(number)


def write_line(line: str) -> None:
    """Write a line to standard error from a handler. print() would find its buffer locked if a signal interrupts it."""
    with suppress(OSError):  # of a terminal that was closed
        os.write(2, f"{line}\n".encode())


def handle_forwarded_signals() -> None:
    """Let the signals of `FORWARDED` end this rank as SIGINT and SIGTERM end a program without handlers."""

    def terminate(number: int, frame: FrameType | None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    for number, asked in FORWARDED.items():
        signal.signal(number, signal.default_int_handler if asked == signal.SIGINT else terminate)


@contextmanager
def exit_on_sigterm(announce: bool = False) -> Iterator[None]:
    """Let the first SIGTERM or SIGHUP raise `SignalExit` inside the block, and Ctrl-C KeyboardInterrupt.

    Later SIGTERM and SIGHUP are ignored, so that the block can end what it has started. Nothing is installed outside
    the main thread, and on a rank other than 0: it may be waiting for another one in native code, where only the
    system's own handler ends it. Without `announce`, which writes a line, the block reports what it has ended.
    """
    if threading.current_thread() is not threading.main_thread() or not is_main_process():
        yield
        return
    lines = [STOPPED] if announce else []
    ending = stop_signals()[1:]

    def handle(number: int, frame: FrameType | None) -> None:
        if lines:
            write_line(lines.pop())
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        for other in ending:
            signal.signal(other, signal.SIG_IGN)
        raise SignalExit(number)

    interrupt = [] if signal.getsignal(signal.SIGINT) == signal.SIG_IGN else [signal.SIGINT]
    with signal_handlers(dict.fromkeys([*ending, *interrupt], handle)):
        yield
