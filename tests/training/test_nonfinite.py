"""Non-finite values: they never change a weight, and the batch that they came from is stored."""

import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from bandpo_cli.config.layers import resolve
from bandpo_cli.models.load import Policy
from bandpo_cli.storage.checkpoints import model_checkpoints
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.storage.tables import MAX_BAD_BATCHES
from bandpo_cli.tasks.task import build_task
from bandpo_cli.training.build import build_components
from bandpo_cli.training.experience import Experience
from bandpo_cli.training.loop import train
from bandpo_cli.training.metrics import update_metrics
from bandpo_cli.training.optimizer import NonFiniteError, Optimizer
from bandpo_cli.training.update import check_finite_weights, handle_bad_update, update_policy
from tests.training.small_updates import config_of, experiences_of, policy_of, weights_of

STEADY = {"warmup_steps": 0, "lr": 1e-3}


def spoil_a_weight(policy: Policy) -> None:
    """Set one entry of an embedding to NaN; through the tied output layer it reaches every log-prob."""
    with torch.no_grad():
        next(policy.model.parameters())[5, 0] = math.nan


def with_value(experience: Experience, name: str, value: float) -> Experience:
    """Return the experience with `value` at one token of a tensor."""
    tensor = getattr(experience, name).clone()
    tensor[3] = value
    return replace(experience, **{name: tensor})


def infinite_gradient(policy: Policy, experience: Experience) -> Experience:
    next(policy.model.parameters()).register_hook(lambda gradient: gradient * math.inf)
    return experience


def broken_since(policy: Policy, experience: Experience) -> Experience:
    """Simulate an earlier update of the step that broke the policy: old log-probs are finite, new ones are not."""
    spoil_a_weight(policy)
    return experience


Fault = Callable[[Policy, Experience], Experience]

