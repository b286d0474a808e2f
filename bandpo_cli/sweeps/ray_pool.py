"""Job pool on a Ray cluster: a running cluster, or a local one that is started and stopped with the sweep.

Every machine of the cluster needs this package, and the sweep folder under the same path. The tasks execute the same
commands as a local slot.
"""

import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import ray

from bandpo_cli.errors import UserError, first_line
from bandpo_cli.sweeps.pool import LocalPool, Pool

GRACE_S = 20.0  # that a run has to end after each signal
CONNECT_S = 10.0  # that a cluster has to accept the first connection


def _execute(command: Sequence[str], folder: str, variables: Mapping[str, str], log: str) -> int:
    """Run a command on the machine that Ray selected and return its exit code; if cancelled, stop the child process."""
    os.chdir(folder)
    pool = LocalPool([variables], GRACE_S)
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


_TASK = ray.remote(max_retries=0)(_execute)


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
        self._variables = {"OMP_NUM_THREADS": str(self.threads), **variables}
        self._share = {"num_cpus": min(self.threads * ranks, cores), "num_gpus": ranks if gpus else 0}

    def start(self, name: str, command: Sequence[str], log: Path) -> None:
        task = _TASK.options(name=name, **self._share)
        self._jobs[name] = task.remote(list(command), os.getcwd(), self._variables, str(log.absolute()))

    def poll_finished(self) -> dict[str, int]:
        codes = {}
        for name, task in list(self._jobs.items()):
            if ray.wait([task], timeout=0)[0]:
                try:
                    codes[name] = int(ray.get(task))
                except ray.exceptions.RayError:  # Ray lost the task
                    codes[name] = 1
                del self._jobs[name]
        return codes

    def stop(self, name: str | None = None) -> None:
        chosen = [task for job, task in [*self._jobs.items()] if name in (None, job)]
        for task in chosen:
            ray.cancel(task, force=False)
        if chosen:
            ray.wait(chosen, num_returns=len(chosen), timeout=GRACE_S + 10)

    def close(self) -> None:
        """Disconnect from the cluster; a cluster started by this pool ends with its jobs."""
        ray.shutdown()
