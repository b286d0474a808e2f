"""Start of an engine process: it ignores the signals of the trainer, ends with it, and serves its commands.

Only the standard library is imported before the process watches the trainer.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

POLL_INTERVAL_S = 0.5
"""Seconds between two checks whether the trainer is alive."""


def main(descriptor: int, trainer: int) -> None:
    """Serve commands until the trainer ends the process or dies.

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

    EngineServer(socket.socket(fileno=descriptor)).serve()
    # Without the interpreter's shutdown, which waits for threads of the engine.
    os._exit(0)


def _end_with(trainer: int) -> None:
    """Kill this process and those that it has started when it is no longer a child of the trainer."""
    while os.getppid() == trainer:
        time.sleep(POLL_INTERVAL_S)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
