"""`--nproc`: start the ranks on this machine with torch's launcher, forward signals, and report the first error.

The processes are those of `torchrun --nproc-per-node N`, with the same environment. torchrun's agent around them is not
used: it ends a process 30 s after a signal, when a long step may not have finished, and it leaves a process that waits
for a dead one as long.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from bandpo_cli.cli.signals import FORWARDED, STOPPED, stop_signals, write_line
from bandpo_cli.config.run import ModelConfig
from bandpo_cli.errors import RunError, SignalExit, UserError, describe_exit
from bandpo_cli.experiments.rank_group import check_gpu_count
from bandpo_cli.rank_process import (
    LAUNCHER_VARIABLE,
    RUN_NAME_VARIABLE,
    RankError,
    launched_ranks,
    rank_count,
    read_error,
)
from bandpo_cli.storage.environment import usable_cores
from bandpo_cli.sweeps.pool import PARENT_PID_VARIABLE

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import SubprocessContext

POLL_INTERVAL_S = 0.1
"""Seconds between two polls of the ranks."""

ENDING_S = 15.0
"""Seconds after the error of a rank in which the others can notice it and write the run's summary. Then they are
killed: a rank that waits for another one on a GPU notices nothing."""

OTHERS_S = 5.0
"""Seconds after the end of rank 0 in which the others can end: they have nothing left to write."""

_KILLED_S = 5
"""Seconds to wait for processes after SIGKILL."""


@dataclass
class RankExit:
    """The end of a rank.

    Attributes:
        rank: its number.
        code: its exit code; minus the number of the signal that killed it.
        error: the error that it recorded; None if there is none.
        by_launcher: it was killed here.
    """

    rank: int
    code: int
    error: RankError | None
    by_launcher: bool = False


def ranks_to_start(nproc: int | None) -> int | None:
    """Return how many ranks `--nproc` asks this process to start; None where it trains itself, also as a rank.

    Raises:
        UserError: torchrun has started another number.
    """
    if launched_ranks() is not None or nproc is None:
        return None
    if rank_count() > 1:
        if nproc != rank_count():
            raise UserError(f"--nproc {nproc}: torchrun has started {rank_count()} ranks; leave out --nproc")
        return None
    return nproc if nproc > 1 else None


def launch(
    count: int,
    model: ModelConfig,
    how_to_continue: Callable[[], str],
    name: str | None = None,
    arguments: Sequence[str] | None = None,
) -> int:
    """Run this command in `count` processes, and return the exit code of the run.

    Args:
        model: the settings of the model; its device decides whether each rank needs a GPU.
        how_to_continue: returns what a message says about continuing, after a rank was killed.
        name: the name of the run or evaluation, for all ranks.
        arguments: those of the Python interpreter of each rank; None for this command.

    Raises:
        UserError: there are fewer GPUs, or the mistake of a rank.
        RunError: the error of the rank that failed first.
    """
    check_gpu_count(model, count, f"--nproc {count}")
    with (
        TemporaryDirectory(prefix="bandpo-ranks-", ignore_cleanup_errors=True) as logs,
        _started_ranks(count, name, arguments or _this_command(), logs) as (context, forwarder),
    ):
        exits = _watch(context, forwarder)
    return _exit_code(exits, forwarder.received, how_to_continue)


def _this_command() -> list[str]:
    return ["-m", "bandpo_cli", *sys.argv[1:]]


@contextmanager
def _started_ranks(
    count: int, name: str | None, arguments: Sequence[str], logs: str
) -> Iterator[tuple[SubprocessContext, SignalForwarder]]:
    """Start the ranks; kill those that are left at the end of the block."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.multiprocessing import (
        DefaultLogsSpecs,
        Std,
        SubprocessContext,
        start_processes,
    )

    # It logs the signals that it sends as warnings.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = [rank_variables(rank, count, store.port, name, os.environ) for rank in range(count)]
    with SignalForwarder() as forwarder:
        with _preserved_handlers():
            context = start_processes(
                "rank",
                sys.executable,
                dict.fromkeys(range(count), tuple(arguments)),
                dict(enumerate(variables)),
                DefaultLogsSpecs(logs, redirects=dict.fromkeys(range(1, count), Std.ALL)),
            )
        assert isinstance(context, SubprocessContext)
        forwarder.forward_to(context)
        try:
            yield context, forwarder
        finally:
            context.close(signal.SIGKILL, _KILLED_S)
            for handler in context.subprocess_handlers.values():
                if handler.proc.returncode != 0:  # processes that a killed rank has started are in its group
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(handler.proc.pid, signal.SIGKILL)


def rank_variables(
    rank: int, count: int, port: int, name: str | None, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables of a rank: those that torchrun sets, and those of this launcher.

    Args:
        port: that of the store in this process by which the ranks find each other.
        name: the name of the run, None where the command line has it.
        environ: the environment of this process; its OMP_NUM_THREADS is kept.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "bandpo",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // count)),
        PARENT_PID_VARIABLE: str(os.getpid()),
        LAUNCHER_VARIABLE: str(count),
        **({} if name is None else {RUN_NAME_VARIABLE: name}),
    }


@contextmanager
def _preserved_handlers() -> Iterator[None]:
    """Keep torch's launcher from replacing the handlers of signals: its own ones end the ranks after 30 s."""
    variable = "TORCHELASTIC_SIGNALS_TO_HANDLE"
    before, handler = os.environ.get(variable), signal.getsignal(signal.SIGQUIT)
    os.environ[variable] = "SIGQUIT"  # it needs one
    try:
        yield
    finally:
        signal.signal(signal.SIGQUIT, handler)
        os.environ.pop(variable)
        if before is not None:
            os.environ[variable] = before


