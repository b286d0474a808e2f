"""The side of a run that a sweep started: it must not outlive the sweep."""

from __future__ import annotations

import os
import signal
import threading
import time

from bandpo_cli.sweeps.pool import PARENT

LOOK_S = 0.5


def end_with_parent() -> None:
    """Watch the sweep that started this process, if one did, and end at once when it is no more.

    A resumed sweep runs again what was not whole; two processes must not write one run.
    """
    parent = os.environ.pop(PARENT, "")  # what this process starts has another parent
    if parent.isdecimal():
        threading.Thread(target=_watch, args=(int(parent),), name="sweep-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os.kill(os.getpid(), signal.SIGKILL)
