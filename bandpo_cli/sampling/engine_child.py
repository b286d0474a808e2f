"""Child process of a sampling engine: environment, entry point, output, and exit status for the trainer.

multiprocessing's spawn would run the user's __main__ again, and would leave the process in the trainer's process group,
which Ctrl-C reaches, until the process has left the group by itself.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from bandpo_cli.errors import RunError, describe_exit
from bandpo_cli.processes.ranks import LAUNCHER_VARIABLE, RUN_NAME_VARIABLE
from bandpo_cli.processes.watch import register

OUTPUT_BYTES = 1 << 14
"""Bytes at the end of the process's output in which an error message looks for the last line."""
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
_OF_RANKS = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    rf"|{LAUNCHER_VARIABLE}|{RUN_NAME_VARIABLE})"
)
"""Environment variables of one of several ranks."""


def engine_environment(environ: Mapping[str, str], cards: Sequence[int]) -> dict[str, str]:
    """Return the environment of a single process that sees only the GPUs `cards`, in the numbers of `environ`."""
    variables = {name: value for name, value in environ.items() if not _OF_RANKS.fullmatch(name)}
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
        pid: process id.
        pipe: the connection; its calls raise EOFError or OSError once the process has ended.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start the process with the variables of `engine_environment`.

        Raises:
            RunError: the system refuses to start a process.
        """
        package = str(Path(__file__).resolve().parents[2])
        path = [str(Path(entry).absolute()) for entry in sys.path]
        path = path if package in path else [*path, package]
        self._socket, theirs = socket.socketpair()
        arguments = json.dumps([theirs.fileno(), os.getpid(), path])
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - the process writes to it
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _SOURCE, arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        except OSError as error:
            self._socket.close()
            raise RunError(f"cannot start the engine process: {error}") from error
        finally:
            theirs.close()
        self.pid = self._process.pid
        self.pipe = Connection(os.dup(self._socket.fileno()))
        self._watch = threading.Thread(target=self._wait, name="engine-watch", daemon=True)
        self._watch.start()

    def kill(self) -> None:
        """Kill the process and those that it has started, and wait for its end; do nothing if it has ended."""
        if self._watch.is_alive():  # the process is not reaped yet, so its id was not reused
            self._kill_group()
        self.wait(EXIT_S)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the process; return whether it has ended."""
        self._watch.join(seconds)
        return not self._watch.is_alive()

    def describe_end(self) -> str:
        """Return how the process ended and the last line of its output. One that still runs is killed."""
        if not self.wait(EXIT_S):
            self.kill()
        file, end = self._output.fileno(), describe_exit(self._process.returncode or 0)
        output = os.pread(file, OUTPUT_BYTES, max(0, os.fstat(file).st_size - OUTPUT_BYTES))
        last = output.decode(errors="replace").strip().rpartition("\n")[2].strip()
        return f"{end} (its last output: {last})" if last else end

    def _wait(self) -> None:
        """Wait for the end of the process, end those that it has started, and close the connection.

        They may hold the connection and memory on a GPU. A thread that waits for the connection is woken.
        """
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self._kill_group()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def main(descriptor: int, trainer: int) -> None:
    """Serve commands until the trainer ends the process or dies; runs in the process.

    The process watches the trainer before it imports more than the standard library.

    Args:
        descriptor: this process's end of the socket pair.
        trainer: process id of the trainer.
    """

    def end_with_trainer() -> None:
        """Kill this process and those that it has started when it is no longer a child of the trainer."""
        while os.getppid() == trainer:
            time.sleep(POLL_INTERVAL_S)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    # A cluster sends SIGTERM to all processes of a job; the trainer completes its step first, for which it needs this
    # process. It ends it itself.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with_trainer, name="trainer-watch", daemon=True).start()
    register("engine")
    os.set_inheritable(descriptor, False)

    from bandpo_cli.sampling.engine_server import EngineServer  # imports torch

    EngineServer(Connection(descriptor)).serve()
    # Without the interpreter's shutdown, which waits for threads of the engine.
    os._exit(0)
