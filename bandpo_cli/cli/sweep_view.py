"""Console view of sweeps: the plan, a live table of the variants, the report, failures."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from bandpo_cli.cli.console import ExperimentView, format_duration, make_table, print_line, print_rows
from bandpo_cli.cli.report import print_report
from bandpo_cli.errors import SignalExit, plural
from bandpo_cli.storage.run_folder import shell_command
from bandpo_cli.storage.sweep_folder import SweepRun, by_variant
from bandpo_cli.sweeps.sweep_run import (
    States,
    SweepInfo,
    SweepResult,
    estimate_disk_space,
    estimate_time,
)

LINES_EVERY_S = 60.0
"""Seconds between progress lines where the output is no terminal."""


class SweepView(ExperimentView):
    """Console view of a sweep: a live table on a terminal, elsewhere a line when a run ends and every minute."""

    spinners: Mapping[str, str] = {
        "tracking": "opening the sweep at MLflow …",
        "trial": "a trial of three steps, for an estimate of the time …",
        "report": "writing the report …",
    }

    def __init__(self, console: Console, runs_dir: Path) -> None:
        super().__init__(console, runs_dir)
        self._info: SweepInfo | None = None
        self._states: States = {}
        self._start = self._next_line = 0.0
        self._ended = -1

    def start(self, info: SweepInfo) -> None:
        """Print the folder, the plan and the estimate of the time."""
        self._info = info
        self.print_start(info.folder, "sweep")
        self._start = time.perf_counter()
        self.print_plan(info)

    def print_plan(self, info: SweepInfo) -> None:
        """Print the table of runs and the estimate of the time."""
        steps = {name: config.steps for name, config in info.configs.items()}
        self.console.print(plan_table(info.runs, steps), highlight=False)
        finished = len(info.runs) - len(info.pending)
        processes = "" if info.ranks == 1 else f"{info.ranks} processes of "
        self._print(
            f"{len(info.runs)} runs{f', {finished} of them finished' if finished else ''}, {info.slots} at a time, "
            f"{processes}{plural(info.threads, 'thread')} each"
        )
        if not info.pending:
            return
        needed, free = (size / 1e9 for size in estimate_disk_space(info, self.runs_dir))
        if needed >= 1:
            line = f"checkpoints: about {needed:,.0f} GB in the end; {free:,.0f} GB are free"
            fewer = "; --set checkpoint.keep_last=1 --set checkpoint.keep_best=0 keeps one per run"
            is_short = needed > free
            print_line(
                self.console, line + fewer if is_short else line, "warning:" if is_short else "", "yellow"
            )
        try:
            estimate = estimate_time(info, self.runs_dir, lambda: self.spin(self.spinners["trial"]))
        finally:
            self.spin(None)
        if estimate is None:
            self._print("no time estimate yet, because no finished run has these settings")
        else:
            total, run, source = estimate
            self._print(f"about {format_duration(total)} in total, {format_duration(run)} per run ({source})")

    def _print(self, text: str = "") -> None:
        self.console.print(text, highlight=False)

    def phase(self, name: str) -> None:
        """Show the live table while the runs are executed, a spinner in other phases."""
        if name == "run":
            self.show_progress()
        if name == "report":
            self.stop_progress()
            self._print()
        super().phase(name)

    def step(self, report: States) -> None:
        """Show the states of the runs."""
        self._states = report
        self.update_progress()

    def end(self, result: SweepResult) -> None:
        """Print the report and what failed; after Ctrl-C or SIGTERM print how to resume."""
        self.close()
        if self._info is None:
            return
        finished = f"{result.finished} of {len(self._info.runs)} runs"
        if isinstance(result.error, KeyboardInterrupt | SignalExit):
            how = str(result.error) or "stopped by Ctrl-C"
            again = shell_command("sweep --resume", result.folder, self.runs_dir)
            print_line(self.console, f"{how} with {finished} finished; resume with: {again}")
        if result.error is not None:
            return
        if result.report is None:
            print_line(self.console, str(result.report_error), "no report:", "yellow")
        else:
            print_report(self.console, result.report)
            self._print()
        duration = format_duration(time.perf_counter() - self._start)
        self._print(f"{finished} finished{f' in {duration}' if self._info.pending else ''}")
        print_rows(self.console, [("MLflow", result.mlflow or "")], 6)
        ended = (("stopped early", "yellow", result.stopped), ("failed", "red", result.failures))
        for heading, style, reasons in ended:
            for name, why in reasons.items():
                print_line(self.console, f"{name}: {why}", heading, style)

    def render(self) -> RenderableType:
        """Return the table of the variants; nothing before the first states."""
        if self._info is None or not self._states:
            return ""
        table = variants_table(self._info.runs, self._states)
        table.title, table.title_justify = self._counts_text(), "left"
        return table

    def line(self) -> str | None:
        """Return a line if a run has ended since the last line, or `LINES_EVERY_S` seconds have passed."""
        ended = sum(state.status in ("finished", "failed", "stopped") for state in self._states.values())
        if ended == self._ended and time.monotonic() < self._next_line:
            return None
        self._ended, self._next_line = ended, time.monotonic() + LINES_EVERY_S
        states = self._states.items()
        running = [f"{name} {run.step}/{run.steps}" for name, run in states if run.status == "running"]
        return self._counts_text() + (f"  running: {', '.join(running)}" if running else "")

    def _counts_text(self) -> str:
        """Return `2/6 runs finished · 1 failed · 0:01:05 left`."""
        counts: Counter[str] = Counter(state.status for state in self._states.values())
        parts = [f"{counts['finished']}/{len(self._states)} runs finished"]
        for status, text in (("failed", "failed"), ("stopped", "stopped early")):
            parts += [f"{counts[status]} {text}"] if counts[status] else []
        if self._info is not None and (left := seconds_left(self._states, self._info.slots)) is not None:
            parts.append(f"{format_duration(left)} left")
        return " · ".join(parts)


def plan_table(runs: Sequence[SweepRun], steps: Mapping[str, int]) -> Table:
    """Return one row per variant, with its seeds and steps."""
    table = make_table("variant", "seeds", ">steps", ">runs")
    for variant, members in by_variant(runs).items():
        seeds = ", ".join(str(run.seed) for run in members)
        counts = sorted({steps[run.name] for run in members})
        table.add_row(Text(variant), seeds, " ".join(map(str, counts)), str(len(members)))
    return table


def variants_table(runs: Sequence[SweepRun], states: States) -> Table:
    """Return one row per variant: finished runs, steps of the running ones, accuracy or reward and entropy so far.

    The accuracy or reward is the held-out one, or that of the last training step if the runs evaluate nothing.
    """
    known = [state for state in states.values() if state.score is not None]
    held_out = not known or any(state.evaluations for state in known)
    metric = "reward" if any(state.metric == "reward" for state in known) else "accuracy"
    heading = f">{'held-out' if held_out else 'training'} {metric}"
    table = make_table("variant", ">finished", "running at step", heading, ">entropy", ">left")
    for variant, members in by_variant(runs).items():
        own = [states[run.name] for run in members]
        counts = Counter(state.status for state in own)
        running = [state for state in own if state.status == "running"]
        scores = [state.score for state in own if state.evaluations or not held_out]
        left = [state.seconds_left for state in running if state.seconds_left is not None]
        table.add_row(
            Text(variant),
            Text.assemble(
                f"{counts['finished']}/{len(own)}",
                (f" {counts['failed']} failed" if counts["failed"] else "", "red"),
                (f" {counts['stopped']} stopped" if counts["stopped"] else "", "yellow"),
            ),
            "  ".join(f"{state.step}/{state.steps}" for state in running) or "·",
            _mean_text(scores),
            _mean_text(state.entropy for state in own),
            format_duration(max(left)) if left else "·",
        )
    return table


def _mean_text(values: Iterable[float | None]) -> str:
    """Return the mean of the known values as text; `·` without any."""
    known = [value for value in values if value is not None]
    return f"{fmean(known):.3f}" if known else "·"


def seconds_left(states: States, jobs: int) -> float | None:
    """Return the remaining seconds by the mean seconds per step of the running runs; None before their first step.

    `jobs` runs share the remaining steps, but the time is not shorter than the time of the slowest running run.
    """
    active = [state for state in states.values() if state.status in ("waiting", "running")]
    left = [state for state in active if state.step < state.steps]
    timed = [
        (state.seconds_left, state.steps - state.step) for state in left if state.seconds_left is not None
    ]
    if not timed:
        return None
    seconds_per_step = fmean(seconds / steps for seconds, steps in timed)
    steps = sum(state.steps - state.step for state in left)
    return max(steps * seconds_per_step / jobs, *(seconds for seconds, _ in timed))
