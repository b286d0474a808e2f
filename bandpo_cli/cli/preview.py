"""Previews of a training run: `--dry-run`, the memory estimate, and `--probe`."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from bandpo_cli.cli.console import Console, ExperimentView, format_duration, make_table, open_console
from bandpo_cli.cli.train_view import sample_text, settings_rows
from bandpo_cli.config.layers import setting_text, to_yaml
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import UserError, plural
from bandpo_cli.experiments.memory_check import describe_memory, memory_of_task, memory_report, saving_advice
from bandpo_cli.experiments.monitor import advice
from bandpo_cli.experiments.plan import Plan
from bandpo_cli.experiments.trials import ProbeReport, dry_run, probe, try_graders
from bandpo_cli.metric_names import has_nonbinary_rewards
from bandpo_cli.processes.ranks import is_main_process
from bandpo_cli.results import changed_settings
from bandpo_cli.types import Problem

if TYPE_CHECKING:
    from bandpo_cli.models.memory_estimate import MemoryEstimate
    from bandpo_cli.sampling.prompt_encoding import PromptEncoder


def print_changes(console: Console, config: RunConfig, all_settings: bool) -> None:
    """Print the settings that differ from the defaults, one line each, or all settings as a config file."""
    if all_settings:
        console.print(to_yaml(config), markup=False, highlight=False)
        return
    first, method = RunConfig(), config.bounds.published()
    changes = {
        "seed": (config.seed, first.seed),
        "model.path": (config.model.path, first.model.path),
        "task": (config.task.title, first.task.title),
        "bounds.method": (config.bounds.method, first.bounds.method),
    }
    for name in ("divergence", "delta"):
        changes[f"bounds.{name}"] = getattr(config.bounds, name, None), getattr(method, name, None)
    table = make_table("changed setting", "value", "default")
    for key, values in (changes | changed_settings(config)).items():
        if values[0] != values[1]:
            table.add_row(key, *(Text("null" if value is None else setting_text(value)) for value in values))
    if table.row_count:
        console.print(table, highlight=False)
    else:
        console.print_line("all settings have their defaults (--all-settings prints them)")


def print_dry_run(console: Console, plan: Plan) -> None:
    """Print a trial of every grader, the memory estimate and the first prompt, and start the run up to its folder.

    The errors are those of training.
    """
    config, task = plan.pinned, plan.task
    assert task is not None  # only a resume can be without problems
    for problem, completion, grade, warnings in try_graders(config, task) if is_main_process() else ():
        dummy = f"the dummy completion {completion!r:.80}"
        dummy += f" for the reference {problem.answer!r:.80}" if problem.answer else ""
        reward = f"reward {grade.reward:g}" if grade.has_reward else "without a reward (None or NaN)"
        console.print_rows([("grader", f"{problem.grader} grades {dummy} as {grade.verdict}, {reward}")], 10)
        console.print_warnings(warnings)
    with ExitStack() as stack:
        view = stack.enter_context(closing(ExperimentView(console)))

        def show_memory(config: RunConfig, estimate: MemoryEstimate) -> None:
            view.spin(None)
            print_memory(console, config, estimate)
            view.phase("load")

        loaded, unchecked = dry_run(plan, [view], stack, show_memory)
        view.spin(None)
        assert loaded is not None
        print_prompt(console, config, loaded.encoder, loaded.train[0])
        console.print_warnings(loaded.notes)
    others = "the results of a step", "the space on the disk", "whether the trackers answer"
    unknown = ", ".join(filter(None, [unchecked, *others]))
    console.print_rows([("dry run", f"accepted; not checked: {unknown}")], 10)


def print_prompt(console: Console, config: RunConfig, encoder: PromptEncoder, problem: Problem) -> None:
    """Print a prompt as the model reads it, its special tokens, and the effect of arguments of the chat template."""
    ids, most = encoder.encode([problem])[0].token_ids, config.sampling.max_prompt_tokens
    pieces, count = [*encoder.pieces(ids)], f"{len(ids):,} tokens (sampling.max_prompt_tokens = {most:,})"
    console.print_rows([("prompt", f"of problem {problem.id}, {count}:")], 10)
    styled = [(text, "" if token is None else "reverse") for text, token in pieces]
    console.print(Text.assemble(*styled), soft_wrap=True)
    special = ", ".join(f"{text} ({token})" for text, token in pieces if token is not None)
    console.print_line(special or "none", "special tokens")
    if arguments := config.model.chat_template_kwargs:
        effect = encoder.effect_of_arguments(problem)
        changed = "these lines of it:" if effect else "nothing in it: these are the template's own values"
        line = f"model.chat_template_kwargs = {arguments} changes {changed}"
        console.print_rows([("template", "\n".join([line, *effect]))], 10)


def print_memory(console: Console, config: RunConfig, estimate: MemoryEstimate) -> None:
    """Print the memory estimate of a rank, and whether the run fits, or with which settings it does."""
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
            if size:
                table.add_row(name, f"{size / 2**30:,.2f}", phase)
    console.print(table, highlight=False)
    fits = "fits" if estimate.fits else f"too much; {saving_advice(config, estimate)}"
    heading = "" if estimate.fits else "warning:"
    console.print_line(f"{describe_memory(estimate)}: {fits}", heading, "yellow")
    if config.model.lora is not None:
        without = {"model": config.model.model_copy(update={"lora": None})}
        peak = memory_report(config.model_copy(update=without), estimate.ranks).peak
        trained = f"{estimate.trained / 1e6:,.1f}M of {estimate.parameters / 1e6:,.1f}M parameters"
        line = f"trains {trained}; training all weights takes {peak / 2**30:,.1f} GiB at the peak"
        console.print_rows([("LoRA", line)], 10)


def run_probe(plan: Plan, runs_dir: Path, size: int) -> None:
    """Print the statement of the run, probe it, and print the results, the memory, and the settings to change."""
    console, task = open_console(long_running=True), plan.task
    assert task is not None  # only a resume can be without problems
    console.print_settings(settings_rows(plan.config, task), task.notes, plan.warnings)
    with closing(ExperimentView(console, runs_dir)) as view:
        view.spinners = {
            **view.spinners,
            "sample": "sampling with the untrained model …",
            "grade": "grading …",
        }
        view.spinners |= dict.fromkeys(("logprobs", "update"), "a trial step …")
        sampling = view.spinners["sample"]

        def show_progress(done: int, total: int, seconds: float) -> None:
            left = f"{done} of {plural(total, 'problem')} sampled, about {format_duration(seconds)} left"
            view.spinners = {**view.spinners, "sample": f"{sampling} {left}"}
            if view.is_overdue and not console.is_terminal and done < total:
                view.spin(None)
                console.print_rows([("probe", f"{left}, then a trial step")], 10)
                view.printed_at = time.monotonic()

        report = probe(plan, [view], size, show_progress)
    print_results(console, plan.config, report)
    with suppress(UserError):  # of a model without an estimate
        memory = memory_of_task(plan.config, task)
        console.print_rows([("memory", "of the run, not of the probe:")], 10)
        print_memory(console, *memory)
    console.print_warnings(lines := advice(plan.config, report.metrics), "try:")
    if not lines:
        console.print_line("nothing to change: the run can learn from these completions")


def print_results(console: Console, config: RunConfig, report: ProbeReport) -> None:
    """Print the metrics of the completions and of the trial step, and one completion."""
    metrics, samples = report.metrics, config.sampling.samples
    rollouts = [rollout for group in report.groups for rollout in group.rollouts_G]
    problems, useful = len(report.groups), 1 - metrics["train/uniform_group_fraction"]
    solved = sum(any(rollout.grade.correct for rollout in group.rollouts_G) for group in report.groups)
    rewards = [rollout.grade.reward for rollout in rollouts if rollout.grade.has_reward]
    lengths = np.quantile([len(rollout.completion.token_ids) for rollout in rollouts], [0.5, 0.95, 1])
    rows = {
        "probe": f"{plural(problems, 'problem')} × {samples} = {problems * samples:,} completions of the untrained "
        "model",
        "reward": f"mean {metrics['train/reward']:.3g}, from {min(rewards):.3g} to {max(rewards):.3g}"
        if (has_rewards := has_nonbinary_rewards(metrics))
        else "",
        "pass rate": f"{metrics['train/accuracy']:.1%} of the completions are correct; {solved} of {problems} problems "
        f"are solved at least once (pass@{samples})"
        if solved or not has_rewards
        else "",
        "groups": f"{useful:.1%} have different rewards; the others have no gradient",
        "lengths": "median {:.0f}, 95% up to {:.0f}, longest {:.0f} tokens; ".format(*lengths)
        + f"{metrics['train/truncated_fraction']:.1%} truncated, "
        f"{metrics['grade/malformed_fraction']:.1%} without a readable answer",
        "clipping": clipping_text(config, report),
        "time": time_text(config, report),
        "a sample": sample_text(rollouts[0]).plain,
    }
    console.print_rows(rows.items(), 10)


def clipping_text(config: RunConfig, report: ProbeReport) -> str:
    """Return the clip fraction and the largest ratio of the trial step, or why they were not measured."""
    metrics, reason = report.metrics, "no group has different rewards, so no token has a gradient"
    if "ratio/max" not in metrics:
        overflow = "its updates were skipped, because the gradient overflows in float16"
        return f"not measured: {reason if report.update_seconds is None else overflow}"
    size = f"{plural(config.optim.updates, 'update')} on {plural(report.trial_groups, 'group')}"
    return (
        f"{metrics['clip/active_fraction']:.2%} of the tokens in a trial step of {size} at lr {config.optim.lr:g}, "
        f"ratios up to {metrics['ratio/max']:.3g}; its weights are discarded"
    )


def time_text(config: RunConfig, report: ProbeReport) -> str:
    """Return the time of a step and of the run; without a trial step, the time without the updates."""
    sampling, updates = report.sample_seconds, report.update_seconds
    run = f"{format_duration(report.run_seconds)} for {plural(config.steps, 'step')}"
    run += " with their evaluations" if config.evaluation.every else ""
    if updates is None:
        unknown = "the updates were not measured, because no group has different rewards"
        return f"about {sampling:,.1f} s per step for sampling and grading alone, {run} without the updates; {unknown}"
    parts = f"sampling and grading {sampling:,.1f} s, updates {updates:,.1f} s"
    return f"about {sampling + updates:,.1f} s per step ({parts}), {run}"
