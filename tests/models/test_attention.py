"""Attention of one query per head against transformers' own function, which repeats keys and values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bandpo_cli.models import attention

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
def test_one_query_per_head(groups: int, mask: torch.dtype | None) -> None:
    compare(groups, 1, None if mask is None else left_padding(mask), scaling=0.3)


def test_several_queries_per_head() -> None:
    compare(2, KEYS, None)
    compare(2, 4, left_padding(torch.bool))


def test_a_mask_or_bias_per_head() -> None:
    bias = torch.linspace(-2, 2, HEADS, dtype=torch.float64)[:, None, None] * torch.arange(KEYS)
    compare(2, 1, bias[None])
    compare(2, 1, left_padding(torch.bool), position_bias=bias[None])


def test_keys_and_values_are_not_copied_for_the_heads_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[torch.Size] = []

    def record(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: Any) -> torch.Tensor:
        shapes.extend([query.shape, key.shape, value.shape])
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **settings)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", record)
    compare(2, 1, left_padding(torch.bool))
    assert shapes == [(BATCH, 2, HEADS // 2, WIDTH), (BATCH, 2, KEYS, WIDTH), (BATCH, 2, KEYS, WIDTH)]
