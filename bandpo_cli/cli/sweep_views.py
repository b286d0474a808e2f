"""How a sweep looks: the table of its runs before it starts, a live table of its arms, what came of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bandpo_cli.cli.eval_views import format_duration
from bandpo_cli.sweeps.folder import SweepRun
from bandpo_cli.sweeps.scheduler import RunState

LINES_EVERY_S = 60.0
"""Seconds between progress lines where the output is no terminal."""

States = Mapping[str, RunState]


class SweepView(Protocol):
    """Something that shows how far a sweep has come."""

    def __enter__(self) -> SweepView: ...

    def __exit__(self, *exc: object) -> None: ...

    def show(self, states: States) -> None:
        """Take in how far all runs are."""


def make_sweep_view(console: Console, runs: Sequence[SweepRun], jobs: int) -> SweepView:
    """Return the live table on a terminal, plain lines elsewhere."""
    return _LiveTable(console, runs, jobs) if console.is_terminal else _PlainLines(console, runs, jobs)


def plan_table(runs: Sequence[SweepRun], steps: Mapping[str, int]) -> Table:
    """Return one row an arm, with its seeds and steps."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("arm", "seeds", "steps", "runs"):
        table.add_column(heading, justify="left" if heading in ("arm", "seeds") else "right")
    for arm, members in by_arm(runs).items():
        seeds = ", ".join(str(run.seed) for run in members)
        counts = sorted({steps[run.name] for run in members})
        table.add_row(arm, seeds, " ".join(map(str, counts)), str(len(members)))
    return table


def by_arm(runs: Sequence[SweepRun]) -> dict[str, list[SweepRun]]:
    """Group runs by arm, in the order in which the arms first come."""
    arms: dict[str, list[SweepRun]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    return arms


def arms_table(runs: Sequence[SweepRun], states: States) -> Table:
    """Return one row an arm: how many runs are whole, where the running ones are, accuracy and entropy so far."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("arm", "whole", "running at step", "accuracy", "entropy", "left"):
        table.add_column(heading, justify="left" if heading in ("arm", "running at step") else "right")
    for arm, members in by_arm(runs).items():
        own = [states[run.name] for run in members]
        running = [state for state in own if state.status == "running"]
        whole = sum(state.status == "finished" for state in own)
        ended = [
            (f" {count} {status}", style)
            for status, style in (("failed", "red"), ("stopped", "yellow"))
            if (count := sum(state.status == status for state in own))
        ]
        table.add_row(
            arm,
            Text.assemble(f"{whole}/{len(own)}", *ended),
            "  ".join(f"{state.step}/{state.steps}" for state in running) or "·",
            _mean([state.accuracy for state in own]),
            _mean([state.entropy for state in own]),
            _max_duration([state.seconds_left for state in running]),
        )
    return table


def seconds_left(states: States, jobs: int) -> float | None:
    """Return how long the rest will take, by the pace of the runs so far; None before there is one."""
    rates = [
        state.seconds_left / (state.steps - state.step)
        for state in states.values()
        if state.status == "running" and state.seconds_left is not None and state.step < state.steps
    ]
    if not rates:
        return None
    pace = fmean(rates)
    waiting = sum(state.steps for state in states.values() if state.status == "waiting")
    running = sum(state.steps - state.step for state in states.values() if state.status == "running")
    return (waiting + running) * pace / jobs


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.3f}" if known else "·"


def _max_duration(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return format_duration(max(known)) if known else "·"


def _progress(states: States, jobs: int) -> str:
    whole = sum(state.status == "finished" for state in states.values())
    failed = sum(state.status == "failed" for state in states.values())
    left = seconds_left(states, jobs)
    parts = [f"{whole}/{len(states)} runs whole"]
    stopped = sum(state.status == "stopped" for state in states.values())
    parts += [f"{failed} failed"] if failed else []
    parts += [f"{stopped} stopped early"] if stopped else []
    parts += [f"{format_duration(left)} left"] if left is not None else []
    return " · ".join(parts)


class _LiveTable:
    def __init__(self, console: Console, runs: Sequence[SweepRun], jobs: int) -> None:
        self._runs, self._jobs = runs, jobs
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> _LiveTable:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def show(self, states: States) -> None:
        table = arms_table(self._runs, states)
        table.title, table.title_justify = _progress(states, self._jobs), "left"
        self._live.update(table, refresh=True)


class _PlainLines:
    def __init__(self, console: Console, runs: Sequence[SweepRun], jobs: int) -> None:
        self._console, self._jobs = console, jobs
        self._ended = -1
        self._next = time.monotonic()
        self._arms = {run.name: run.arm for run in runs}

    def __enter__(self) -> _PlainLines:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def show(self, states: States) -> None:
        ended = sum(state.status in ("finished", "failed", "stopped") for state in states.values())
        if ended == self._ended and time.monotonic() < self._next:
            return
        self._ended, self._next = ended, time.monotonic() + LINES_EVERY_S
        running = ", ".join(
            f"{name} {state.step}/{state.steps}"
            for name, state in states.items()
            if state.status == "running"
        )
        self._console.print(
            _progress(states, self._jobs) + (f"  running: {running}" if running else ""),
            highlight=False,
            soft_wrap=True,
        )
