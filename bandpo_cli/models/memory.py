"""How much memory training takes, from shapes alone: the model is laid out on the meta device, without numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from bandpo_cli.config.run import ModelConfig, RunConfig
from bandpo_cli.models.checks import check_declared_size, loading_errors
from bandpo_cli.models.load import model_location, read_config
from bandpo_cli.models.logprobs import TILE_BYTES

FLOAT32 = 4
"""Bytes."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by part.

    Attributes:
        parameters: their number, tied ones once.
        held: what stays for the whole run: weights, gradients, optimizer.
        update: what one forward and backward pass adds.
        sampling: what sampling with the trainer's own model adds; 0 for an engine with memory of its own.
    """

    parameters: int
    held: dict[str, int]
    update: dict[str, int]
    sampling: dict[str, int]

    @property
    def peak(self) -> int:
        """The most that is needed at one time: an update and sampling take turns."""
        return sum(self.held.values()) + max(sum(self.update.values()), sum(self.sampling.values()))


def estimate_memory(config: RunConfig, own_sampler: bool, device: str = "cpu") -> MemoryEstimate:
    """Estimate what the trainer needs on its device.

    Args:
        own_sampler: the trainer's model samples too (the transformers engine), with a cache beside the weights.
        device: `cpu` or `cuda`: what the trainer runs on.

    Raises:
        UserError: the model's config cannot be had.
    """
    model = build_on_meta_device(config.model)
    numel = sum(parameter.numel() for parameter in model.parameters())
    width = getattr(torch, config.model.dtype).itemsize
    held = {"weights": numel * width, "gradients": numel * FLOAT32, "AdamW": 2 * numel * FLOAT32}
    if width != FLOAT32:
        held["master weights"] = numel * FLOAT32
    if config.objective.reference_kl > 0:
        held["reference model"] = numel * width
    longest = config.sampling.max_prompt_tokens + config.sampling.max_tokens
    tokens = max(config.optim.micro_batch_tokens, longest)
    hidden = model.config.get_text_config().hidden_size
    update = {
        f"activations of {tokens:,} tokens": activation_bytes(model, tokens, config.model),
        # two tiles of logits, and hidden states, their scaled copy and their gradient in float32
        "log-probs and their gradient": 2 * TILE_BYTES[device] + 3 * tokens * hidden * FLOAT32,
    }
    sampling = {}
    if own_sampler:
        sequences = min(config.sampling.prompts * config.sampling.samples, config.sampling.max_sequences)
        text = model.config.get_text_config()
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        per_token = 2 * text.num_hidden_layers * heads * head_dim * width
        sampling = {
            f"key-value cache of {sequences:,} × {longest:,} tokens": sequences * longest * per_token,
            # float32 logits, their log-softmax, and its float64 exponential and running sum
            f"next-token distributions of {sequences:,} sequences": sequences
            * text.vocab_size
            * (4 + 4 + 8 + 8),
        }
    return MemoryEstimate(numel, held, update, sampling)


def build_on_meta_device(config: ModelConfig) -> PreTrainedModel:
    """Lay the model out on the meta device; reads its config.json alone.

    Raises:
        UserError: there is no config, or transformers knows no such architecture.
    """
    described = read_config(config)
    with loading_errors(config.path, "its config cannot be read"):
        check_declared_size(model_location(config), described, config)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                described,
                dtype=getattr(torch, config.dtype),
                attn_implementation=_SHAPES_ONLY,
                trust_remote_code=config.trust_remote_code,
            )
    model.tie_weights()
    return model.eval()


def activation_bytes(model: PreTrainedModel, tokens: int, config: ModelConfig) -> int:
    """Return what autograd keeps for the backward pass of one packed row of `tokens` tokens, in bytes.

    With gradient checkpointing that is each layer's input, and everything inside of one layer at a time.
    """
    layers = model.config.get_text_config().num_hidden_layers
    whole = _activation_bytes_one_pass(model, tokens)
    if not config.gradient_checkpointing:
        return whole
    layer_input = tokens * model.config.get_text_config().hidden_size * getattr(torch, config.dtype).itemsize
    return int(layers * layer_input + whole // layers)


def _activation_bytes_one_pass(model: PreTrainedModel, tokens: int) -> int:
    parameters = {_storage(parameter) for parameter in model.parameters()}
    saved: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # a storage's address may be given out again once its tensor is gone

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        key = _storage(tensor)
        if key not in parameters and key not in saved:
            saved[key] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    positions = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(input_ids=ids, position_ids=positions, use_cache=False)
    return sum(saved.values())


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _FusedAttention(torch.autograd.Function):
    """Keeps what fused kernels keep: queries, keys, values and the output, not the matrix of all pairs."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(query).transpose(1, 2).contiguous()
        ctx.save_for_backward(query, key, value, output)
        return output


def _shapes_only(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **settings: Any
) -> tuple[torch.Tensor, None]:
    return _FusedAttention.apply(query, key, value), None  # type: ignore[no-untyped-call]


_SHAPES_ONLY = "bandpo_shapes_only"
_register: Callable[..., None] = AttentionInterface.register
_register(_SHAPES_ONLY, _shapes_only)
