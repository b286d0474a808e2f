"""vLLM samples from the policy's distribution and reports the trainer's log-probs after every change of weights.

The log-probs are compared with a forward pass of transformers, one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

from bandpo_cli.errors import UserError
from bandpo_cli.sampling.sampler import SampleRequest, SamplingParams
from bandpo_cli.types import Completion

pytest.importorskip("vllm")

from tests.vllm.conftest import Running, perturb

pytestmark = pytest.mark.vllm

PROMPTS = [(5, 6, 7), (4,), tuple(4 + i % 15 for i in range(90)), (8, 9, 10, 11, 12, 13)]
PARAMS = SamplingParams(samples=6, temperature=1.0, max_tokens=20, stop_ids=(2, 3))


@torch.no_grad()
def trainer_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int], temperature: float
) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *answer]])
    logprobs = torch.log_softmax(model(ids).logits.double() / temperature, dim=-1)[0, len(prompt) - 1 : -1]
    return logprobs.gather(-1, torch.tensor(answer)[:, None]).squeeze(1)


def gap(running: Running, groups: list[list[Completion]], temperature: float) -> float:
    """Return the largest difference in nats between the reported and the trainer's log-probs over all tokens."""
    return max(
        (
            torch.tensor(completion.logprobs).double()
            - trainer_logprobs(running.policy.model, prompt, completion.token_ids, temperature)
        )
        .abs()
        .max()
        .item()
        for prompt, group in zip(PROMPTS, groups, strict=True)
        for completion in group
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_the_trainers_after_all_weights_changed(running: Running, temperature: float) -> None:
    """This includes the prefix cache: the same prompts were computed and cached with the previous weights."""
    params = SamplingParams(6, temperature, 20, (2, 3))
    before = running.sampler.sample(PROMPTS, params, seed=1)
    assert gap(running, before, temperature) <= 1e-4
    old = [parameter.clone() for parameter in running.policy.model.parameters()]
    perturb(running.policy.model)
    assert all(not torch.equal(a, b) for a, b in zip(old, running.policy.model.parameters(), strict=True))
    assert gap(running, before, temperature) > 0.05, (
        "the change must be large enough to detect a stale engine"
    )
    running.sync()
    assert gap(running, running.sampler.sample(PROMPTS, params, seed=1), temperature) <= 1e-4
    assert running.sampler.probe_gap <= 1e-4


def test_completions_end_at_a_stop_token_or_the_token_limit(running: Running) -> None:
    """The stop token is part of the completion, with its log-prob; no other token ends a completion."""
    model_end = running.policy.model.config.eos_token_id
    assert model_end != 7
    params = SamplingParams(samples=24, temperature=1.5, max_tokens=20, stop_ids=(7, 9, 11))
    completions = [c for group in running.sampler.sample(PROMPTS, params, seed=2) for c in group]
    for completion in completions:
        *before, last = completion.token_ids
        assert not set(before) & {7, 9, 11}
        assert (completion.finish_reason == "stop") == (last in (7, 9, 11))
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 20
        assert len(completion.logprobs) == len(completion.token_ids)
    assert {c.finish_reason for c in completions} == {"stop", "length"}


def test_samples_depend_on_the_seed(running: Running) -> None:
    first = running.sampler.sample(PROMPTS, PARAMS, 7)
    assert [len(group) for group in first] == [6, 6, 6, 6]
    assert first == running.sampler.sample(PROMPTS, PARAMS, 7)
    assert first != running.sampler.sample(PROMPTS, PARAMS, 8)


def test_completions_of_a_prompt_use_different_random_numbers(running: Running) -> None:
    """All completions of two equal prompts and of two seeds differ."""
    params = SamplingParams(samples=8, temperature=2.0, max_tokens=20, stop_ids=())
    sampled = [
        tuple(completion.token_ids)
        for seed in (1, 3)
        for group in running.sampler.sample([PROMPTS[0], PROMPTS[0]], params, seed)
        for completion in group
    ]
    assert len(set(sampled)) == len(sampled) == 32


def test_prompts_of_one_call_divided_over_two_calls_have_the_same_completions(running: Running) -> None:
    """Each rank samples a part of the prompts; their seeds are those of their places."""
    together = running.sampler.sample(PROMPTS, PARAMS, 7)
    divided = running.sampler.sample(PROMPTS[:1], PARAMS, 7) + running.sampler.sample(PROMPTS[1:], PARAMS, 8)
    same = [
        one.token_ids == other.token_ids
        for group, other_group in zip(together, divided, strict=True)
        for one, other in zip(group, other_group, strict=True)
    ]
    assert sum(same) >= 0.95 * len(same)  # the order of additions depends on the batch


def test_completions_carry_the_policy_version(running: Running) -> None:
    running.sync()
    group = running.sampler.sample(PROMPTS[:1], PARAMS, 0)[0]
    assert {completion.policy_version for completion in group} == {running.version}


def test_sampled_tokens_follow_the_distribution(running: Running) -> None:
    """Chi-squared test of first tokens against the trainer's exact probabilities, for expected counts of at least 5."""
    n = 4000
    params = SamplingParams(samples=n, temperature=0.8, max_tokens=1, stop_ids=())
    group = running.sampler.sample(PROMPTS[:1], params, seed=11)[0]
    with torch.no_grad():
        logits = running.policy.model(torch.tensor([PROMPTS[0]])).logits[0, -1].double()
    expected = n * torch.softmax(logits / 0.8, dim=-1)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in group]), minlength=len(expected)).double()
    cells = expected >= 5
    freedom = int(cells.sum()) - 1
    assert freedom >= 1
    chi_squared = ((counts - expected) ** 2 / expected)[cells].sum().item()
    assert chi_squared < freedom + 4 * (2 * freedom) ** 0.5 + 8  # beyond the 0.9999 quantile for any freedom


