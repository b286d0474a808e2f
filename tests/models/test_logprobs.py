"""Log-probs and gradients from packed rows equal those of each sequence run separately through the complete model.

Attention of one query per head equals transformers' own function, which repeats keys and values.
"""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bandpo_cli.models import attention, packing
from bandpo_cli.models.logprobs import token_logprobs
from bandpo_cli.models.packing import Row, collate
from bandpo_cli.sampling.sampler import SamplingParams, TransformersSampler
from tests.conftest import random_model

ROWS = [
    Row([1, 2, 3], [[4, 5], [6], [7, 8, 9, 10]]),
    Row([11, 12, 13, 14, 15], [[1, 1, 1]]),
    Row([16], [[2], [3, 4]]),
    Row([5, 4, 3, 2, 1, 6], [[8, 7, 6, 5, 4, 3, 2, 1, 9, 10, 11, 12]]),
]
CPU = torch.device("cpu")


@pytest.fixture(params=[512, 8, 0], ids=["shared-prompts-masked", "some", "all-separate"])
def _layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Select how attention computes rows with several completions: masked, as separate sequences, or both."""
    monkeypatch.setattr(packing, "MAX_MASKED_ROW_TOKENS", request.param)


def padded(model: PreTrainedModel, rows: list[Row], temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log-probs, entropies at temperature 1) of the complete model on right-padded sequences."""
    sequences = [(len(row.prompt_ids), [*row.prompt_ids, *c]) for row in rows for c in row.completions]
    width = max(len(ids) for _, ids in sequences)
    ids = torch.tensor([[*ids, *[0] * (width - len(ids))] for _, ids in sequences])
    attended = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for _, ids in sequences])
    logits = model(input_ids=ids, attention_mask=attended).logits
    read = torch.cat([logits[i, start - 1 : len(ids) - 1] for i, (start, ids) in enumerate(sequences)])
    targets = torch.tensor([token for start, ids in sequences for token in ids[start:]])
    logprobs = torch.log_softmax(read / temperature, -1).gather(1, targets[:, None]).squeeze(1)
    return logprobs, torch.distributions.Categorical(logits=read).entropy()


def gradient(model: PreTrainedModel, loss: torch.Tensor) -> torch.Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def assert_same_gradient(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare gradients with a tolerance relative to the largest entry, since entries differ by orders of magnitude."""
    torch.testing.assert_close(ours, expected, atol=2e-5 * expected.abs().max().item(), rtol=1e-3)


def weights(count: int) -> torch.Tensor:
    """Return weights that differ per token and have both signs, so that a permutation changes the sum."""
    return torch.linspace(-1.0, 2.0, count)


@pytest.mark.usefixtures("_layout")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_packed_rows_equal_padded_sequences(model, temperature):
    ours = token_logprobs(model, collate(ROWS, CPU), temperature, with_entropy=True)
    logprobs, entropy = padded(model, ROWS, temperature)
    torch.testing.assert_close(ours.logprobs, logprobs, atol=2e-5, rtol=1e-5)
    assert not ours.entropy.requires_grad
    torch.testing.assert_close(ours.entropy, entropy, atol=2e-5, rtol=1e-5)
    both = (ours.logprobs, logprobs)
    assert_same_gradient(*(gradient(model, (item * weights(len(item))).sum()) for item in both))


def plain_varlen(
    query: Any, key: Any, value: Any, ends: Any, key_ends: Any, longest: int, longest_key: int, **options: Any
) -> torch.Tensor:
    """Stands in for torch's `varlen_attn`, which has no kernel for a CPU: [E, heads, width] by its documentation."""
    assert torch.equal(ends, key_ends)
    left, right = options["window_size"]
    outputs = []
    for first, last in itertools.pairwise(ends.tolist()):
        assert last - first <= longest == longest_key
        q, groups = query[first:last], query.shape[1] // key.shape[1]
        k, v = (states[first:last].repeat_interleave(groups, dim=1) for states in (key, value))
        distance = torch.arange(last - first)[:, None] - torch.arange(last - first)
        outside = (distance < -right) | ((left >= 0) & (distance > left))
        scores = torch.einsum("qhd,khd->hqk", q, k) * options["scale"]
        probabilities = scores.masked_fill(outside, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", probabilities, v))
    return torch.cat(outputs)


def varlen_with_gqa(*arguments: Any, enable_gqa: bool = False, **options: Any) -> torch.Tensor:
    """Stands in for the function from torch 2.12 on, which takes grouped heads where it is asked to."""
    assert enable_gqa
    return plain_varlen(*arguments, **options)


def varlen_without_gqa(query: Any, key: Any, *arguments: Any, **options: Any) -> torch.Tensor:
    """Stands in for the function of torch 2.11, which needs a key for each query head."""
    assert query.shape == key.shape
    return plain_varlen(query, key, *arguments, **options)


@pytest.fixture(params=[varlen_with_gqa, varlen_without_gqa])
def _varlen_on_a_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", request.param)


def flash_attention(module: Any, query: Any, key: Any, value: Any, mask: None, **kwargs: Any) -> Any:
    """Stands in for FlashAttention of transformers: one call over all sequences with their boundaries."""
    assert mask is None
    assert kwargs["max_length_q"] == kwargs["max_length_k"] == 18
    assert torch.equal(kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"])
    return attention._torch_varlen(module, query, key, value, mask, **kwargs)


@pytest.mark.usefixtures("_varlen_on_a_cpu")
@pytest.mark.parametrize("kind", ["varlen", "any-length"])
def test_varlen_attention_gives_the_same_log_probs_and_completions(model, kind):
    """Sampling, which has no packed rows, is that of sdpa."""
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    function = attention._packed(sdpa, flash_attention, attention._attend_varlen)
    AttentionInterface.register("any-length", function)
    params = SamplingParams(samples=3, temperature=1.0, max_tokens=6, stop_ids=(2,))
    expected = token_logprobs(model, collate(ROWS, CPU)).logprobs
    sampled = TransformersSampler(model, 0).sample([(1, 2, 3), (4,)], params, 0)
    model.set_attn_implementation(kind)
    ours = token_logprobs(model, collate(ROWS, CPU)).logprobs
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-5)
    assert_same_gradient(gradient(model, ours.sum()), gradient(model, expected.sum()))
    if kind == "varlen":
        assert TransformersSampler(model, 0).sample([(1, 2, 3), (4,)], params, 0) == sampled


def test_torch_takes_the_arguments_of_varlen_attention():
    """On the meta device, where the real function computes shapes."""
    query, key = torch.empty(1, 4, 10, 16, device="meta"), torch.empty(1, 2, 10, 16, device="meta")
    boundaries = torch.empty(3, dtype=torch.int32, device="meta")
    ends: dict[str, Any] = {"cu_seq_lens_q": boundaries, "max_length_q": 6}
    module, options = torch.nn.Module(), {"scaling": 0.5, "sliding_window": 4}
    output, _ = attention._torch_varlen(module, query, key, key, None, **ends, **options)
    assert output.shape == (1, 10, 4, 16)


@pytest.mark.usefixtures("_layout", "_varlen_on_a_cpu")
@pytest.mark.parametrize("kind", ["sdpa", "eager", "varlen"])
def test_sliding_windows_are_applied(kind):
    model = random_model("mistral", sliding_window=4, attn_implementation=kind)
    ours = token_logprobs(model, collate(ROWS, CPU)).logprobs
    torch.testing.assert_close(ours, padded(model, ROWS, 1.0)[0], atol=2e-5, rtol=1e-5)
    model.config.sliding_window = None
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    assert not torch.allclose(token_logprobs(model, collate(ROWS, CPU)).logprobs, ours, atol=1e-2)


def test_an_output_layer_with_a_bias():
    model = random_model("llama", seed=1)
    model.lm_head = torch.nn.Linear(32, 23, bias=True)
    torch.nn.init.normal_(model.lm_head.bias)
    ours, (expected, _) = token_logprobs(model, collate(ROWS, CPU), 0.7).logprobs, padded(model, ROWS, 0.7)
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-5)
    assert_same_gradient(*(gradient(model, (item * weights(len(item))).sum()) for item in (ours, expected)))


def test_gradient_checkpointing_only_changes_memory(model):
    saved: list[list[int]] = [[], []]
    results = []
    for sizes in saved:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, s=sizes: (s.append(t.numel()), t)[1], lambda t: t
        ):
            logprobs = token_logprobs(model, collate(ROWS, CPU), 0.8).logprobs
        results.append((logprobs.detach(), gradient(model, logprobs.sum())))
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert torch.equal(results[1][0], results[0][0])
    assert_same_gradient(results[1][1], results[0][1])
    assert sum(saved[1]) < sum(saved[0]) / 2
    assert not any(module.training for module in model.modules())
    cached = model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values
    assert cached.get_seq_length() == 3


