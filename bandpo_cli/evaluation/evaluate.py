"""Evaluation of a policy: sample and grade completions batch by batch, for training and for `bandpo eval` alike."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

from bandpo_cli.config.run import EvaluationConfig, RewardConfig
from bandpo_cli.evaluation.batches import Batch, chunks, eval_row
from bandpo_cli.sampling.base import Sampler, SamplingParams
from bandpo_cli.sampling.rollouts import PromptEncoder, grade_groups, sample_completions
from bandpo_cli.seeds import derive_seed
from bandpo_cli.storage.eval_folder import PartKey
from bandpo_cli.types import Grader, Problem


def sample_batches(
    sampler: Sampler,
    encoder: PromptEncoder,
    grade: Grader,
    sets: Mapping[str, Sequence[Problem]],
    params: SamplingParams,
    batch_size: int,
    seed: int,
    version: int,
    done: Container[PartKey] = (),
) -> Iterator[Batch]:
    """Sample and grade `params.samples` completions per problem and yield them in batches.

    Each batch has its own seed, so its completions do not depend on which batches were `done` before. Rewards are not
    scaled or shaped as in training.

    Args:
        grade: grades texts [N], each as an answer to its problem [N].
        sets: problems by label of the evaluation set.
        batch_size: approximate number of completions per batch; the completions of a problem are never split.
        seed: the run's seed, from which the seeds of the batches are derived.
        version: version of the policy's weights that the sampler must run.
        done: keys of batches to skip.

    Raises:
        StaleEngineError: the sampler does not run the weights of `version`.
    """
    for index, (label, problems_P) in enumerate(sets.items()):
        for start, problems in chunks(problems_P, batch_size // params.samples):
            key = PartKey(index, start)
            if key in done:
                continue
            prompts = encoder.encode(problems)
            completions = sample_completions(
                sampler, prompts, params, derive_seed(seed, "eval", label, start), version
            )
            groups = grade_groups(
                encoder.tokenizer, grade, problems, prompts, completions, RewardConfig(), params.max_tokens
            )
            rows = [
                eval_row(
                    label,
                    rollout.problem,
                    prompt=rollout.prompt,
                    text=rollout.text,
                    grade=rollout.grade,
                    length=len(rollout.completion.token_ids),
                    finish_reason=rollout.completion.finish_reason,
                    logprob_sum=sum(rollout.completion.logprobs),
                )
                for group in groups
                for rollout in group.rollouts_G
            ]
            yield Batch(key, label, rows)


def is_evaluation_due(config: EvaluationConfig, step: int, last_step: int) -> bool:
    """Return whether `step` ends with an evaluation: step 0 (before training), every `every` steps, and the last."""
    return config.every > 0 and (step % config.every == 0 or step == last_step)
