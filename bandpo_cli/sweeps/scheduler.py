"""Scheduler of a sweep: choose the next run, observe, resume and stop runs, as many at a time as the pool has slots."""

import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from bandpo_cli.errors import UserError
from bandpo_cli.metric_names import has_nonbinary_rewards
from bandpo_cli.processes.watch import Wait
from bandpo_cli.storage.checkpoints import complete_checkpoints, record_score
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.storage.run_record import is_finished, read_summary
from bandpo_cli.storage.sweep_folder import SweepFolder, SweepRun
from bandpo_cli.sweeps.pool import Pool

log = logging.getLogger("bandpo_cli")

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
        margin: stop runs whose held-out accuracy or reward is this far below another variant's (`runs_to_stop`); None
            stops none.
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
                waits[name].restart(
                    (states[name], folder.log_path(name).exists() and folder.log_path(name).stat().st_size)
                )
                waits[name].check()
            reasons = runs_to_stop(folder.runs, states, margin) if margin is not None else {}
            for name, reason in reasons.items():
                if name not in stopped:
                    stopped[name] = reason
                    folder.record_stopped(name, reason)
                    pool.request_stop(name)
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
    metric: Literal["reward", "accuracy"] = (
        "reward" if any(map(has_nonbinary_rewards, records)) else "accuracy"
    )
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
