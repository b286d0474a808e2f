"""Where the runs of a sweep are executed: child processes of this machine, one a slot."""

# MERGED: The side of a run that a sweep started: it must not outlive the sweep.
from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from bandpo_cli.storage.environment import usable_cores as usable_cores

PARENT_PID_VARIABLE = "BANDPO_PARENT_PID"
"""The variable that tells a run which process it must not outlive."""


STOP_SIGNALS = (signal.SIGINT, signal.SIGINT, signal.SIGKILL)
"""What ends a run: the first lets its step end and a checkpoint be written, the second drops the step."""


@dataclass(frozen=True)
class Job:
    """A command that makes one run; `log` gets what it prints."""

    name: str
    command: Sequence[str]
    log: Path


@dataclass(frozen=True)
class FinishedJob:
    """A job that has ended, with its exit code; negative for a signal."""

    name: str
    code: int


class Pool(Protocol):
    """Executes jobs, as many at a time as it has slots."""

    slots: int
    threads: int
    """Of each job, on a CPU."""

    @property
    def free(self) -> int:
        """How many jobs may be started now."""

    def start(self, job: Job) -> None:
        """Start a job in a free slot."""

    def ended(self) -> list[FinishedJob]:
        """Return the jobs that have ended since the last call; never waits."""

    def stop(self, name: str | None = None) -> None:
        """End one job, or all: ask first, and then make sure."""

    def close(self) -> None:
        """Give back what the pool holds, when no job is left."""


@dataclass
class _Child:
    job: Job
    slot: int
    process: subprocess.Popen[bytes]
    log: IO[bytes]


class LocalPool:
    """Child processes, each in a process group of its own, with the environment of its slot on top of ours."""

    def __init__(self, slots: Sequence[Mapping[str, str]], grace_s: float = 20.0) -> None:
        """Start nothing yet.

        Args:
            slots: variables for the child in each slot: its GPU, its threads.
            grace_s: how long a child may take to close its run after it was asked to end, seconds.
        """
        self.slots = len(slots)
        self.threads = int(slots[0].get("OMP_NUM_THREADS", 1)) if slots else 1
        self._variables = slots
        self._grace_s = grace_s
        self._children: dict[str, _Child] = {}

    @property
    def free(self) -> int:
        """How many jobs may be started now."""
        return self.slots - len(self._children)

    def start(self, job: Job) -> None:
        """Start a job in a free slot. Raises OSError when the system refuses."""
        taken = {child.slot for child in self._children.values()}
        slot = next(index for index in range(self.slots) if index not in taken)
        job.log.parent.mkdir(parents=True, exist_ok=True)
        log = job.log.open("ab")
        try:
            process = subprocess.Popen(
                job.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._variables[slot], PARENT_PID_VARIABLE: str(os.getpid())},
                start_new_session=True,  # Ctrl-C at the terminal reaches us alone, and we end them in order
            )
        except OSError:
            log.close()
            raise
        self._children[job.name] = _Child(job, slot, process, log)

    def ended(self) -> list[FinishedJob]:
        """Return the jobs that have ended since the last call; never waits."""
        found = []
        for name, child in list(self._children.items()):
            code = child.process.poll()
            if code is not None:
                child.log.close()
                del self._children[name]
                found.append(FinishedJob(name, code))
        return found

    def stop(self, name: str | None = None) -> None:
        """Interrupt one job, or all, so that runs are closed in order; kill what takes twice the grace and longer."""
        alive = [child for each, child in self._children.items() if name in (None, each)]
        for number in STOP_SIGNALS:
            for child in alive:
                _signal(child.process, number)
            end = time.monotonic() + self._grace_s
            for child in alive:
                with suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.0, end - time.monotonic()))
            alive = [child for child in alive if child.process.poll() is None]

    def close(self) -> None:
        """Nothing is held once the children have ended."""


def slot_environments(
    jobs: int, cores: int, gpus: Sequence[str], environ: Mapping[str, str]
) -> list[dict[str, str]]:
    """Return the variables of each slot: a GPU of its own where there are GPUs, and its share of the cores.

    Threads that outnumber the cores cost a multiple of what they bring. A number that the user has set stays.
    """
    threads = environ.get("OMP_NUM_THREADS") or str(max(1, cores // jobs))
    slots = []
    for slot in range(jobs):
        variables = {"OMP_NUM_THREADS": threads}
        if gpus:
            variables["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
        slots.append(variables)
    return slots


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs as CUDA_VISIBLE_DEVICES names them, asked of the driver's own tool: torch is slow to import."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [each.strip() for each in named.split(",") if each.strip() not in ("", "-1")]
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listed.stdout.splitlines() if line.strip().isdecimal()]


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the child and whatever it started."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return


POLL_INTERVAL_S = 0.5


def exit_with_parent() -> None:
    """Watch the sweep that started this process, if one did, and end at once when it is no more.

    A resumed sweep runs again what was not whole; two processes must not write one run.
    """
    parent = os.environ.pop(PARENT_PID_VARIABLE, "")  # what this process starts has another parent
    if parent.isdecimal():
        threading.Thread(target=_watch, args=(int(parent),), name="sweep-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_INTERVAL_S)
    os.kill(os.getpid(), signal.SIGKILL)
