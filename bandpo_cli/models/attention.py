"""Attention over packed rows, and the key-value cache of sampling.

Every layer except attention treats tokens independently, so it runs on the packed tokens unchanged. Attention gathers
the queries, keys and values of the rows, calls the model's own attention function on them and scatters the results
back.

Importing this module wraps `sdpa`, `eager` and FlashAttention 2 and 3 in transformers' registry of attention functions.
A wrapped function behaves differently only if the model is called with `packing=`; `sdpa` also saves the copies of keys
and values when one token per sequence is sampled with grouped heads. `varlen` is added to the registry: `sdpa`, and for
packed rows the FlashAttention kernels that torch contains.
"""

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bandpo_cli.config.run import RunConfig
from bandpo_cli.models.packing import (
    MAX_MASKED_ROW_TOKENS,
    MAX_SHARED_ROW_TOKENS,
    Packing,
    Row,
    causal_mask,
    split_row,
)

MIN_SPARE_TOKENS, SPARE_SHARE = 32, 0.25
"""Room for further tokens that a cache layer gets when it grows: a share of its length, but at least a number."""

Output = tuple[Tensor, Tensor | None]
Attention = Callable[..., Output]
States = Sequence[Tensor]  # queries, keys and values


def _packed(attention: Attention, kernel: Attention, attend: Callable[..., Tensor]) -> Attention:
    """Return `attention` with support for `packing`, for which `attend` calls `kernel` on the rows."""

    def forward(module: nn.Module, *arguments: Any, packing: Packing | None = None, **kwargs: Any) -> Output:
        if packing is None:
            return attention(module, *arguments, **kwargs)
        kwargs.pop("position_ids", None)  # of the packed tokens; some kernels would infer sequences from them
        states = [state.squeeze(0).transpose(0, 1) for state in arguments[:3]]  # each [T, heads, width]
        window = kwargs.get("sliding_window")
        return attend(partial(kernel, module, **kwargs), packing, states, window)[None], None

    return forward


def _attend_in_blocks(attend: Attention, packing: Packing, states: States, window: int | None) -> Tensor:
    """Return the attention output of a kernel that takes sequences of equal length."""
    outputs = []
    for block in packing.blocks:
        index, shape = block.gather_index, block.shape
        gathered = (state.index_select(0, index) for state in states)
        rows = (state.view(*shape, *state.shape[1:]).transpose(1, 2) for state in gathered)
        mask = block.mask if window is None else block.windowed_mask(window)
        outputs.append(attend(*rows, mask)[0].flatten(0, 1))
    return torch.cat(outputs).index_select(0, packing.block_scatter_index)


def _attend_varlen(attend: Attention, packing: Packing, states: States, window: int | None) -> Tensor:
    """Return the attention output of a kernel that takes concatenated sequences of any length and knows its window."""
    gathered = [state.index_select(0, packing.gather_index).transpose(0, 1)[None] for state in states]
    lengths: dict[str, Any] = {f"cu_seq_lens_{side}": packing.boundaries for side in "qk"}
    lengths |= {f"max_length_{side}": packing.longest for side in "qk"}
    output, _ = attend(*gathered, None, **lengths)
    return output.flatten(0, 1).index_select(0, packing.scatter_index)


def _eager_attention(module: nn.Module, *arguments: Any, **kwargs: Any) -> Output:
    """Call the `eager` attention of the module's architecture, which the registry does not contain."""
    attention: Attention = sys.modules[type(module).__module__].eager_attention_forward
    return attention(module, *arguments, **kwargs)


def _eager_attention_of_blocks(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Output:
    """Call it with the mask that it requires and adds to its scores."""
    allowed = causal_mask(query.shape[2], query.device) if mask is None else mask
    lowest = torch.finfo(query.dtype).min
    additive = torch.zeros_like(allowed, dtype=query.dtype).masked_fill(~allowed, lowest)
    return _eager_attention(module, query, key, value, additive, **kwargs)


def _sdpa_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Output:
    """Call `sdpa` of transformers, without its copies of keys and values where there is one query per head.

    With a mask, transformers repeats keys and values for all query heads of a group, which copies the complete cache
    for every sampled token. With one query per head, the heads of a group can be the queries of one head instead.
    Queries are [B, heads, L, width], keys and values [B, groups, K, width]; the output is [B, L, heads, width].
    """
    groups = key.shape[1]
    is_one_query = query.shape[2] == 1 and (attention_mask is None or attention_mask.shape[1] == 1)
    is_plain = kwargs.get("position_bias") is None and kwargs.get("cache") is None
    if not is_one_query or groups == query.shape[1] or not is_plain:
        return _SDPA(module, query, key, value, attention_mask, **kwargs)
    options = {"dropout_p": kwargs.get("dropout", 0.0), "scale": kwargs.get("scaling")}
    query = query.reshape(len(query), groups, -1, query.shape[3])
    output = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, **options)
    return output.flatten(1, 2)[:, None], None


