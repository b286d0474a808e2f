"""The training loop, top to bottom: problems → rollouts → advantages → old log-probs and bounds → updates → record.

It is a generator, so that the terminal, the tracker and a test can all look on without the loop knowing of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from bandpo_cli.config.run import RunConfig
from bandpo_cli.evaluation.evaluate import is_evaluation_due, sample_batches
from bandpo_cli.evaluation.scores import metric_record, score
from bandpo_cli.objective.advantages import group_advantages, has_reward_spread
from bandpo_cli.sampling.rollouts import grade_groups, sample_completions
from bandpo_cli.seeds import derive_seed
from bandpo_cli.storage.checkpoints import prune_checkpoints
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.storage.tables import EvalRow, sample_rows
from bandpo_cli.training.components import Components, save_checkpoint
from bandpo_cli.training.experience import Experience, prepare_experience
from bandpo_cli.training.metrics import StepTimer, clip_map_columns, rollout_metrics, token_metrics
from bandpo_cli.training.update import BadUpdateHandler, update_policy
from bandpo_cli.types import Group, Rollout, StepReport


@dataclass(frozen=True)
class SampledGroups:
    """The rollouts of a step.

    Attributes:
        groups: what is learnt from, `sampling.prompts` of them.
        drawn: everything that was sampled for it; more than `groups` where dynamic sampling dropped some.
    """

    groups: list[Group]
    drawn: list[Group]


def _nobody(part: str) -> None:
    """Hear nothing."""


def _never() -> bool:
    """Train to the end."""
    return False


def train(
    config: RunConfig,
    parts: Components,
    folder: RunFolder,
    watch: Callable[[str], None] = _nobody,
    first: int = 0,
    stop: Callable[[], bool] = _never,
) -> Iterator[StepReport]:
    """Train up to step `config.steps`, writing the run folder as it goes; yields after each step is on disk.

    Step 0 is the evaluation before training.

    Args:
        watch: hears what a step is doing: `sample`, ...
        first: the step to begin with; after a resume the one that follows the checkpoint that `parts` went on from.
        stop: asked between steps; where it says yes, the state is written as a checkpoint and the loop ends.

    Raises:
        NonFiniteError: a loss, gradient or log-prob is no number; the weights are still those of the last update.
        StaleEngineError: the sampler does not run the policy's weights.
        RunError: a checkpoint cannot be written.
    """
    if first == 0 and is_evaluation_due(config.evaluation, 0, config.steps):
        yield _finish_step(config, parts, folder, 0, {}, StepTimer(watch), sample=None)
    for step in range(max(1, first), config.steps + 1):
        if stop():
            _save_on_stop(config, parts, folder, step - 1)
            return
        clock = StepTimer(watch)
        draw = _sample_groups(config, parts, step, clock)
        parts.sampler.sleep()
        with clock.part("logprobs"):
            experiences = _prepare_updates(config, parts, draw.groups)
        with clock.part("update"):
            rule = BadUpdateHandler(config, parts.optimizer, folder.path, step)
            figures = update_policy(parts.policy, parts.optimizer, experiences, config, rule)
        with clock.part("sync"):
            parts.sampler.sync(parts.policy.model, parts.optimizer.update)
        with clock.part("record"):
            tokens = token_metrics(figures.trained or experiences)
            record = rollout_metrics(draw.drawn) | tokens | figures.metrics()
            folder.write_samples(step, sample_rows(draw.drawn))
            if figures.trained and is_evaluation_due(config.evaluation, step, config.steps):
                folder.write_tokens(step, clip_map_columns(figures.trained, figures))
        yield _finish_step(config, parts, folder, step, record, clock, sample=draw.groups[0].rollouts_G[0])


def _sample_groups(config: RunConfig, parts: Components, step: int, clock: StepTimer) -> SampledGroups:
    """Draw and grade batches of rollouts: one, or with dynamic sampling until enough groups can teach something."""
    wanted, dynamic = config.sampling.prompts, config.sampling.dynamic
    drawn: list[Group] = []
    kept: list[Group] = []
    for batch in range(config.sampling.dynamic_batches if dynamic else 1):
        groups = _sample_batch(
            config, parts, derive_seed(config.seed, "sample", step, *([batch] if batch else [])), clock
        )
        drawn += groups
        kept += [group for group in groups if has_reward_spread(group)] if dynamic else groups
        if len(kept) >= wanted:
            break
    # Where even the last batch left too few, groups without spread fill up: they have no gradient, and an update
    # keeps its size.
    fill = [group for group in drawn if not has_reward_spread(group)] if dynamic else []
    return SampledGroups([*kept, *fill][:wanted], drawn)


def _sample_batch(config: RunConfig, parts: Components, seed: int, clock: StepTimer) -> list[Group]:
    problems = parts.stream.next(config.sampling.prompts)
    with clock.part("sample"):
        prompts = parts.encoder.encode(problems)
        completions = sample_completions(parts.sampler, prompts, parts.params, seed, parts.optimizer.update)
    with clock.part("grade"):
        return grade_groups(
            parts.policy.tokenizer,
            parts.grader.grade,
            problems,
            prompts,
            completions,
            config.reward,
            parts.params.max_tokens,
        )


def _prepare_updates(config: RunConfig, parts: Components, groups: Sequence[Group]) -> list[Experience]:
    """Split the groups over the step's updates and fix what π_old decides, before the first update moves it."""
    rewards_PG = torch.tensor([[rollout.grade.reward for rollout in group.rollouts_G] for group in groups])
    advantages_PG = group_advantages(rewards_PG, config.objective.advantage_std)
    size = len(groups) // config.optim.updates
    return [
        prepare_experience(
            parts.policy,
            parts.reference,
            groups[start : start + size],
            advantages_PG[start : start + size],
            parts.bounds_of,
            config,
            sampler_shares_weights=parts.sampler.shares_weights,
        )
        for start in range(0, len(groups), size)
    ]


