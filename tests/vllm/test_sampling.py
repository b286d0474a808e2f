"""vLLM samples from the policy's distribution and reports the trainer's log-probs after every change of weights.

A sync after which the engine does not run the new weights raises StaleEngineError.

The log-probs are compared with a forward pass of transformers, one sequence at a time.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch

from bandpo_cli.errors import UserError
from bandpo_cli.sampling import vllm_sampler, vllm_worker
from bandpo_cli.sampling.sampler import (
    SampleRequest,
    SamplingParams,
    StaleEngineError,
    TransformersSampler,
    Turn,
)
from bandpo_cli.sampling.sync_check import HALF_PRECISION_LIMIT
from bandpo_cli.types import Completion

pytest.importorskip("vllm")

from tests.sampling.test_stop_strings import check_ends
from tests.text_model import character_tokenizer
from tests.vllm.engines import Running, perturb, random_policy, start

pytestmark = pytest.mark.vllm

PROMPTS = [(5, 6, 7), (4,), tuple(4 + i % 15 for i in range(90)), (8, 9, 10, 11, 12, 13)]
PARAMS = SamplingParams(samples=6, temperature=1.0, max_tokens=20, stop_ids=(2, 3))


both = pytest.mark.parametrize("running", ["qwen2", "llama"], indirect=True)
only_qwen2 = pytest.mark.parametrize("running", ["qwen2"], indirect=True)


@torch.no_grad()
def gap(running: Running, groups: list[list[Completion]], temperature: float) -> float:
    """Return the largest difference in nats between the reported and the trainer's log-probs; in bfloat16 the mean."""
    gaps = []
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            logits = running.policy.model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0].double()
            logprobs = torch.log_softmax(logits / temperature, dim=-1)[len(prompt) - 1 : -1]
            ours = logprobs.gather(-1, torch.tensor(completion.token_ids)[:, None]).squeeze(1)
            gaps += (torch.tensor(completion.logprobs) - ours).abs().tolist()
    return max(gaps) if running.policy.dtype == torch.float32 else sum(gaps) / len(gaps)


def limit(running: Running) -> float:
    """Return the largest `gap` that rounding explains, nats."""
    return 1e-4 if running.policy.dtype == torch.float32 else HALF_PRECISION_LIMIT / 2


@both
def test_log_probs_equal_the_trainers_after_all_weights_changed(running):
    """This includes the prefix cache: the same prompts were computed and cached with the previous weights."""
    before = {
        temperature: running.sampler.sample(PROMPTS, replace(PARAMS, temperature=temperature), seed=1)
        for temperature in (1.0, 0.7)
    }
    assert all(gap(running, groups, temperature) <= limit(running) for temperature, groups in before.items())
    perturb(running.policy.model)
    assert gap(running, before[1.0], 1.0) > 0.05, "the change must be large enough to detect a stale engine"
    running.sync()
    assert running.sampler.check.gap <= limit(running)
    for temperature in before:
        groups = running.sampler.sample(PROMPTS, replace(PARAMS, temperature=temperature), seed=1)
        assert gap(running, groups, temperature) <= limit(running)
        assert {item.policy_version for group in groups for item in group} == {running.version}


def test_completions_end_at_a_stop_string_as_with_transformers():
    """The text is decoded from its start for the comparison. The engine goes on to sample without the ended ones."""
    letters = "".join(map(chr, range(33, 127)))
    tokenizer = character_tokenizer("", letters + "äöüßéàâçîôûñ" * 2, ["<a>", "<b>"], "<a>")
    policy, stops = replace(random_policy("qwen2"), tokenizer=tokenizer), ["<b>", *letters[40:60], "ab"]
    params = SamplingParams(12, 1.0, 12, stop_ids=(2,))
    with closing(start(policy, stop=stops)) as sampler:
        found = [*chain(*sampler.sample(PROMPTS * 3, params, 2))]
        assert not sampler._llm.llm_engine.has_unfinished_requests()
        plain = [*chain(*sampler.sample(PROMPTS * 3, replace(params, stops=False), 2))]
    check_ends(found, plain, tokenizer, stops)


@only_qwen2
def test_greedy_completions_are_those_of_the_transformers_engine(running):
    params, threads = replace(PARAMS, samples=1, temperature=0.0), torch.get_num_threads()
    expected = TransformersSampler(running.policy.model, 0).sample(PROMPTS, params, seed=0)
    found = running.sampler.sample(PROMPTS, params, seed=0)
    assert [[*group[0].token_ids] for group in found] == [[*group[0].token_ids] for group in expected]
    assert torch.get_num_threads() == threads