class SignalForwarder:
    """Handlers of SIGINT, SIGTERM and SIGHUP that forward them to the ranks. The earlier handlers are restored at the
    end.

    Rank 0 receives the first signal, since the ranks ask each other at every step whether to stop. The second one of
    its kind drops the step: rank 0 receives it too, and the others, which have nothing to write, are killed, because
    rank 0 may be waiting for them.

    The ranks receive other signals than this process: a cluster sends SIGTERM to all processes of a job, which asks
    for one thing.
    """

    def __init__(self) -> None:
        self._context: SubprocessContext | None = None
        self._before: dict[int, Any] = {}
        self.received: list[int] = []
        self.killed: set[int] = set()
        """The ranks that a second signal has killed."""

    def __enter__(self) -> SignalForwarder:
        for number in stop_signals():
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def forward_to(self, context: SubprocessContext) -> None:
        """Forward signals from now on; before, they end this process, and the ranks with it."""
        self._context = context

    def _handle(self, number: int, _: object) -> None:
        if self._context is None:
            raise SignalExit(number)
        if number == signal.SIGHUP:  # a closed terminal sends several
            if self.received:
                return
            number = signal.SIGTERM
        repeated = number in self.received
        self.received.append(number)
        forwarded = next(own for own, asked in FORWARDED.items() if asked == number)
        for rank, handler in self._context.subprocess_handlers.items():
            if handler.proc.returncode is not None:
                continue
            with suppress(ProcessLookupError):
                if rank == 0:
                    os.kill(handler.proc.pid, forwarded)
                elif repeated:
                    self.killed.add(rank)
                    os.killpg(handler.proc.pid, signal.SIGKILL)


def _watch(context: SubprocessContext, forwarder: SignalForwarder) -> list[RankExit]:
    """Wait until all ranks have ended. After an error of one, or the end of rank 0, the others have some seconds."""
    processes = {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}
    files = {rank: Path(path) for rank, path in context.error_files.items()}
    killed: set[int] = set()
    failed_at = main_ended_at = math.inf
    while running := [rank for rank, process in processes.items() if process.poll() is None]:
        now = time.monotonic()
        if any(process.returncode for process in processes.values()) or any(map(Path.exists, files.values())):
            failed_at = min(failed_at, now)
        if 0 not in running:
            main_ended_at = min(main_ended_at, now)
        if now > min(failed_at + ENDING_S, main_ended_at + OTHERS_S):
            killed = {*running}
            context.close(signal.SIGKILL, _KILLED_S)
            break
        time.sleep(POLL_INTERVAL_S)
    killed |= forwarder.killed
    return [
        RankExit(rank, process.returncode or 0, read_error(files[rank]), rank in killed)
        for rank, process in processes.items()
    ]


def _exit_code(exits: Sequence[RankExit], signals: Sequence[int], how_to_continue: Callable[[], str]) -> int:
    """Return the exit code of the run, or raise the error of the rank that failed first.

    Args:
        signals: those that this process has received and forwarded.
    """
    main, cause = exits[0], first_failure(exits, signals)
    if cause is None or (signals and cause.error is not None and cause.error.lost_rank):
        if main.code < 0 and signals:  # before it could handle a signal, or while it waited for another rank
            write_line(STOPPED)
        return main.code if main.code >= 0 else 128 + signals[-1] if signals else 1
    error = cause.error
    if error is None:
        raise RunError(f"{describe_death(cause)}; {how_to_continue()}")
    # A failure of all ranks is not one of the rank that was the first by a moment.
    on_main = main.error is not None and main.error.message == error.message
    named = cause.rank == 0 or on_main or error.received
    message = error.message if named else f"rank {cause.rank}: {error.message}"
    if error.traceback:
        print(error.traceback.rstrip(), file=sys.stderr)
        message = f"{message}; {how_to_continue()}"
    raise UserError(message) if error.code == 2 else RunError(message)


def first_failure(exits: Sequence[RankExit], signals: Collection[int] = ()) -> RankExit | None:
    """Return the rank whose failure ended the run; None where all ranks succeeded or were stopped.

    A rank that was killed comes before one with an error, and that before one that has received the error. A lost
    connection comes last, because it has one of the others as its cause. So may SIGABRT: NCCL's watchdog aborts a
    process that has lost the connection to another rank.

    Args:
        signals: those that asked for the end of the run; ranks that they ended have not failed.
    """
    asked = {*signals, *FORWARDED} if signals else set()
    ended = [each for each in exits if each.code < 0 and -each.code not in asked and not each.by_launcher]
    killed = [each for each in ended if each.code != -signal.SIGABRT]
    aborted = [each for each in ended if each.code == -signal.SIGABRT]
    recorded = [(each.error, each) for each in exits if each.error is not None and not each.error.lost_rank]
    errors = [each for _, each in sorted(recorded, key=lambda pair: (pair[0].received, pair[0].time_ns))]
    others = [each for each in exits if each.error is None and each.code > 0 and each.code - 128 not in asked]
    lost = [each for each in exits if each.error is not None and each.error.lost_rank]
    return next(iter([*killed, *errors, *others, *aborted, *lost]), None)


def describe_death(end: RankExit) -> str:
    """Return how a rank without an error of its own ended."""
    return f"rank {end.rank} {describe_exit(end.code)}"


def continue_with(resume: str, count: int) -> str:
    """Return the clause of a message about the command that continues a run with `count` ranks."""
    return f"continue with: {resume} --nproc {count}"
