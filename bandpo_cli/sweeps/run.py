"""Running a sweep: every run that is not whole, as many at a time as the pool has slots."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bandpo_cli.sweeps.folder import SweepFolder
from bandpo_cli.sweeps.pool import Job, Pool
from bandpo_cli.sweeps.states import RunState, Status, read_state
from bandpo_cli.sweeps.stopping import hopeless
from bandpo_cli.tracking.checkpoints import whole_checkpoints
from bandpo_cli.tracking.run_folder import RunFolder

REFUSED = 2
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
        run.name for run in folder.runs if not folder.is_whole(run.name) and run.name not in stopped
    )
    states = {
        run.name: RunState("waiting", 0, steps[run.name])
        if run.name in waiting
        else read_state(folder, run.name, steps[run.name], "stopped" if run.name in stopped else "whole")
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
                status: Status = "whole" if ended.code == 0 and folder.is_whole(ended.name) else "failed"
                if status == "failed" and ended.name in stopped:
                    status = "stopped"
                if status == "failed":
                    failures[ended.name] = _why(folder, ended.name, ended.code)
                    if ended.code == REFUSED:  # what is there is no use to the next attempt
                        folder.set_aside(ended.name)
                states[ended.name] = read_state(folder, ended.name, steps[ended.name], status)
            for name in running:
                states[name] = read_state(folder, name, steps[name], "running")
            for name, why in (hopeless(folder.runs, states, margin) if margin is not None else {}).items():
                stopped[name] = why
                folder.note_stopped(name, why)
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
    if can_go_on(folder.run_path(name)):
        return resume_command(folder, name)
    folder.set_aside(name)
    return run_command(folder, name)


def can_go_on(path: Path) -> bool:
    """Tell whether a run has a whole checkpoint and was ended from outside: one that failed would fail again."""
    try:
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError:  # killed outright
        summary = {"status": "KILLED"}
    except (OSError, ValueError):
        return False
    ended = isinstance(summary, dict) and summary.get("status") == "KILLED"
    return ended and bool(whole_checkpoints(RunFolder(path))[0])


def run_command(folder: SweepFolder, name: str) -> list[str]:
    """Return the command that makes one run, an ordinary run folder in the sweep's."""
    plan: Path = folder.plan_path(name).absolute()
    return [
        sys.executable, "-m", "bandpo_cli", "train", "--config", str(plan), "--name", name,
        "--runs-dir", str(folder.path.absolute()),
    ]  # fmt: skip


def resume_command(folder: SweepFolder, name: str) -> list[str]:
    """Return the command that goes on with one run."""
    path = str(folder.run_path(name).absolute())
    return [sys.executable, "-m", "bandpo_cli", "train", "--resume", path]


def _why(folder: SweepFolder, name: str, code: int) -> str:
    end = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{end}: {folder.last_words(name)}"