def test_unsupported_lengths_and_temperatures_raise_user_errors(running: Running) -> None:
    with pytest.raises(UserError, match=r"101 tokens and sampling.max_tokens = 24 .* 124"):
        running.sampler.sample([(5,) * 101], SamplingParams(2, 1.0, 24, (2,)), 0)
    with pytest.raises(UserError, match="temperature = 3"):
        running.sampler.sample(PROMPTS, SamplingParams(2, 3.0, 4, (2,)), 0)


def test_sleep_on_a_cpu_changes_nothing(running: Running) -> None:
    before = running.sampler.sample(PROMPTS, PARAMS, 3)
    running.sampler.sleep()
    assert running.sampler.sample(PROMPTS, PARAMS, 3) == before


def test_no_prompts_give_no_completions(running: Running) -> None:
    assert running.sampler.sample([], PARAMS, 0) == []


def test_a_stream_samples_what_separate_calls_sample(running: Running) -> None:
    """The batches differ in size. Seeds are those of the calls; log-probs differ by the order of additions."""
    requests = [
        SampleRequest(PROMPTS[start : start + size], start)
        for start, size in ((0, 2), (2, 1), (3, 1), (1, 3))
    ]
    expected = [running.sampler.sample(request.prompts_P, PARAMS, request.seed) for request in requests]
    found = list(running.sampler.sample_stream(requests, PARAMS))
    flat, flat_expected = (
        [completion for groups in item for group in groups for completion in group]
        for item in (found, expected)
    )
    assert [[len(group) for group in groups] for groups in found] == [
        [PARAMS.samples] * len(request.prompts_P) for request in requests
    ]
    same = [one.token_ids == other.token_ids for one, other in zip(flat, flat_expected, strict=True)]
    assert sum(same) >= 0.95 * len(same)
    for one, other in zip(flat, flat_expected, strict=True):
        if one.token_ids == other.token_ids:
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_a_stream_that_is_closed_leaves_nothing_in_the_queue(running: Running) -> None:
    requests = [SampleRequest(PROMPTS[:1], 1), SampleRequest(PROMPTS, 2)]
    stream = running.sampler.sample_stream(requests, PARAMS)
    next(iter(stream))
    stream.close()  # type: ignore[attr-defined]
    assert not running.sampler._llm.llm_engine.has_unfinished_requests()
    assert len(running.sampler.sample(PROMPTS, PARAMS, seed=1)) == len(PROMPTS)
