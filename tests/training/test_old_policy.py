"""Values of π_old from three sources, and groups without an advantage that do not go through the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from bandpo_cli.config.run import ModelConfig, RunConfig
from bandpo_cli.models import logprobs
from bandpo_cli.models.load import Policy, load_reference
from bandpo_cli.objective.advantages import group_advantages, has_reward_spread
from bandpo_cli.objective.loss import LossInputs, UpdateTokens, policy_loss, policy_objective
from bandpo_cli.registries import METHODS
from bandpo_cli.sampling.base import SamplingParams, is_exact
from bandpo_cli.sampling.transformers_sampler import TransformersSampler
from bandpo_cli.training import old_policy, update
from bandpo_cli.training.experience import Experience, UpdateBatch
from bandpo_cli.training.metrics import token_metrics
from bandpo_cli.training.old_policy import active_groups, prepare_experience, prepare_updates
from bandpo_cli.training.optimizer import Optimizer
from bandpo_cli.training.update import UpdateMetrics, update_policy
from bandpo_cli.types import Group
from tests.training.small_updates import PROMPTS, config_of, graded_groups, policy_of, weights_of

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


def batches_of(
    policy: Policy, config: RunConfig, entropy: bool = True, shares: bool = True
) -> list[UpdateBatch]:
    groups, advantages = graded(policy, entropy)
    loss = policy_loss(config.bounds, config.objective)
    return prepare_updates(policy, None, groups, advantages, loss, config, sampler_is_exact=shares)


def complete_of(policy: Policy, config: RunConfig, shares: bool = True) -> list[Experience]:
    """Return experiences of all tokens, from passes of the trainer."""
    groups, advantages = graded(policy)
    loss = policy_loss(config.bounds, config.objective)
    size = len(groups) // config.optim.updates
    return [
        prepare_experience(policy, None, groups[i : i + size], advantages[i : i + size], loss, config, shares)
        for i in range(0, len(groups), size)
    ]


@dataclass
class Outcome:
    weights: torch.Tensor
    gradient: torch.Tensor
    updates: UpdateMetrics

    @property
    def metrics(self) -> dict[str, float]:
        return self.updates.metrics() | token_metrics(self.updates.trained)


def updated(policy: Policy, batches: list[UpdateBatch] | list[Experience], config: RunConfig) -> Outcome:
    optimizer = Optimizer(policy.model, config.optim, total_updates=len(batches))
    updates = update_policy(policy, optimizer, batches, config)
    gradient = torch.cat([each.grad.flatten() for each in policy.model.parameters()])  # type: ignore[union-attr]
    return Outcome(weights_of(policy), gradient, updates)


@pytest.mark.parametrize("micro_batch_tokens", [10_000, 1])
@pytest.mark.parametrize("method", METHODS)
def test_updates_equal_those_of_all_tokens_with_log_probs_of_the_trainer(
    method: str, micro_batch_tokens: int
) -> None:
    """One update: the gradient is that of all groups; metrics differ in those that need a ratio alone."""
    config = settings(method, updates=1)
    config = config.model_copy(
        update={"optim": config.optim.model_copy(update={"micro_batch_tokens": micro_batch_tokens})}
    )
    policy, other = policy_of(), policy_of()
    found = updated(policy, batches_of(policy, config), config)
    expected = updated(other, complete_of(other, config), config)
    assert expected.gradient.abs().max() > 1e-3
    torch.testing.assert_close(found.gradient, expected.gradient, atol=1e-5, rtol=1e-4)
    left_out = set() if policy_loss(config.bounds, config.objective).needs_all_tokens else RATIO_METRICS
    same = {name for name in expected.metrics if name not in left_out and not name.startswith("sampler/")}
    for name in same:
        assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize(("entropy", "shares"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "token-mean", "seq-sum-norm"])
def test_weights_after_several_updates_equal_those_of_all_tokens(
    aggregation: str, entropy: bool, shares: bool
) -> None:
    config = settings(objective={"aggregation": aggregation})
    policy, other = policy_of(), policy_of()
    found = updated(policy, batches_of(policy, config, entropy, shares), config)
    expected = updated(other, complete_of(other, config, shares), config)
    torch.testing.assert_close(found.gradient, expected.gradient, atol=1e-4, rtol=1e-3)
    same = set(expected.metrics) - RATIO_METRICS
    if entropy and shares:
        same = {name for name in same if not name.startswith("sampler/")}
    for name in same:
        assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-3, abs=1e-4), name


def test_the_first_update_has_ratios_of_exactly_one() -> None:
    policy = policy_of()
    config = settings()
    outcome = updated(policy, batches_of(policy, config), config)
    assert (outcome.updates.ratios[0] == 1).all()
    assert (outcome.updates.old_new[0] == 0).all()
    assert (outcome.updates.ratios[1] != 1).any()


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_needs_no_other_tokens_has_no_loss_without_an_advantage(method: str) -> None:
    """And its columns of some completions are those of all, so that they can be computed per micro-batch."""
    config = settings(method)
    loss = policy_loss(config.bounds, config.objective)
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([30, 20, 50])
    old = -4 * torch.rand(100, generator=generator) - 0.1
    new = old + 0.3 * torch.randn(100, generator=generator)
    advantages = torch.tensor([1.0, 0.0, -2.0]).repeat_interleave(lengths)
    columns = loss.prepare(UpdateTokens(old, advantages, lengths))
    parts = [
        loss.prepare(UpdateTokens(old[span], advantages[span], lengths[index : index + 1]))
        for index, span in enumerate((slice(0, 30), slice(30, 50), slice(50, 100)))
    ]
    separate = all(torch.equal(torch.cat([part[name] for part in parts]), columns[name]) for name in columns)
    inputs = LossInputs(new, old, advantages, torch.full_like(new, 0.01), lengths, columns)
    out = policy_objective(loss, inputs)
    idle = advantages == 0
    without = not out.gradient[idle].any() and not loss.token_losses(inputs)[idle].any()
    assert (separate and without) != loss.needs_all_tokens


def count_passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Return a list that receives (with gradient, completion tokens) of each forward pass."""
    passes: list[tuple[bool, int]] = []

    def counted(model: Any, batch: Any, *arguments: Any, **options: Any) -> Any:
        passes.append((torch.is_grad_enabled(), len(batch.targets)))
        return logprobs.token_logprobs(model, batch, *arguments, **options)

    monkeypatch.setattr(old_policy, "token_logprobs", counted)
    monkeypatch.setattr(update, "token_logprobs", counted)
    return passes


