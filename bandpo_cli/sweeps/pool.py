"""Job pool of a sweep: the base class `Pool`, and a pool of child processes on this machine, one per slot."""

import os
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bandpo_cli.processes.watch import PARENT_PID_VARIABLE

STOP_SIGNALS = (signal.SIGINT, signal.SIGINT, signal.SIGKILL)
"""Signals that end a run, in order: after the first it completes its step and saves a checkpoint, after the second it
aborts the step."""


class Pool(ABC):
    """Executes jobs, as many at a time as it has slots. A job is a command that executes one run.

    Attributes:
        slots: number of jobs at a time.
        threads: CPU threads per job, or per rank of one.
    """

    def __init__(self, slots: int, threads: int) -> None:
        self.slots = slots
        self.threads = threads
        self._jobs: dict[str, Any] = {}

    @property
    def free_slots(self) -> int:
        """Return the number of jobs that can be started now."""
        return self.slots - len(self._jobs)

    @abstractmethod
    def start(self, name: str, command: Sequence[str], log: Path) -> None:
        """Start a job in a free slot; its output is appended to the file `log`."""

    @abstractmethod
    def poll_finished(self) -> dict[str, int]:
        """Return, without waiting, the exit codes of the jobs that have ended since the last call, by name.

        A negative code is the signal that killed the job.
        """

    @abstractmethod
    def stop(self, name: str | None = None) -> None:
        """Stop one job, or all if `name` is None: interrupt so that runs save their state, then kill."""

    def request_stop(self, name: str) -> None:
        """Stop a job without waiting for its end."""
        threading.Thread(target=self.stop, args=(name,), daemon=True).start()

    def close(self) -> None:
        """Stop the jobs that still run, and release the resources of the pool."""
        self.stop()


class LocalPool(Pool):
    """Child processes, each in its own process group, with the variables of its slot added to the environment."""

    def __init__(self, slots: Sequence[Mapping[str, str]], grace_s: float = 20.0) -> None:
        """Create the pool without starting a process.

        Args:
            slots: environment variables of each slot: its GPUs and its number of threads.
            grace_s: seconds that a child has to end its run after each signal.
        """
        super().__init__(len(slots), int(slots[0].get("OMP_NUM_THREADS", 1)) if slots else 1)
        self._variables = slots
        self._grace_s = grace_s

    def start(self, name: str, command: Sequence[str], log: Path) -> None:
        taken = {slot for slot, _ in self._jobs.values()}
        slot = next(index for index in range(self.slots) if index not in taken)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            variables = {**self._variables[slot], PARENT_PID_VARIABLE: str(os.getpid())}
            # In its own session: Ctrl-C at the terminal reaches only this process, which then stops the jobs.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                env={**os.environ, **variables}, start_new_session=True,
            )  # fmt: skip
        self._jobs[name] = slot, process

    def poll_finished(self) -> dict[str, int]:
        jobs = self._jobs.items()
        ended = {name: code for name, (_, process) in jobs if (code := process.poll()) is not None}
        for name in ended:
            del self._jobs[name]
        return ended

    def stop(self, name: str | None = None) -> None:
        alive = [process for job, (_, process) in [*self._jobs.items()] if name in (None, job)]
        for number in STOP_SIGNALS:
            for process in alive:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)
            end = time.monotonic() + self._grace_s
            for process in alive:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))
            alive = [process for process in alive if process.poll() is None]


def slot_environments(
    jobs: int, cores: int, gpus: Sequence[str], environ: Mapping[str, str], ranks: int = 1
) -> list[dict[str, str]]:
    """Return the environment variables of each slot: its GPUs, where there are GPUs, and the threads of a rank.

    Each rank gets its share of the cores: more threads than cores make runs several times slower. A value of
    OMP_NUM_THREADS set by the user is kept. The GPUs of two slots are the same ones or have none in common.

    Args:
        jobs: number of slots.
        cores: usable CPU cores.
        gpus: GPUs as CUDA_VISIBLE_DEVICES names them; none, or at least `ranks`.
        environ: the environment of this process.
        ranks: processes of a run, each with a GPU of its own where there are GPUs.
    """
    threads = environ.get("OMP_NUM_THREADS") or str(max(1, cores // (jobs * ranks)))
    sets = [",".join(gpus[start : start + ranks]) for start in range(0, len(gpus) - ranks + 1, ranks)]
    visible = [{"CUDA_VISIBLE_DEVICES": sets[slot % len(sets)]} if sets else {} for slot in range(jobs)]
    return [{"OMP_NUM_THREADS": threads, **variables} for variables in visible]


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs as CUDA_VISIBLE_DEVICES names them; from nvidia-smi, because torch is slow to import."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu for gpu in map(str.strip, named.split(",")) if gpu not in ("", "-1")]
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listed.stdout.splitlines() if line.strip().isdecimal()]
