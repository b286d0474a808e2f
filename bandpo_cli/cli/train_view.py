"""Console view of a training run: a live panel on a terminal, plain lines elsewhere; and the summary at its end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import progress
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from bandpo_cli.callbacks import RunInfo, RunResult, StepReport
from bandpo_cli.cli.console import LINE_SECONDS, PLAIN_LINES, Console, ExperimentView, make_table
from bandpo_cli.cli.signals import StopSignals
from bandpo_cli.config.run import RunConfig, TrackingConfig, dtype_on
from bandpo_cli.errors import excerpt, plural
from bandpo_cli.experiments.monitor import destroyed_policy
from bandpo_cli.metric_names import LABELS, PHASES, SCORE, has_nonbinary_rewards
from bandpo_cli.processes.ranks import launched_ranks
from bandpo_cli.registries import BUNDLED_MODELS
from bandpo_cli.storage.checkpoints import model_checkpoints
from bandpo_cli.storage.run_folder import RunFolder, shell_command
from bandpo_cli.storage.run_record import last_change
from bandpo_cli.tasks.task import Task
from bandpo_cli.tracking.sender import tracker_rows
from bandpo_cli.types import Rollout

if TYPE_CHECKING:
    from bandpo_cli.experiments.monitor import ProfileCallback

CURVES = ("train/reward", "train/accuracy", "train/entropy", "clip/active_fraction")
"""The metrics of the panel; the reward only if rewards are not just 0 and 1."""

FLAGGED = (
    ("grade/malformed_fraction", 0.2, "without a readable answer"),
    ("grade/timeout_fraction", 0.0, "timed out"),
    ("grade/error_fraction", 0.0, "grader errors"),
    ("grade/not_applicable_fraction", 0.2, "without a reward (None or NaN)"),
    ("train/truncated_fraction", 0.2, "truncated"),
)
"""Shares of completions that are shown above a threshold. Answers that are unreadable or truncated are common until the
model has learned the form of an answer."""


def describe_model(config: RunConfig) -> str:
    """Return the model, its dtype and its adapters."""
    model = config.model
    name = "the bundled model (ships with the package)" if model.path in BUNDLED_MODELS else model.path
    if model.device == "auto" and model.dtype == "auto":  # torch is not imported yet to look for a GPU
        dtype = f"{dtype_on('auto', on_gpu=True)} on a GPU, else {dtype_on('auto', on_gpu=False)}"
    else:
        dtype = dtype_on(model.dtype, on_gpu=model.device.startswith("cuda"))
    return f"{name}, {dtype}{'' if model.lora is None else f', LoRA {model.lora.describe()}'}"


def settings_rows(config: RunConfig, task: Task, ranks: int = 1) -> list[tuple[str, str]]:
    """Return what a run of `ranks` processes does as (heading, text) rows: model, task, method, batch arithmetic."""
    sampling, optim, evaluation = config.sampling, config.optim, config.evaluation
    completions = sampling.prompts * sampling.samples
    refills = f"zero-variance groups sampled again up to {sampling.dynamic_batches - 1} times, "
    rows = {
        "model": describe_model(config),
        "task": f"{config.task.title}, {plural(len(task.train_problems()), 'training problem')}, "
        f"answers of at most {sampling.max_tokens:,} tokens, T = {sampling.temperature:g}",
        "method": "\n".join(filter(None, [config.bounds.describe(), config.bounds.source()])),
        "each step": f"{sampling.prompts} prompts × {sampling.samples} = {completions:,} completions "
        f"(≤ {completions * sampling.max_tokens:,} tokens), {refills if sampling.dynamic else ''}"
        f"{plural(optim.updates, 'update')} of {completions // optim.updates:,}",
        "the run": f"{plural(config.steps, 'step')} = {plural(config.steps * optim.updates, 'update')} on "
        f"{config.steps * completions:,} completions, lr {optim.lr:g}, seed {config.seed}",
    }
    if sampling.max_lag:
        ahead = "one step ahead" if sampling.max_lag == 1 else f"{sampling.max_lag} steps ahead"
        when = "while the trainer updates" if sampling.engine_process else "before the updates of each step"
        most = sampling.max_lag * completions * (sampling.dynamic_batches if sampling.dynamic else 1)
        tokens = most * sampling.max_tokens
        size = f"{(12 * tokens + 128 * most) / 2**20:,.1f} MiB of memory and of each checkpoint"
        rows["sampling"] = f"{ahead}, {when}; the queue has ≤ {tokens:,} tokens, about {size}"
    if ranks > 1:
        fewest, more = divmod(sampling.prompts, ranks)
        share = f"{fewest} or {fewest + 1}" if more else f"{fewest}"
        rows["ranks"] = f"{ranks} processes, {share} of a step's {sampling.prompts} prompts each"
    if evaluation.every:
        heldout = task.heldout_sets().items()
        counts = {label: len(problems[: evaluation.problems]) for label, problems in heldout}
        sets = ", ".join(f"{plural(count, 'problem')} of '{label}'" for label, count in counts.items())
        if list(counts) == [config.task.name]:
            sets = plural(counts[config.task.name], "held-out problem")
        samples = f"{plural(evaluation.samples, 'completion')} per problem"
        rows["evaluation"] = f"{sets}, {samples}, every {plural(evaluation.every, 'step')}"
    return [*rows.items()]


class TrainView(ExperimentView):
    """Console view of a training run: a panel with time left, curves and the latest completion, or plain lines."""

    def __init__(self, console: Console, runs_dir: Path, signals: StopSignals | None = None) -> None:
        super().__init__(console, runs_dir)
        self.spinners = {**self.spinners, "close": "writing the plots …"}
        self._signals = signals or StopSignals()
        self._report: StepReport | None = None
        self._history: dict[str, list[float]] = {key: [] for key in CURVES}
        self._held_out: list[tuple[int, str]] = []
        self._last: Mapping[str, Any] = {}
        self._skipped, self._since_line = 0, 0.0
        # The curve without information: the reward that is the accuracy, or the accuracy of rewards that never reach 1.
        self._hidden = "train/reward"
        self._bar = progress.Progress(
            "step",
            progress.MofNCompleteColumn(),
            progress.BarColumn(bar_width=None),
            progress.TimeElapsedColumn(),
            "left",
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[phase]}", style="dim"),
            expand=True,
        )

    def start(self, info: RunInfo) -> None:
        """Print the notes and the folder, and show the panel, which shows a request to stop too on a terminal."""
        if places := ", ".join(TrackingConfig.model_construct(**info.config["tracking"]).names):
            finishing = f"finishing the record in {places.replace('mlflow', 'MLflow')} …"
            self.spinners = {**self.spinners, "close": f"writing the plots, {finishing}"}
        self.print_start(info.folder, "run folder", info.notes)
        if info.first_step > 0:
            for record in RunFolder(info.folder).read_metrics():
                self._add_metrics(record)
            begin = last_change(info.folder)[0]
            self._held_out = [evaluation for evaluation in self._held_out if evaluation[0] > begin]
        self._steps, done = info.steps, self._last.get("step", 0)
        self._task = self._bar.add_task("train", total=info.steps, completed=done, phase="")
        self._signals.silent = self.console.is_terminal
        self.show_progress()

    def phase(self, name: str) -> None:
        """Show what the run is doing: beside the panel's bar, or with a spinner before and after it."""
        if name == "close":
            self.stop_progress()
        if self.in_progress:
            self._bar.update(self._task, phase=PHASES.get(name, ""))
            if name == "eval" and not self._last and not self.console.is_terminal:
                self.console.print_line("evaluating the policy before the first step …")
        else:
            super().phase(name)

    def step(self, report: StepReport) -> None:
        self._report = report
        self._add_metrics(report.record)
        self._bar.update(self._task, completed=report.step)
        self.update_progress()

    def stop_progress(self) -> None:
        """Stop the clock, and leave the last state of the panel on a terminal."""
        if self.in_progress:
            self._bar.update(self._task, phase="")
            self._bar.stop_task(self._task)
        super().stop_progress()
        self._signals.silent = False

    def end(self, result: RunResult) -> None:
        """Print why a run did not finish, and how to resume it."""
        self.spin(None)
        if result.status == "FINISHED":
            return
        how = "failed" if result.status == "FAILED" else f"stopped by {self._signals.sender or 'request'}"
        after = f" after step {result.records[-1]['step']}" if result.records else " before the first step"
        self.console.print_line(f"{how}{after}; its files are in {result.folder}")
        if result.status == "KILLED" or model_checkpoints(RunFolder(result.folder)):
            nproc = "" if (ranks := launched_ranks()) is None else f" --nproc {ranks}"
            again = shell_command("train --resume", result.folder, self.runs_dir)
            self.console.print_line(f"resume with: {again}{nproc}")

    def line(self) -> str | None:
        """Return a line about every n-th step, the last one, those with an evaluation, and a minute after a line."""
        assert self._report is not None
        step, record = self._report.step, self._report.record
        held_out = eval_metrics_text(record)
        self._since_line += record.get("time/step", 0.0)
        is_nth = step % max(1, self._steps // PLAIN_LINES) == 0
        if not (is_nth or held_out or step == self._steps or self._since_line >= LINE_SECONDS):
            return None
        self._since_line = 0.0
        clipped, skipped = record.get("clip/active_fraction", math.nan), record.get("optim/skipped_updates")
        has_reward, has_accuracy = self._hidden != "train/reward", step and self._hidden != "train/accuracy"
        accuracy = f"training accuracy {record['train/accuracy']:.3f}" if has_accuracy else ""
        parts = [
            f"step {step:>{len(str(self._steps))}}/{self._steps}",
            f"reward {record['train/reward']:.3f}" if has_reward and "train/reward" in record else "",
            "training answers not graded" if is_not_graded(record) else accuracy,
            f"entropy {record['train/entropy']:.3f} nats  clip fraction {clipped:.2%}  {record['time/step']:.2f} s/step"
            if step
            else "",
            f"updates skipped {skipped:.0f}" if skipped else "",
            flagged_shares(record),
            held_out and f"held-out {held_out}",
        ]
        return "  ".join(filter(None, parts))

    def render(self) -> RenderableType:
        """Return the panel; a request to stop appears at once, and not after the step that it waits for."""
        grid = Table.grid(padding=(0, 2))
        for key in CURVES:
            if key == self._hidden:
                continue
            values = self._history[key]
            last = LABELS[key].text(values[-1]) if values else "…"
            grid.add_row(LABELS[key].name, last, Text(sparkline(values), style="cyan"))
        if "perf/sampled_tokens_per_s" in self._last:
            sampled, trained = (self._last[f"perf/{kind}_tokens_per_s"] for kind in ("sampled", "trained"))
            grid.add_row("tokens per second", f"{sampled:,.0f} sampled", Text(f"{trained:,.0f} trained"))
        if flagged := flagged_shares(self._last):
            grid.add_row("completions", "", Text(flagged, style="yellow"))
        if self._skipped:
            grid.add_row("updates skipped", str(self._skipped), Text("not finite", style="yellow"))
        first_and_last = self._held_out[:1] + self._held_out[1:][-1:]
        headings = ("held-out before", "held-out now") if len(first_and_last) > 1 else ("held-out",)
        for heading, (step, metrics) in zip(headings, first_and_last, strict=False):
            grid.add_row(heading, f"step {step}", Text(metrics))
        sample = None if self._report is None else self._report.sample
        grid.add_row("a sample", "", "" if sample is None else sample_text(sample))
        requested = self.in_progress and self._signals.is_requested()
        stopping = [Text(self._signals.request, style="yellow")] if requested else []
        return Panel(Group(self._bar, grid, *stopping), title="bandpo train", title_align="left")

    def _add_metrics(self, record: Mapping[str, Any]) -> None:
        """Add the metrics of a step. In metrics.jsonl, a value that is not finite is None."""
        known = {key: value for key, value in record.items() if value is not None}
        if is_not_graded(known):
            known.pop("train/accuracy", None)
        for key, values in self._history.items():
            if math.isfinite(value := known.get(key, math.nan)):
                values.append(value)
        if held_out := eval_metrics_text(known):
            self._held_out.append((known["step"], held_out))
        if self._hidden and has_nonbinary_rewards(known):
            self._hidden = "" if any(self._history["train/accuracy"]) else "train/accuracy"
        self._skipped += int(known.get("optim/skipped_updates", 0))
        self._last = known


def is_not_graded(record: Mapping[str, Any], rates: str = "grade/{}_fraction", error: str = "error") -> bool:
    """Return whether no answer has a verdict, such as in an outage of a judge, so that there is no accuracy."""
    return sum(record.get(rates.format(kind)) or 0.0 for kind in ("timeout", error)) >= 1


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return values as a line of block characters, scaled to their range, averaged down to `width`."""
    if not values:
        return ""
    size = min(width, len(values))
    edges = [round(i * len(values) / size) for i in range(size + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join("▁▂▃▄▅▆▇█"[round((mean - low) / span * 7) if span > 0 else 0] for mean in means)


def eval_metrics_text(record: Mapping[str, float]) -> str:
    """Return an evaluation's metrics in one line, such as `mean@16 0.31 · pass@4 0.62`; "" when the step had none.

    The mean reward is the first metric unless it equals mean@n, and the only one if no completion is correct. The
    metrics of several sets follow the set's label.
    """
    by_set: dict[str, list[str]] = {}
    for key, value in record.items():
        if match := SCORE.fullmatch(key):
            metrics, reward = by_set.setdefault(match[1], []), record.get(f"eval/{match[1]}/reward")
            if match[2] == "mean" and reward is not None and reward != value:
                metrics.append(f"reward {reward:.3f}")
            unknown = is_not_graded(record, f"eval/{match[1]}/{{}}_rate", "grader_error")
            if unknown or value or reward in (None, value):
                metrics.append(f"{match[2]}@{match[3]} {'not graded' if unknown else f'{value:.3f}'}")
    if len(by_set) == 1:
        return " · ".join(*by_set.values())
    return "  ".join(f"{label}: {' · '.join(metrics)}" for label, metrics in by_set.items())


def flagged_shares(record: Mapping[str, float]) -> str:
    """Return the shares of `FLAGGED` completions that are above their thresholds."""
    shares = ((record.get(key, 0.0), threshold, words) for key, threshold, words in FLAGGED)
    return ", ".join(f"{share:.1%} {words}" for share, threshold, words in shares if share > threshold)


def sample_text(rollout: Rollout) -> Text:
    """Return the question → the beginning and the end of the completion → reward and verdict, in one line."""
    question, text = excerpt(rollout.problem.label, 80), rollout.text.replace("\n", " ")
    if len(text) > 120:
        text = f"{text[:60]} … {text[-60:]}"
    grade = rollout.grade
    reward = "" if not grade.has_reward or grade.reward in (0, 1) else f"reward {grade.reward:.3f}, "
    verdict = (grade.verdict, "green" if grade.correct else "red")
    return Text.assemble((question, "dim"), " → ", text, " → ", reward, verdict)


def print_summary(console: Console, config: RunConfig, result: RunResult, first_step: int = 0) -> None:
    """Print the metrics of a finished run, its folder, and how to open it in MLflow.

    This process has done the steps from `first_step` on. A value from before a fork that changed what it measures is
    not compared with later ones.
    """
    changed_at, changed = last_change(result.folder)
    steps = [record for record in result.records if "train/accuracy" in record]
    seconds = sum(record["time/step"] for record in result.records if record["step"] >= first_step)
    earlier = sum(record["step"] < first_step for record in steps)
    done = f"{plural(len(steps) - earlier, 'step')} in {seconds:.0f} s"
    done += f", after {plural(earlier, 'earlier step')}" if earlier else ""
    if "task." in changed:
        steps = [record for record in steps if record["step"] > changed_at]
    times = Counter[str]()
    for record in result.records:
        times.update({key: value for key, value in record.items() if key.startswith("time/")})
    graded = [record for record in steps if not is_not_graded(record)]
    held_out = [(record["step"], text) for record in result.records if (text := eval_metrics_text(record))]
    compared = [(step, text) for step, text in held_out if step > changed_at] or held_out
    lines = [f"step {step:>4}  {text}" for step, text in [*compared[:1], *compared[1:][-1:]]]
    if len(compared) == 1 < len(held_out):
        lines.append(f"not comparable with step {held_out[0][0]}, since the fork changed {changed}")
    rows = [("done", done), ("held-out", "\n".join(lines))]
    hidden = "reward"
    if any(map(has_nonbinary_rewards, result.records)):
        hidden = "" if any(record["train/accuracy"] for record in steps) else "training"
    for heading, key, form in (
        ("reward", "train/reward", "{:.3f} → {:.3f}"),
        ("training", "train/accuracy", "accuracy {:.3f} → {:.3f}"),
        ("entropy", "train/entropy", "{:.3f} → {:.3f} nats per token"),
    ):
        known = steps if key == "train/entropy" else graded
        values = [value for record in known if (value := record.get(key)) is not None]
        if values and heading != hidden:
            rows.append((heading, form.format(values[0], values[-1])))
    if ungraded := len(steps) - len(graded):
        line = f"the answers of {ungraded} of {len(steps)} steps, which have no accuracy"
        rows.append(("not graded", line))
    rows.append(("a step", phases_text(times, sum("time/update" in record for record in result.records))))
    rows += [("run folder", str(result.folder)), ("plots", str(result.folder / "plots"))]
    rows += tracker_rows(config.tracking, result.folder)
    console.print_rows(rows, 10)
    console.print_warnings(filter(None, [destroyed_policy(config, result.records)]))


def phases_text(times: Mapping[str, float], steps: int) -> str:
    """Return share and seconds per trained step of the phases, the longest first, in lines of three; "" without steps.

    `times` are the sums of the metrics `time/…` of all steps. Phases below 0.5% are a part of `other`.
    """
    if not steps or not (seconds := times.get("time/step", 0.0)):
        return ""
    known = {label: times.get(f"time/{key}", 0.0) for key, label in PHASES.items()}
    shown = sorted((item for item in known.items() if item[1] >= 0.005 * seconds), key=lambda item: -item[1])
    if (other := seconds - sum(value for _, value in shown)) >= 0.005 * seconds:
        shown.append(("other", other))
    parts = [f"{label} {value / seconds:.0%} ({value / steps:.2g} s)" for label, value in shown]
    return "\n".join(" · ".join(parts[start : start + 3]) for start in range(0, len(parts), 3))


def print_profile(console: Console, profile: ProfileCallback) -> None:
    """Print seconds and share per phase and its parts, indented; `other` is the time outside of all phases."""
    count, first, last = len(profile.steps), profile.steps[0], profile.steps[-1]
    on_gpu = any(phase.gpu_seconds for phase in profile.phases.values())
    span = f"step {first}" if count == 1 else f"steps {first} to {last}"
    table = make_table(span, ">s/step", ">share", *([">GPU s/step"] if on_gpu else []), ">calls/step")

    def add(label: str, seconds: float, *more: str) -> None:
        table.add_row(label, f"{seconds / count:.3f}", f"{seconds / profile.seconds:.1%}", *more)

    for key, label in PHASES.items():
        if (phase := profile.phases.get(key)) is not None:
            on_device = [f"{phase.gpu_seconds / count:.3f}"] if on_gpu else []
            add("  " * key.count("/") + label, phase.seconds, *on_device, f"{phase.calls / count:g}")
    inside = sum(phase.seconds for key, phase in profile.phases.items() if "/" not in key)
    add("other", max(0.0, profile.seconds - inside))
    add("complete step", profile.seconds)
    console.print(table, highlight=False)
    console.print_line(f"{profile.trace}; open it at https://ui.perfetto.dev (Open trace file)", "trace")
