"""Tables around a training run: the statement of its settings, the memory estimate, the profile of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bandpo_cli.cli.console import make_table, print_line
from bandpo_cli.config.hardware import dtype_on
from bandpo_cli.config.layers import to_yaml
from bandpo_cli.config.run import RunConfig
from bandpo_cli.datasets import BUNDLED_MODELS
from bandpo_cli.errors import UserError, plural
from bandpo_cli.experiments.memory_check import (
    GIB,
    describe_memory,
    memory_of_task,
    memory_report,
    saving_advice,
)
from bandpo_cli.tasks.task import Task

if TYPE_CHECKING:
    from bandpo_cli.experiments.profile import ProfileCallback


def describe_model(config: RunConfig) -> str:
    """Return the model, its dtype and its adapters."""
    model = config.model
    name = "the bundled model (ships with the package)" if model.path in BUNDLED_MODELS else model.path
    if model.device == "auto" and model.dtype == "auto":  # torch is not imported yet to look for a GPU
        dtype = f"{dtype_on('auto', on_gpu=True)} on a GPU, else {dtype_on('auto', on_gpu=False)}"
    else:
        dtype = dtype_on(model.dtype, on_gpu=model.device.startswith("cuda"))
    return f"{name}, {dtype}{'' if model.lora is None else f', LoRA {model.lora.describe()}'}"


def run_statement(config: RunConfig, task: Task, ranks: int = 1) -> list[tuple[str, str]]:
    """Return the statement as (heading, text) rows: model, task, method, and the batch arithmetic.

    Args:
        ranks: number of processes that share the work.
    """
    sampling, optim, evaluation = config.sampling, config.optim, config.evaluation
    completions = sampling.prompts * sampling.samples
    refills = f"zero-variance groups sampled again up to {sampling.dynamic_batches - 1} times, "
    rows = {
        "model": describe_model(config),
        "task": f"{config.task.title}, {plural(len(task.train_problems()), 'training problem')}, "
        f"answers of at most {sampling.max_tokens} tokens, T = {sampling.temperature:g}",
        "method": "\n".join(filter(None, [config.bounds.describe(), config.bounds.source()])),
        "each step": f"{sampling.prompts} prompts × {sampling.samples} = {completions:,} completions "
        f"(≤ {completions * sampling.max_tokens:,} tokens), {refills if sampling.dynamic else ''}"
        f"{plural(optim.updates, 'update')} of {completions // optim.updates:,}",
        "the run": f"{plural(config.steps, 'step')} = {plural(config.steps * optim.updates, 'update')} on "
        f"{config.steps * completions:,} completions, lr {optim.lr:g}, seed {config.seed}",
    }
    if sampling.max_lag:
        rows["sampling"] = "one step ahead: an engine process samples while the trainer updates"
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


def print_statement(
    console: Console, rows: Sequence[tuple[str, str]], notes: Sequence[str] = (), warnings: Sequence[str] = ()
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
        print_line(console, warning, "warning:", "yellow")


def print_dry_run(console: Console, config: RunConfig, task: Task, ranks: int = 1) -> None:
    """Print all settings, a trial of every grader, the memory estimate, and the first prompt.

    A mistake in a custom function is reported before torch is imported.
    """
    from bandpo_cli.experiments.trials import first_prompt, try_graders

    console.print(to_yaml(config), markup=False, highlight=False)
    for trial in try_graders(config, task):
        problem, grade = trial.problem, trial.grade
        dummy = f"the dummy completion {trial.completion!r:.80} for the reference {problem.answer!r:.80}"
        reward = f"reward {grade.reward:g}" if grade.has_reward else "without a reward (None or NaN)"
        line = f"{problem.grader} grades {dummy} as {grade.verdict}, {reward}"
        print_line(console, line, "grader")
        for warning in trial.warnings:
            print_line(console, warning, "warning:", "yellow")
    if print_memory(console, config, task, ranks):
        encoder, problem, warnings = first_prompt(config, task)
        ids, most = encoder.encode([problem])[0].token_ids, config.sampling.max_prompt_tokens
        pieces, count = [*encoder.pieces(ids)], f"{len(ids):,} tokens (sampling.max_prompt_tokens = {most:,})"
        print_line(console, f"of problem {problem.id}, {count}:", "prompt")
        styled = [(text, "" if token is None else "reverse") for text, token in pieces]
        console.print(Text.assemble(*styled), soft_wrap=True)
        special = ", ".join(f"{text} ({token})" for text, token in pieces if token is not None)
        print_line(console, special or "none", "special tokens")
        if arguments := config.model.chat_template_kwargs:
            effect = encoder.effect_of_arguments(problem)
            changed = "these lines of it:" if effect else "nothing in it: these are the template's own values"
            line = f"model.chat_template_kwargs = {arguments} changes {changed}"
            print_line(console, "\n".join([line, *effect]), "template")
        for warning in warnings:
            print_line(console, warning, "warning:", "yellow")


def print_memory(console: Console, config: RunConfig, task: Task | None = None, ranks: int = 1) -> bool:
    """Print the memory estimate by component, and whether the run fits the GPU or, without a GPU, this machine.

    With several ranks it is the estimate of each. Return False if there is none because the model cannot be read.
    """
    try:
        estimate = memory_report(config, ranks)
    except UserError as error:
        print_line(console, str(error), "no estimate of memory:", "yellow")
        return False
    if not estimate.fits:
        config, estimate = memory_of_task(config, task, ranks)
    over = "" if estimate.ranks == 1 else f", a rank of {estimate.ranks}"
    table = make_table(f"{estimate.parameters / 1e6:,.1f}M parameters{over}", ">GiB", "while")
    phases = {
        "always": estimate.always,
        "updating": estimate.update,
        "reducing gradients": {k: v for k, v in estimate.reduction.items() if k not in estimate.update},
        "sampling": estimate.sampling,
        "on the engine's GPU": estimate.engine_gpu,
    }
    for phase, components in phases.items():
        for name, size in components.items():
            table.add_row(name, f"{size / GIB:,.2f}", phase)
    console.print(table, highlight=False)
    print_line(console, f"{describe_memory(estimate)}: {'fits' if estimate.fits else 'too much'}")
    if config.model.lora is not None:
        without = {"model": config.model.model_copy(update={"lora": None})}
        peak = memory_report(config.model_copy(update=without), ranks).peak
        trained = f"{estimate.trained / 1e6:,.1f}M of {estimate.parameters / 1e6:,.1f}M parameters"
        line = f"trains {trained}; training all weights takes {peak / GIB:,.1f} GiB at the peak"
        print_line(console, line, "LoRA")
    if not estimate.fits:
        print_line(console, saving_advice(config, estimate), "warning:", "yellow")
    return True


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


def print_profile(console: Console, profile: ProfileCallback) -> None:
    """Print seconds and share per phase, the mean of the traced steps, and where to open the trace.

    Parts of a phase are indented; `other` is the time of a step outside of all phases.
    """
    count, first, last = len(profile.steps), profile.steps[0], profile.steps[-1]
    on_gpu = any(phase.gpu_seconds for phase in profile.phases.values())
    span = f"step {first}" if count == 1 else f"steps {first} to {last}"
    table = make_table(span, ">s/step", ">share", *([">GPU s/step"] if on_gpu else []), ">calls/step")

    def add(label: str, seconds: float, *more: str) -> None:
        table.add_row(label, f"{seconds / count:.3f}", f"{seconds / profile.seconds:.1%}", *more)

    for key, label in PROFILE_LABELS.items():
        if (phase := profile.phases.get(key)) is not None:
            on_device = [f"{phase.gpu_seconds / count:.3f}"] if on_gpu else []
            add("  " * key.count("/") + label, phase.seconds, *on_device, f"{phase.calls / count:g}")
    inside = sum(phase.seconds for key, phase in profile.phases.items() if "/" not in key)
    add("other", max(0.0, profile.seconds - inside))
    add("complete step", profile.seconds)
    console.print(table, highlight=False)
    print_line(console, f"{profile.trace}; open it at https://ui.perfetto.dev (Open trace file)", "trace")
