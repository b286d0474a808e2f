"""Updates: from graded groups to updated weights, on small random models."""

import math
from dataclasses import replace

import pytest
import torch

from bandpo_cli.config.batch_and_sampling import OptimConfig
from bandpo_cli.errors import RunError
from bandpo_cli.methods.loss import policy_loss
from bandpo_cli.objective.advantages import group_advantages
from bandpo_cli.objective.policy_objective import AGGREGATIONS
from bandpo_cli.training.metrics import clip_map_columns, token_metrics, update_metrics
from bandpo_cli.training.optimizer import Optimizer, lr_factor
from bandpo_cli.training.update import update_policy
from bandpo_cli.types import Completion, Group
from tests.training.small_updates import (
    CONFIG,
    band_loss,
    changed,
    config_of,
    experience_of,
    experiences_of,
    graded_groups,
    policy_of,
    weights_of,
)


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "seq-sum-norm"])
def test_accumulated_micro_batches_give_the_gradient_of_one_pass(aggregation):
    """The gradients of one row at a time add up to the gradient of all rows at once."""
    gradients = []
    for micro in (10_000, 1):
        policy = policy_of()
        config = config_of(
            objective={"aggregation": aggregation}, optim={"micro_batch_tokens": micro, "max_grad_norm": None}
        )
        optimizer = Optimizer(policy.model, config.optim, total_updates=1)
        metrics = update_policy(policy, optimizer, experiences_of(policy, 1, config=config), config)
        gradient = torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()])
        gradients.append((update_metrics(metrics), gradient))
    (one_pass_metrics, one_pass), (split_metrics, split) = gradients
    assert one_pass.abs().max() > 1e-3
    torch.testing.assert_close(split, one_pass, atol=1e-5, rtol=1e-4)
    assert split_metrics == pytest.approx(one_pass_metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("masks", [False, True])
def test_a_batch_without_an_advantage_or_with_masked_completions_alone_changes_nothing(masks):
    """Of masked completions neither penalty nor bonus counts, which need no advantage."""
    terms = {"mask_truncated": True, "reference_kl": 0.5, "entropy_bonus": 0.1} if masks else {}
    policy, config = policy_of(), config_of(objective=terms)
    groups = changed(graded_groups(policy), lambda _: {"finish_reason": "length" if masks else "stop"})
    advantages = torch.linspace(-1, 2, 16).reshape(4, 4) if masks else group_advantages(torch.ones(4, 4))
    loss = policy_loss(config.bounds, config.objective)
    experience = experience_of(policy, groups, advantages, loss, config, reference=policy_of(seed=1))
    before = weights_of(policy)
    updates = update_policy(policy, Optimizer(policy.model, OptimConfig(), 1), [experience], config)
    assert torch.equal(weights_of(policy), before)
    assert update_metrics(updates)["optim/grad_norm"] == 0.0


@pytest.mark.parametrize(("method", "rule"), [("clip", "token-mask"), ("gmpo", "sequence-mask-any")])
def test_an_update_without_any_kept_token_has_no_gradient(method, rule):
    """Every token's weight is e, beyond the cap."""
    config = config_of(objective={"importance": rule, "importance_cap": 2.0}, bounds={"method": method})
    policy = policy_of()
    groups = changed(
        graded_groups(policy), lambda item: {"logprobs": tuple(value - 1 for value in item.logprobs)}
    )
    rewards = torch.tensor([[rollout.grade.reward for rollout in group.rollouts_G] for group in groups])
    loss = policy_loss(config.bounds, config.objective)
    experience = experience_of(policy, groups, group_advantages(rewards), loss, config, exact=False)
    before = weights_of(policy)
    updates = update_policy(policy, Optimizer(policy.model, config.optim, 1), [experience], config)
    assert torch.equal(weights_of(policy), before)
    metrics = update_metrics(updates)
    assert (metrics["optim/loss"], metrics["optim/grad_norm"], metrics["clip/active_fraction"]) == (0, 0, 0)
    assert not [name for name in metrics if name.startswith("gradient/")]
    assert token_metrics([experience])["sampler/importance_masked_fraction"] == 1
    assert (clip_map_columns(updates)["advantage"] == 0).all()


def with_completions(groups: list[Group], *token_ids: tuple[int, ...]) -> list[Group]:
    """Return the groups with other completions, each with a slightly higher reward than the one before it."""
    return [
        replace(
            group,
            rollouts_G=tuple(
                replace(
                    rollout,
                    completion=Completion(ids, (-1.0,) * len(ids), "stop", 0),
                    grade=replace(rollout.grade, reward=float(place)),
                )
                for place, (rollout, ids) in enumerate(zip(group.rollouts_G, token_ids, strict=False))
            ),
        )
        for group in groups
    ]


@pytest.mark.parametrize(
    ("aggregation", "token_ids"),
    [("seq-mean-token-mean", ((2,), (2,))), ("seq-sum-norm", ((2,), (2,), (2,), (5, 6, 7, 8, 9, 2)))],
)
def test_updates_of_the_shortest_batches(aggregation, token_ids):
    """Groups of two and completions of only the end token: finite metrics, and the better one becomes likelier."""
    policy = policy_of()
    groups = with_completions(graded_groups(policy)[:1], *token_ids)
    advantages = group_advantages(torch.tensor([[rollout.grade.reward for rollout in groups[0].rollouts_G]]))
    config = config_of(objective={"aggregation": aggregation, "reference_kl": 0.1}, optim={"lr": 1e-3})
    before = experience_of(policy, groups, advantages, band_loss(), config, reference=policy)
    metrics = update_policy(policy, Optimizer(policy.model, config.optim, 2), [before, before], config)
    assert all(math.isfinite(value) for value in update_metrics(metrics).values())
    after = experience_of(policy, groups, advantages, band_loss(), config)
    better = before.advantages == before.advantages.max()
    if len(set(token_ids)) > 1:
        assert (after.old_logprobs - before.old_logprobs)[better].sum() > 0


def ending(groups: list[Group], *reasons: str) -> list[Group]:
    """Return the groups with other reasons for the end of their completions."""
    return [
        replace(
            group,
            rollouts_G=tuple(
                replace(rollout, completion=replace(rollout.completion, finish_reason=reason))
                for rollout, reason in zip(group.rollouts_G, reasons, strict=True)
            ),
        )
        for group in groups
    ]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_masked_completions_have_no_loss_and_do_not_count_in_its_normalisation(aggregation):
    """The update is that of the other completions alone; penalty and bonus, which need no advantage, too."""
    objective = {"aggregation": aggregation, "reference_kl": 0.5, "entropy_bonus": 0.1}
    objective |= {"mask_truncated": True}
    config = config_of(objective=objective, optim={"max_grad_norm": None, "micro_batch_tokens": 20})
    loss, advantages = policy_loss(config.bounds, config.objective), torch.linspace(-1, 2, 16).reshape(4, 4)
    groups = ending(graded_groups(policy_of()), "length", "stop", "stop", "stop")
    others = [replace(group, rollouts_G=group.rollouts_G[1:]) for group in groups]
    outcomes = []
    for completions, values in ((groups, advantages), (others, advantages[:, 1:])):
        policy = policy_of()
        experience = experience_of(policy, completions, values, loss, config, reference=policy_of(seed=1))
        updates = update_policy(policy, Optimizer(policy.model, config.optim, 1), [experience], config)
        outcomes.append((updates.forwards[0].loss, updates.grad_norms[0], weights_of(policy)))
    assert outcomes[0][1] > 1e-3
    torch.testing.assert_close(outcomes[0], outcomes[1], atol=1e-6, rtol=1e-5)
    truncated = experience_of(policy, ending(groups, *["length"] * 4), advantages, loss, config)
    assert not truncated.loss_weights(aggregation, 6).any()


def test_a_completion_without_tokens_is_refused():
    policy = policy_of()
    groups = with_completions(graded_groups(policy), (2,), ())
    with pytest.raises(RunError, match="a completion without a token"):
        experience_of(policy, groups, torch.zeros(4, 2), band_loss(), CONFIG)


def test_learning_rate_warms_up_then_follows_its_schedule():
    linear = OptimConfig(warmup_steps=4, schedule="linear")
    assert [lr_factor(update, 12, linear) for update in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert lr_factor(8, 12, linear) == pytest.approx(0.5)
    cosine = OptimConfig(warmup_steps=0, schedule="cosine")
    assert lr_factor(6, 12, cosine) == pytest.approx(0.5)
    assert lr_factor(999, 12, OptimConfig(warmup_steps=0)) == 1.0
