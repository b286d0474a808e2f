"""Text around a training run: the statement of its settings, the memory table, the summary, the table of a profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bandpo_cli.cli.console import make_table, print_column, print_line, print_warning
from bandpo_cli.cli.train_view import eval_metrics_text
from bandpo_cli.config.hardware import dtype_on
from bandpo_cli.config.run import EMBEDDED_MODEL, ModelConfig, RunConfig
from bandpo_cli.errors import UserError, plural
from bandpo_cli.experiments.memory import (
    GIB,
    describe_memory,
    memory_report,
    saving_advice,
)
from bandpo_cli.tasks.task import Task
from bandpo_cli.tracking.store import tracking_store, ui_text
from bandpo_cli.types import RunResult

if TYPE_CHECKING:
    from bandpo_cli.experiments.profile import PhaseTime, StepProfile
    from bandpo_cli.models.memory import MemoryEstimate


def describe_model(config: RunConfig) -> str:
    """Return the model, its dtype and its adapters."""
    path, lora = config.model.path, config.model.lora
    name = "the bundled model (ships with the package)" if path == EMBEDDED_MODEL else path
    adapters = "" if lora is None else f", LoRA {lora.describe()}"
    return f"{name}, {_dtype_text(config.model)}{adapters}"


def _dtype_text(config: ModelConfig) -> str:
    """Return the dtype; for `auto` what it depends on, since torch is not imported yet to look for a GPU."""
    if config.device != "auto" or config.dtype != "auto":
        return dtype_on(config.dtype, on_gpu=config.device.startswith("cuda"))
    return f"{dtype_on('auto', on_gpu=True)} on a GPU, else {dtype_on('auto', on_gpu=False)}"


def run_statement(config: RunConfig, task: Task, ranks: int = 1) -> list[tuple[str, str]]:
    """Return the statement as (heading, text) rows: model, task, method, and the batch arithmetic.

    Args:
        ranks: number of processes that share the work.
    """
    sampling, optim, evaluation = config.sampling, config.optim, config.evaluation
    completions = sampling.prompts * sampling.samples
    per_update = completions // optim.updates
    rows = [
        ("model", describe_model(config)),
        (
            "task",
            f"{config.task.title}, {len(task.train_problems()):,} problems, "
            f"answers of at most {sampling.max_tokens} tokens, T = {sampling.temperature:g}",
        ),
        ("method", "\n".join(filter(None, [config.bounds.describe(), config.bounds.source()]))),
        (
            "each step",
            f"{sampling.prompts} prompts × {sampling.samples} = {completions:,} completions "
            f"(≤ {completions * sampling.max_tokens:,} tokens), {_refills(config)}"
            f"{plural(optim.updates, 'update')} of {per_update:,}",
        ),
        (
            "the run",
            f"{config.steps} steps = {config.steps * optim.updates:,} updates on {config.steps * completions:,} "
            f"completions, lr {optim.lr:g}, seed {config.seed}",
        ),
    ]
    if sampling.max_lag:
        rows.append(("sampling", "one step ahead: an engine process samples while the trainer updates"))
    if ranks > 1:
        fewest, more = divmod(sampling.prompts, ranks)
        share = f"{fewest} or {fewest + 1}" if more else f"{fewest}"
        rows.append(("ranks", f"{ranks} processes, {share} of a step's {sampling.prompts} prompts each"))
    if evaluation.every:
        sets = _held_out(config, task)
        rows.append(("evaluation", f"{sets} × {evaluation.samples}, every {evaluation.every} steps"))
    return rows


def _refills(config: RunConfig) -> str:
    """Return a clause about dynamic sampling; '' without it."""
    sampling = config.sampling
    if not sampling.dynamic:
        return ""
    return f"zero-variance groups sampled again up to {sampling.dynamic_batches - 1} times, "


def _held_out(config: RunConfig, task: Task) -> str:
    """Return the evaluation sets with the number of problems taken from each."""
    counts = {
        label: len(problems[: config.evaluation.problems]) for label, problems in task.heldout_sets().items()
    }
    if len(counts) == 1 and config.task.name in counts:
        return f"{counts[config.task.name]:,} held-out problems"
    return ", ".join(f"{count:,} of {label}" for label, count in counts.items())


def print_statement(
    console: Console, rows: Sequence[tuple[str, str]], notes: Sequence[str], warnings: Sequence[str]
) -> None:
    """Print the statement, and the notes and warnings below it."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for heading, text in rows:
        grid.add_row(heading, Text(text))
    for index, note in enumerate(notes):
        grid.add_row("" if index else "data", Text(note))
    console.print(grid, highlight=False)
    for warning in warnings:
        print_warning(console, warning)


