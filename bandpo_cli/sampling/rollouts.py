"""From problems to graded groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from bandpo_cli.config.run import RewardConfig
from bandpo_cli.objective.rewards import shaped_reward
from bandpo_cli.sampling.base import Sampler, SamplingParams, StaleEngineError
from bandpo_cli.sampling.prompts import EncodedPrompt
from bandpo_cli.types import Completion, Grader, Group, Problem, Rollout


def sample_completions(
    sampler: Sampler, prompts_P: Sequence[EncodedPrompt], params: SamplingParams, seed: int, version: int
) -> list[list[Completion]]:
    """Return completions [P][n] drawn from the policy after `version` optimizer updates.

    Raises:
        StaleEngineError: the engine drew them from the weights of another version.
    """
    completions_PG = sampler.sample([prompt.token_ids for prompt in prompts_P], params, seed)
    versions = {completion.policy_version for group in completions_PG for completion in group}
    if versions - {version}:
        raise StaleEngineError(
            f"the engine sampled from the weights of update {min(versions - {version})}, the policy is at {version}"
        )
    return completions_PG


def grade_groups(
    tokenizer: PreTrainedTokenizerBase,
    grade: Grader,
    problems_P: Sequence[Problem],
    prompts_P: Sequence[EncodedPrompt],
    completions_PG: Sequence[Sequence[Completion]],
    reward: RewardConfig,
    max_tokens: int,
) -> list[Group]:
    """Decode every completion, have it judged and give it its reward."""
    flat = [completion for group in completions_PG for completion in group]
    texts = tokenizer.batch_decode([list(each.token_ids) for each in flat], skip_special_tokens=True)
    owners = [problem for problem, group in zip(problems_P, completions_PG, strict=True) for _ in group]
    judged = iter(zip(texts, grade(owners, texts), strict=True))
    groups = []
    for problem, prompt, completions in zip(problems_P, prompts_P, completions_PG, strict=True):
        rollouts = []
        for completion in completions:
            text, verdict = next(judged)
            shaped = shaped_reward(verdict, len(completion.token_ids), max_tokens, reward)
            rollouts.append(
                Rollout(
                    problem, prompt.text, prompt.token_ids, completion, text, replace(verdict, reward=shaped)
                )
            )
        groups.append(Group(problem, tuple(rollouts)))
    return groups
