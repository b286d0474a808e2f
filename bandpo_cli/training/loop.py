"""The training loop: each iteration of `train` is one step, and its body is the data flow of the step.

problems → rollouts → graded groups → advantages → token batches → old log-probs → bounds → loss → optimizer step →
metrics → weight sync → checkpoint. `train` is a generator, so that a console view, a tracker or a test can observe
the steps without the loop depending on them.

Several ranks each run this loop. A rank samples and grades its share of the problems and runs its share of the tokens
through the model; everything in between is computed from the groups of all ranks, and rank 0 writes the run folder.
With `sampling.max_lag` the rollouts of a later step are sampled before or while a step is trained (`rollout_batches`).

Dimension suffixes: `_P` problems (groups) of a step, `_G` completions per group.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from bandpo_cli.callbacks import StepReport
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import log
from bandpo_cli.evaluation.evaluate import sample_batches
from bandpo_cli.evaluation.scores import metric_record, score
from bandpo_cli.grading.pool import all_calls_failed, grade_components
from bandpo_cli.methods.loss import policy_loss
from bandpo_cli.metric_names import TOTAL_SECONDS, TOTALS
from bandpo_cli.models.load import Policy, release_cached_memory
from bandpo_cli.objective.advantages import estimate_advantages
from bandpo_cli.objective.policy_objective import next_entropy_bonus
from bandpo_cli.sampling.sampler import is_exact
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.training.build import Components
from bandpo_cli.training.checkpoint_writer import CheckpointWriter
from bandpo_cli.training.experience import prepare_updates
from bandpo_cli.training.metrics import (
    clip_map_columns,
    is_recorded,
    rollout_metrics,
    token_metrics,
    token_values,
    update_metrics,
)
from bandpo_cli.training.performance import PackedWork, StepTimer, add_to_totals
from bandpo_cli.training.rollout_batches import RolloutBatches, SampledGroups
from bandpo_cli.training.update import AppliedUpdates, handle_bad_update, update_policy
from bandpo_cli.types import Group, Rollout


def train(
    config: RunConfig,
    components: Components,
    folder: RunFolder,
    watch: Callable[[str], None] = lambda phase: None,
    first: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> Generator[StepReport, None, None]:
    """Train up to step `config.steps` and write the run folder; yield after each step is on disk.

    Step 0 is the evaluation before training. A thread may still be writing the checkpoint of a step when the step is
    yielded, except that of the last step; closing the generator waits for it. All ranks must iterate together; the
    reports are the same on each. Raise NonFiniteError, with the weights of the last applied update, if a loss, gradient
    or log-prob is not finite, StaleEngineError if the sampler does not run the policy's weights, GraderFailedError if
    every answer of a step or an evaluation is a grader error, and RunError if a checkpoint cannot be written.

    Args:
        watch: called with the name of each phase of a step (`sample`, `grade`, ...) when it starts.
        first: the first step; after a resume, the step after the checkpoint that `components` were loaded from.
        stop: called between steps; where it returns True on any rank, the state is saved and the loop ends.
    """
    policy, optimizer, is_main = components.policy, components.optimizer, components.ranks.is_main
    reference = None if components.reference is None else components.reference.model
    # vLLM caches prompts and turns. The transformers engine has no cache between the turns of a conversation.
    streams, sampling = components.sampler.streams, config.sampling
    has_cache = sampling.vllm.prefix_caching if streams else not config.task.functions
    records = components.ranks.on_main(folder.read_metrics) if first > 0 else []
    totals = {name: records[-1][name] if records else 0 for name in TOTALS}
    work = PackedWork(policy.model, components.ranks, reference, has_cache)
    about = config, components
    with CheckpointWriter(*about, folder) as writer, RolloutBatches(*about) as batches:
        finish_step = partial(_finish_step, *about, folder, writer, totals)
        if first == 0 and config.evaluation.is_due(0, config.steps):
            yield finish_step(0, {**totals}, StepTimer(watch), sample=None)
        for step in range(max(1, first), config.steps + 1):
            writer.check()
            if any(components.ranks.gather(stop())):
                watch("checkpoint")
                writer.save_on_stop(step - 1)
                return
            timer = StepTimer(watch)
            # problems → rollouts → graded groups
            rollouts = batches.take(step, timer)
            lag = optimizer.update - rollouts.version
            work.note_memory()
            released = components.sampler.sleep()
            if config.sampling.max_lag:
                batches.start(step)
            adapts = config.objective.entropy_target is not None
            settings = with_entropy_bonus(config, components.entropy_bonus) if adapts else config
            scheduled = config.bounds.scheduled(step, config.steps)
            with work.counted(), timer.phase("logprobs"):
                # → advantages → token batches → old log-probs → bounds
                advantages_PG = step_advantages(config, rollouts.groups)
                loss = policy_loss(config.bounds.model_copy(update=scheduled), settings.objective)
                # The log-probs of older weights are not the trainer's, whichever engine computed them.
                exact = sampling.max_lag == 0 and is_exact(components.sampler, policy)
                graded = rollouts.groups, advantages_PG
                experiences = prepare_updates(policy, components.reference, *graded, loss, settings, exact)
            with work.counted(), timer.phase("update"):
                # → loss → optimizer step, once per experience
                run = folder.path if is_main else None
                on_bad_update = partial(handle_bad_update, config, optimizer, step, run)
                updates = update_policy(policy, optimizer, experiences, settings, on_bad_update)
                del experiences
                optimizer.zero_grad()  # no gradients are held while the sampler wakes up and samples
            with timer.phase("record"):
                # → metrics
                updates = updates.on_host()
                record = rollout_metrics(rollouts.sampled) | token_metrics(updates.trained or updates.skipped)
                record |= update_metrics(updates)
                record |= {f"bounds/{name}": value for name, value in scheduled.items()}
                record |= work.metrics(timer, rollouts, updates.trained, totals, released)
                if adapts:
                    record |= _adapt_entropy_bonus(config, components, record["train/entropy"])
                if sampling.max_lag:
                    record |= {"sampler/lag": float(lag), "sampler/lag_steps": float(rollouts.age)}
                if is_main:
                    last = step if config.stop.budget_reached(record) else config.steps
                    _write_tables(config, policy, folder, step, last, rollouts, updates)
                # No values per token are held while the sampler wakes up and samples.
                del updates
            batches.wait(timer)
            with timer.phase("sync"):
                # → weight sync
                components.sampler.sync(policy.model, optimizer.update)
            # → evaluation and checkpoint where due → the step's line
            sample = rollouts.groups[0].rollouts_G[0]
            yield finish_step(step, record, timer, sample)


def step_advantages(config: RunConfig, groups: Sequence[Group]) -> torch.Tensor:
    """Return the advantage of each completion, [P, G] float32."""
    grades_PG = [[rollout.grade for rollout in group.rollouts_G] for group in groups]
    pairs_PG = [[(grade.reward, grade.has_reward) for grade in grades] for grades in grades_PG]
    rewards_PG, has_reward_PG = torch.tensor(pairs_PG, dtype=torch.float64).unbind(dim=2)
    parts = []
    for part in config.task.rewards or ():
        values_PG = [[grade.components.get(part.label) for grade in grades] for grades in grades_PG]
        parts.append((part.weight, torch.from_numpy(np.array(values_PG, np.float64))))  # None becomes NaN
    return estimate_advantages(config.objective, rewards_PG, has_reward_PG.bool(), parts).float()


def with_entropy_bonus(config: RunConfig, coefficient: float) -> RunConfig:
    """Return the settings of a step whose entropy bonus has this coefficient."""
    objective = config.objective.model_copy(update={"entropy_bonus": coefficient})
    return config.model_copy(update={"objective": objective})


def _adapt_entropy_bonus(config: RunConfig, components: Components, entropy: float) -> dict[str, float]:
    """Set the coefficient of the next step's entropy bonus, and return the metrics of this step's."""
    before = components.entropy_coefficient, components.entropy_bonus
    adapted = next_entropy_bonus(config.objective, before[0], entropy)
    components.entropy_coefficient, components.entropy_bonus = adapted
    return dict(zip(("train/entropy_coefficient", "train/entropy_bonus"), before, strict=True))


def _write_tables(
    config: RunConfig,
    policy: Policy,
    folder: RunFolder,
    step: int,
    last: int,
    rollouts: SampledGroups,
    updates: AppliedUpdates,
) -> None:
    """Write the completions of a step, and the values of its tokens where they are due."""
    folder.write_samples(step, rollouts.sampled)
    if updates.trained and config.evaluation.is_due(step, last):
        folder.write_tokens(step, clip_map_columns(updates))
    if is_recorded(config, step, last):
        folder.write_token_values(step, token_values(rollouts.sampled, updates, policy.tokenizer))


def _finish_step(
    config: RunConfig,
    components: Components,
    folder: RunFolder,
    writer: CheckpointWriter,
    totals: dict[str, float],
    step: int,
    record: dict[str, float],
    timer: StepTimer,
    sample: Rollout | None,
) -> StepReport:
    """Evaluate and save a checkpoint where due, and write the step's line, which marks the step as complete."""
    last = step if config.stop.budget_reached(record) else config.steps
    if config.evaluation.is_due(step, last):
        with timer.phase("eval"):
            release_cached_memory()
            record = record | _evaluate(config, components, folder, step)
    save = config.checkpoint.is_due(step, last)
    if save:
        with timer.phase("checkpoint"):
            writer.prepare(step)
    line = {"step": step, **record, **timer.metrics()}
    seconds = line["time/step"] - timer.seconds("eval", "checkpoint")
    line |= add_to_totals(totals, {TOTAL_SECONDS: seconds})
    if components.ranks.is_main:
        folder.append_metrics(line)
    if save:
        writer.commit()
    return StepReport(step, line, sample)


