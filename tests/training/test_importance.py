"""Updates with importance corrections: masked tokens have no part in the gradient and in the metrics of the method."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from bandpo_cli.config.run import RunConfig
from bandpo_cli.models.load import Policy
from bandpo_cli.objective.advantages import group_advantages
from bandpo_cli.objective.loss import policy_loss
from bandpo_cli.training.experience import Experience
from bandpo_cli.training.metrics import clip_map_columns, token_metrics, update_metrics
from bandpo_cli.training.optimizer import Optimizer
from bandpo_cli.training.update import AppliedUpdates, update_policy
from bandpo_cli.types import Group
from tests.training import small_updates
from tests.training.small_updates import config_of, graded_groups, policy_of, shifted_groups, weights_of


def experience_of(policy: Policy, groups: list[Group], config: RunConfig, **changes: Any) -> Experience:
    """Return the experience of groups that another engine sampled."""
    rewards = torch.tensor([[rollout.grade.reward for rollout in group.rollouts_G] for group in groups])
    loss = policy_loss(config.bounds, config.objective)
    found = small_updates.experience_of(policy, groups, group_advantages(rewards), loss, config, exact=False)
    return replace(found, **changes)


def updated(policy: Policy, experience: Experience, config: RunConfig, times: int = 1) -> AppliedUpdates:
    """Return the metrics of the last of some updates on the same experience."""
    optimizer = Optimizer(policy.model, config.optim, total_updates=times)
    return [update_policy(policy, optimizer, [experience], config) for _ in range(times)][-1]


def gradient_of(policy: Policy) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        ("clip", "token-mask"),
        ("sapo", "sequence-mask"),
        ("gmpo", "sequence-mask-any"),
        ("clip-cov", "token-mask"),
    ],
)
def test_an_update_without_any_kept_token_has_no_gradient(method: str, rule: str) -> None:
    """Every token's weight is e, beyond the cap; the reference penalty is part of the masked loss."""
    config = config_of(objective={"importance": rule, "importance_cap": 2.0}, bounds={"method": method})
    policy = policy_of()
    experience = experience_of(policy, shifted_groups(graded_groups(policy), by=-1.0), config)
    before = weights_of(policy)
    updates = updated(policy, experience, config)
    assert torch.equal(weights_of(policy), before)
    metrics = update_metrics(updates)
    assert (metrics["optim/loss"], metrics["optim/grad_norm"]) == (0, 0)
    assert metrics["clip/active_fraction"] == 0
    assert not [name for name in metrics if name.startswith("gradient/")]
    assert token_metrics([experience])["sampler/importance_masked_fraction"] == 1
    assert (clip_map_columns(updates)["advantage"] == 0).all()


@pytest.mark.parametrize("method", ["clip", "gspo"])
def test_a_completion_that_is_dropped_has_the_gradient_of_an_advantage_of_zero(method: str) -> None:
    """The first group is off by one nat and dropped; its tokens stay in the denominators of the loss."""
    config = config_of(objective={"importance": "sequence-mask"}, bounds={"method": method})
    policy, other = policy_of(), policy_of()
    groups = graded_groups(policy)
    shifted = [*shifted_groups(groups[:1], by=-1.0), *groups[1:]]
    dropped = sum(len(rollout.completion.token_ids) for rollout in groups[0].rollouts_G)
    masked = experience_of(policy, shifted, config)
    metrics = update_metrics(updated(policy, masked, config))
    same = experience_of(other, groups, config, importance_weights=None)
    advantages = torch.where(torch.arange(len(same.advantages)) < dropped, 0.0, same.advantages)
    expected = update_metrics(updated(other, replace(same, advantages=advantages), config))
    torch.testing.assert_close(gradient_of(policy), gradient_of(other), rtol=1e-4, atol=1e-6)
    assert gradient_of(policy).abs().max() > 1e-3
    assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-6)
    share = token_metrics([masked])["sampler/importance_masked_fraction"]
    assert share == pytest.approx(dropped / len(same.advantages))


@pytest.mark.parametrize("method", ["clip", "dppo"])
def test_masked_tokens_are_not_counted_as_clipped(method: str) -> None:
    """Half of the tokens are masked; the clipped ones are those of the other half."""
    config = config_of(
        objective={"importance": "token-mask", "dual_clip": None},
        bounds={"method": method},
        optim={"lr": 0.03, "warmup_steps": 0},
    )
    policy = policy_of()
    experience = experience_of(policy, graded_groups(policy), config)
    kept = (torch.arange(len(experience.old_logprobs)) % 2).float()
    updates = updated(policy, replace(experience, importance_weights=kept), config, times=2)
    metrics = update_metrics(updates)
    weights, ratios = updates.forwards[-1].gradient_weights, updates.forwards[-1].ratios
    clipped = (weights == 0) & (kept == 1) & (experience.advantages != 0)
    assert clipped.any()
    assert metrics["clip/active_fraction"] == pytest.approx(clipped.float().mean().item())
    used = (kept == 1) & (experience.advantages != 0)
    assert metrics["gradient/zero_fraction"] == pytest.approx(clipped.sum().item() / used.sum().item())
    assert metrics["gradient/weight_max"] == pytest.approx(ratios[used & ~clipped].max().item(), rel=1e-4)