def _torch_varlen(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **kwargs: Any
) -> Output:
    """Call torch's causal varlen attention: queries [1, heads, E, width] → output [1, E, heads, width]."""
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (state.squeeze(0).transpose(0, 1) for state in (query, key, value))
    ends, longest, window = kwargs["cu_seq_lens_q"], kwargs["max_length_q"], kwargs.get("sliding_window")
    left = -1 if window is None else window - 1
    options: dict[str, Any] = {"scale": kwargs.get("scaling"), "window_size": (left, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # from torch 2.12 on
        options["enable_gqa"] = True
    else:
        repeats = query.shape[1] // key.shape[1]
        key, value = (state.repeat_interleave(repeats, dim=1) for state in (key, value))
    output = varlen_attn(query, key, value, ends, ends, longest, longest, **options)
    return cast(Tensor, output)[None], None


_SDPA: Attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
_FLASH_2, _FLASH_3 = (ALL_ATTENTION_FUNCTIONS[f"flash_attention_{version}"] for version in (2, 3))
# The attention function of calls without `packing`, the function of calls with it, and how it is called.
_IMPLEMENTATIONS: dict[str, tuple[Attention, Attention, Callable[..., Tensor]]] = {
    "sdpa": (_sdpa_attention, _sdpa_attention, _attend_in_blocks),
    "eager": (_eager_attention, _eager_attention_of_blocks, _attend_in_blocks),
    "flash_attention_2": (_FLASH_2, _FLASH_2, _attend_varlen),
    "flash_attention_3": (_FLASH_3, _FLASH_3, _attend_varlen),
    "varlen": (_sdpa_attention, _torch_varlen, _attend_varlen),
}

AttentionMaskInterface.register("varlen", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
for _name, _functions in _IMPLEMENTATIONS.items():
    AttentionInterface.register(_name, _packed(*_functions))


def attention_heads(text: PreTrainedConfig) -> tuple[int, int, int]:
    """Return the number of attention heads, the number of heads for keys and values, and the width of a head."""
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return heads, getattr(text, "num_key_value_heads", None) or heads, width


def _full_rows(config: RunConfig) -> list[tuple[int, list[Row]]]:
    """Return each power of two up to the maximum length, and it, with the rows of completions of this length."""
    sampling, longest = config.sampling, config.sampling.max_tokens
    prompt, lengths = range(sampling.max_prompt_tokens), [2**i for i in range(longest.bit_length())]
    lengths.append(longest)
    rows = {length: Row(prompt, [range(length)] * sampling.samples) for length in lengths}
    return [(length, split_row(row, MAX_SHARED_ROW_TOKENS)) for length, row in rows.items()]


def update_tokens(config: RunConfig, ranks: int = 1) -> int:
    """Return the most tokens of an update on a rank: completions share their prompt unless their row is split."""
    sampling, groups = config.sampling, config.sampling.prompts // config.optim.updates
    completions = math.ceil(groups * sampling.samples / ranks)
    return max(
        min(completions, groups * len(rows)) * sampling.max_prompt_tokens + completions * length
        for length, rows in _full_rows(config)
    )


def attention_elements(config: RunConfig, text: PreTrainedConfig, tokens: int) -> int:
    """Return the most elements of queries, keys, values, output and masks that attention saves in a layer.

    They depend on the lengths of the completions: a prompt is copied for each of its completions, or has a mask
    (`models.packing`). Micro-batches of `tokens` tokens are taken of prompts of the maximum length.
    """
    heads, key_value_heads, width = attention_heads(text)
    has_masks = config.model.attention in ("auto", "sdpa", "eager")
    most = 0
    for length, (row, *_) in _full_rows(config):
        samples = len(row.completions)
        if samples > 1 and len(row) <= MAX_MASKED_ROW_TOKENS and has_masks:
            # Keys and values are repeated for the query heads; the kernel converts masks to the dtype of the model.
            elements = 4 * heads * tokens * width + tokens * len(row)
        else:
            copies = math.ceil(tokens / len(row) * samples * (len(row.prompt_ids) + length))
            elements = 2 * (heads + key_value_heads) * copies * width
        most = max(most, elements)
    return most


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Cache layer with room for further tokens: a new token is written in place, and does not copy all others."""

    def __init__(self, most_tokens: int) -> None:
        """Create an empty layer; it never has room for more than `most_tokens`."""
        super().__init__()
        self._most = most_tokens
        self._buffers: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, heads, n, width]; return all [B, heads, L, width]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return self.keys, self.values
        before = self.get_seq_length()
        length = before + key_states.shape[-2]
        # Sequences that were repeated or selected are copies, which lie outside of the buffers.
        is_stored = self._buffers and self.keys.data_ptr() == self._buffers[0].data_ptr()
        if not is_stored or self._buffers[0].shape[-2] < length:
            room = min(self._most, length + max(MIN_SPARE_TOKENS, int(SPARE_SHARE * length)))
            stored = self.keys, self.values
            self._buffers = [item.new_empty(*item.shape[:2], room, item.shape[3]) for item in stored]
            for buffer, states in zip(self._buffers, stored, strict=True):
                buffer[:, :, :before] = states
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, before:length] = states
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)
        return self.keys, self.values


def growing_cache(model: PreTrainedModel, most_tokens: int) -> DynamicCache:
    """Return a cache for up to `most_tokens` per sequence; layers that keep all tokens grow in place."""
    cache = DynamicCache(config=model.config)
    cache.layers = [
        GrowingLayer(most_tokens) if type(item) is DynamicLayer else item for item in cache.layers
    ]
    return cache
