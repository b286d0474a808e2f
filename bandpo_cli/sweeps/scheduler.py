"""Execution of the runs of a sweep: the job pools, and the scheduler that starts, observes, resumes and stops runs.

A pool has child processes on this machine, one per slot, or the tasks of a Ray cluster, which is running already, or is
started on this machine and stopped with the sweep. Each of its machines needs this package, and the sweep folder under
the same path. The tasks execute the same commands as a local slot.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal
from urllib.parse import urlsplit

from bandpo_cli.errors import UserError, first_line, log
from bandpo_cli.metric_names import has_nonbinary_rewards
from bandpo_cli.processes.watch import ChildProcess, Wait
from bandpo_cli.storage.checkpoints import complete_checkpoints, record_score
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.storage.run_record import is_finished, read_summary
from bandpo_cli.storage.sweep_folder import SweepFolder, SweepRun

# A run completes its step and saves a checkpoint after the first signal, and aborts the step after the second.
STOP_SIGNALS = (signal.SIGINT, signal.SIGINT, signal.SIGKILL)
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
            ranks: processes of a run, all on one machine, each with a GPU of its own where the cluster has GPUs.

        Raises UserError if there is no cluster, or it has GPUs and no machine with as many as `ranks`.
        """
        import ray  # an extra, and seconds to import

        try:
            # Ray itself retries an address without a cluster for minutes, and then ends the process.
            place = urlsplit(address if address and "//" in address else f"//{address or ''}")
            if place.hostname and place.port:
                socket.create_connection((place.hostname, place.port), CONNECT_S).close()
            options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
            ray.init(address=address or "local", **options)
        except (RuntimeError, ValueError, OSError) as error:
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
    """Return the environment variables of each of `jobs` slots: its GPUs, if there are any, and the threads of a rank.

    Each rank gets its share of the cores: more threads than cores make runs several times slower. A value of
    OMP_NUM_THREADS set by the user is kept. The GPUs of two slots are the same ones or have none in common; of `gpus`
    there are none or at least `ranks`.
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


Status = Literal["waiting", "running", "finished", "failed", "stopped"]

EXIT_USER_ERROR = 2  # of a command that refused its input and did nothing
TRAIN = [sys.executable, "-m", "bandpo_cli", "train"]

POLL_S = 0.5  # between two polls of the running jobs; the longest time that a free slot waits
MIN_PROGRESS = 0.5  # share of its steps that a run does before it can be stopped: early learning curves cross


@dataclass(frozen=True)
class RunState:
    """The state of a run, for display and for stopping early.

    Attributes:
        status: `stopped` means that the sweep stopped the run early.
        step, steps: the last complete step, and the total number of steps.
        metric: `reward` if rewards are not just 0 and 1, else `accuracy`.
        score: the held-out metric of the latest evaluation; without one, the metric of the last training step.
        entropy: entropy of the last step in nats per token.
        seconds_left: estimate from the mean time of the steps so far; None before the first step.
        evaluations: the held-out metric by step, the mean over evaluation sets.
    """

    status: Status
    step: int
    steps: int
    metric: Literal["reward", "accuracy"] = "accuracy"
    score: float | None = None
    entropy: float | None = None
    seconds_left: float | None = None
    evaluations: Mapping[int, float] = field(default_factory=dict)


def run_sweep(
    folder: SweepFolder,
    pool: Pool,
    steps: Mapping[str, int],
    on_states: Callable[[Mapping[str, RunState]], None],
    flags: Sequence[str] = (),
    margin: float | None = None,
) -> dict[str, str]:
    """Execute the unfinished runs of a sweep and return the error message of each failed run, by name.

    A failed run does not stop the others. A run that was terminated from outside is resumed from its last checkpoint;
    the files of any other earlier attempt are moved to `attempts/`, not deleted.

    Args:
        steps: number of steps of each run, by name.
        on_states: called with the state of every run, by name, every `POLL_S` seconds.
        flags: additional flags for the command of every run.
        margin: as in `runs_to_stop`; None stops no run.
    """
    stopped = folder.stopped()
    waiting = [run.name for run in folder.pending()]
    running: set[str] = set()
    failures: dict[str, str] = {}
    states: dict[str, RunState] = {}
    waits = {name: Wait(f"run {name}", f"its output: {folder.log_path(name)}") for name in waiting}

    def update(name: str, status: Status) -> None:
        states[name] = read_run_state(folder, name, steps[name], status)

    for name in steps:
        update(name, "waiting" if name in waiting else "stopped" if name in stopped else "finished")
    try:
        while waiting or running:
            while waiting and pool.free_slots:
                name = waiting.pop(0)
                pool.start(name, [*train_command(folder, name), *flags], folder.log_path(name))
                running.add(name)
            for name, code in pool.poll_finished().items():
                running.discard(name)
                has_finished = is_finished(folder.path / name)
                how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
                end = f"{how}: {folder.error_message(name)}"
                if has_finished and code:
                    log.warning("run %s is finished, but its process ended otherwise: %s", name, end)
                elif not has_finished and name not in stopped:
                    failures[name] = end
                    if code == EXIT_USER_ERROR:  # the next attempt cannot use these files either
                        folder.archive_attempt(name)
                update(name, "finished" if has_finished else "failed" if name in failures else "stopped")
            for name in running:
                update(name, "running")
                output = folder.log_path(name)
                waits[name].restart((states[name], output.exists() and output.stat().st_size))
                waits[name].check()
            reasons = runs_to_stop(folder.runs, states, margin) if margin is not None else {}
            for name, reason in reasons.items():
                if name not in stopped:
                    stopped[name] = reason
                    folder.record_stopped(name, reason)
                    threading.Thread(target=pool.stop, args=(name,), daemon=True).start()
            on_states(states)
            if running:
                time.sleep(POLL_S)
    except BaseException:  # Ctrl-C included: no child process outlives the sweep
        pool.stop()
        raise
    return failures


def runs_to_stop(runs: Sequence[SweepRun], states: Mapping[str, RunState], margin: float) -> dict[str, str]:
    """Return the running runs to stop early, each with the reason in one line.

    A run is stopped if at its latest evaluation, after at least half of its steps and before the last one, its held-out
    accuracy (the reward if rewards are not just 0 and 1) is more than `margin` below that of another variant at the
    same step (the mean over the runs of that variant evaluated there). Stopped runs are missing from the report, and
    the remaining variants are those that did well: use this to find good settings, not for a fair comparison.
    """
    reasons = {}
    for run in runs:
        state = states[run.name]
        step = max(state.evaluations, default=0)
        is_trained = state.step >= state.steps  # it only writes its last files
        if state.status != "running" or is_trained or step < MIN_PROGRESS * state.steps:
            continue
        scores = defaultdict(list)
        for other in runs:
            if other.variant != run.variant and step in states[other.name].evaluations:
                scores[other.variant].append(states[other.name].evaluations[step])
        means = {variant: fmean(values) for variant, values in scores.items()}
        best, own = max(means, key=means.__getitem__, default=""), state.evaluations[step]
        if best and means[best] - own > margin:
            below = f"held-out {state.metric} {own:.3f} at step {step}"
            reasons[run.name] = f"{below}, {best} had {means[best]:.3f}"
    return reasons


def read_run_state(folder: SweepFolder, name: str, steps: int, status: Status) -> RunState:
    """Return the state of a run, read from its metrics.jsonl; the caller provides the status."""
    try:
        records = [] if status == "waiting" else RunFolder(folder.path / name).read_metrics()
    except UserError:  # damaged metrics.jsonl: the progress is unknown
        records = []
    step = records[-1]["step"] if records else 0
    trained = [record for record in records if record["step"] > 0]
    last = trained[-1] if trained else {}
    evaluations = {record["step"]: score for record in records if (score := record_score(record)) is not None}
    metric: Literal["reward", "accuracy"] = "accuracy"
    if any(map(has_nonbinary_rewards, records)):
        metric = "reward"
    score = evaluations[max(evaluations)] if evaluations else last.get(f"train/{metric}")
    seconds = [record.get("time/step", 0.0) for record in trained]
    left = fmean(seconds) * (steps - step) if seconds else None
    return RunState(status, step, steps, metric, score, last.get("train/entropy"), left, evaluations)


def train_command(folder: SweepFolder, name: str) -> list[str]:
    """Return the command that completes a run: a resume if possible, else a new attempt (or fork) in the sweep folder.

    A run that was terminated from outside and has a complete checkpoint is resumed; a failed run would fail again.
    """
    path = (folder.path / name).absolute()
    try:
        summary = read_summary(path)
        killed = summary is None or summary.status == "KILLED"
    except UserError:
        killed = False
    if killed and complete_checkpoints(RunFolder(path)).complete:
        return [*TRAIN, "--resume", str(path)]
    folder.archive_attempt(name)
    start = [] if folder.fork is None else ["--fork", folder.fork]
    plan = str(folder.plan_path(name).absolute())
    return [*TRAIN, *start, "--config", plan, "--name", name, "--runs-dir", str(path.parent)]


def rank_flags(ranks: int) -> list[str]:
    """Return the flags of `bandpo train` for a run with this many processes; none for one."""
    return ["--nproc", str(ranks)] if ranks > 1 else []
