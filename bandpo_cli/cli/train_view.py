"""Console view of a training run: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from bandpo_cli.cli.console import PLAIN_LINES, LiveDisplay, Spinner, print_line
from bandpo_cli.cli.signals import STOPPING, StopSignals
from bandpo_cli.rank_process import launched_ranks
from bandpo_cli.storage.checkpoints import model_checkpoints
from bandpo_cli.storage.run_folder import RunFolder, resume_command
from bandpo_cli.types import CallbackBase, Rollout, RunInfo, RunResult, StepReport

SPARK_CHARS = "▁▂▃▄▅▆▇█"
PHASES = {
    "sample": "sampling",
    "grade": "grading",
    "logprobs": "old log-probs",
    "update": "updating",
    "sync": "syncing the sampler",
    "eval": "evaluating",
    "checkpoint": "writing a checkpoint",
}
"""Text beside the bar for the phases of a step that may take long; the keys are the names under `time/`."""

SPINNERS = {
    "load": "loading torch and the model …",
    "close": "writing the plots …",
}
"""Text beside the spinner in the phases before and after the steps."""

CLOSE_WITH_MLFLOW = "writing the plots, finishing the record in MLflow …"
"""Text in place of that of the phase `close` for a run that MLflow records."""


class TrainView(CallbackBase):
    """Console view of a training run: a live panel on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, runs_dir: Path, signals: StopSignals | None = None) -> None:
        self._console, self._runs_dir, self._signals = console, runs_dir, signals
        self._panel: LivePanel | PlainLines | None = None
        self._spinner = Spinner(self._console)
        self._spinners = dict(SPINNERS)

    def start(self, info: RunInfo) -> None:
        """Print the notes and the run folder, and show the panel."""
        self._spinner.show(None)
        if info.config["tracking"]["mlflow"]:
            self._spinners["close"] = CLOSE_WITH_MLFLOW
        for note in info.notes:
            print_line(self._console, note, "note:", "yellow")
        print_line(self._console, str(info.folder), "run folder")
        self._panel = make_panel(self._console, info.steps, self._signals)
        self._panel.restore(RunFolder(info.folder).read_metrics())  # of the steps before a resume
        self._panel.start()

    def phase(self, name: str) -> None:
        """Show what the run is doing: beside the panel's bar, or with a spinner before and after it."""
        if name == "close" and self._panel is not None:
            self._panel.stop()
            self._panel = None
        if self._panel is not None:
            self._panel.phase(name)
        else:
            self._spinner.show(self._spinners.get(name))

    def step(self, report: StepReport) -> None:
        """Show one step."""
        if self._panel is not None:
            self._panel.show(report)

    def end(self, result: RunResult) -> None:
        """Print why a run did not finish, and how to resume it."""
        self._spinner.show(None)
        if result.status == "FINISHED":
            return
        sender = None if self._signals is None else self._signals.sender
        how = "failed" if result.status == "FAILED" else f"stopped by {sender or 'request'}"
        after = f" after step {result.records[-1]['step']}" if result.records else " before the first step"
        print_line(self._console, f"{how}{after}; its files are in {result.folder}")
        if result.status == "KILLED" or model_checkpoints(RunFolder(result.folder)):
            again = resume_command("train", result.folder, self._runs_dir)
            ranks = launched_ranks()
            print_line(self._console, f"resume with: {again}{'' if ranks is None else f' --nproc {ranks}'}")

    def close(self) -> None:
        """Remove the spinner and the panel, where an error left them."""
        self._spinner.show(None)
        if self._panel is not None:
            self._panel.stop()


