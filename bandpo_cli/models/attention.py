"""Attention over packed rows, which are one after another without padding and do not see each other.

Every layer but attention treats tokens one by one, so it runs on the packed tokens as they are. Attention alone has
to know the rows: it gathers their queries, keys and values, runs the model's own attention on them and puts the
results back.

Importing this module wraps transformers' `sdpa`, `eager` and `flash_attention_2` in its registry of attention
functions. A wrapped function does something else only where the model is called with `packing=`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bandpo_cli.models.packing import Packing, causal_mask

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def _packed(attention: Attention, attend: Callable[..., torch.Tensor]) -> Attention:
    """Return `attention` as it is but for calls with `packing`, for which `attend` calls it."""

    def forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packing: Packing | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if packing is None:
            return attention(module, query, key, value, attention_mask, **kwargs)
        kwargs.pop("position_ids", None)  # of the packed tokens; some kernels would read sequences off them
        states = [state.squeeze(0).transpose(0, 1) for state in (query, key, value)]  # each [T, heads, width]
        return attend(attention, packing, module, states, **kwargs)[None], None

    return forward


def _attend_in_blocks(
    attention: Attention,
    packing: Packing,
    module: torch.nn.Module,
    states: Sequence[torch.Tensor],
    **kwargs: Any,
) -> torch.Tensor:
    """Return attention by kernels that take sequences of one length."""
    outputs = []
    for block in packing.blocks:
        mask = block.mask(kwargs.get("sliding_window"))
        gathered = [
            s.index_select(0, block.take).view(*block.shape, *s.shape[1:]).transpose(1, 2) for s in states
        ]
        outputs.append(attention(module, *gathered, mask, **kwargs)[0].flatten(0, 1))
    return torch.cat(outputs).index_select(0, packing.block_scatter_index)


def _attend_varlen(
    attention: Attention,
    packing: Packing,
    module: torch.nn.Module,
    states: Sequence[torch.Tensor],
    **kwargs: Any,
) -> torch.Tensor:
    """Return attention by a kernel that takes sequences of any lengths one after another."""
    gathered = [s.index_select(0, packing.take).transpose(0, 1)[None] for s in states]
    output, _ = attention(
        module, *gathered, None, cu_seq_lens_q=packing.boundaries, cu_seq_lens_k=packing.boundaries,
        max_length_q=packing.longest, max_length_k=packing.longest, **kwargs,
    )  # fmt: skip
    return output.flatten(0, 1).index_select(0, packing.keep)


def _eager_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The `eager` attention of the module's architecture, which the registry does not hold."""
    attention: Attention = sys.modules[type(module).__module__].eager_attention_forward
    return attention(module, query, key, value, attention_mask, **kwargs)


def _eager_attend_in_blocks(
    attention: Attention,
    packing: Packing,
    module: torch.nn.Module,
    states: Sequence[torch.Tensor],
    **kwargs: Any,
) -> torch.Tensor:
    """Return `_in_blocks` for attention that always takes a mask, and adds it to its scores."""

    def masked(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        allowed = causal_mask(query.shape[2], query.device) if mask is None else mask
        lowest = torch.finfo(query.dtype).min
        added = torch.zeros_like(allowed, dtype=query.dtype).masked_fill(~allowed, lowest)
        return attention(module, query, key, value, added, **kwargs)

    return _attend_in_blocks(masked, packing, module, states, **kwargs)


_IMPLEMENTATIONS = {
    "sdpa": (ALL_ATTENTION_FUNCTIONS["sdpa"], _attend_in_blocks),
    "eager": (_eager_attention, _eager_attend_in_blocks),
    "flash_attention_2": (ALL_ATTENTION_FUNCTIONS["flash_attention_2"], _attend_varlen),
}
for _name, (_attention, _attend) in _IMPLEMENTATIONS.items():
    AttentionInterface.register(_name, _packed(_attention, _attend))
