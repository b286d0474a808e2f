"""Signal handlers: the first signal waits for the end of the step, the second exits, and both are restored."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from bandpo_cli.cli.signals import FORWARDED, StopSignals, exit_on_sigterm, handle_forwarded_signals


@pytest.mark.parametrize(
    ("number", "code", "again"),
    [(signal.SIGINT, 130, "press Ctrl-C again"), (signal.SIGTERM, 143, "send SIGTERM again")],
)
def test_the_second_signal_exits(number, code, again, capfd):
    before = signal.getsignal(number)
    with StopSignals() as signals:
        signals.start(None)
        assert not signals.is_requested()
        os.kill(os.getpid(), number)
        assert (signals.is_requested(), signals.exit_code) == (True, code)
        with pytest.raises(SystemExit) as end:
            os.kill(os.getpid(), number)
    assert end.value.code == code
    assert again in capfd.readouterr().err
    with StopSignals() as signals:
        signals.start(None)
        signals.phase("close")  # outside of steps the first one exits
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


def test_the_first_sigterm_exits_the_block_and_later_ones_are_ignored():
    before, cleaned = signal.getsignal(signal.SIGTERM), []

    def work():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            cleaned.append(True)

    with pytest.raises(SystemExit) as end, exit_on_sigterm():
        work()
    assert cleaned == [True]
    assert (end.value.code, str(end.value)) == (143, "stopped by SIGTERM")
    assert signal.getsignal(signal.SIGTERM) == before


def test_handlers_are_unchanged_in_another_thread():
    def work():
        with StopSignals() as signals:
            signals.start(None)
            return signal.getsignal(signal.SIGTERM), signals.is_requested()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == (signal.getsignal(signal.SIGTERM), False)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("BANDPO_NPROC", "2")):
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("launched")
def test_a_rank_of_nproc_listens_to_its_parent_process_alone(capfd):
    """A cluster sends SIGTERM to all processes of a job, and the parent forwards its own: one request."""
    with StopSignals() as signals:
        signals.start(None)
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert not signals.is_requested()
        os.kill(os.getpid(), signal.SIGVTALRM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (signals.is_requested(), signals.sender, signals.exit_code) == (True, "SIGTERM", 143)
        with pytest.raises(SystemExit) as end:
            os.kill(os.getpid(), signal.SIGVTALRM)
    assert (end.value.code, str(end.value)) == (143, "stopped by SIGTERM")
    assert signal.getsignal(signal.SIGVTALRM) == signal.SIG_DFL
    assert "send SIGTERM again" in capfd.readouterr().err


@pytest.mark.usefixtures("launched")
def test_two_signals_that_arrive_in_native_code_abort_the_step():
    """Python calls the handlers after it, that of the lower number first."""
    first, *_, again = (number for number, asked in FORWARDED.items() if asked == signal.SIGINT)
    with StopSignals() as signals:
        signals.start(None)
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        for number in (first, again):  # sent to this thread: another one would not block it
            signal.pthread_kill(threading.get_ident(), number)
        with pytest.raises(SystemExit) as end:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        assert (signals.exit_code, end.value.code) == (130, 130)


@pytest.mark.usefixtures("launched")
def test_forwarded_signals_end_a_rank_that_does_not_train():
    with contextlib.ExitStack() as stack:
        for number in FORWARDED:
            stack.callback(signal.signal, number, signal.getsignal(number))
        handle_forwarded_signals()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGUSR2)


def test_a_rank_of_torchrun_ignores_sigterm_at_the_end(monkeypatch, capfd):
    """torchrun sends SIGTERM to the other ranks when one has ended, and kills them 30 s later."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with StopSignals() as signals:
        signals.start(None)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.is_requested()
        signals.phase("close")
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
    assert capfd.readouterr().err == ""  # rank 0 prints


def test_sighup_stops_as_sigterm_does_unless_nohup_ignores_it():
    """A further one, of which a closed terminal sends several, asks for nothing."""
    with StopSignals() as signals:
        signals.start(None)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
        assert (signals.is_requested(), signals.sender, signals.exit_code) == (True, "SIGHUP", 129)
    with pytest.raises(SystemExit, match="stopped by SIGHUP"), exit_on_sigterm():
        os.kill(os.getpid(), signal.SIGHUP)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with exit_on_sigterm(), StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
        assert not signals.is_requested()
    finally:
        signal.signal(signal.SIGHUP, before)


INTERRUPTED_IMPORT = """
import os, sys

module, number = sys.argv[1], int(sys.argv[2])

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), number)

sys.meta_path.insert(0, Interrupt())
from bandpo_cli.__main__ import main
sys.argv[1:] = ["bounds", "0.1"]
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("module", "number"), [("typer", signal.SIGINT), ("numpy", signal.SIGTERM)])
def test_a_signal_during_the_imports_gives_one_line(module, number):
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, module, str(int(number))]
    done = subprocess.run(command, capture_output=True)
    assert (done.stderr, done.returncode) == (b"stopped\n", 128 + number)