def make_panel(console: Console, steps: int, signals: StopSignals | None = None) -> LivePanel | PlainLines:
    """Return the live panel on a terminal, plain lines elsewhere."""
    return LivePanel(console, steps, signals) if console.is_terminal else PlainLines(console, steps)


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return values as a line of block characters, scaled to their range, averaged down to `width`."""
    if not values:
        return ""
    size = min(width, len(values))
    edges = [round(i * len(values) / size) for i in range(size + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(
        SPARK_CHARS[round((value - low) / span * (len(SPARK_CHARS) - 1))] if span > 0 else SPARK_CHARS[0]
        for value in means
    )


def eval_metrics_text(record: Mapping[str, float]) -> str:
    """Return an evaluation's metrics in one line, empty when the step had none: `mean@16 0.31 · pass@4 0.62`.

    With several evaluation sets, each one's metrics follow its label.
    """
    by_set: dict[str, list[str]] = {}
    for key, value in record.items():
        prefix, _, metric = key.rpartition("/")
        if prefix.startswith("eval/") and metric.startswith(("mean_at_", "pass_at_")):
            label = prefix.removeprefix("eval/")
            by_set.setdefault(label, []).append(f"{metric.replace('_at_', '@')} {value:.3f}")
    if len(by_set) == 1:
        return " · ".join(*by_set.values())
    return "  ".join(f"{label}: {' · '.join(metrics)}" for label, metrics in by_set.items())


def flagged_shares(record: Mapping[str, float]) -> str:
    """Return the shares of completions that are truncated or have no verdict, empty when they are below the thresholds.

    Both are common until the model has learned the form of an answer; truncated answers end without a stop token, and a
    grader may read a number that is cut off.
    """
    shares = [
        (record.get(key, 0.0), threshold, words)
        for key, threshold, words in (
            ("grade/malformed_fraction", 0.2, "without a readable answer"),
            ("grade/timeout_fraction", 0.0, "timed out"),
            ("grade/error_fraction", 0.0, "grader errors"),
            ("train/truncated_fraction", 0.2, "truncated"),
        )
    ]
    return ", ".join(f"{share:.1%} {words}" for share, threshold, words in shares if share > threshold)


class PlainLines:
    """One line every few steps and for each evaluation, for a log file."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._stride = max(1, steps // PLAIN_LINES)
        self._start = time.perf_counter()

    def restore(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing: the log file of the earlier steps has them."""

    def start(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""

    def phase(self, name: str) -> None:
        """Do nothing: a log file shows steps only."""

    def show(self, report: StepReport) -> None:
        """Print every n-th step, the last one, and steps with an evaluation."""
        record, held_out = report.record, eval_metrics_text(report.record)
        if report.step % self._stride and not held_out and report.step != self._steps:
            return
        parts = [f"step {report.step}/{self._steps}"]
        if report.step:
            clipped = record.get("clip/active_fraction", math.nan)
            parts.append(
                f"training accuracy {record['train/accuracy']:.3f}  entropy {record['train/entropy']:.3f} nats  "
                f"clipped {clipped:.2%}  {record['time/step']:.2f} s/step"
            )
        if skipped := record.get("optim/skipped_updates"):
            parts.append(f"updates skipped {skipped:.0f}")
        if flagged := flagged_shares(record):
            parts.append(flagged)
        if held_out:
            parts.append(f"held-out {held_out}")
        print_line(self._console, "  ".join(parts))


class LivePanel:
    """One panel that stays in place: progress, time left, the curves so far and the latest completion."""

    def __init__(self, console: Console, steps: int, signals: StopSignals | None = None) -> None:
        self._steps, self._signals = steps, signals
        self._history: dict[str, list[float]] = {}
        self._held_out: list[tuple[int, str]] = []
        self._sample = Text("")
        self._throughput: tuple[float, float] | None = None
        self._flagged = ""
        self._skipped = 0
        self._running = False
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[phase]}", style="dim"),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("train", total=steps, phase="", start=False)
        self._grid = self._metric_grid()
        self._display = LiveDisplay(console, self._render)

    def restore(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Show the metrics of earlier steps, from metrics.jsonl. The time left counts from the steps after them."""
        for record in records:
            self._add(int(record["step"]), record)
        if records:
            self._progress.reset(
                self._task, total=self._steps, completed=int(records[-1]["step"]), start=False
            )
        self._grid = self._metric_grid()

    def start(self) -> None:
        """Show the panel. It also shows the request to stop, in place of the signal handlers."""
        self._running = True
        self._progress.start_task(self._task)
        if self._signals is not None:
            self._signals.silent = True
        self._display.start()

    def stop(self) -> None:
        """Show the last state and leave it on the terminal."""
        self._progress.update(self._task, phase="")
        self._progress.stop_task(self._task)
        self._running = False
        self._display.stop()
        if self._signals is not None:
            self._signals.silent = False

    def phase(self, name: str) -> None:
        """Show the phase beside the bar: a step of a large model takes minutes."""
        self._progress.update(self._task, phase=PHASES.get(name, ""))

    def show(self, report: StepReport) -> None:
        """Update the panel with a step."""
        self._add(report.step, report.record)
        if report.sample is not None:
            self._sample = _sample_text(report.sample)
        self._progress.update(self._task, completed=report.step)
        self._grid = self._metric_grid()

    def _add(self, step: int, record: Mapping[str, Any]) -> None:
        """Add the metrics of a step. In metrics.jsonl, a value that is not finite is None."""
        for key in ("train/accuracy", "train/entropy", "clip/active_fraction"):
            value = record.get(key)
            if value is not None and math.isfinite(value):
                self._history.setdefault(key, []).append(value)
        known = {key: value for key, value in record.items() if value is not None}
        if held_out := eval_metrics_text(known):
            self._held_out.append((step, held_out))
        self._flagged = flagged_shares(known)
        if "perf/sampled_tokens_per_s" in known:
            self._throughput = (known["perf/sampled_tokens_per_s"], known["perf/trained_tokens_per_s"])
        self._skipped += int(known.get("optim/skipped_updates", 0))

    def _render(self) -> Panel:
        """Return the panel; a request to stop appears at once, and not after the step that it waits for."""
        lines: list[RenderableType] = [self._progress, self._grid]
        if self._running and self._signals is not None and self._signals.requested:
            lines.append(Text(STOPPING, style="yellow"))
        return Panel(Group(*lines), title="bandpo train", title_align="left")

    def _metric_grid(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        for key, label, form in (
            ("train/accuracy", "training accuracy", "{:.3f}"),
            ("train/entropy", "entropy", "{:.3f} nats"),
            ("clip/active_fraction", "clipped tokens", "{:.2%}"),
        ):
            values = self._history.get(key, [])
            grid.add_row(
                label, form.format(values[-1]) if values else "…", Text(sparkline(values), style="cyan")
            )
        if self._throughput is not None:
            sampled, trained = self._throughput
            grid.add_row("tokens per second", f"{sampled:,.0f} sampled", Text(f"{trained:,.0f} trained"))
        if self._flagged:
            grid.add_row("completions", "", Text(self._flagged, style="yellow"))
        if self._skipped:
            grid.add_row("updates skipped", str(self._skipped), Text("not finite", style="yellow"))
        for heading, (step, metrics) in _first_and_last(self._held_out):
            grid.add_row(heading, f"step {step}", Text(metrics))
        grid.add_row("a sample", "", self._sample)
        return grid


def _first_and_last(held_out: Sequence[tuple[int, str]]) -> list[tuple[str, tuple[int, str]]]:
    """Return the first and the last evaluation, (step, metrics), each with its heading in the panel."""
    if len(held_out) < 2:
        return [("held-out", each) for each in held_out]
    return [("held-out before", held_out[0]), ("held-out now", held_out[-1])]


def _sample_text(rollout: Rollout) -> Text:
    """Return prompt, completion and verdict in one line."""
    style = "green" if rollout.grade.correct else "red"
    return Text.assemble(
        _one_line(rollout.prompt, 0, 60),
        _one_line(rollout.text, 60, 60),
        "  ",
        (rollout.grade.verdict, style),
    )


def _one_line(text: str, head: int, tail: int) -> str:
    """Return the beginning and the end of `text` without its line breaks: a worked answer's end is what counts."""
    flat = " ".join(text.split("\n"))
    return flat if len(flat) <= head + tail else f"{flat[:head]} … {flat[-tail:]}".strip()
