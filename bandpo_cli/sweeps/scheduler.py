"""Scheduler of a sweep: start, observe, resume and stop its runs, as many at a time as the pool has slots."""

from __future__ import annotations

import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Literal

from bandpo_cli.errors import UserError
from bandpo_cli.storage.checkpoints import complete_checkpoints, record_score
from bandpo_cli.storage.run_folder import RunFolder, read_metrics
from bandpo_cli.storage.run_record import read_summary
from bandpo_cli.sweeps.folder import SweepFolder
from bandpo_cli.sweeps.plan import SweepRun
from bandpo_cli.sweeps.pool import Pool

Status = Literal["waiting", "running", "finished", "failed", "stopped"]

EXIT_USER_ERROR = 2
"""Exit code of a command that refused its input and did nothing."""

POLL_S = 0.5
"""Seconds between two polls of the running jobs; the longest time that a free slot waits."""

MIN_PROGRESS = 0.5
"""Share of its steps that a run must have done before it can be stopped early: early learning curves cross."""


@dataclass(frozen=True)
class RunState:
    """The state of a run, for display and for stopping early.

    Attributes:
        status: `stopped` means that the sweep stopped the run early.
        step, steps: the last complete step, and the total number of steps.
        accuracy: held-out accuracy of the latest evaluation; without one, the training accuracy of the last step.
        entropy: entropy of the last step in nats per token.
        seconds_left: estimate from the mean time of the steps so far; None before the first step.
        evaluations: held-out accuracy by step, the mean over evaluation sets.
    """

    status: Status
    step: int
    steps: int
    accuracy: float | None = None
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
        margin: stop runs whose held-out accuracy is this far below another variant's (`runs_to_stop`); None stops none.
    """
    stopped = folder.stopped()
    waiting = deque(run.name for run in folder.pending())
    running: set[str] = set()
    failures: dict[str, str] = {}
    states: dict[str, RunState] = {}

    def read_state(name: str, status: Status) -> None:
        states[name] = read_run_state(folder, name, steps[name], status)

    for run in folder.runs:
        if run.name in waiting:
            states[run.name] = RunState("waiting", 0, steps[run.name])
        else:
            read_state(run.name, "stopped" if run.name in stopped else "finished")
    try:
        while waiting or running:
            while waiting and pool.free_slots:
                name = waiting.popleft()
                pool.start(name, [*_command(folder, name), *flags], folder.log_path(name))
                running.add(name)
            for name, code in pool.poll_finished().items():
                running.discard(name)
                if code == 0 and folder.is_finished(name):
                    read_state(name, "finished")
                elif name in stopped:
                    read_state(name, "stopped")
                else:
                    end = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
                    failures[name] = f"{end}: {folder.error_message(name)}"
                    if code == EXIT_USER_ERROR:  # the next attempt cannot use these files either
                        folder.archive_attempt(name)
                    read_state(name, "failed")
            for name in running:
                read_state(name, "running")
            reasons = runs_to_stop(folder.runs, states, margin) if margin is not None else {}
            for name, reason in reasons.items():
                stopped[name] = reason
                folder.record_stopped(name, reason)
                pool.stop(name)
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
    accuracy is more than `margin` below that of another variant at the same step (the mean over the runs of that
    variant evaluated there). Stopped runs are missing from the report, and the remaining variants are those that did
    well: use this to find good settings, not for a fair comparison.
    """
    accuracies: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for step, accuracy in states[run.name].evaluations.items():
            accuracies[step][run.arm].append(accuracy)
    reasons = {}
    for run in runs:
        state = states[run.name]
        is_trained = state.step >= state.steps  # it only writes its last files
        if state.status != "running" or not state.evaluations or is_trained:
            continue
        step = max(state.evaluations)
        others = {arm: fmean(values) for arm, values in accuracies[step].items() if arm != run.arm}
        if step < MIN_PROGRESS * state.steps or not others:
            continue
        best = max(others, key=lambda arm: others[arm])
        if others[best] - state.evaluations[step] > margin:
            reasons[run.name] = (
                f"held-out accuracy {state.evaluations[step]:.3f} at step {step}, {best} had {others[best]:.3f}"
            )
    return reasons


def read_run_state(folder: SweepFolder, name: str, steps: int, status: Status) -> RunState:
    """Return the state of a run, read from its metrics.jsonl; the caller provides the status."""
    try:
        records = read_metrics(folder.run_path(name) / "metrics.jsonl")
    except UserError:  # damaged metrics.jsonl: the progress is unknown
        records = []
    if not records:
        return RunState(status, 0, steps)
    trained = [record for record in records if record["step"] > 0]
    step = records[-1]["step"]
    evaluations = {record["step"]: score for record in records if (score := record_score(record)) is not None}
    in_training = trained[-1].get("train/accuracy") if trained else None
    accuracy = evaluations[max(evaluations)] if evaluations else in_training
    seconds = sum(record.get("time/step", 0.0) for record in trained)
    return RunState(
        status=status,
        step=step,
        steps=steps,
        accuracy=accuracy,
        entropy=trained[-1].get("train/entropy") if trained else None,
        seconds_left=seconds / len(trained) * (steps - step) if trained else None,
        evaluations=evaluations,
    )


def is_resumable(path: Path) -> bool:
    """Return whether a run was terminated from outside and has a complete checkpoint; a failed run would fail again."""
    try:
        summary = read_summary(path)
    except UserError:
        return False
    killed = summary is None or summary.status == "KILLED"
    return killed and bool(complete_checkpoints(RunFolder(path)).complete)


def train_command(folder: SweepFolder, name: str) -> list[str]:
    """Return the command that starts a run, as an ordinary run folder inside the sweep folder."""
    plan: Path = folder.plan_path(name).absolute()
    return [
        sys.executable, "-m", "bandpo_cli", "train", "--config", str(plan), "--name", name,
        "--runs-dir", str(folder.path.absolute()),
    ]  # fmt: skip


def resume_train_command(folder: SweepFolder, name: str) -> list[str]:
    """Return the command that resumes a run."""
    path = str(folder.run_path(name).absolute())
    return [sys.executable, "-m", "bandpo_cli", "train", "--resume", path]


def _command(folder: SweepFolder, name: str) -> list[str]:
    """Return the command that completes a run: resume where possible, else a new attempt."""
    if is_resumable(folder.run_path(name)):
        return resume_train_command(folder, name)
    folder.archive_attempt(name)
    return train_command(folder, name)
