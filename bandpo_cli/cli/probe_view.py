"""Console view of `bandpo train --probe`: a spinner while it works, then the results and what to change."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
from rich.console import Console

from bandpo_cli.cli.console import ExperimentView, format_duration, open_console, print_line, print_rows
from bandpo_cli.cli.statement import print_memory, print_statement, run_statement
from bandpo_cli.cli.train_view import sample_text
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import plural
from bandpo_cli.experiments.monitor import advice
from bandpo_cli.experiments.plan import Plan
from bandpo_cli.experiments.trials import ProbeReport, probe
from bandpo_cli.metric_names import has_nonbinary_rewards


class ProbeView(ExperimentView):
    """Spinner with the present phase of a probe."""

    spinners: Mapping[str, str] = {
        "load": "loading torch and the model …",
        "sample": "sampling with the untrained model …",
        "grade": "grading …",
        "logprobs": "a trial step …",
        "update": "a trial step …",
    }


def run_probe(plan: Plan, runs_dir: Path) -> None:
    """Print the statement of the run, probe it, and print the results, the memory, and the settings to change."""
    console, task = open_console(long_running=True), plan.task
    assert task is not None  # only a resume can be without problems
    print_statement(console, run_statement(plan.config, task), task.notes(), plan.warnings)
    with closing(ProbeView(console, runs_dir)) as view:
        report = probe(plan, [view])
    print_results(console, plan.config, report)
    print_memory(console, plan.config, task)
    for line in (lines := advice(plan.config, report.metrics)):
        print_line(console, line, "try:", "yellow")
    if not lines:
        print_line(console, "nothing to change: the run can learn from these completions")


def print_results(console: Console, config: RunConfig, report: ProbeReport) -> None:
    """Print the metrics of the completions and of the trial step, and one completion."""
    metrics = report.metrics
    rollouts = [rollout for group in report.groups for rollout in group.rollouts_G]
    problems, samples, useful = (
        len(report.groups),
        config.sampling.samples,
        1 - metrics["train/uniform_group_fraction"],
    )
    solved = sum(any(rollout.grade.correct for rollout in group.rollouts_G) for group in report.groups)
    rewards = [rollout.grade.reward for rollout in rollouts if rollout.grade.has_reward]
    lengths = np.quantile([len(rollout.completion.token_ids) for rollout in rollouts], [0.5, 0.95, 1])
    rows = {
        "probe": f"{problems} problems × {samples} = {problems * samples:,} completions of the untrained model",
        "reward": f"mean {metrics['train/reward']:.3g}, from {min(rewards):.3g} to {max(rewards):.3g}"
        if has_nonbinary_rewards(metrics)
        else "",
        "pass rate": f"{metrics['train/accuracy']:.1%} of the completions are correct; {solved} of {problems} problems "
        f"are solved at least once (pass@{samples})",
        "groups": f"{useful:.1%} have different rewards; the others have no gradient",
        "lengths": "median {:.0f}, 95% up to {:.0f}, longest {:.0f} tokens; ".format(*lengths)
        + f"{metrics['train/truncated_fraction']:.1%} truncated, "
        f"{metrics['grade/malformed_fraction']:.1%} without a readable answer",
        "clipping": f"{metrics['clip/active_fraction']:.2%} of the tokens in a trial step of "
        f"{plural(config.optim.updates, 'update')} on {plural(report.trial_groups, 'group')} at lr "
        f"{config.optim.lr:g}, ratios up to {metrics['ratio/max']:.3g}; its weights are discarded"
        if useful
        else "not measured: no group has different rewards, so no token has a gradient",
        "time": time_text(config, report),
        "a sample": sample_text(rollouts[0]).plain,
    }
    print_rows(console, rows.items(), 10)


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