FAULTS: dict[str, tuple[Fault, str]] = {
    "policy": (
        lambda _, experience: with_value(experience, "trainer_logprobs", math.nan),
        r"the policy's log-probs are not finite at 1 of \d+ tokens",
    ),
    "sampler": (
        lambda _, experience: with_value(experience, "sampler_logprobs", -math.inf),
        "the sampler's log-probs are not finite at 1 of",
    ),
    "reference": (
        lambda _, experience: replace(
            experience, ref_logprobs=torch.full_like(experience.old_logprobs, math.nan)
        ),
        r"the reference model's log-probs are not finite at (\d+) of \1 tokens",
    ),
    "advantage": (
        lambda _, experience: with_value(experience, "advantages", math.inf),
        "the advantages are not finite at 1 of",
    ),
    "update": (broken_since, r"the policy's log-probs under update are not finite at (\d+) of \1 tokens"),
    "loss": (
        lambda _, experience: replace(experience, advantages=torch.full_like(experience.advantages, 3e38)),
        "the loss is -inf",
    ),
    "gradient": (infinite_gradient, "the gradient norm is (inf|nan)"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_raises_its_own_message_before_the_weights_change(name):
    fault, line = FAULTS[name]
    policy = policy_of()
    config = config_of(objective={"aggregation": "seq-sum-norm"}, sampling={"max_tokens": 1})
    optimizer = Optimizer(policy.model, config.optim, total_updates=1)
    experience = fault(policy, experiences_of(policy, updates=1)[0])
    before = weights_of(policy)
    with pytest.raises(NonFiniteError, match=f"^{line}"):
        update_policy(policy, optimizer, [experience], config)
    torch.testing.assert_close(weights_of(policy), before, rtol=0, atol=0, equal_nan=True)
    assert optimizer.update == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_update_changes_only_the_count_of_skips(tmp_path, dtype):
    """Good, bad, good: weights, masters, moments and metrics are those of the two good updates bit for bit."""
    config = config_of(optim={**STEADY, "max_skips": 1})
    ended = []
    for bad in (False, True):
        policy = policy_of()
        first, second = experiences_of(policy, updates=2)
        broken = [with_value(first, "sampler_logprobs", -math.inf)] if bad else []
        policy.model.to(dtype)
        optimizer = Optimizer(policy.model, config.optim, total_updates=3)
        handler = partial(handle_bad_update, config, optimizer, 1, tmp_path)
        updates = update_policy(policy, optimizer, [first, *broken, second], config, handler)
        ended.append((weights_of(policy), update_metrics(updates), optimizer))
    (weights, expected, other), (changed, metrics_with_bad, optimizer) = ended
    assert torch.equal(changed, weights)
    assert (dtype == torch.bfloat16) == any("master" in name for name in other.state())
    assert all(torch.equal(optimizer.state()[name], value) for name, value in other.state().items())
    assert metrics_with_bad.pop("optim/skipped_updates") == 1.0
    assert expected.pop("optim/skipped_updates") == 0.0
    assert metrics_with_bad == expected
    assert optimizer.update == 3
    assert optimizer.skipped_in_a_row == 0


def test_an_overflow_in_float16_skips_the_update_and_halves_the_scale(caplog):
    """The update without an overflow has the gradient of float32, and no batch is stored for the other."""
    norms = {}
    for dtype in (torch.float32, torch.float16):
        policy = policy_of()
        first, second = experiences_of(policy, updates=2)
        policy.model.to(dtype)
        optimizer = Optimizer(policy.model, config_of(optim=STEADY).optim, total_updates=2)
        before = weights_of(policy)
        hook = next(policy.model.parameters()).register_hook(lambda gradient: gradient * math.inf)
        if dtype == torch.float16:
            updates = update_policy(policy, optimizer, [first], config_of())
            assert torch.equal(weights_of(policy), before)
            expected = {"optim/lr": 1e-3, "optim/skipped_updates": 1.0, "optim/loss_scale": 32768.0}
            assert update_metrics(updates) == expected
            assert (optimizer.update, optimizer.skipped_in_a_row, len(caplog.messages)) == (1, 0, 1)
            assert "it is skipped, the loss scale falls to 32768" in caplog.text
            optimizer.scaler.update(256.0)
        hook.remove()
        updates = update_policy(policy, optimizer, [second], config_of())
        norms[dtype] = updates.grad_norms[0]
        assert not torch.equal(weights_of(policy), before)
    assert norms[torch.float16] == pytest.approx(norms[torch.float32], rel=0.02)


def test_the_batch_is_stored_with_every_computed_value(tmp_path):
    policy = policy_of()
    config = config_of(objective={"reference_kl": 0.1})
    (experience,) = experiences_of(policy, updates=1)
    experience = with_value(
        replace(experience, ref_logprobs=experience.old_logprobs - 1), "trainer_logprobs", 0
    )
    optimizer = Optimizer(policy.model, config.optim, total_updates=1)
    spoil_a_weight(policy)
    handler = partial(handle_bad_update, config, optimizer, 12, tmp_path)
    with pytest.raises(NonFiniteError) as caught:
        update_policy(policy, optimizer, [experience], config, handler)
    path = tmp_path / "bad_batches" / "step-000012-update-1.parquet"
    line = str(caught.value)
    assert line.startswith("step 12, update 1 of 4: the policy's log-probs under update are not finite at ")
    assert "\n" not in line
    for part in (str(path), "a lower optim.lr than 5e-05", "optim.max_skips=5"):
        assert part in line
    assert os.listdir(path.parent) == [path.name]

    table = pd.read_parquet(path)
    assert len(table) == len(experience.lengths)
    assert table["token_ids"].map(len).tolist() == experience.lengths.tolist()
    rollouts = [rollout for group in experience.groups for rollout in group.rollouts_G]
    for row, rollout in zip(table.itertuples(), rollouts, strict=True):
        assert (tuple(row.prompt_ids), tuple(row.token_ids)) == (
            rollout.prompt_ids,
            tuple(rollout.completion.token_ids),
        )
        assert (row.prompt, row.text, row.reward) == (rollout.prompt, rollout.text, rollout.grade.reward)
        assert row.error in line
    for name, tensor in {
        "old_logprobs": experience.old_logprobs,
        "trainer_logprobs": experience.trainer_logprobs,
        "sampler_logprobs": experience.sampler_logprobs,
        "ref_logprobs": experience.ref_logprobs,
        "lower": experience.columns["lower"],
        "upper": experience.columns["upper"],
        "advantages": experience.advantages,
    }.items():
        np.testing.assert_array_equal(np.concatenate(table[name]), tensor.numpy(), err_msg=name)
    assert np.isnan(np.concatenate(table["new_logprobs"])).all()
    assert np.isnan(np.concatenate(table["ratios"])).all()
    assert table["importance"].isna().all()


@pytest.mark.parametrize(("dtype", "norm"), [("float32", 1.0), ("bfloat16", None)])
def test_suggestions_leave_out_settings_in_use_and_an_unwritable_disk_is_named(tmp_path, dtype, norm):
    (tmp_path / "bad_batches").write_text("a file where the folder should be")
    config = config_of(model={"dtype": dtype}, optim={"max_grad_norm": norm})
    policy = policy_of()
    optimizer = Optimizer(policy.model, config.optim, total_updates=1)
    (experience,) = experiences_of(policy, updates=1)
    bad = with_value(experience, "advantages", math.nan)
    handler = partial(handle_bad_update, config, optimizer, 1, tmp_path)
    with pytest.raises(NonFiniteError, match=r"are not finite.*batch could not be written") as caught:
        update_policy(policy, optimizer, [bad], config, handler)
    assert ("model.dtype=float32" in str(caught.value)) == (dtype != "float32")
    assert ("optim.max_grad_norm=1" in str(caught.value)) == (norm is None)


def test_consecutive_skips_and_stored_batches_are_limited(tmp_path):
    limit = MAX_BAD_BATCHES + 2
    config = config_of(optim={**STEADY, "max_skips": limit})
    policy = policy_of()
    good, other = experiences_of(policy, updates=2)
    bad = with_value(other, "trainer_logprobs", math.nan)
    optimizer = Optimizer(policy.model, config.optim, total_updates=99)

    def updates(step: int, *experiences: Experience) -> int:
        handler = partial(handle_bad_update, config, optimizer, step, tmp_path)
        return len(update_policy(policy, optimizer, experiences, config, handler).skipped)

    assert updates(1, *[bad] * limit, good, *[bad] * limit) == 2 * limit, "a good update resets the count"
    assert len(os.listdir(tmp_path / "bad_batches")) == MAX_BAD_BATCHES
    with pytest.raises(
        NonFiniteError, match=rf"not applied, after {limit} skipped in a row; its batch is in"
    ):
        updates(2, bad)
    names = sorted(os.listdir(tmp_path / "bad_batches"))
    assert len(names) == MAX_BAD_BATCHES + 1
    assert names[-1] == "step-000002-update-1.parquet", "the batch that stops the run is always stored"


SMALL: dict[str, Any] = {
    "steps": 3,
    "task": {"max_number": 5},
    "sampling": {"prompts": 4, "samples": 2},
    "optim": {"updates": 2},
    "evaluation": {"every": 0},
    "checkpoint": {"every": 1},
}


def test_a_run_with_a_broken_weight_skips_up_to_the_limit_and_stops(tmp_path):
    """Three skips are allowed: step 1 is recorded with both updates skipped, step 2 stops at its second."""
    config = resolve([SMALL, {"optim": {"max_skips": 3}, "checkpoint": {"every": 0}}])
    components = build_components(config, build_task(config.task))
    folder = RunFolder.create(tmp_path, "a")
    spoil_a_weight(components.policy)
    with pytest.raises(
        NonFiniteError, match=r"^step 2, update 2 of 2: the sampler's log-probs are not finite"
    ):
        for _ in train(config, components, folder):
            pass
    (record,) = folder.read_metrics()
    assert record["optim/skipped_updates"] == 2
    assert record["train/entropy"] is None
    assert "optim/loss" not in record
    names = sorted(path.stem for path in (folder.path / "bad_batches").iterdir())
    assert names == [f"step-00000{step}-update-{update}" for step in (1, 2) for update in (1, 2)]


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([1.0, math.nan], False),
        ([math.inf, -math.inf], False),
        ([-math.inf, 0.0], False),
        ([3e38, 3e38], True),
        ([3e38, 3e38, math.nan], False),
    ],
)
def test_weights_whose_sum_is_too_large_are_finite(values, finite):
    layer = torch.nn.Linear(len(values), 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([values]))
    with nullcontext() if finite else pytest.raises(NonFiniteError):
        check_finite_weights(layer)


@pytest.mark.slow
def test_infinite_gradients_after_good_steps_reach_no_checkpoint(tmp_path):
    """Two good steps, then infinite gradients. All checkpoints have the weights of step 2, the last good update; and
    while updates fail no checkpoint is removed, although the settings keep only the last one."""
    keep_one = {"checkpoint": {"every": 1, "keep_last": 1, "keep_best": 0}}
    config = resolve([SMALL, {"steps": 5, "optim": {"updates": 2, "max_skips": 3}}, keep_one])
    components = build_components(config, build_task(config.task))
    folder = RunFolder.create(tmp_path, "a")
    steps = train(config, components, folder)
    assert [next(steps).step, next(steps).step] == [1, 2]
    next(components.policy.model.parameters()).register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(NonFiniteError, match=r"^step 4, update 2 of 2: the gradient norm is (inf|nan)"):
        list(steps)
    assert list(model_checkpoints(folder)) == [2, 3]
    for path in model_checkpoints(folder).values():
        saved = AutoModelForCausalLM.from_pretrained(path).state_dict()
        for name, tensor in components.policy.model.state_dict().items():
            assert torch.equal(saved[name], tensor), name