BATCH, HEADS, KEYS, WIDTH = 3, 6, 11, 8


def states(groups: int, queries: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random queries, keys and values, float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, HEADS, queries, WIDTH), *[(BATCH, groups, KEYS, WIDTH)] * 2]
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return query, key, value


def left_padding(dtype: torch.dtype) -> torch.Tensor:
    """Return the mask of sequences with 0, 2 and 4 tokens of padding: bool, or added to the scores."""
    padding = torch.tensor([0, 2, 4])
    allowed = (torch.arange(KEYS) >= padding[:, None])[:, None, None]
    if dtype == torch.bool:
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, float("-inf"))


def compare(groups: int, queries: int, mask: torch.Tensor | None, **settings: Any) -> None:
    """Require equal outputs of the registered function and of transformers' own."""
    module: Any = SimpleNamespace(num_key_value_groups=HEADS // groups, is_causal=True)
    inputs = (module, *states(groups, queries), mask)
    expected, _ = sdpa_attention_forward(*inputs, **settings)
    found, weights = ALL_ATTENTION_FUNCTIONS["sdpa"](*inputs, **settings)
    assert weights is None
    assert found.shape == (BATCH, queries, HEADS, WIDTH)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("mask", [None, torch.bool, torch.float64])
def test_one_query_per_head(groups, mask):
    compare(groups, 1, None if mask is None else left_padding(mask), scaling=0.3)


def test_several_queries_per_head_and_a_mask_or_bias_per_head():
    compare(2, KEYS, None)
    compare(2, 4, left_padding(torch.bool))
    bias = torch.linspace(-2, 2, HEADS, dtype=torch.float64)[:, None, None] * torch.arange(KEYS)
    compare(2, 1, bias[None])
    compare(2, 1, left_padding(torch.bool), position_bias=bias[None])


def test_keys_and_values_are_not_copied_for_the_heads_of_a_group(monkeypatch):
    shapes: list[torch.Size] = []

    def record(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: Any) -> torch.Tensor:
        shapes.extend([query.shape, key.shape, value.shape])
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **settings)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", record)
    compare(2, 1, left_padding(torch.bool))
    assert shapes == [(BATCH, 2, HEADS // 2, WIDTH), (BATCH, 2, KEYS, WIDTH), (BATCH, 2, KEYS, WIDTH)]
