"""Log-probs and gradients from packed rows equal those of each sequence run separately through the complete model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bandpo_cli.models import attention, packing
from bandpo_cli.models.logprobs import token_logprobs
from bandpo_cli.models.packing import Row, batch_rows, collate
from bandpo_cli.sampling.sampler import SamplingParams
from bandpo_cli.sampling.transformers_sampler import TransformersSampler
from tests.conftest import SHAPE, random_model

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
def test_packed_rows_equal_padded_sequences(model: PreTrainedModel, temperature: float) -> None:
    ours = token_logprobs(model, collate(ROWS, CPU), temperature, with_entropy=True)
    logprobs, entropy = padded(model, ROWS, temperature)
    torch.testing.assert_close(ours.logprobs, logprobs, atol=2e-5, rtol=1e-5)
    assert ours.entropy is not None
    assert not ours.entropy.requires_grad
    torch.testing.assert_close(ours.entropy, entropy, atol=2e-5, rtol=1e-5)
    both = (ours.logprobs, logprobs)
    assert_same_gradient(*(gradient(model, (item * weights(len(item))).sum()) for item in both))


def plain_varlen(
    query: Any, key: Any, value: Any, ends: Any, key_ends: Any, longest: int, longest_key: int, **options: Any
) -> torch.Tensor:
    """Stands in for torch's `varlen_attn`, which has no kernel for a CPU: [E, heads, width] by its documentation."""
    assert options["enable_gqa"]
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


@pytest.fixture
def _varlen_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", plain_varlen)


def flash_attention(module: Any, query: Any, key: Any, value: Any, mask: None, **kwargs: Any) -> Any:
    """Stands in for FlashAttention of transformers: one call over all sequences with their boundaries."""
    assert mask is None
    assert kwargs["max_length_q"] == kwargs["max_length_k"] == 18
    assert torch.equal(kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"])
    return attention._torch_varlen(module, query, key, value, mask, **kwargs)


@pytest.mark.usefixtures("_varlen_on_a_cpu")
@pytest.mark.parametrize("kind", ["varlen", "flash"])
def test_varlen_attention_gives_the_same_log_probs_and_completions(model: PreTrainedModel, kind: str) -> None:
    """Sampling, which has no packed rows, is that of sdpa."""
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    AttentionInterface.register("flash", attention._packed(sdpa, flash_attention, attention._attend_varlen))
    params = SamplingParams(samples=3, temperature=1.0, max_tokens=6, stop_ids=(2,))
    expected = token_logprobs(model, collate(ROWS, CPU)).logprobs
    sampled = TransformersSampler(model, 0).sample([(1, 2, 3), (4,)], params, 0)
    model.set_attn_implementation(kind)
    ours = token_logprobs(model, collate(ROWS, CPU)).logprobs
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-5)
    assert_same_gradient(gradient(model, ours.sum()), gradient(model, expected.sum()))
    if kind == "varlen":
        assert TransformersSampler(model, 0).sample([(1, 2, 3), (4,)], params, 0) == sampled


def test_torch_takes_the_arguments_of_varlen_attention() -> None:
    """On the meta device, where the real function computes shapes."""
    if not attention.has_torch_varlen():
        pytest.skip("this version of torch has no varlen attention with grouped heads")
    query, key = torch.empty(1, 4, 10, 16, device="meta"), torch.empty(1, 2, 10, 16, device="meta")
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    output, _ = attention._torch_varlen(
        torch.nn.Module(),
        query,
        key,
        key,
        None,
        cu_seq_lens_q=ends,
        max_length_q=6,
        scaling=0.5,
        sliding_window=4,
    )
    assert output.shape == (1, 10, 4, 16)


@pytest.mark.usefixtures("_layout", "_varlen_on_a_cpu")
@pytest.mark.parametrize("kind", ["sdpa", "eager", "varlen"])
def test_sliding_windows_are_applied(kind: str) -> None:
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4, attn_implementation=kind)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    ours = token_logprobs(model, collate(ROWS, CPU)).logprobs
    torch.testing.assert_close(ours, padded(model, ROWS, 1.0)[0], atol=2e-5, rtol=1e-5)
    model.config.sliding_window = None
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    assert not torch.allclose(token_logprobs(model, collate(ROWS, CPU)).logprobs, ours, atol=1e-2)


@pytest.mark.parametrize("bias", [False, True])
def test_untied_head_with_and_without_bias(bias: bool) -> None:
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)).eval()
    if bias:
        model.lm_head = torch.nn.Linear(32, 23, bias=True)
        torch.nn.init.normal_(model.lm_head.bias)
    ours, (expected, _) = token_logprobs(model, collate(ROWS, CPU), 0.7).logprobs, padded(model, ROWS, 0.7)
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-5)
    assert_same_gradient(*(gradient(model, (item * weights(len(item))).sum()) for item in (ours, expected)))


def test_gradient_is_the_sum_over_micro_batches(model: PreTrainedModel) -> None:
    """An update's gradient does not depend on optim.micro_batch_tokens."""
    rows = ROWS * 2
    full = gradient(model, token_logprobs(model, collate(rows, CPU)).logprobs.sum())
    batches = [collate(batch, CPU) for batch in batch_rows(rows, 1)]
    gradients = [gradient(model, token_logprobs(model, batch).logprobs.sum()) for batch in batches]
    assert len(gradients) == 14
    assert_same_gradient(torch.stack(gradients).sum(0), full)


def test_gradient_checkpointing_only_changes_memory(model: PreTrainedModel) -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor, int]:
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.numel()), t)[1], lambda t: t):
            logprobs = token_logprobs(model, collate(ROWS, CPU), 0.8).logprobs
        return logprobs.detach(), gradient(model, logprobs.sum()), sum(saved)

    plain = run()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again = run()
    assert torch.equal(again[0], plain[0])
    assert_same_gradient(again[1], plain[1])
    assert again[2] < plain[2] / 2
    assert not any(module.training for module in model.modules())
    cached = model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values
    assert cached.get_seq_length() == 3


def test_bfloat16_log_probs_are_close_and_gradients_finite() -> None:
    model = random_model("llama")
    expected = token_logprobs(model, collate(ROWS, CPU)).logprobs
    model.bfloat16()
    ours = token_logprobs(model, collate(ROWS, CPU), with_entropy=True)
    assert ours.logprobs.dtype == torch.float32
    # An eighth of a nat: logits are about 10, and bfloat16 has 8 significant bits through two layers.
    assert (ours.logprobs - expected).abs().mean() < 0.125
    grads = gradient(model, ours.logprobs.sum())
    assert grads.dtype == torch.bfloat16
    assert torch.isfinite(grads).all()