@only_qwen2
def test_completions_end_at_a_stop_token_or_the_token_limit(running):
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


@only_qwen2
def test_completions_depend_on_the_seed_and_on_the_place_of_their_prompt(running):
    """Prompts divided over two calls, as over ranks, have the same completions; all of equal prompts differ."""
    together = running.sampler.sample(PROMPTS, PARAMS, 7)
    assert [len(group) for group in together] == [6, 6, 6, 6]
    assert together == running.sampler.sample(PROMPTS, PARAMS, 7)
    divided = running.sampler.sample(PROMPTS[:1], PARAMS, 7) + running.sampler.sample(PROMPTS[1:], PARAMS, 8)
    pairs = zip(chain(*together), chain(*divided), strict=True)
    same = [one.token_ids == other.token_ids for one, other in pairs]
    assert sum(same) >= 0.95 * len(same)  # the order of additions depends on the batch
    params = SamplingParams(samples=8, temperature=2.0, max_tokens=20, stop_ids=())
    groups = chain(*(running.sampler.sample([PROMPTS[0], PROMPTS[0]], params, seed) for seed in (1, 3)))
    sampled = [tuple(completion.token_ids) for completion in chain(*groups)]
    assert len(set(sampled)) == len(sampled) == 32


@only_qwen2
def test_sampled_tokens_follow_the_distribution(running):
    """Chi-squared test of first tokens against the trainer's exact probabilities, for expected counts of at least 5."""
    n = 2000
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


@only_qwen2
def test_unsupported_lengths_raise_user_errors(running):
    with pytest.raises(UserError, match=r"101 tokens and sampling.max_tokens = 24 .* 124"):
        running.sampler.sample([(5,) * 101], SamplingParams(2, 1.0, 24, (2,)), 0)


@only_qwen2
def test_a_stream_samples_what_separate_calls_sample(running):
    """The batches differ in size. Seeds are those of the calls; log-probs differ by the order of additions."""
    places = ((0, 2), (2, 1), (3, 1), (1, 3))
    requests = [SampleRequest(PROMPTS[start : start + size], start) for start, size in places]
    expected = [running.sampler.sample(request.prompts_P, PARAMS, request.seed) for request in requests]
    found = [groups for _, groups in running.sampler.sample_stream(requests, PARAMS)]
    assert [len(groups) for groups in found] == [size for _, size in places]
    one, other = ([*chain(*chain(*groups))] for groups in (found, expected))
    assert len(one) == len(other) == 7 * PARAMS.samples
    pairs = [pair for pair in zip(one, other, strict=True) if pair[0].token_ids == pair[1].token_ids]
    assert len(pairs) >= 0.95 * len(one)
    for streamed, separate in pairs:
        assert streamed.logprobs == pytest.approx(separate.logprobs, abs=1e-4)
    # A rank without a problem of a batch asks for no completions of it. A stream that is closed leaves no requests.
    requests = [SampleRequest([], 1), SampleRequest(PROMPTS[:1], 2), SampleRequest(PROMPTS, 3)]
    stream = running.sampler.sample_stream(requests, PARAMS)
    assert [len(next(stream)[1]) for _ in range(2)] == [0, 1]
    stream.close()
    assert not running.sampler._llm.llm_engine.has_unfinished_requests()


@only_qwen2
def test_turns_are_those_of_each_conversation_alone(running):
    """Second turns continue from the first ones; between them the engine asks for requests that are not there yet."""
    single = replace(PARAMS, samples=1)
    contexts, asked = [list(prompt) for prompt in PROMPTS * 3], dict[int, tuple[int, list[int], Turn]]()
    waiting = deque(range(len(contexts)))
    found: dict[int, Completion] = {}

    def requests() -> Iterator[SampleRequest | None]:
        while len(found) < 2 * len(contexts):
            if not waiting:
                yield None
                continue
            place, number = waiting.popleft(), len(asked)
            asked[number] = place, [*contexts[place]], Turn(900 + number, 5 + place % 7)
            yield SampleRequest([asked[number][1]], 0, [asked[number][2]])

    for number, ((completion,),) in running.sampler.sample_stream(requests(), PARAMS, in_order=False):
        found[number], place = completion, asked[number][0]
        if number < len(contexts):
            contexts[place] += [*completion.token_ids, 5, 6, 7]
            waiting.append(place)
    assert found.keys() == asked.keys()
    assert not running.sampler._llm.llm_engine.has_unfinished_requests()
    equal = 0
    for number, (_, prompt, turn) in asked.items():
        params = replace(single, max_tokens=turn.max_tokens)
        (alone,) = running.sampler.sample([prompt], params, turn.seed)
        assert len(found[number].token_ids) <= turn.max_tokens
        equal += alone[0].token_ids == found[number].token_ids
    assert equal >= 0.9 * len(asked)