def _finish_step(
    config: RunConfig,
    parts: Components,
    folder: RunFolder,
    step: int,
    record: dict[str, float],
    clock: StepTimer,
    sample: Rollout | None,
) -> StepReport:
    """Evaluate and checkpoint where they are due, then write the step's line: the line says that the step is whole."""
    if is_evaluation_due(config.evaluation, step, config.steps):
        with clock.part("eval"):
            record = record | _evaluate(config, parts, folder, step)
    write = step == config.steps or (
        step > 0 and config.checkpoint.every > 0 and step % config.checkpoint.every == 0
    )
    if write:
        with clock.part("checkpoint"):
            folder.sync_metrics()  # a checkpoint never gets ahead of the lines before it, not even in a power cut
            save_checkpoint(parts.policy, parts.optimizer, parts.progress(step), folder.checkpoint_dir(step))
    line = {"step": step, **record, **clock.metrics()}
    folder.append_metrics(line)
    if write:
        prune_checkpoints(folder, config.checkpoint)
    return StepReport(step, line, sample)


def _save_on_stop(config: RunConfig, parts: Components, folder: RunFolder, step: int) -> None:
    """Keep the state after `step`, unless there is nothing to keep or it is kept already."""
    if step > 0 and step not in folder.checkpoints():
        save_checkpoint(parts.policy, parts.optimizer, parts.progress(step), folder.checkpoint_dir(step))
        prune_checkpoints(folder, config.checkpoint)


def _evaluate(config: RunConfig, parts: Components, folder: RunFolder, step: int) -> dict[str, float]:
    """Score held-out problems; the same draws at every step, so that curves move by the policy and not by the dice."""
    settings = config.evaluation
    batches = sample_batches(
        parts.sampler,
        parts.encoder,
        parts.grader.grade,
        parts.heldout,
        replace(parts.params, samples=settings.samples, temperature=settings.temperature),
        settings.batch,
        config.seed,
        version=parts.optimizer.update,
    )
    rows: dict[str, list[EvalRow]] = {label: [] for label in parts.heldout}
    for batch in batches:
        rows[batch.label] += batch.rows
    scores = {label: score(label, each, settings.k) for label, each in rows.items()}
    folder.write_eval(step, {"step": step, "sets": {label: each.as_json() for label, each in scores.items()}})
    return metric_record(scores)
