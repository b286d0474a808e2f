"""Experiences of a small random model, for tests of updates."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import RunConfig
from bandpo_cli.methods.loss import PolicyLoss, policy_loss
from bandpo_cli.methods.settings import BandSettings
from bandpo_cli.models.load import Policy
from bandpo_cli.objective.advantages import group_advantages
from bandpo_cli.sampling.sampler import SamplingParams, TransformersSampler
from bandpo_cli.training.experience import Experience, prepare_updates
from bandpo_cli.types import Completion, Grade, Group, Problem, Rollout
from tests.conftest import random_model

PROMPTS = [(1, 2, 3), (4,), (5, 6, 7, 8), (9, 10)]
CONFIG = RunConfig.model_validate({"sampling": {"prompts": 4, "samples": 4}, "optim": {"warmup_steps": 0}})


def policy_of(seed: int = 0) -> Policy:
    return Policy(model=random_model(seed=seed), tokenizer=None, stop_ids=(2,), pad_id=0)


def graded_groups(policy: Policy, entropy: bool = False) -> list[Group]:
    """Return sampled groups in which shorter completions have higher rewards, so that the gradient is not zero.

    Args:
        entropy: the sampler reports the entropy at each token.
    """
    params = SamplingParams(
        samples=4, temperature=1.0, max_tokens=6, stop_ids=policy.stop_ids, entropy=entropy
    )
    groups = []
    sampled = TransformersSampler(policy.model, policy.pad_id).sample(PROMPTS, params, seed=5)
    for prompt, completions in zip(PROMPTS, sampled, strict=True):
        problem = Problem(id=str(prompt), prompt="", answer="", source="test", grader="countdown")
        rollouts = (
            Rollout(problem, "", prompt, completion, "", Grade(1 / len(completion.token_ids), False, "wrong"))
            for completion in completions
        )
        groups.append(Group(problem, tuple(rollouts)))
    return groups


def config_of(**sections: dict[str, Any]) -> RunConfig:
    """Return the tests' config with other settings for some sections."""
    return resolve([CONFIG.model_dump(), sections])


def experiences_of(
    policy: Policy, updates: int, bounds: Any = None, config: RunConfig = CONFIG, exact: bool = True
) -> list[Experience]:
    groups = graded_groups(policy)
    advantages = group_advantages(
        torch.tensor([[r.grade.reward for r in group.rollouts_G] for group in groups])
    )
    size, loss = len(groups) // updates, policy_loss(bounds or BandSettings(), config.objective)
    return [
        experience_of(policy, groups[i : i + size], advantages[i : i + size], loss, config, exact)
        for i in range(0, len(groups), size)
    ]


def experience_of(
    policy: Policy,
    groups: Sequence[Group],
    advantages_PG: torch.Tensor,
    loss: PolicyLoss,
    config: RunConfig = CONFIG,
    exact: bool = True,
    reference: Policy | None = None,
) -> Experience:
    """Return the experience of all groups with log-probs under π_old from a pass of the trainer.

    That is what the first update of a method that needs all tokens has; the columns are those of `loss`.
    """
    needs_all = copy.copy(loss)
    needs_all.needs_all_tokens = True
    one = config.model_copy(update={"optim": config.optim.model_copy(update={"updates": 1})})
    (experience,) = prepare_updates(policy, reference, groups, advantages_PG, needs_all, one, exact)
    return replace(experience, loss=loss)


def band_loss() -> PolicyLoss:
    """Return the loss of the Band with its defaults."""
    return policy_loss(BandSettings(), CONFIG.objective)


def weights_of(policy: Policy) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in policy.model.parameters()])


def changed(groups: list[Group], change: Callable[[Completion], dict[str, Any]]) -> list[Group]:
    """Return the groups with the attributes of their completions that `change` returns."""

    def completed(rollout: Rollout) -> Rollout:
        return replace(rollout, completion=replace(rollout.completion, **change(rollout.completion)))

    return [replace(group, rollouts_G=tuple(map(completed, group.rollouts_G))) for group in groups]
