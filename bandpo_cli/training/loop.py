"""The training loop, top to bottom: problems → rollouts → advantages → old log-probs and bounds → updates → record.

It is a generator, so that the terminal, the tracker and a test can all look on without the loop knowing of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from bandpo_cli.bounds import ratio_bounds
from bandpo_cli.config.run import RunConfig
from bandpo_cli.evaluation.evaluate import due, evaluate
from bandpo_cli.models.load import Policy, frozen_copy, load_policy
from bandpo_cli.objective.advantages import group_advantages
from bandpo_cli.sampling import Sampler, SamplingParams, build_sampler
from bandpo_cli.sampling.rollouts import grade_groups, sample_completions
from bandpo_cli.tasks import build_task
from bandpo_cli.tasks.base import Task
from bandpo_cli.tasks.stream import ProblemStream
from bandpo_cli.tracking.run_folder import RunFolder
from bandpo_cli.tracking.tables import sample_rows
from bandpo_cli.training.checkpoint import save_checkpoint
from bandpo_cli.training.experience import BoundsOf, Experience, prepare
from bandpo_cli.training.optimizer import Optimizer
from bandpo_cli.training.record import Stopwatch, rollout_metrics, token_columns
from bandpo_cli.training.seeds import derive_seed
from bandpo_cli.training.update import update_policy
from bandpo_cli.types import Group, Rollout


@dataclass(frozen=True)
class StepReport:
    """One step as its onlookers see it: its line in metrics.jsonl, and a completion to show (none at step 0)."""

    step: int
    record: dict[str, float]
    sample: Rollout | None


@dataclass(frozen=True)
class Parts:
    """What a run is built of."""

    policy: Policy
    reference: Policy | None
    task: Task
    stream: ProblemStream
    sampler: Sampler
    optimizer: Optimizer
    bounds_of: BoundsOf
    params: SamplingParams


def build(config: RunConfig) -> Parts:
    """Load the model and set up everything that the config names. Raises UserError for what cannot be loaded."""
    torch.manual_seed(config.seed)
    task = build_task(config.task)
    policy = load_policy(config.model)
    reference = replace(policy, model=frozen_copy(policy)) if config.objective.reference_kl > 0 else None
    sampling = config.sampling
    return Parts(
        policy=policy,
        reference=reference,
        task=task,
        stream=ProblemStream(task.train_problems(), derive_seed(config.seed, "problems")),
        sampler=build_sampler(sampling, policy),
        optimizer=Optimizer(policy.model, config.optim, config.steps * config.optim.updates),
        bounds_of=ratio_bounds(config.bounds),
        params=SamplingParams(sampling.samples, sampling.temperature, sampling.max_tokens, policy.stop_ids),
    )


def train(config: RunConfig, parts: Parts, folder: RunFolder) -> Iterator[StepReport]:
    """Train for `config.steps` steps, writing the run folder as it goes; yields after each step is on disk.

    The first report is step 0: the evaluation before training.

    Raises:
        NonFiniteError: a loss, gradient or log-prob is no number; the weights are still those of the last update.
    """
    if due(config.evaluation, 0, config.steps):
        yield _finish_step(config, parts, folder, 0, {}, Stopwatch(), sample=None)
    for step in range(1, config.steps + 1):
        clock = Stopwatch()
        groups = _sample_groups(config, parts, step, clock)
        with clock.part("logprobs"):
            experiences = _prepare_updates(config, parts, groups)
        with clock.part("update"):
            figures = update_policy(parts.policy, parts.optimizer, experiences, config)
        with clock.part("sync"):
            parts.sampler.sync(parts.policy.model, parts.optimizer.update)
        with clock.part("record"):
            record = rollout_metrics(groups, experiences) | figures.metrics()
            folder.write_samples(step, sample_rows(groups))
            if due(config.evaluation, step, config.steps):
                folder.write_tokens(step, token_columns(experiences, figures))
        yield _finish_step(config, parts, folder, step, record, clock, sample=groups[0].rollouts_G[0])


def _sample_groups(config: RunConfig, parts: Parts, step: int, clock: Stopwatch) -> list[Group]:
    """Draw and grade the rollouts of a step."""
    count = config.sampling.prompts
    problems = parts.stream.take((step - 1) * count, count)
    tokenizer = parts.policy.tokenizer
    with clock.part("sample"):
        seed = derive_seed(config.seed, "sample", step)
        prompts, completions = sample_completions(parts.sampler, tokenizer, problems, parts.params, seed)
    with clock.part("grade"):
        return grade_groups(tokenizer, parts.task.grade, problems, prompts, completions)


def _prepare_updates(config: RunConfig, parts: Parts, groups: Sequence[Group]) -> list[Experience]:
    """Split the groups over the step's updates and fix what π_old decides, before the first update moves it."""
    rewards_PG = torch.tensor([[rollout.grade.reward for rollout in group.rollouts_G] for group in groups])
    advantages_PG = group_advantages(rewards_PG, config.objective.advantage_std)
    size = len(groups) // config.optim.updates
    return [
        prepare(
            parts.policy,
            parts.reference,
            groups[start : start + size],
            advantages_PG[start : start + size],
            parts.bounds_of,
            config.sampling.temperature,
            config.optim.micro_batch_tokens,
        )
        for start in range(0, len(groups), size)
    ]


def _finish_step(
    config: RunConfig,
    parts: Parts,
    folder: RunFolder,
    step: int,
    record: dict[str, float],
    clock: Stopwatch,
    sample: Rollout | None,
) -> StepReport:
    """Evaluate and checkpoint where they are due, then write the step's line: the line says that the step is whole."""
    if due(config.evaluation, step, config.steps):
        with clock.part("eval"):
            record = record | _evaluate(config, parts, folder, step)
    last = step == config.steps
    if last or (step and config.checkpoint.every and step % config.checkpoint.every == 0):
        with clock.part("checkpoint"):
            save_checkpoint(parts.policy, folder.checkpoint_dir(step))
    line = {"step": step, **record, **clock.metrics()}
    folder.append_metrics(line)
    return StepReport(step, line, sample)


def _evaluate(config: RunConfig, parts: Parts, folder: RunFolder, step: int) -> dict[str, float]:
    """Score held-out problems; the same draws at every step, so that curves move by the policy and not by the dice."""
    settings = config.evaluation
    params = replace(parts.params, samples=settings.samples, temperature=settings.temperature)
    problems = parts.task.heldout_problems()[: settings.problems]
    seed = derive_seed(config.seed, "eval")
    result = evaluate(parts.sampler, parts.policy.tokenizer, parts.task, problems, params, settings.k, seed)
    correct = {group.problem.id: sum(r.grade.correct for r in group.rollouts_G) for group in result.groups_P}
    folder.write_eval(
        step, {"step": step, "metrics": result.metrics, "samples": params.samples, "correct": correct}
    )
    return result.metrics
