"""Evaluation of a policy on held-out problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bandpo_cli.config.run import EvaluationConfig, RewardConfig
from bandpo_cli.evaluation.metrics import mean_at_n, mean_pass_at_k
from bandpo_cli.sampling.base import Sampler, SamplingParams
from bandpo_cli.sampling.prompts import PromptEncoder
from bandpo_cli.sampling.rollouts import Grader, grade_groups, sample_completions
from bandpo_cli.types import Group, Problem


@dataclass(frozen=True)
class Evaluation:
    """`metrics` under their names in metrics.jsonl (`eval/<task>/mean_at_16`), and what they were computed from."""

    metrics: dict[str, float]
    groups_P: tuple[Group, ...]


def evaluate(
    sampler: Sampler,
    encoder: PromptEncoder,
    grade: Grader,
    label: str,
    problems_P: Sequence[Problem],
    params: SamplingParams,
    k: Sequence[int],
    seed: int,
    version: int,
) -> Evaluation:
    """Sample `params.samples` completions of each problem and score them under `eval/<label>/`.

    Rewards are the plain 1 and 0 here, whatever training shapes them to.
    """
    prompts = encoder.encode(problems_P)
    completions = sample_completions(sampler, prompts, params, seed, version)
    groups = grade_groups(
        encoder.tokenizer, grade, problems_P, prompts, completions, RewardConfig(), params.max_tokens
    )
    correct_P = [sum(rollout.grade.correct for rollout in group.rollouts_G) for group in groups]
    n, prefix = params.samples, f"eval/{label}"
    metrics = {f"{prefix}/mean_at_{n}": mean_at_n(correct_P, n)}
    metrics |= {f"{prefix}/pass_at_{each}": mean_pass_at_k(correct_P, n, each) for each in k}
    return Evaluation(metrics, tuple(groups))


def due(config: EvaluationConfig, step: int, last_step: int) -> bool:
    """Tell whether `step` ends with an evaluation: step 0 (before training), every `every` steps, and the last."""
    return config.every > 0 and (step % config.every == 0 or step == last_step)
