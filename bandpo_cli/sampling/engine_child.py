"""Child process of a sampling engine: environment, entry point, output, and exit status for the trainer.

The process is started by subprocess and not by multiprocessing's spawn, which would run the user's __main__ again, and
would leave the process in the trainer's process group, where Ctrl-C reaches it, until it has left it by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from bandpo_cli.errors import RunError, describe_exit
from bandpo_cli.rank_process import LAUNCHER_VARIABLE, RUN_NAME_VARIABLE

OUTPUT_BYTES = 1 << 14
"""Bytes of the end of the process's output that are kept for an error message."""
EXIT_S = 5.0
"""Seconds to wait for the end of the process after SIGKILL or after the end of the connection."""
POLL_INTERVAL_S = 0.5
"""Seconds between two checks of the process whether the trainer is alive."""

# The process gets the module search path of this one. It runs neither the __main__ of the user nor files of the current
# folder.
_SOURCE = (
    "import json, sys; *arguments, sys.path[:] = json.loads(sys.argv[1]); "
    "from bandpo_cli.sampling.engine_child import main; main(*arguments)"
)
_RANK_VARIABLES = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", LAUNCHER_VARIABLE, RUN_NAME_VARIABLE,
}  # fmt: skip
_RANK_PREFIX = "TORCHELASTIC_"


def engine_environment(environ: Mapping[str, str], cards: Sequence[int]) -> dict[str, str]:
    """Return the environment of an engine process: the environment of a single process that sees only the given GPUs.

    Args:
        environ: the environment of the trainer.
        cards: the GPUs of the process, in the trainer's numbers; none on a CPU.
    """
    variables = {
        name: value
        for name, value in environ.items()
        if name not in _RANK_VARIABLES and not name.startswith(_RANK_PREFIX)
    }
    if cards:
        listed = environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(card) if listed is None else listed.split(",")[card].strip() for card in cards]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    return variables


class EngineChild:
    """A process that runs `main`, with the connection to it.

    It leads its own process group, so that Ctrl-C at the terminal does not reach it, and killing it also kills the
    processes that its engine has started. It ends within a second of the trainer.

    Attributes:
        pipe: the connection; its calls raise EOFError or OSError once the process has ended.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start the process.

        Args:
            environment: what `engine_environment` returns.

        Raises:
            RunError: the system refuses to start a process.
        """
        package = str(Path(__file__).resolve().parents[2])
        path = [str(Path(entry).absolute()) for entry in sys.path]
        path = path if package in path else [*path, package]
        self._socket, theirs = socket.socketpair()
        arguments = json.dumps([theirs.fileno(), os.getpid(), path])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _SOURCE, arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
                pass_fds=[theirs.fileno()],
                bufsize=0,
            )
        except OSError as error:
            self._socket.close()
            raise RunError(f"cannot start the engine process: {error}") from error
        finally:
            theirs.close()
        self.pipe = Connection(os.dup(self._socket.fileno()))
        self._output = b""
        self._reader = threading.Thread(target=self._collect_output, name="engine-output", daemon=True)
        self._watch = threading.Thread(target=self._wait, name="engine-watch", daemon=True)
        self._reader.start()
        self._watch.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def kill(self) -> None:
        """Kill the process and those that it has started, and wait for its end; do nothing if it has ended."""
        if self._watch.is_alive():  # the process is not reaped yet, so its id was not reused
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self.wait(EXIT_S)

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the process; return whether it has ended."""
        self._watch.join(seconds)
        return not self._watch.is_alive()

    def describe_end(self) -> str:
        """Return how the process ended and the last line of its output. One that still runs is killed."""
        if not self.wait(EXIT_S):
            self.kill()
        self._reader.join(1.0)
        end = describe_exit(self._process.returncode or 0)
        lines = [line.strip() for line in self._output.decode(errors="replace").splitlines()]
        last = next((line for line in reversed(lines) if line), "")
        return f"{end} (its last output: {last})" if last else end

    def _collect_output(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            while chunk := pipe.read(OUTPUT_BYTES):
                self._output = (self._output + chunk)[-OUTPUT_BYTES:]

    def _wait(self) -> None:
        """Wait for the end of the process, end those that it has started, and close the connection.

        A process of the engine may hold the other end of the connection open, and its memory on a GPU. A thread that
        waits for the connection is woken.
        """
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def main(descriptor: int, trainer: int) -> None:
    """Serve commands until the trainer ends the process or dies; runs in the process.

    Only the standard library is imported before the process watches the trainer.

    Args:
        descriptor: this process's end of the socket pair.
        trainer: process id of the trainer.
    """
    # A cluster sends SIGTERM to all processes of a job; the trainer completes its step first, for which it needs this
    # process. It ends it itself.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(trainer,), name="trainer-watch", daemon=True).start()
    os.set_inheritable(descriptor, False)

    from bandpo_cli.sampling.engine_server import EngineServer  # imports torch

    EngineServer(Connection(descriptor)).serve()
    # Without the interpreter's shutdown, which waits for threads of the engine.
    os._exit(0)


def _end_with(trainer: int) -> None:
    """Kill this process and those that it has started when it is no longer a child of the trainer."""
    while os.getppid() == trainer:
        time.sleep(POLL_INTERVAL_S)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
