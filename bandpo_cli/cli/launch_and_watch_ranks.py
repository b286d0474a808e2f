"""`--nproc`: start the ranks on this machine, forward signals to them, report the first error; output of a rank.

The ranks have the environment of `torchrun --nproc-per-node N`. torchrun's agent is not used: it has one timeout (torch
2.13: 30 s) for ranks that complete their step after a signal, which may take longer, and for ranks that wait for a dead
one, which are to end in seconds; and it does not tell a second signal from the first.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from bandpo_cli.cli.signals import FORWARDED, STOPPED, signal_handlers, stop_signals, write_line
from bandpo_cli.errors import (
    LostRankError,
    RunError,
    SignalExit,
    UserError,
    describe_exit,
    is_received,
    log,
    one_line,
    redact_credentials,
)
from bandpo_cli.paths import path_exists
from bandpo_cli.processes.ranks import (
    LAUNCHER_VARIABLE,
    RUN_NAME_VARIABLE,
    check_gpu_count,
    is_main_process,
    launched_ranks,
)
from bandpo_cli.processes.watch import ChildProcess

if TYPE_CHECKING:
    from bandpo_cli.config.run import RunConfig

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the file for the error of a rank; torchrun prints its content in its report."""

POLL_INTERVAL_S = 0.1  # seconds between two polls of the ranks

ENDING_S = 15.0
"""Seconds after the error of a rank in which the others can notice it and write the run's summary. Then they are
killed: a rank that waits for another one on a GPU notices nothing."""

OTHERS_S = 5.0  # seconds after the end of rank 0 in which the others can end: they have nothing left to write
WARNING_S = 2.0  # that a warning of another rank waits for the same one of rank 0, which prints its own
MAX_WARNING_CHARS = 100_000  # of the warnings of a rank that are read: more is a flood


@dataclass(frozen=True)
class RankError:
    """The error that ended a rank, as its file holds it, in one line, with the exit code."""

    message: str
    code: int
    traceback: str = ""  # of an exception that is neither a mistake of the user nor a known failure of a run
    lost_rank: bool = False  # the error is that another rank has ended
    time_ns: int = 0  # nanoseconds since 1970
    received: bool = False  # the error was raised on another rank, whose number the message has


class RankWarnings(logging.Handler):
    """Reports the warnings of a rank, each text once: to the launcher; with torchrun rank 0 prints its own."""

    def emit(self, record: logging.LogRecord) -> None:
        self._report(one_line(redact_credentials(record.getMessage())))

    @cache  # noqa: B019 - there is one handler
    def _report(self, line: str) -> None:
        with suppress(OSError):
            if launched_ranks() is not None:
                with open(f"{os.environ[ERROR_FILE_VARIABLE]}.warnings", "a", encoding="utf-8") as file:
                    file.write(f"{line}\n")
            elif not is_main_process():
                os.write(2, f"warning: rank {os.environ['RANK']}: {line}\n".encode())


def silence_other_ranks() -> None:
    """Discard what ranks other than 0 print; warnings (`RankWarnings`) and crashes of native code are reported."""
    log.addHandler(RankWarnings(logging.WARNING))
    if is_main_process():
        return
    null = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - stays open for the life of the process
    os.dup2(null.fileno(), 1)
    sys.stdout = sys.stderr = null


