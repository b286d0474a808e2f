"""How far each run of a sweep has come, read from the run folders alone."""

# MERGED: Which runs of a sweep are not worth their time any more.
# MERGED: Running a sweep: every run that is not whole, as many at a time as the pool has slots.
from __future__ import annotations

import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from bandpo_cli.errors import UserError
from bandpo_cli.storage.checkpoints import complete_checkpoints
from bandpo_cli.storage.run_folder import RunFolder, read_metrics
from bandpo_cli.storage.run_record import read_summary
from bandpo_cli.sweeps.folder import SweepFolder, SweepRun
from bandpo_cli.sweeps.pool import Job, Pool

Status = Literal["waiting", "running", "whole", "failed", "stopped"]


@dataclass(frozen=True)
class RunState:
    """A run at a glance.

    Attributes:
        step, steps: the last that is whole, and how many there will be.
        accuracy, entropy: of that step; accuracy held-out where there was an evaluation, else in training.
        seconds_left: by the mean of its steps so far; None before the first.
        evaluations: held-out accuracy by step, the mean over evaluation sets.
    """

    status: Status
    step: int
    steps: int
    accuracy: float | None = None
    entropy: float | None = None
    seconds_left: float | None = None
    evaluations: Mapping[int, float] = field(default_factory=dict)


def read_run_state(folder: SweepFolder, name: str, steps: int, status: Status) -> RunState:
    """Read the state of a run whose status the caller knows."""
    try:
        records = read_metrics(folder.run_path(name) / "metrics.jsonl")
    except UserError:  # a damaged record: what the run is like now cannot be told
        records = []
    if not records:
        return RunState(status, 0, steps)
    trained = [record for record in records if record["step"] > 0]
    step = records[-1]["step"]
    evaluations = {record["step"]: fmean(means) for record in records if (means := _heldout_means(record))}
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


def _heldout_means(record: Mapping[str, Any]) -> list[float]:
    return [
        value
        for key, value in record.items()
        if key.startswith("eval/") and "/mean_at_" in key and isinstance(value, float)
    ]


MIN_PROGRESS = 0.5
"""The share of its steps that a run may take before it is judged: early curves cross."""


def runs_to_stop(runs: Sequence[SweepRun], states: Mapping[str, RunState], margin: float) -> dict[str, str]:
    """Return the running runs to stop, with the reason in a line.

    A run is hopeless when at its latest evaluation, half-way or later, its held-out accuracy is more than `margin`
    below that of another arm at the same step (the mean over that arm's runs that have been there). What is stopped is
    missing from the report, and the arms that are left are those that did well: for finding a good setting, not for a
    comparison.
    """
    at: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for step, accuracy in states[run.name].evaluations.items():
            at[step][run.arm].append(accuracy)
    found = {}
    for run in runs:
        state = states[run.name]
        if state.status != "running" or not state.evaluations:
            continue
        step = max(state.evaluations)
        others = {arm: fmean(values) for arm, values in at[step].items() if arm != run.arm}
        if step < MIN_PROGRESS * state.steps or not others:
            continue
        best = max(others, key=lambda arm: others[arm])
        if others[best] - state.evaluations[step] > margin:
            found[run.name] = (
                f"held-out accuracy {state.evaluations[step]:.3f} at step {step}, {best} had {others[best]:.3f}"
            )
    return found


EXIT_USER_ERROR = 2
"""Exit code of a command that found fault with what it was given, and did nothing."""

POLL_S = 0.5
"""Seconds between looks at the children: the most that a free slot waits."""


def run_sweep(
    folder: SweepFolder,
    pool: Pool,
    steps: Mapping[str, int],
    watch: Callable[[Mapping[str, RunState]], None],
    flags: Sequence[str] = (),
    margin: float | None = None,
) -> dict[str, str]:
    """Execute the runs that are not whole, and return why each failed one did, by name.

    A failed run stops no other. A run that was ended from outside goes on from its last checkpoint; what any other
    attempt left is set aside, not deleted.

    Args:
        steps: of each run, by name.
        watch: hears how far all runs are, every `POLL_S`.
        flags: further flags of every run's command.
        margin: stop runs that lie this far behind another arm; None stops none. See `hopeless`.
    """
    stopped = folder.stopped()
    waiting = deque(
        run.name for run in folder.runs if not folder.is_finished(run.name) and run.name not in stopped
    )
    states = {
        run.name: RunState("waiting", 0, steps[run.name])
        if run.name in waiting
        else read_run_state(folder, run.name, steps[run.name], "stopped" if run.name in stopped else "whole")
        for run in folder.runs
    }
    running: set[str] = set()
    failures: dict[str, str] = {}
    try:
        while waiting or running:
            while waiting and pool.free:
                name = waiting.popleft()
                pool.start(Job(name, [*_command(folder, name), *flags], folder.log_path(name)))
                running.add(name)
            for ended in pool.ended():
                running.discard(ended.name)
                status: Status = "whole" if ended.code == 0 and folder.is_finished(ended.name) else "failed"
                if status == "failed" and ended.name in stopped:
                    status = "stopped"
                if status == "failed":
                    failures[ended.name] = _failure_message(folder, ended.name, ended.code)
                    if ended.code == EXIT_USER_ERROR:  # what is there is no use to the next attempt
                        folder.archive_attempt(ended.name)
                states[ended.name] = read_run_state(folder, ended.name, steps[ended.name], status)
            for name in running:
                states[name] = read_run_state(folder, name, steps[name], "running")
            for name, why in (
                runs_to_stop(folder.runs, states, margin) if margin is not None else {}
            ).items():
                stopped[name] = why
                folder.record_stopped(name, why)
                pool.stop(name)
            watch(states)
            if running:
                time.sleep(POLL_S)
    except BaseException:  # Ctrl-C among them: no child outlives the sweep
        pool.stop()
        raise
    return failures


def _command(folder: SweepFolder, name: str) -> list[str]:
    """Return what brings a run to its end, from its last checkpoint if it can go on from one."""
    if is_resumable(folder.run_path(name)):
        return resume_train_command(folder, name)
    folder.archive_attempt(name)
    return train_command(folder, name)


def is_resumable(path: Path) -> bool:
    """Tell whether a run has a whole checkpoint and was ended from outside: one that failed would fail again."""
    try:
        summary = read_summary(path)
    except UserError:
        return False
    killed = summary is None or summary.status == "KILLED"
    return killed and bool(complete_checkpoints(RunFolder(path)).complete)


def train_command(folder: SweepFolder, name: str) -> list[str]:
    """Return the command that makes one run, an ordinary run folder in the sweep's."""
    plan: Path = folder.plan_path(name).absolute()
    return [
        sys.executable, "-m", "bandpo_cli", "train", "--config", str(plan), "--name", name,
        "--runs-dir", str(folder.path.absolute()),
    ]  # fmt: skip


def resume_train_command(folder: SweepFolder, name: str) -> list[str]:
    """Return the command that goes on with one run."""
    path = str(folder.run_path(name).absolute())
    return [sys.executable, "-m", "bandpo_cli", "train", "--resume", path]


def _failure_message(folder: SweepFolder, name: str, code: int) -> str:
    end = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{end}: {folder.error_message(name)}"
