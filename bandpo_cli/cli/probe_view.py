"""Console view of `bandpo train --probe`: a spinner while it works, then a table of the results and what to change."""

from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console

from bandpo_cli.cli.console import ExperimentView, format_duration, print_line, print_rows
from bandpo_cli.errors import plural
from bandpo_cli.experiments.advice import excerpt
from bandpo_cli.experiments.memory import describe_memory, memory_of_task, saving_advice
from bandpo_cli.experiments.probe_run import ProbeReport
from bandpo_cli.experiments.train_run import TrainPlan
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


def print_probe(console: Console, plan: TrainPlan, report: ProbeReport) -> None:
    """Print the results of a probe, one example of a completion, and the settings to change."""
    print_rows(console, probe_rows(plan, report), 10)
    lines = report.advice(plan.config)
    for line in lines:
        print_line(console, line, "try:", "yellow")
    if not lines:
        print_line(console, "nothing to change: the run can learn from these completions")


def probe_rows(plan: TrainPlan, report: ProbeReport) -> Sequence[tuple[str, str]]:
    """Return the results of a probe as (heading, text) rows."""
    metrics, trial, config = report.metrics, report.trial, plan.config
    rollouts = [rollout for group in report.groups for rollout in group.rollouts_G]
    problems, samples = len(report.groups), config.sampling.samples
    solved = sum(any(rollout.grade.correct for rollout in group.rollouts_G) for group in report.groups)
    rewards = [rollout.grade.reward for rollout in rollouts if rollout.grade.has_reward]
    lengths = np.quantile([len(rollout.completion.token_ids) for rollout in rollouts], [0.5, 0.95, 1])
    useful = 1 - metrics["train/uniform_group_fraction"]
    clipped = "not measured: no group has different rewards, so no token has a gradient"
    if trial is not None:
        clipped = (
            f"{trial['clip/active_fraction']:.2%} of the tokens in a trial step of "
            f"{plural(config.optim.updates, 'update')} on {plural(report.trial_groups, 'group')} at lr "
            f"{config.optim.lr:g}, ratios up to {trial['ratio/max']:.3g}; its weights are discarded"
        )
    step = report.sample_seconds + report.update_seconds
    rows = {
        "probe": f"{problems} problems × {samples} = {problems * samples:,} completions of the untrained model"
    }
    if has_nonbinary_rewards(metrics):
        rows["reward"] = f"mean {metrics['train/reward']:.3g}, from {min(rewards):.3g} to {max(rewards):.3g}"
    rows |= {
        "pass rate": f"{metrics['train/accuracy']:.1%} of the completions are correct; {solved} of {problems} problems "
        f"are solved at least once (pass@{samples})",
        "groups": f"{useful:.1%} have different rewards; the others have no gradient",
        "lengths": "median {:.0f}, 95% up to {:.0f}, longest {:.0f} tokens; ".format(*lengths)
        + f"{metrics['train/truncated_fraction']:.1%} truncated, "
        f"{metrics['grade/malformed_fraction']:.1%} without a readable answer",
        "clipping": clipped,
        "time": f"about {step:,.1f} s per step (sampling and grading {report.sample_seconds:,.1f} s, updates "
        f"{report.update_seconds:,.1f} s), {format_duration(report.run_seconds)} for {config.steps} steps with their "
        "evaluations",
        "memory": _memory_text(plan),
        "a sample": excerpt(rollouts[0]),
    }
    return [*rows.items()]


def _memory_text(plan: TrainPlan) -> str:
    """Return the memory estimate of the run, and what to change if the run does not fit."""
    from bandpo_cli.models.memory import NoEstimateError

    try:
        config, estimate = memory_of_task(plan.config, plan.task)
    except NoEstimateError as error:
        return str(error)
    text = describe_memory(estimate).removeprefix("memory: ")
    return text if estimate.fits else f"{text}; {saving_advice(config, estimate)}"