RELOAD = "vllm.v1.worker.gpu_model_runner.reload_weights"
Weights = Iterable[tuple[str, torch.Tensor]]


@pytest.fixture
def qwen2(running: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """Return an engine with old weights; check that it recovers by a regular sync from whatever a test broke."""
    perturb(running.policy.model)
    yield running
    monkeypatch.undo()
    running.sync()
    assert running.sampler.check.gap <= 1e-4


def change_loaded_weights(monkeypatch: pytest.MonkeyPatch, change: Callable[[Weights], Weights]) -> None:
    """Make vLLM's loader load other weights than those of the sync."""
    from vllm.v1.worker import gpu_model_runner

    real = gpu_model_runner.reload_weights

    def reload(config: Any, model: Any, weights_iterator: Weights, **rest: Any) -> None:
        real(config, model, weights_iterator=change(list(weights_iterator)), **rest)

    monkeypatch.setattr(RELOAD, reload)


def without(part: str) -> Callable[[Weights], Weights]:
    return lambda weights: [pair for pair in weights if part not in pair[0]]


def scaled(part: str, factor: float) -> Callable[[Weights], Weights]:
    return lambda weights: [(name, tensor * factor if part in name else tensor) for name, tensor in weights]


@only_qwen2
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("layers.1.mlp.down_proj"), r"in part: .*layers.1.mlp.down_proj.* was not filled"),
        (without("embed_tokens"), r"in part: .*embed_tokens.* was not filled"),
        # vLLM reports qkv_proj as loaded if one of its three tensors is.
        (without("layers.1.self_attn.k_proj.weight"), "log-probs of sampled tokens"),
        # Norms are compared bit by bit, fused and repacked weights by log-probs.
        (scaled("model.norm", 1 + 1e-6), "model.norm.weight differs"),
        (scaled("gate_proj", 1.3), "log-probs of sampled tokens"),
    ],
)
def test_other_weights_than_those_of_the_sync_are_detected(qwen2, monkeypatch, change, message):
    change_loaded_weights(monkeypatch, change)
    with pytest.raises(StaleEngineError, match=message):
        qwen2.sync()


@only_qwen2
def test_tied_output_layer_that_is_not_updated(qwen2, monkeypatch):
    """vLLM 0.32 does not update it on a CPU: without the repacking, the probe fails."""
    monkeypatch.setattr(vllm_worker, "_repack_tied", lambda model: None)
    with pytest.raises(StaleEngineError, match="log-probs of sampled tokens"):
        qwen2.sync()


@only_qwen2
def test_prefix_cache_that_is_not_cleared(qwen2, monkeypatch):
    """vLLM reports it; if vLLM wrongly reports success, the continued probe reads the old keys and values."""
    engine = qwen2.sampler._llm
    monkeypatch.setattr(engine, "reset_prefix_cache", lambda: False)
    with pytest.raises(StaleEngineError, match="kept cached prompts"):
        qwen2.sync()
    monkeypatch.setattr(engine, "reset_prefix_cache", lambda: True)
    with pytest.raises(StaleEngineError, match="log-probs of sampled tokens"):
        qwen2.sync()


@only_qwen2
def test_the_prefix_cache_is_in_use(qwen2):
    """A repeated prompt is not computed again until a sync; otherwise the test above would prove nothing."""
    prompt, params = [*range(4, 94)], SamplingParams(1, 1.0, 4, (2,))

    def cached() -> int:
        requests = [vllm_sampler._vllm_params(params, 1, Turn(1, 4))]
        (output,) = qwen2.sampler._llm.generate({"prompt_token_ids": prompt}, requests, use_tqdm=False)
        return int(output.num_cached_tokens)

    assert cached() == 0
    assert cached() == 64
    qwen2.sync()
    assert cached() == 0
