"""Experiences: values of π_old from three sources, and groups without an advantage that do not go through the model."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from bandpo_cli.config.run import ModelConfig, RunConfig
from bandpo_cli.methods import METHODS
from bandpo_cli.methods.loss import LossBatch, policy_loss
from bandpo_cli.models import logprobs
from bandpo_cli.models.load import Policy, load_reference
from bandpo_cli.objective.advantages import group_advantages, has_reward_spread
from bandpo_cli.objective.policy_objective import policy_objective
from bandpo_cli.sampling.sampler import TransformersSampler, is_exact
from bandpo_cli.training import experience, update
from bandpo_cli.training.experience import Experience, active_groups, prepare_updates
from bandpo_cli.training.metrics import token_metrics, update_metrics
from bandpo_cli.training.optimizer import Optimizer
from bandpo_cli.training.update import AppliedUpdates, update_policy
from bandpo_cli.types import Group
from tests.training import small_updates
from tests.training.small_updates import config_of, graded_groups, policy_of, weights_of

RATIO_METRICS = {"ratio/mean", "ratio/max", "kl/old_new", "clip/outside_fraction"}
"""Metrics of the tokens that went through the model in an update."""


def settings(method: str = "band", updates: int = 2, **sections: Any) -> RunConfig:
    optim = {"updates": updates, "warmup_steps": 0, "lr": 1e-2, "max_grad_norm": None}
    return config_of(bounds={"method": method}, optim=optim, **sections)


def graded(policy: Policy, entropy: bool = True) -> tuple[list[Group], torch.Tensor]:
    """Return groups of which some have equal rewards, and their advantages."""
    groups = graded_groups(policy, entropy)
    rewards = torch.tensor([[rollout.grade.reward for rollout in group.rollouts_G] for group in groups])
    assert sum(map(has_reward_spread, groups)) == 2
    return groups, group_advantages(rewards)


def experiences_of(
    policy: Policy, config: RunConfig, entropy: bool = True, exact: bool = True
) -> list[Experience]:
    groups, advantages = graded(policy, entropy)
    loss = policy_loss(config.bounds, config.objective)
    return prepare_updates(policy, None, groups, advantages, loss, config, exact)


@dataclass
class Outcome:
    weights: torch.Tensor
    gradient: torch.Tensor
    updates: AppliedUpdates

    @property
    def metrics(self) -> dict[str, float]:
        return update_metrics(self.updates) | token_metrics(self.updates.trained)


def updated(policy: Policy, experiences: list[Experience], config: RunConfig) -> Outcome:
    optimizer = Optimizer(policy.model, config.optim, total_updates=len(experiences))
    updates = update_policy(policy, optimizer, experiences, config)
    gradient = torch.cat([parameter.grad.flatten() for parameter in policy.model.parameters()])
    return Outcome(weights_of(policy), gradient, updates)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("method", ["band", "gspo", "kl-cov"])
def test_updates_equal_those_of_all_tokens_with_log_probs_of_the_trainer(method):
    """One update: the gradient is that of all groups; metrics differ in those that need a ratio alone."""
    config = settings(method, updates=1)
    config = config.model_copy(update={"optim": config.optim.model_copy(update={"micro_batch_tokens": 1})})
    policy, other = policy_of(), policy_of()
    found = updated(policy, experiences_of(policy, config), config)
    expected = updated(other, small_updates.experiences_of(other, 1, config.bounds, config), config)
    assert expected.gradient.abs().max() > 1e-3
    torch.testing.assert_close(found.gradient, expected.gradient, atol=1e-5, rtol=1e-4)
    left_out = set() if policy_loss(config.bounds, config.objective).needs_all_tokens else RATIO_METRICS
    same = {name for name in expected.metrics if name not in left_out and not name.startswith("sampler/")}
    for name in same:
        assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-4, abs=1e-5), name


def test_the_first_update_has_ratios_of_exactly_one():
    policy = policy_of()
    config = settings()
    outcome = updated(policy, experiences_of(policy, config), config)
    first, second = outcome.updates.forwards
    assert (first.ratios == 1).all()
    assert torch.equal(first.logprobs, outcome.updates.trained[0].old_logprobs)
    assert (second.ratios != 1).any()


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_needs_no_other_tokens_has_no_loss_without_an_advantage(method):
    """And its columns of some completions are those of all, so that they can be computed per micro-batch."""
    config = settings(method)
    loss = policy_loss(config.bounds, config.objective)
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([30, 20, 50])
    old = -4 * torch.rand(100, generator=generator) - 0.1
    new = old + 0.3 * torch.randn(100, generator=generator)
    advantages = torch.tensor([1.0, 0.0, -2.0]).repeat_interleave(lengths)
    values = (old, advantages, *([old - new.abs() / 9] if loss.needs_sampler else []))
    columns = loss.prepare(*values)
    spans = (slice(0, 30), slice(30, 50), slice(50, 100))
    parts = [loss.prepare(*(column[span] for column in values)) for span in spans]
    separate = all(torch.equal(torch.cat([part[name] for part in parts]), columns[name]) for name in columns)
    batch = LossBatch(lengths, advantages, old, columns, wrong_peers=torch.tensor([0.5, 0.0, 0.0]))
    out = policy_objective(loss, new, batch, torch.full_like(new, 0.01))
    idle = advantages == 0
    without = not out.gradient[idle].any() and not loss.token_losses(new, batch)[idle].any()
    assert (separate and without) != loss.needs_all_tokens


def count_passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Return a list that receives (with gradient, completion tokens) of each forward pass."""
    passes: list[tuple[bool, int]] = []

    def counted(model: Any, batch: Any, *arguments: Any, **options: Any) -> Any:
        passes.append((torch.is_grad_enabled(), len(batch.targets)))
        return logprobs.token_logprobs(model, batch, *arguments, **options)

    monkeypatch.setattr(experience, "token_logprobs", counted)
    monkeypatch.setattr(update, "token_logprobs", counted)
    return passes