def _evaluate(config: RunConfig, components: Components, folder: RunFolder, step: int) -> dict[str, float]:
    """Score the held-out problems, write `evals/` and return the metrics; none if all calls of the grader have failed.

    The sampling seeds are the same at every step, so that changes come from the policy and not from chance.
    """
    settings = config.evaluation
    batches = sample_batches(
        components.sampler,
        components.encoder,
        partial(grade_components, components.grader.grade, config.task.evaluated_rewards),
        components.heldout,
        replace(components.params, samples=settings.samples, temperature=settings.temperature, entropy=False),
        settings.batch,
        config.seed,
        version=components.optimizer.update,
        cancel=components.grader.cancel,
        ranks=components.ranks,
        conversations=components.conversations,
    )
    rows = [row for batch in batches for row in batch.rows]
    graders, verdicts = [row["grader"] for row in rows], [row["verdict"] for row in rows]
    if all_calls_failed(components.grader, verdicts, graders, components.ranks):
        if components.ranks.is_main:
            log.warning("the evaluation of step %d has no metrics: the calls of the grader failed", step)
        return {}
    scores = {
        label: score(label, [row for row in rows if row["task"] == label], settings.k)
        for label in components.heldout
    }
    if components.ranks.is_main:
        sets = {label: value.as_json() for label, value in scores.items()}
        folder.write_eval(step, {"step": step, "sets": sets})
    return metric_record(scores)
