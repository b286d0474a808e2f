"""Job pool of a sweep: child processes on this machine, one per slot, or the tasks of a Ray cluster.

A Ray cluster is running already, or is started on this machine and stopped with the sweep. Each of its machines needs
this package, and the sweep folder under the same path. The tasks execute the same commands as a local slot.
"""

import os
import signal
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bandpo_cli.errors import UserError, first_line
from bandpo_cli.processes.watch import ChildProcess

STOP_SIGNALS = (signal.SIGINT, signal.SIGINT, signal.SIGKILL)
"""Signals that end a run, in order: after the first it completes its step and saves a checkpoint, after the second it
aborts the step."""

GRACE_S = 20.0  # that a run has to end after each signal
CONNECT_S = 10.0  # that a cluster has to accept the first connection


class Pool(ABC):
    """Executes jobs, as many at a time as it has slots. A job is a command that executes one run.

    Attributes:
        slots: number of jobs at a time.
        threads: CPU threads per job, or per rank of one.
    """

    def __init__(self, slots: int, threads: int) -> None:
        self.slots, self.threads = slots, threads
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

    def __init__(self, slots: Sequence[Mapping[str, str]], grace_s: float = GRACE_S) -> None:
        """Create the pool; `slots` are the environment variables of each slot, its GPUs and number of threads."""
        super().__init__(len(slots), int(slots[0].get("OMP_NUM_THREADS", 1)) if slots else 1)
        self._variables, self._grace_s = slots, grace_s

    def start(self, name: str, command: Sequence[str], log: Path) -> None:
        taken = {slot for slot, _ in self._jobs.values()}
        slot = next(index for index in range(self.slots) if index not in taken)
        log.parent.mkdir(parents=True, exist_ok=True)
        variables = {**os.environ, **self._variables[slot]}
        with log.open("ab") as file:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            self._jobs[name] = slot, ChildProcess(command, variables, may_leave=True, **streams)

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
                process.send(number)
            end = time.monotonic() + self._grace_s
            alive = [process for process in alive if not process.wait(end - time.monotonic())]


def _execute(command: Sequence[str], folder: str, variables: Mapping[str, str], log: str) -> int:
    """Run a command on the machine that Ray selected and return its exit code; if cancelled, stop the child process."""
    os.chdir(folder)
    pool = LocalPool([variables])
    # Ray's workers block SIGINT, and child processes inherit that.
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        pool.start("run", command, Path(log))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    try:
        # A blocking wait would delay Ray's interrupt, which arrives between Python instructions.
        while not (codes := pool.poll_finished()):
            time.sleep(0.2)
    except BaseException:
        pool.stop()
        raise
    return codes["run"]


class RayPool(Pool):
    """A `Pool` on a Ray cluster; Ray assigns cores and GPUs to each run."""

    def __init__(
        self, address: str | None, jobs: int | None, variables: Mapping[str, str], ranks: int = 1
    ) -> None:
        """Connect to a cluster, or start one on this machine.

        Args:
            address: address of a running cluster (`auto`, `ray://host:10001`, `host:6379`); None starts a local one.
            jobs: number of runs at a time; None for one per GPU of the cluster, without GPUs one per core.
            variables: environment variables of every run.
            ranks: processes of a run, all on one machine, each with a GPU of its own where the cluster has GPUs.

        Raises:
            UserError: there is no cluster at the address, or it has GPUs and no machine with as many as `ranks`.
        """
        import ray  # an extra, and seconds to import

        try:
            # Ray itself retries an address without a cluster for minutes, and then ends the process.
            place = urlsplit(address if address and "//" in address else f"//{address or ''}")
            if place.hostname and place.port:
                socket.create_connection((place.hostname, place.port), CONNECT_S).close()
            options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
            ray.init(address=address or "local", **options)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            line = getattr(error, "strerror", None) or first_line(error)
            raise UserError(f"--executor ray: no cluster at {address or 'this machine'}: {line}") from None
        resources = ray.cluster_resources()
        gpus, cores = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
        most = max(int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"])
        if gpus and ranks > most:
            ray.shutdown()
            raise UserError(f"--gpus-per-run {ranks}: machines of the Ray cluster have at most {most} GPUs")
        slots = max(1, jobs or (gpus or cores) // ranks)
        super().__init__(slots, threads=max(1, cores // (slots * ranks)))
        self._ray: Any = ray
        self._task = ray.remote(max_retries=0)(_execute)
        self._variables = {"OMP_NUM_THREADS": str(self.threads), **variables}
        self._share = {"num_cpus": min(self.threads * ranks, cores), "num_gpus": ranks if gpus else 0}

    def start(self, name: str, command: Sequence[str], log: Path) -> None:
        task = self._task.options(name=name, **self._share)
        self._jobs[name] = task.remote(list(command), os.getcwd(), self._variables, str(log.absolute()))

    def poll_finished(self) -> dict[str, int]:
        codes = {}
        for name, task in list(self._jobs.items()):
            if self._ray.wait([task], timeout=0)[0]:
                try:
                    codes[name] = int(self._ray.get(task))
                except self._ray.exceptions.RayError:  # Ray lost the task
                    codes[name] = 1
                del self._jobs[name]
        return codes

    def stop(self, name: str | None = None) -> None:
        chosen = [task for job, task in [*self._jobs.items()] if name in (None, job)]
        for task in chosen:
            self._ray.cancel(task, force=False)
        if chosen:
            self._ray.wait(chosen, num_returns=len(chosen), timeout=GRACE_S + 10)

    def close(self) -> None:
        """Disconnect from the cluster; a cluster started by this pool ends with its jobs."""
        self._ray.shutdown()


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
