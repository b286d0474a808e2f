"""The check after a weight sync, with the transformers sampler on a copy of the model in the place of an engine."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from bandpo_cli.config.run import ModelConfig
from bandpo_cli.models.load import Policy, load_policy
from bandpo_cli.sampling.sampler import SamplingParams, StaleEngineError, TokenIds
from bandpo_cli.sampling.sync_check import (
    ATTEMPTS,
    HALF_PRECISION_LIMIT,
    CheckSchedule,
    SyncCheck,
    mean_gap,
)
from bandpo_cli.sampling.transformers_sampler import TransformersSampler
from bandpo_cli.types import Completion
from tests.conftest import random_model

Change = Callable[[int, Sequence[Completion]], Sequence[Completion]]
LONG = 100
"""A limit of the engine's context that allows the longest prompt of the check."""


class Engine:
    """Samples from `model`; `change` receives the number of the call, from 0, and what was sampled."""

    def __init__(
        self, model: PreTrainedModel, change: Change = lambda call, completions: completions
    ) -> None:
        self.model, self._change = model, change
        self.prompts: list[TokenIds] = []
        self.seeds: list[int] = []

    def __call__(self, prompt: TokenIds, params: SamplingParams, seed: int) -> Sequence[Completion]:
        self.prompts.append(prompt)
        self.seeds.append(seed)
        completions = TransformersSampler(self.model, 0).sample([prompt], params, seed)[0]
        return self._change(len(self.prompts) - 1, completions)


def policy_of(model: PreTrainedModel) -> Policy:
    no_tokenizer: Any = None
    return Policy(model, no_tokenizer, (2,), 0)


def shifted(completion: Completion, *shifts: float) -> Completion:
    padded = [*shifts, *[0.0] * len(completion.logprobs)]
    pairs = zip(completion.logprobs, padded, strict=False)
    return replace(completion, logprobs=tuple(logprob + shift for logprob, shift in pairs))


def check(model: PreTrainedModel, engine: Engine) -> float:
    """Run the check; return the gap of the last attempt."""
    found = SyncCheck(policy_of(model), LONG)
    found.check(model, 5, engine)
    return found.gap


def test_the_gap_is_the_mean_of_all_absolute_differences() -> None:
    """A float64 copy of the model gives the log-probs; the shifts add up to 4 over 32 tokens."""
    model = random_model()
    prompt = (3, 1, 4, 1, 5)
    params = SamplingParams(samples=4, temperature=1.0, max_tokens=8, stop_ids=())
    completions = Engine(model)(prompt, params, 0)
    exact = copy.deepcopy(model).double()
    reported = []
    for completion in completions:
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logprobs = torch.log_softmax(exact(input_ids=ids).logits[0], dim=-1)
        own = [logprobs[4 + place, token].item() for place, token in enumerate(completion.token_ids)]
        reported.append(replace(completion, logprobs=tuple(own)))
    changed = [shifted(reported[0], 1.0, -1.0), shifted(reported[1], -2.0), *reported[2:]]
    assert mean_gap(model, prompt, changed) == pytest.approx(4 / 32, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_synced_engine_passes_at_the_first_attempt(dtype: torch.dtype) -> None:
    model = random_model().to(dtype)
    engine = Engine(copy.deepcopy(model))
    gap = check(model, engine)
    assert len(engine.prompts) == 1
    assert gap < (1e-5 if dtype == torch.float32 else HALF_PRECISION_LIMIT / 2)


def test_one_token_far_off_in_16_bits_is_no_error() -> None:
    """One token off by 2 nats is 0.06 on average: rounding at a token that the policy hardly ever samples."""
    model = random_model().bfloat16()
    engine = Engine(copy.deepcopy(model), lambda call, item: [shifted(item[0], 2.0), *item[1:]])
    assert check(model, engine) == pytest.approx(2 / 32, abs=0.03)
    assert len(engine.prompts) == 1


def test_a_probe_above_the_limit_is_repeated_once_with_other_tokens() -> None:
    model = random_model().bfloat16()
    far_off = [20.0] * 8
    once = Engine(
        copy.deepcopy(model),
        lambda call, item: [shifted(one, *far_off) for one in item] if call == 0 else item,
    )
    assert check(model, once) < HALF_PRECISION_LIMIT
    assert len(once.seeds) == len(set(once.seeds)) == ATTEMPTS == 2
    always = Engine(copy.deepcopy(model), lambda call, entry: [shifted(one, *far_off) for one in entry])
    with pytest.raises(
        StaleEngineError, match=r"version 5 of the weights: .* by 20 nats on average, .* 0\.1"
    ):
        check(model, always)
    assert len(always.prompts) == ATTEMPTS


def test_the_first_sync_one_in_ten_and_those_after_a_failure_are_checked_completely() -> None:
    schedule, complete = CheckSchedule(), []
    for index in range(32):
        try:
            with schedule.sync(always=index == 14) as is_complete:
                complete += [index] * is_complete
                if index == 27:
                    raise StaleEngineError("stale")
        except StaleEngineError:
            pass
    assert complete == [0, 10, 14, 24, 28]


def test_log_probs_that_are_not_numbers_raise() -> None:
    model = random_model()
    with pytest.raises(StaleEngineError, match="nan nats"):
        check(model, Engine(model, lambda call, item: [shifted(one, math.nan) for one in item]))


@pytest.mark.parametrize(
    ("dtype", "noise"),
    [(torch.float32, 0.01), (torch.bfloat16, 0.3)],
    ids=["float32-small-update", "bfloat16-large-update"],
)
def test_a_layer_that_was_not_synced_raises(dtype: torch.dtype, noise: float) -> None:
    model = random_model().to(dtype)
    engine = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            random = torch.randn(parameter.shape, generator=generator)
            parameter.add_((noise * parameter.float().std().nan_to_num(0.0) * random).to(dtype))
            if "layers.1." not in name:
                engine.get_parameter(name).copy_(parameter)
    with pytest.raises(StaleEngineError):
        check(model, Engine(engine))


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.01), (torch.bfloat16, 3.0)])
def test_one_scaled_tensor_raises(dtype: torch.dtype, factor: float) -> None:
    model = random_model().to(dtype)
    engine = copy.deepcopy(model)
    with torch.no_grad():
        engine.get_submodule("model.layers.1.mlp.down_proj").weight.mul_(factor)
    with pytest.raises(StaleEngineError):
        check(model, Engine(engine))


