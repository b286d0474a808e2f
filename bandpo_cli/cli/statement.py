"""What a run is about to do, said before anything heavy loads."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from bandpo_cli.config.run import EMBEDDED_MODEL, RunConfig
from bandpo_cli.tasks.base import Task


def describe_model(config: RunConfig) -> str:
    """Name the model and what it computes in."""
    path = config.model.path
    name = "the embedded model (ships with the package)" if path == EMBEDDED_MODEL else path
    return f"{name}, {config.model.dtype}"


def run_statement(config: RunConfig, task: Task) -> list[tuple[str, str]]:
    """Return the statement as (heading, text) rows: model, task, method, and the batch arithmetic."""
    sampling, optim, evaluation = config.sampling, config.optim, config.evaluation
    completions = sampling.prompts * sampling.samples
    per_update = completions // optim.updates
    rows = [
        ("model", describe_model(config)),
        (
            "task",
            f"{config.task.name}, {len(task.train_problems()):,} problems, "
            f"answers of at most {sampling.max_tokens} tokens, T = {sampling.temperature:g}",
        ),
        ("method", config.bounds.describe()),
        (
            "a step",
            f"{sampling.prompts} prompts × {sampling.samples} = {completions:,} completions "
            f"(≤ {completions * sampling.max_tokens:,} tokens), {_refills(config)}"
            f"{optim.updates} {'update' if optim.updates == 1 else 'updates'} of {per_update:,}",
        ),
        (
            "the run",
            f"{config.steps} steps = {config.steps * optim.updates:,} updates on {config.steps * completions:,} "
            f"completions, lr {optim.lr:g}, seed {config.seed}",
        ),
    ]
    if evaluation.every:
        rows.append(
            (
                "evaluation",
                f"{_held_out(config, task)} × {evaluation.samples}, every {evaluation.every} steps",
            )
        )
    return rows


def _refills(config: RunConfig) -> str:
    sampling = config.sampling
    if not sampling.dynamic:
        return ""
    return f"groups without spread drawn anew up to {sampling.dynamic_batches - 1} times, "


def _held_out(config: RunConfig, task: Task) -> str:
    """Name the evaluation sets with the number of problems taken from each."""
    counts = {
        label: len(problems[: config.evaluation.problems]) for label, problems in task.heldout_sets().items()
    }
    if len(counts) == 1 and config.task.name in counts:
        return f"{counts[config.task.name]:,} held-out problems"
    return ", ".join(f"{count:,} of {label}" for label, count in counts.items())


def config_warnings(config: RunConfig) -> list[str]:
    """Return what the user should know before spending time on this run."""
    found = []
    if config.optim.updates == 1 and config.bounds.method != "none":
        found.append(
            "clipping can never bind: with one update a batch the ratio is always 1 and every method gives the same "
            "run; use --set optim.updates=4 or more to compare methods"
        )
    if config.optim.warmup_steps >= config.steps * config.optim.updates:
        found.append(
            f"the learning rate never gets to {config.optim.lr:g}: the warm-up is {config.optim.warmup_steps} updates, "
            f"the run {config.steps * config.optim.updates}"
        )
    return found


def print_statement(
    console: Console, rows: Sequence[tuple[str, str]], notes: Sequence[str], warnings: Sequence[str]
) -> None:
    """Print the statement, and the notes and cautions below it."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for heading, text in rows:
        grid.add_row(heading, text)
    for index, note in enumerate(notes):
        grid.add_row("" if index else "data", note)
    console.print(grid, highlight=False)
    for warning in warnings:
        console.print(f"[yellow]warning:[/yellow] {warning}", highlight=False, soft_wrap=True)