def record_error(error: BaseException, code: int, traceback: str = "") -> None:
    """Write the error of this process, with the traceback of an unexpected one, to the file that its launcher reads."""
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path:
        return
    text, now = str(error), time.time_ns()
    record = RankError(text, code, traceback, isinstance(error, LostRankError), now, is_received(error))
    # The form that torchrun reads: it prints `py_callstack`.
    extra = {"py_callstack": traceback or text, "timestamp": str(now // 10**9)}
    content = {"message": {"message": text, "errorCode": code, "extraInfo": extra}, "rank": asdict(record)}
    temporary = Path(f"{path}.tmp")
    with suppress(OSError):  # the error itself is more important; the exit code reports that there was one
        temporary.write_text(json.dumps(content), encoding="utf-8")
        temporary.replace(path)  # the launcher finds it complete or not at all


def read_error(path: Path) -> RankError | None:
    """Return the error that `record_error` has written to `path`; None where there is no such file."""
    try:
        return RankError(**json.loads(path.read_text(encoding="utf-8"))["rank"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


class RankProcess(ChildProcess):
    """The process of a rank, with the file for its error, which exists when the rank has failed or is about to."""

    error: RankError | None = None  # in the file, after the end of all ranks
    killed = False  # by the launcher

    def __init__(self, rank: int, command: Sequence[str], variables: Mapping[str, str], folder: Path) -> None:
        self.rank, self.error_file = rank, folder / f"error-{rank}.json"
        variables = {**os.environ, **variables, ERROR_FILE_VARIABLE: str(self.error_file)}
        output = dict.fromkeys(("stdout", "stderr"), None if rank == 0 else subprocess.DEVNULL)
        super().__init__(command, variables, may_leave=True, **output)


def launch(
    count: int,
    config: RunConfig,
    command: Literal["train", "eval"],
    folder: Path,
    runs_dir: Path,
    arguments: Sequence[str] | None = None,
) -> int:
    """Run this command in `count` processes, and return the exit code of the run.

    SIGINT, SIGTERM and SIGHUP are forwarded, as `FORWARDED`. Rank 0 receives the first one, since the ranks ask each
    other at every step whether to stop. The second one of its kind drops the step: rank 0 receives it too, and the
    others, which have nothing to write, are killed, because rank 0 may be waiting for them.

    `folder` is what rank 0 writes in `runs_dir`; its name is the name for all ranks. `arguments` are those of Python in
    each rank, None for this command. Raises the error of the rank that failed first.
    """
    from bandpo_cli.config.run import check_ranks
    from bandpo_cli.storage.run_folder import shell_command

    check_ranks(config, count, training=command == "train")
    check_gpu_count(config.model.device, count, f"--nproc {count}")
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # The ranks find each other by this store; its port cannot be taken by another process before they start.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[RankProcess] = []
    received: list[int] = []
    warnings: dict[str, float] = {}

    def forward(number: int, _: object) -> None:
        if len(ranks) < count:
            raise SignalExit(number)
        if number == signal.SIGHUP:  # a closed terminal sends several
            if received:
                return
            number = signal.SIGTERM
        repeated = number in received
        received.append(number)
        main, *others = ranks
        main.send([own for own, asked in FORWARDED.items() if asked == number][repeated], to_group=False)
        for rank in others if repeated else ():
            if rank.code is None:
                rank.killed = True
                rank.send(signal.SIGKILL)

    with (
        TemporaryDirectory(prefix="bandpo-ranks-", ignore_cleanup_errors=True) as errors,
        signal_handlers(dict.fromkeys(stop_signals(), forward)),
    ):
        try:
            for number in range(count):
                variables = rank_variables(number, count, store.port, folder.name, os.environ)
                words = arguments or ["-m", "bandpo_cli", *sys.argv[1:]]
                ranks.append(RankProcess(number, [sys.executable, *words], variables, Path(errors)))
            _watch(ranks, warnings)
        finally:
            for rank in ranks:
                rank.kill()
                rank.error = read_error(rank.error_file)
            _print_warnings(ranks, warnings, 0.0)
    if path_exists(folder / {"train": "config.yaml", "eval": "eval.json"}[command]):
        advice = f"continue with: {shell_command(f'{command} --resume', folder, runs_dir)} --nproc {count}"
    else:
        advice = "nothing has been written yet: repeat the command"
    return _exit_code(ranks, received, advice)


def rank_variables(rank: int, count: int, port: int, name: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a rank: torchrun's and this launcher's. OMP_NUM_THREADS is kept."""
    from bandpo_cli.storage.run_record import usable_cores

    return {
        **{f"{scope}RANK": str(rank) for scope in ("", "LOCAL_", "ROLE_")},
        **{f"{scope}WORLD_SIZE": str(count) for scope in ("", "LOCAL_", "ROLE_")},
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "bandpo",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // count)),
        LAUNCHER_VARIABLE: str(count),
        RUN_NAME_VARIABLE: name,
    }


def _print_warnings(ranks: Sequence[RankProcess], times: dict[str, float], wait_s: float) -> None:
    """Print warnings that only ranks other than 0 have had for `wait_s` seconds, by `times`; inf: it is printed."""
    for rank in ranks:
        with suppress(FileNotFoundError), open(f"{rank.error_file}.warnings", encoding="utf-8") as file:
            for line in file.read(MAX_WARNING_CHARS).splitlines():
                first = times.setdefault(line, time.monotonic())
                if rank.rank == 0:  # it prints its own
                    times[line] = math.inf
                elif time.monotonic() >= first + wait_s:
                    print(f"warning: rank {rank.rank}: {line}", file=sys.stderr, flush=True)
                    times[line] = math.inf


def _watch(ranks: Sequence[RankProcess], warnings: dict[str, float]) -> None:
    """Wait until all ranks have ended. After an error of one, or the end of rank 0, the others have some seconds."""
    deadline = math.inf
    while running := [rank for rank in ranks if rank.poll() is None]:
        now = time.monotonic()
        _print_warnings(ranks, warnings, WARNING_S)
        if any(rank.code or rank.error_file.exists() for rank in ranks):
            deadline = min(deadline, now + ENDING_S)
        if running[0].rank != 0:
            deadline = min(deadline, now + OTHERS_S)
        if now > deadline:
            for rank in running:
                rank.killed = True
            return
        time.sleep(POLL_INTERVAL_S)


def _exit_code(ranks: Sequence[RankProcess], signals: Sequence[int], advice: str) -> int:
    """Return the exit code after forwarded `signals`, or raise the first error; `advice` continues the run."""
    code, cause = ranks[0].code or 0, first_failure(ranks, signals)
    if cause is None or (signals and cause.error is not None and cause.error.lost_rank):
        if code < 0 and signals:  # before it could handle a signal, or while it waited for another rank
            write_line(STOPPED)
        return code if code >= 0 else 128 + signals[-1] if signals else 1
    error = cause.error
    if error is None:
        raise RunError(f"rank {cause.rank} {describe_exit(cause.code or 0)}; {advice}")
    # A failure of all ranks is not one of the rank that was the first by a moment.
    on_main = ranks[0].error is not None and ranks[0].error.message == error.message
    named = cause.rank == 0 or on_main or error.received
    message = error.message if named else f"rank {cause.rank}: {error.message}"
    if error.traceback:
        print(error.traceback.rstrip(), file=sys.stderr)
    if error.traceback or error.lost_rank:
        message = f"{message}; {advice}"
    raise UserError(message) if error.code == 2 else RunError(message)


def first_failure(ranks: Sequence[RankProcess], signals: Collection[int] = ()) -> RankProcess | None:
    """Return the rank whose failure ended the run; None where all ranks succeeded or were stopped.

    A rank that was killed comes before one with an error, and that before one that has received the error. A lost
    connection comes last, because it has one of the others as its cause. So may SIGABRT: NCCL's watchdog aborts a
    process that has lost the connection to another rank. Ranks that `signals` ended have not failed.
    """
    asked = {*signals, *FORWARDED} if signals else set()

    def place(rank: RankProcess) -> tuple[int, bool, int] | None:
        """Return the place of a failure in this order; None for a rank that has not failed."""
        code, error = rank.code or 0, rank.error
        was_killed = code < 0 and -code not in asked and not rank.killed
        if was_killed and code != -signal.SIGABRT:
            return 0, False, 0
        if error is not None:
            return (4, False, 0) if error.lost_rank else (1, error.received, error.time_ns)
        if code > 0 and code - 128 not in asked:
            return 2, False, 0
        return (3, False, 0) if was_killed else None

    failures = [(order, rank.rank, rank) for rank in ranks if (order := place(rank)) is not None]
    return min(failures)[2] if failures else None
