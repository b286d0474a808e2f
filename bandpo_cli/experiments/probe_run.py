"""Probe of a run: samples and grades completions of the untrained model, and times one trial step that is discarded.

The components, the sampler and the graders are those of the run. Nothing is written, and MLflow receives nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bandpo_cli.callbacks import RunInfo, RunResult, StepReport, TrainCallback
from bandpo_cli.config.layers import with_values
from bandpo_cli.experiments.memory import out_of_memory_errors
from bandpo_cli.experiments.plan import Plan
from bandpo_cli.experiments.rank_group import Dispatcher
from bandpo_cli.experiments.run import loaded_components
from bandpo_cli.types import Group

PROBLEMS = 32
"""Problems that are sampled, rounded to a multiple of `optim.updates`."""

TRIAL_TOKENS = 8192
"""Completion tokens of the trial step, if one group per update has no more: the updates of larger models take a minute
on a CPU, and those of small models long enough to be timed."""


@dataclass(frozen=True)
class ProbeReport:
    """Results of a probe.

    Attributes:
        groups: the graded completions of the untrained model.
        metrics: their metrics by the names of metrics.jsonl, and those of the updates of the trial step. Without a
            group of different rewards there is no trial step.
        trial_groups: number of groups of the trial step.
        sample_seconds: of a step of the run, by the times of the probe.
        update_seconds: of the updates of a step; None if no group has different rewards, so that there was no update.
        run_seconds: of the complete run with its evaluations, by the same times; without updates that have no time.
    """

    groups: Sequence[Group]
    metrics: dict[str, float]
    trial_groups: int
    sample_seconds: float
    update_seconds: float | None
    run_seconds: float


def probe(plan: Plan, callbacks: Sequence[TrainCallback] = ()) -> ProbeReport:
    """Sample and grade completions of the untrained model, and measure a trial step.

    The trial step has the updates of a step of the run at the full learning rate, on a part of the groups, first those
    whose rewards differ. The weights that it changes are in memory only.

    Args:
        callbacks: receive the event `phase`.

    Raises:
        UserError, RunError: as `train`.
    """
    run, updates, task = plan.pinned, plan.config.optim.updates, plan.task
    assert task is not None  # only a resume can be without problems
    problems = min(PROBLEMS, len(task.train_problems()))
    values = {
        "sampling.prompts": max(1, problems // updates) * updates,
        "sampling.dynamic": False,
        "sampling.max_lag": 0,
        "optim.warmup_steps": 0,
    }
    events: Dispatcher[RunInfo, StepReport, RunResult] = Dispatcher(callbacks)
    with (
        loaded_components(with_values(run, values), task, events) as (config, components),
        out_of_memory_errors(config),
    ):
        from bandpo_cli.evaluation.evaluate import is_evaluation_due
        from bandpo_cli.methods.loss import policy_loss
        from bandpo_cli.sampling.sampler import is_exact
        from bandpo_cli.training.batches import RolloutBatches, select_groups
        from bandpo_cli.training.experience import prepare_updates
        from bandpo_cli.training.loop import step_advantages
        from bandpo_cli.training.metrics import StepTimer, rollout_metrics, update_metrics
        from bandpo_cli.training.update import update_policy

        policy, timer = components.policy, StepTimer(events.phase)
        with RolloutBatches(config, components) as batches:
            groups = batches.take(1, timer).groups
        metrics = rollout_metrics(groups)
        useful = round((1 - metrics["train/uniform_group_fraction"]) * len(groups))
        tokens = metrics["train/response_length"] * run.sampling.samples * updates
        tried = updates * max(1, min(len(groups) // updates, int(TRIAL_TOKENS / tokens)))
        if useful:
            components.sampler.sleep()
            with timer.phase("logprobs"):
                chosen = select_groups(groups, tried, updates)
                graded = chosen, step_advantages(config, chosen)
                loss = policy_loss(config.bounds.at_step(1, config.steps), config.objective)
                exact = is_exact(components.sampler, policy)
                experiences = prepare_updates(policy, components.reference, *graded, loss, config, exact)
            with timer.phase("update"):
                metrics |= update_metrics(update_policy(policy, components.optimizer, experiences, config))
    per_prompt = timer.seconds("sample", "grade") / len(groups)
    # Groups whose rewards are all equal do not go through the model in an update.
    sampling, updating = run.sampling.prompts * per_prompt, None
    if useful:
        per_useful = timer.seconds("logprobs", "update") / min(useful, tried)
        updating = run.sampling.prompts * useful / len(groups) * per_useful
    evaluations = sum(is_evaluation_due(run.evaluation, step, run.steps) for step in range(run.steps + 1))
    heldout = sum(len(items[: run.evaluation.problems]) for items in task.heldout_sets().values())
    evaluating = evaluations * heldout * per_prompt * run.evaluation.samples / run.sampling.samples
    seconds = sampling, updating, run.steps * (sampling + (updating or 0.0)) + evaluating
    return ProbeReport(groups, metrics, tried, *seconds)