@pytest.mark.parametrize(
    ("entropy", "shares", "dtype", "without_gradient"),
    [
        (True, True, "float32", []),
        (False, True, "float32", ["idle", "second"]),
        (True, False, "float32", ["idle", "second"]),
        (True, True, "bfloat16", ["idle", "second"]),
    ],
    ids=["the trainer's model", "no entropies", "another engine", "bfloat16"],
)
def test_no_more_tokens_go_through_the_model_than_are_needed(
    monkeypatch: pytest.MonkeyPatch, entropy: bool, shares: bool, dtype: str, without_gradient: list[str]
) -> None:
    """Of the groups 0 to 3, two have spread. Only they have a pass with gradient."""
    policy = policy_of()
    config = settings()
    groups, advantages = graded(policy, entropy)
    spread = [has_reward_spread(group) for group in groups]
    sizes = [sum(len(each.completion.token_ids) for each in group.rollouts_G) for group in groups]
    policy.model.to(getattr(torch, dtype))
    passes = count_passes(monkeypatch)
    loss = policy_loss(config.bounds, config.objective)
    sampler = TransformersSampler(policy.model, policy.pad_id)
    sampler.shares_weights = shares
    exact = is_exact(sampler, policy)
    batches = prepare_updates(policy, None, groups, advantages, loss, config, sampler_is_exact=exact)
    before = [tokens for _, tokens in passes]
    update_policy(policy, Optimizer(policy.model, config.optim, 2), batches, config)
    used = [[i for i in pair if spread[i]] or [pair[0]] for pair in ([0, 1], [2, 3])]
    with_gradient = [tokens for gradient, tokens in passes if gradient]
    assert with_gradient == [sum(sizes[i] for i in places) for places in used]
    idle = sum(sizes) - sum(with_gradient)
    expected = {"idle": idle, "second": with_gradient[1]}
    assert sum(before) == sum(expected[name] for name in without_gradient)
    assert len(passes) == len(before) + 2


def test_a_reference_model_keeps_all_groups() -> None:
    policy = policy_of()
    config = settings(objective={"reference_kl": 0.1})
    groups, advantages = graded(policy)
    loss = policy_loss(config.bounds, config.objective)
    reference = load_reference(policy, ModelConfig())
    batches = prepare_updates(policy, reference, groups, advantages, loss, config, sampler_is_exact=True)
    assert [each for batch in batches for each in batch.groups] == groups
    assert all(batch.idle is None and batch.ref_logprobs is not None for batch in batches)


def test_one_group_is_kept_where_none_has_an_advantage() -> None:
    advantages = torch.tensor([[0.0, 0.0], [1.0, -1.0], [0.0, float("nan")]])
    assert active_groups(advantages).tolist() == [False, True, True]
    assert active_groups(advantages[:1]).tolist() == [True]
    assert active_groups(torch.zeros(3, 2)).tolist() == [True, False, False]


def test_entropies_and_log_probs_of_the_sampler_are_those_of_the_trainer() -> None:
    """At a temperature other than 1, at which the log-probs are, and the entropies are not."""
    policy = policy_of()
    config = settings(sampling={"temperature": 0.7})
    params = SamplingParams(4, 0.7, 6, policy.stop_ids, entropy=True)
    sampled = TransformersSampler(policy.model, policy.pad_id).sample(PROMPTS, params, seed=5)
    changed = []
    for group, completions in zip(graded_groups(policy), sampled, strict=True):
        pairs = zip(group.rollouts_G, completions, strict=True)
        rollouts = [replace(rollout, completion=completion) for rollout, completion in pairs]
        changed.append(replace(group, rollouts_G=tuple(rollouts)))
    loss = policy_loss(config.bounds, config.objective)
    experience = prepare_experience(policy, None, changed, torch.zeros(4, 4), loss, config)
    reported = [
        value for group in changed for each in group.rollouts_G for value in each.completion.entropies
    ]
    assert experience.entropy is not None
    torch.testing.assert_close(torch.tensor(reported), experience.entropy, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(experience.sampler_logprobs, experience.old_logprobs, atol=2e-5, rtol=1e-5)
