"""From problems to graded groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from bandpo_cli.sampling.base import Sampler, SamplingParams
from bandpo_cli.types import Completion, Grade, Group, Problem, Rollout

Grader = Callable[[Problem, str], Grade]


def sample_completions(
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    problems_P: Sequence[Problem],
    params: SamplingParams,
    seed: int,
) -> tuple[list[tuple[int, ...]], list[list[Completion]]]:
    """Return the prompts' token ids [P] and the completions [P][n]."""
    encoded = tokenizer([problem.prompt for problem in problems_P], add_special_tokens=False)["input_ids"]
    prompts = [tuple(ids) for ids in encoded]
    return prompts, sampler.sample(prompts, params, seed)


def grade_groups(
    tokenizer: PreTrainedTokenizerBase,
    grade: Grader,
    problems_P: Sequence[Problem],
    prompts_P: Sequence[tuple[int, ...]],
    completions_PG: Sequence[Sequence[Completion]],
) -> list[Group]:
    """Decode every completion and let the task judge it."""
    flat = [list(completion.token_ids) for group in completions_PG for completion in group]
    texts = iter(tokenizer.batch_decode(flat, skip_special_tokens=True))
    groups = []
    for problem, prompt_ids, completions in zip(problems_P, prompts_P, completions_PG, strict=True):
        rollouts = []
        for completion in completions:
            text = next(texts)
            rollouts.append(Rollout(problem, prompt_ids, completion, text, grade(problem, text)))
        groups.append(Group(problem, tuple(rollouts)))
    return groups