ALL = ["left out of the first", "second", "left out of the second"]


@pytest.mark.parametrize(
    ("objective", "method", "without_gradient"),
    [
        ({}, "band", ["second"]),
        ({"old_logprobs": "sampler"}, "band", []),
        ({"all_token_metrics": True}, "band", ALL),
        ({"old_logprobs": "sampler", "all_token_metrics": True}, "band", ALL),
        ({}, "kl-cov", ["all of the first", "all of the second"]),
        ({"old_logprobs": "sampler"}, "kl-cov", []),
        # Only entropies of all tokens have a threshold, before the first update.
        ({"top_entropy": 0.3}, "band", ["first", *ALL]),
        ({"top_entropy": 0.3, "old_logprobs": "sampler"}, "band", ["first", *ALL]),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_more_passes_than_the_loss_needs_with_a_sampler_that_is_not_exact(
    monkeypatch, dtype, objective, method, without_gradient
):
    """Two updates of two groups each, one of which has equal rewards; a pass is one micro-batch."""
    config = settings(method, objective=objective)
    policy = policy_of()
    groups, _ = graded(policy, entropy=False)
    uniform, spread = (
        [group for group in groups if has_reward_spread(group) is spread] for spread in (False, True)
    )
    groups = [group for pair in zip(spread, uniform, strict=True) for group in pair]
    rewards = torch.tensor([[rollout.grade.reward for rollout in group.rollouts_G] for group in groups])
    policy.model.to(getattr(torch, dtype))
    sampler = TransformersSampler(policy.model, policy.pad_id)
    sampler.shares_weights = dtype == "bfloat16"
    passes = count_passes(monkeypatch)
    loss = policy_loss(config.bounds, config.objective)
    experiences = prepare_updates(
        policy, None, groups, group_advantages(rewards), loss, config, is_exact(sampler, policy)
    )
    update_policy(policy, Optimizer(policy.model, config.optim, 2), experiences, config)
    sizes = [sum(len(rollout.completion.token_ids) for rollout in group.rollouts_G) for group in groups]
    tokens = {
        "first": sizes[0],
        "left out of the first": sizes[1],
        "second": sizes[2],
        "left out of the second": sizes[3],
        "all of the first": sizes[0] + sizes[1],
        "all of the second": sizes[2] + sizes[3],
    }
    with_gradient = [tokens["all of the first"], tokens["all of the second"]]
    if method == "band":
        with_gradient = [sizes[0], sizes[2]]
    assert passes == [
        *((False, tokens[name]) for name in without_gradient),
        *((True, count) for count in with_gradient),
    ]


@pytest.mark.parametrize("entropy", [False, True])
def test_no_pass_without_gradient_where_the_sampler_is_exact(monkeypatch, entropy):
    """Not even for entropies that an engine does not report, and not with metrics of all tokens."""
    policy = policy_of()
    config = settings(objective={"all_token_metrics": True})
    passes = count_passes(monkeypatch)
    metrics = updated(policy, experiences_of(policy, config, entropy), config).metrics
    assert [with_gradient for with_gradient, _ in passes] == [True, True]
    assert ("train/entropy_token_share" in metrics) != entropy


@pytest.mark.parametrize("term", ["reference_kl", "entropy_bonus"])
def test_a_term_of_all_tokens_keeps_all_groups(term):
    policy = policy_of()
    config = settings(objective={term: 0.1})
    groups, advantages = graded(policy)
    loss = policy_loss(config.bounds, config.objective)
    reference = load_reference(policy, ModelConfig()) if term == "reference_kl" else None
    experiences = prepare_updates(policy, reference, groups, advantages, loss, config, sampler_is_exact=True)
    assert [group for item in experiences for group in item.groups] == groups
    assert all(item.left_out is None for item in experiences)
    assert all((item.ref_logprobs is None) == (reference is None) for item in experiences)


def test_one_group_is_kept_where_none_has_an_advantage():
    advantages = torch.tensor([[0.0, 0.0], [1.0, -1.0], [0.0, float("nan")]])
    assert active_groups(advantages).tolist() == [False, True, True]
    assert active_groups(advantages[:1]).tolist() == [True]
    assert active_groups(torch.zeros(3, 2)).tolist() == [True, False, False]
