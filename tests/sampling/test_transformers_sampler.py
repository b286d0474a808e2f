"""The transformers sampler samples from the model's distribution and reports the trainer's log-probs."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from bandpo_cli.config.run import RunConfig
from bandpo_cli.models import attention
from bandpo_cli.models.attention import GrowingLayer, growing_cache
from bandpo_cli.models.logprobs import token_logprobs
from bandpo_cli.models.packing import Row, collate
from bandpo_cli.sampling.sampler import (
    SampleRequest,
    SamplingParams,
    TransformersSampler,
    Turn,
    build_sampler,
    sample_tokens,
)
from tests.conftest import random_model

PROMPTS = [(1, 2, 3), (4,), (5, 6, 7, 8, 9, 10)]
PARAMS = SamplingParams(samples=5, temperature=0.8, max_tokens=12, stop_ids=(2, 3))


def test_log_probs_equal_the_trainers(model):
    """Left padding, the repeated cache and the removal of ended completions do not change them."""
    groups = TransformersSampler(model, pad_id=0).sample(PROMPTS, PARAMS, seed=1)
    assert [len(group) for group in groups] == [5, 5, 5]
    for prompt, group in zip(PROMPTS, groups, strict=True):
        batch = collate([Row(prompt, [c.token_ids for c in group])], torch.device("cpu"))
        ours = torch.tensor([lp for c in group for lp in c.logprobs])
        torch.testing.assert_close(ours, token_logprobs(model, batch, 0.8).logprobs, atol=2e-5, rtol=1e-5)


def test_logits_of_a_bfloat16_model_are_not_rounded_to_bfloat16():
    """The log-probs of first tokens are those of the model's hidden state times its output layer in float32."""
    model = random_model("llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    model = model.bfloat16()
    params = replace(PARAMS, samples=20, temperature=1.0, max_tokens=1)
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([PROMPTS[0]])).last_hidden_state[0, -1]
        logits = model.lm_head.weight.float() @ hidden.float()
    assert logits.max() > 8
    expected = torch.log_softmax(logits, dim=0)
    rounded = torch.log_softmax(logits.bfloat16().float(), dim=0)
    (group,) = TransformersSampler(model, pad_id=0).sample(PROMPTS[:1], params, seed=1)
    tokens = torch.tensor([completion.token_ids[0] for completion in group])
    found = torch.tensor([completion.logprobs[0] for completion in group])
    assert (found - expected[tokens]).abs().max() <= 1e-4
    assert (rounded - expected)[tokens].abs().max() > 1e-3
    assert model.lm_head(hidden).dtype == torch.bfloat16, "the model is as it was"


def test_completions_end_at_a_stop_token_or_the_token_limit(model):
    completions = list(itertools.chain(*TransformersSampler(model, 0).sample(PROMPTS, PARAMS, seed=2)))
    for completion in completions:
        *before, last = completion.token_ids
        assert not set(before) & {2, 3}
        assert (completion.finish_reason == "stop") == (last in (2, 3))
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 12
    assert {c.finish_reason for c in completions} == {"stop", "length"}


def test_completions_depend_on_the_seed_and_carry_the_policy_version():
    sampler = TransformersSampler(random_model(), 0)
    assert sampler.sample(PROMPTS, PARAMS, 7) == sampler.sample(PROMPTS, PARAMS, 7)
    assert sampler.sample(PROMPTS, PARAMS, 7) != sampler.sample(PROMPTS, PARAMS, 8)
    sampler.sync(random_model(), version=12)
    assert sampler.sample([(1,)], PARAMS, 0)[0][0].policy_version == 12


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampled_tokens_follow_the_distribution(temperature):
    """Chi-squared test against the exact probabilities; the 0.9999 quantile for 7 degrees of freedom is 29.9."""
    logits = torch.tensor([1.0, -2.0, 0.3, 0.0, 2.0, -30.0, 1.5, 0.7, -0.5])
    n = 40_000
    uniforms = torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens, logprobs, _ = sample_tokens(logits.expand(n, -1), uniforms, temperature)
    probabilities = torch.softmax(logits.double() / temperature, 0)
    counts = torch.bincount(tokens, minlength=9)
    assert counts[5] == 0
    cells = [i for i in range(9) if i != 5]
    expected = probabilities[cells] * n
    assert ((counts[cells] - expected) ** 2 / expected).sum() < 29.9
    torch.testing.assert_close(logprobs.double(), probabilities.log()[tokens], atol=1e-5, rtol=1e-5)


def test_extreme_random_numbers_select_valid_tokens():
    """0 must not select a token of probability 0, and the number just below 1 must not exceed the last token."""
    logits = torch.tensor([[-1e9, 0.0, 0.0, -1e9]])
    for uniform, token in [(0.0, 1), (1.0 - 2**-53, 2)]:
        sampled, _, _ = sample_tokens(logits, torch.tensor([uniform], dtype=torch.float64), 1.0)
        assert sampled.item() == token


