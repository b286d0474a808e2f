"""Console view of a training run: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
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

from bandpo_cli.cli.console import PLAIN_LINES, ExperimentView, print_line
from bandpo_cli.cli.signals import STOPPING, StopSignals
from bandpo_cli.metric_names import SCORE
from bandpo_cli.rank_process import launched_ranks
from bandpo_cli.storage.checkpoints import model_checkpoints
from bandpo_cli.storage.run_folder import RunFolder, resume_command
from bandpo_cli.types import Rollout, RunInfo, RunResult, StepReport

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
"""Text for the phase `close` of a run that MLflow records."""


class TrainView(ExperimentView):
    """Console view of a training run: a live panel on a terminal, plain lines elsewhere."""

    spinners = SPINNERS

    def __init__(self, console: Console, runs_dir: Path, signals: StopSignals | None = None) -> None:
        super().__init__(console, runs_dir)
        self._signals = signals
        self._progress: TrainProgress | None = None

    def start(self, info: RunInfo) -> None:
        """Print the notes and the run folder, and show the panel.

        On a terminal the panel shows a request to stop too, in place of the signal handlers.
        """
        self.spinners = SPINNERS | ({"close": CLOSE_WITH_MLFLOW} if info.config["tracking"]["mlflow"] else {})
        self.print_start(info.folder, "run folder", info.notes)
        self._progress = TrainProgress(info.steps, self._signals)
        self._progress.restore(RunFolder(info.folder).read_metrics())  # of the steps before a resume
        if self._signals is not None:
            self._signals.silent = self.console.is_terminal
        self.show_progress(self._progress.panel, self._progress.line)

    def phase(self, name: str) -> None:
        """Show what the run is doing: beside the panel's bar, or with a spinner before and after it."""
        if name == "close":
            self.stop_progress()
        if self._progress is not None:
            self._progress.show_phase(PHASES.get(name, ""))
        else:
            super().phase(name)

    def step(self, report: StepReport) -> None:
        """Show one step."""
        if self._progress is not None:
            self._progress.add(report)
            self.update_progress()

    def stop_progress(self) -> None:
        """Leave the last state of the panel on a terminal."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        super().stop_progress()
        if self._signals is not None:
            self._signals.silent = False

    def end(self, result: RunResult) -> None:
        """Print why a run did not finish, and how to resume it."""
        self.spinner.show(None)
        if result.status == "FINISHED":
            return
        sender = None if self._signals is None else self._signals.sender
        how = "failed" if result.status == "FAILED" else f"stopped by {sender or 'request'}"
        after = f" after step {result.records[-1]['step']}" if result.records else " before the first step"
        print_line(self.console, f"{how}{after}; its files are in {result.folder}")
        if result.status == "KILLED" or model_checkpoints(RunFolder(result.folder)):
            again = resume_command("train", result.folder, self.runs_dir)
            ranks = launched_ranks()
            print_line(self.console, f"resume with: {again}{'' if ranks is None else f' --nproc {ranks}'}")


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
        if match := SCORE.fullmatch(key):
            by_set.setdefault(match[1], []).append(f"{match[2]}@{match[3]} {value:.3f}")
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


class TrainProgress:
    """Progress of a run: a panel with time left, curves and the latest completion, or a line every few steps."""

    def __init__(self, steps: int, signals: StopSignals | None = None) -> None:
        self._steps, self._signals = steps, signals
        self._stride = max(1, steps // PLAIN_LINES)
        self._report: StepReport | None = None
        self._history: dict[str, list[float]] = {}
        self._held_out: list[tuple[int, str]] = []
        self._sample = Text("")
        self._throughput: tuple[float, float] | None = None
        self._flagged = ""
        self._skipped = 0
        self._running = True
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[phase]}", style="dim"),
            expand=True,
        )
        self._task = self._bar.add_task("train", total=steps, phase="")
        self._grid = self._metric_grid()

    def restore(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Show the metrics of earlier steps, from metrics.jsonl. The time left counts from the steps after them."""
        for record in records:
            self._add_metrics(int(record["step"]), record)
        if records:
            self._bar.reset(self._task, total=self._steps, completed=int(records[-1]["step"]))
        self._grid = self._metric_grid()

    def show_phase(self, text: str) -> None:
        """Show the phase beside the bar: a step of a large model takes minutes."""
        self._bar.update(self._task, phase=text)

    def add(self, report: StepReport) -> None:
        """Add a step."""
        self._report = report
        self._add_metrics(report.step, report.record)
        if report.sample is not None:
            self._sample = _sample_text(report.sample)
        self._bar.update(self._task, completed=report.step)
        self._grid = self._metric_grid()

    def stop(self) -> None:
        """Stop the clock; the panel shows its last state."""
        self.show_phase("")
        self._bar.stop_task(self._task)
        self._running = False

    def line(self) -> str | None:
        """Return a line about the last step if it is every n-th, the last of the run, or one with an evaluation."""
        if self._report is None:
            return None
        step, record = self._report.step, self._report.record
        held_out = eval_metrics_text(record)
        if step % self._stride and not held_out and step != self._steps:
            return None
        parts = [f"step {step}/{self._steps}"]
        if step:
            clipped = record.get("clip/active_fraction", math.nan)
            parts.append(
                f"training accuracy {record['train/accuracy']:.3f}  entropy {record['train/entropy']:.3f} nats  "
                f"clipped {clipped:.2%}  {record['time/step']:.2f} s/step"
            )
        if skipped := record.get("optim/skipped_updates"):
            parts.append(f"updates skipped {skipped:.0f}")
        parts += filter(None, [flagged_shares(record), held_out and f"held-out {held_out}"])
        return "  ".join(parts)

    def panel(self) -> Panel:
        """Return the panel; a request to stop appears at once, and not after the step that it waits for."""
        lines: list[RenderableType] = [self._bar, self._grid]
        if self._running and self._signals is not None and self._signals.requested:
            lines.append(Text(STOPPING, style="yellow"))
        return Panel(Group(*lines), title="bandpo train", title_align="left")

    def _add_metrics(self, step: int, record: Mapping[str, Any]) -> None:
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
        return [("held-out", evaluation) for evaluation in held_out]
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