def print_memory(console: Console, config: RunConfig, ranks: int = 1) -> bool:
    """Print the memory estimate by component, and whether the run fits the GPU or, without a GPU, this machine.

    With several ranks it is the estimate of each. Return False if there is none because the model cannot be read.
    """
    try:
        estimate = memory_report(config, ranks)
        full = None
        if config.model.lora is not None:
            all_weights = config.model.model_copy(update={"lora": None})
            full = memory_report(config.model_copy(update={"model": all_weights}), ranks)
    except UserError as error:
        print_line(console, str(error), "no estimate of memory:", "yellow")
        return False
    console.print(_memory_table(estimate), highlight=False)
    print_line(console, f"{describe_memory(estimate)}: {'fits' if estimate.fits else 'too much'}")
    if full is not None:
        trained = f"{estimate.trained / 1e6:,.1f}M of {estimate.parameters / 1e6:,.1f}M parameters"
        line = f"trains {trained}; training all weights takes {_number(full.peak, 1)} GiB at the peak"
        print_line(console, line, "LoRA")
    if not estimate.fits:
        print_warning(console, saving_advice(config, estimate))
    return True


def _memory_table(estimate: MemoryEstimate) -> Table:
    over = "" if estimate.ranks == 1 else f", a rank of {estimate.ranks}"
    table = make_table(f"{estimate.parameters / 1e6:,.1f}M parameters{over}", ">GiB", "while")
    for phase, components in (
        ("always", estimate.always),
        ("updating", estimate.update),
        ("reducing gradients", estimate.reduction),
        ("sampling", estimate.sampling),
        ("on the engine's GPU", estimate.engine_gpu),
    ):
        for name, size in components.items():
            if phase != "reducing gradients" or name not in estimate.update:
                table.add_row(name, _number(size), phase)
    return table


def _number(size: int, digits: int = 2) -> str:
    return f"{size / GIB:,.{digits}f}"


def print_summary(console: Console, config: RunConfig, result: RunResult) -> None:
    """Print the metrics of a finished run, its folder, and how to open it in MLflow."""
    records = result.records
    steps = [record for record in records if "train/accuracy" in record]
    evaluations = [record for record in records if eval_metrics_text(record)]
    seconds = sum(record["time/step"] for record in records)

    def line(heading: str, text: str) -> None:
        print_column(console, text, heading, 10)

    line("done", f"{len(steps)} steps in {seconds:.0f} s")
    if evaluations:
        for heading, record in (("held-out", evaluations[0]), ("", evaluations[-1])):
            line(heading, f"step {record['step']:>4}  {eval_metrics_text(record)}")
    if steps:
        first, last = steps[0], steps[-1]
        line("training", f"accuracy {first['train/accuracy']:.3f} → {last['train/accuracy']:.3f}")
    entropies = [entropy for record in steps if (entropy := record["train/entropy"]) is not None]
    if entropies:
        line("entropy", f"{entropies[0]:.3f} → {entropies[-1]:.3f} nats per token")
    line("run folder", str(result.folder))
    line("plots", str(result.folder / "plots"))
    if config.tracking.mlflow:
        store = tracking_store(config.tracking, result.folder.absolute().parent)
        line("MLflow", ui_text(result.folder, store))


PROFILE_LABELS = {
    "sample": "sampling",
    "grade": "grading",
    "logprobs": "old log-probs",
    "update": "updates",
    "update/forward": "forward",
    "update/backward": "backward",
    "update/optimizer": "optimizer",
    "sync": "weight sync",
    "record": "metrics and completions",
    "eval": "evaluation",
    "checkpoint": "checkpoint",
}
"""Text of the phases and their parts; parts that are not here have no row."""


def print_profile(console: Console, profile: StepProfile) -> None:
    """Print seconds and share per phase, the mean of the traced steps, and where to open the trace."""
    console.print(profile_table(profile), highlight=False)
    print_line(console, f"{profile.trace}; open it at https://ui.perfetto.dev (Open trace file)", "trace")


def profile_table(profile: StepProfile) -> Table:
    """Return the table. Parts of a phase are indented; `other` is the time of a step outside of all phases."""
    steps = profile.steps
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    on_gpu = any(item.gpu_seconds for item in profile.phases.values())
    table = make_table(span, ">s/step", ">share", *([">GPU s/step"] if on_gpu else []), ">calls/step")

    def add(label: str, seconds: float, phase: PhaseTime | None = None) -> None:
        gpu = [f"{phase.gpu_seconds / len(steps):.3f}" if phase else ""] if on_gpu else []
        calls = f"{phase.calls / len(steps):g}" if phase else ""
        table.add_row(label, f"{seconds / len(steps):.3f}", f"{seconds / profile.seconds:.1%}", *gpu, calls)

    for key, label in PROFILE_LABELS.items():
        if key in profile.phases:
            phase = profile.phases[key]
            add("  " * key.count("/") + label, phase.seconds, phase)
    inside = sum(phase.seconds for key, phase in profile.phases.items() if "/" not in key)
    add("other", max(0.0, profile.seconds - inside))
    add("complete step", profile.seconds)
    return table