@pytest.mark.slow
def test_the_first_prompt_is_natural_for_the_policy() -> None:
    """Its tokens are as likely as samples are, unlike ids taken at random."""
    policy = load_policy(ModelConfig(dtype="bfloat16"))
    engine = Engine(policy.model)
    SyncCheck(policy, LONG).check(policy.model, 0, engine)
    (prompt,) = engine.prompts
    assert len(prompt) == 72
    unnatural = tuple((7919 * index + 3) % len(policy.tokenizer) for index in range(72))

    def mean_logprob(ids: TokenIds) -> float:
        tokens = torch.tensor([ids])
        with torch.no_grad():
            logprobs = torch.log_softmax(policy.model(input_ids=tokens).logits[0, :-1].float(), dim=-1)
        return logprobs.gather(-1, tokens[0, 1:, None])[8:].mean().item()

    assert mean_logprob(prompt) > -1.5
    assert mean_logprob(unnatural) < -4


def test_the_prompt_is_the_start_of_the_latest_rollout_that_is_long_enough() -> None:
    model = random_model()
    found, engine = SyncCheck(policy_of(model), 28), Engine(model)
    found.check(model, 0, engine)
    found.observe(tuple(range(15)), Completion(tuple(range(10)), (-1.0,) * 10, "length", 0))
    found.check(model, 1, engine)
    found.observe((1, 2, 3), Completion((4, 5), (-1.0, -1.0), "stop", 0))
    found.check(model, 2, engine)
    first, *later = engine.prompts
    assert len(first) == 20
    assert later == [(*range(15), *range(5))] * 2


@pytest.mark.parametrize(("max_model_len", "prompt", "completion"), [(2, 1, 1), (5, 1, 4), (12, 4, 8)])
def test_short_contexts(max_model_len: int, prompt: int, completion: int) -> None:
    model = random_model()
    lengths = []

    def note(call: int, completions: Sequence[Completion]) -> Sequence[Completion]:
        lengths.append(len(completions[0].token_ids))
        return completions

    found, engine = SyncCheck(policy_of(model), max_model_len), Engine(model, note)
    found.check(model, 0, engine)
    assert (len(engine.prompts[0]), lengths) == (prompt, [completion])