def test_max_sequences_limits_the_batch_size():
    """At most eleven completions: two prompts with five each, then the third prompt; all prompts are sampled."""
    model = random_model()
    sizes: list[int] = []
    model.register_forward_pre_hook(
        lambda module, arguments, named: sizes.append(len(named["input_ids"])), with_kwargs=True
    )
    config = RunConfig.model_validate({"sampling": {"engine": "transformers", "max_sequences": 11}})
    policy: Any = SimpleNamespace(model=model, device=model.device, pad_id=0)
    groups = build_sampler(config, policy).sample(PROMPTS, replace(PARAMS, stop_ids=(-1,)), seed=7)
    steps = PARAMS.max_tokens - 1
    assert sizes == [2, *[10] * steps, 1, *[5] * steps]
    assert [len(group) for group in groups] == [5, 5, 5]


def test_completions_depend_on_the_seed_plus_the_index_of_the_prompt():
    """In batches of any size, and in a call of their own; and they do not depend on when others end."""
    model, params = random_model(), replace(PARAMS, max_tokens=70)

    def sampled(
        prompts: list[tuple[int, ...]] = PROMPTS, seed: int = 7, most: int = 2048, **changes: Any
    ) -> list[list[list[int]]]:
        groups = TransformersSampler(model, 0, most).sample(prompts, replace(params, **changes), seed)
        return [[item.token_ids.tolist() for item in group] for group in groups]

    expected = sampled()
    assert sampled(most=5) == expected
    assert sampled(PROMPTS[1:], seed=8) == expected[1:]
    endless = itertools.chain(*sampled(stop_ids=(-1,)))
    for tokens, more in zip(itertools.chain(*expected), endless, strict=True):
        assert len(more) == params.max_tokens
        assert tokens == more[: len(tokens)]


def test_ended_completions_in_the_batch_do_not_change_the_others(model, monkeypatch):
    """They are kept to the end, until half of the batch has ended, or removed at once."""
    params = replace(PARAMS, samples=16, entropy=True)
    expected = [*itertools.chain(*TransformersSampler(model, 0).sample(PROMPTS, params, seed=4))]
    assert {completion.finish_reason for completion in expected} == {"stop", "length"}
    for kept_until in (0.0, 0.5, 1.0):
        monkeypatch.setattr("bandpo_cli.sampling.sampler.KEPT_UNTIL", kept_until)
        found = itertools.chain(*TransformersSampler(model, 0).sample(PROMPTS, params, seed=4))
        for one, other in zip(found, expected, strict=True):
            assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
            assert one.entropies == pytest.approx(other.entropies, abs=1e-5)


def test_a_growing_cache_holds_what_a_concatenated_one_holds(monkeypatch):
    """Through a repetition, growth beyond the spare room, and a selection."""
    monkeypatch.setattr(attention, "MIN_SPARE_TOKENS", 2)
    generator = torch.Generator().manual_seed(0)
    layers = [GrowingLayer(16), DynamicLayer()]

    def update(batch: int, tokens: int) -> None:
        keys, values = torch.randn(2, batch, 2, tokens, 3, generator=generator)
        (one, other), (expected, other_expected) = (layer.update(keys, values) for layer in layers)
        assert torch.equal(one, expected)
        assert torch.equal(other, other_expected)
        assert layers[0].get_seq_length() == layers[1].get_seq_length()

    update(2, 5)
    for layer in layers:
        layer.batch_repeat_interleave(3)
    for _ in range(7):
        update(6, 1)
    for layer in layers:
        layer.batch_select_indices(torch.tensor([0, 4, 5]))
    for _ in range(4):
        update(3, 1)


def test_a_further_token_is_written_in_place():
    layer = GrowingLayer(100)
    layer.update(*torch.zeros(2, 1, 1, 5, 2))
    layer.update(*torch.ones(2, 1, 1, 1, 2))
    place = layer.keys.data_ptr()
    layer.update(*torch.ones(2, 1, 1, 1, 2))
    assert layer.keys.data_ptr() == place
    cache = growing_cache(random_model(), 100)
    assert [type(item) for item in cache.layers] == [GrowingLayer] * 2


def test_each_conversation_has_its_own_seed_and_limit():
    """The completions of turns are those of each conversation alone."""
    sampler = TransformersSampler(random_model(), pad_id=0)
    turns = [Turn(90, 3), Turn(7, 9), Turn(8, 1)]
    prompts = [(5, 6, 7), (4,), (9, 9)]
    unending = replace(PARAMS, stop_ids=(-1,))
    ((number, together),) = sampler.sample_stream([None, SampleRequest(prompts, 0, turns)], unending)
    assert number == 0
    for prompt, turn, group in zip(prompts, turns, together, strict=True):
        params = replace(unending, samples=1, max_tokens=turn.max_tokens)
        (alone,) = sampler.sample([prompt], params, turn.seed)
        assert [item.token_ids for item in group] == [item.token_ids for item in alone]
        assert group[0].finish_reason == alone[0].finish_reason
        assert group[0].logprobs == pytest.approx(alone[0].logprobs, abs=1e-5)
    assert [completion.finish_reason for (completion,) in together] == ["length"] * 3
    assert [len(completion.token_ids) for (completion,) in together] == [3, 9, 1]
