"""Evaluation of a policy: completions drawn and judged batch by batch, in training and by `bandpo eval` alike."""

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
    """Sample `params.samples` completions of each problem and judge them.

    A batch has about `batch_size` completions, a problem's never split, and a seed of its own: what is drawn does not
    depend on which batches were `done` before. Rewards are the plain 1 and 0, whatever training shapes them to.

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
                    rollout.prompt,
                    rollout.text,
                    rollout.grade,
                    len(rollout.completion.token_ids),
                    rollout.completion.finish_reason,
                    sum(rollout.completion.logprobs),
                )
                for group in groups
                for rollout in group.rollouts_G
            ]
            yield Batch(key, label, rows)


def is_evaluation_due(config: EvaluationConfig, step: int, last_step: int) -> bool:
    """Tell whether `step` ends with an evaluation: step 0 (before training), every `every` steps, and the last."""
    return config.every > 0 and (step % config.every == 0 or step == last_step)
