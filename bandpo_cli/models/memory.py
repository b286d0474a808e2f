"""Estimate of the memory that training needs, from shapes: the model is built on the meta device, without data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, count, takewhile
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from bandpo_cli.config.hardware import with_dtype
from bandpo_cli.config.run import ModelConfig, RunConfig
from bandpo_cli.models.checks import check_declared_size, loading_errors
from bandpo_cli.models.device import dtype_here
from bandpo_cli.models.load import model_location, read_config
from bandpo_cli.models.logprobs import TILE_BYTES
from bandpo_cli.models.lora import add_adapters
from bandpo_cli.models.packing import MAX_SHARED_ROW_TOKENS, Packing, Row, batch_rows
from bandpo_cli.models.sharded_memory import FLOAT32_BYTES, ShardedModel, sharded_model
from bandpo_cli.storage.checkpoints import is_written_in_background


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory in bytes by component; with several ranks, that of one rank.

    Attributes:
        parameters: number of parameters of the model (not bytes), its adapters included; tied parameters count once.
        always: memory that is held during the complete run: weights, optimizer state, reference model.
        update: additional memory of one forward and backward pass, and the gradients, which are dropped after it.
        sampling: additional memory of sampling with the trainer's own model, or of sending it to another engine.
        reduction: with several ranks, additional memory at the end of a backward pass, in place of `update`.
        ranks: number of ranks.
        trained: number of parameters that are trained: all of them, or those of the adapters (LoRA).
    """

    parameters: int
    always: dict[str, int]
    update: dict[str, int]
    sampling: dict[str, int]
    reduction: dict[str, int] = field(default_factory=dict)
    ranks: int = 1
    trained: int = 0

    @property
    def updating(self) -> int:
        """Maximum bytes of an update beside what is always held."""
        return max(sum(self.update.values()), sum(self.reduction.values()))

    @property
    def peak(self) -> int:
        """Maximum bytes at any one time: updates and sampling alternate."""
        return sum(self.always.values()) + max(self.updating, sum(self.sampling.values()))


class AttendedTokens(NamedTuple):
    """Tokens of which attention holds queries, keys and values: packed tokens with the copies of their prompts.

    Attributes:
        masked: tokens in blocks with a mask, where each key and value is repeated for the query heads that share it.
        plain: tokens in sequences of a prompt and one completion.
        mask: elements of the masks, which the kernel converts to the dtype of the model.
    """

    masked: int
    plain: int
    mask: int

    def saved_elements(self, heads: int, key_value_heads: int, head_dim: int) -> int:
        """Return the number of elements of queries, keys, values, output and masks that one layer saves."""
        shared = 2 * (heads + key_value_heads)
        return (4 * heads * self.masked + shared * self.plain) * head_dim + self.mask


def estimate_memory(
    config: RunConfig, trainer_samples: bool, device: str = "cpu", ranks: int = 1
) -> MemoryEstimate:
    """Estimate the memory that the trainer needs on its device.

    Args:
        config: the run's settings.
        trainer_samples: the trainer's model also samples (the transformers engine), with a key-value cache. False with
            `sampling.max_lag`, where an engine process samples; see `engine_process_bytes`.
        device: device type of the trainer, `cpu` or `cuda`.
        ranks: number of ranks; with more than one the model is sharded, and the estimate is that of one rank.

    Raises:
        UserError: the model's config cannot be read.
    """
    config = with_dtype(config, device == "cuda")
    model = build_on_meta_device(config.model)
    # One share of one is the complete model.
    sharded = sharded_model(model, model.dtype.itemsize, ranks)
    always = _held_bytes(config, sharded, device)
    gradients = {"gradients": sharded.trained_share * FLOAT32_BYTES}
    update = gradients | _pass_bytes(config, model, device)
    sampling = _sampling_bytes(config, model, ranks) if trainer_samples else {}
    if ranks == 1:
        return MemoryEstimate(sharded.total, always, update, sampling, trained=sharded.trained)
    if device == "cpu":  # rank 0 has a copy of the weights, in the memory of the host
        saved = sharded.trained if config.model.lora is not None else sharded.total
        always["complete weights for a checkpoint"] = saved * sharded.itemsize
    update |= sharded.update_bytes()
    reduction = gradients | sharded.reduction_bytes()
    if trainer_samples:
        sampling |= {"complete parameters": sharded.sampling_bytes()}
    else:
        sampling = {"a complete weight, to send it to the engine": sharded.sync_bytes()}
    return MemoryEstimate(sharded.total, always, update, sampling, reduction, ranks, sharded.trained)


def engine_process_bytes(
    config: RunConfig, samples_itself: bool, device: str = "cpu", ranks: int = 1
) -> dict[str, int]:
    """Return the bytes that the engine process of one rank holds (`sampling.max_lag`), by component.

    It has the complete weights in the dtype of forward passes, with adapters merged into them. The transformers engine
    samples from these, an engine with weights of its own is checked against them; what that engine holds is not part
    of the result.

    Args:
        config: the run's settings.
        samples_itself: the process samples from its copy of the weights (the transformers engine).
        device: device type of the engine, `cpu` or `cuda`.
        ranks: number of ranks; each has such a process, which samples a share of the prompts.

    Raises:
        UserError: the model's config cannot be read.
    """
    config = with_dtype(config, device == "cuda")
    merged = config.model.model_copy(update={"lora": None})
    model = build_on_meta_device(merged)
    parameters = sum(parameter.numel() for parameter in model.parameters())  # tied ones count once
    held = {"weights of the engine process": parameters * model.dtype.itemsize}
    return held | (_sampling_bytes(config, model, ranks) if samples_itself else {})


def _held_bytes(config: RunConfig, model: ShardedModel, device: str) -> dict[str, int]:
    """Return the bytes that are held during the complete run, by component."""
    held = {}
    if model.ranks > 1:
        held["weights (float32)"] = model.weight_bytes
    else:
        held["weights"] = model.frozen_bytes
    held["AdamW"] = 2 * model.trained_share * FLOAT32_BYTES
    if model.ranks == 1 and model.itemsize != FLOAT32_BYTES:
        held["master weights"] = model.trained_share * FLOAT32_BYTES
    copied = sum(held.values())
    has_lora = config.model.lora is not None
    if model.ranks > 1:  # rank 0 copies the complete weights; masters are saved where the weights are rounded
        copied = held["AdamW"]
        if model.itemsize != FLOAT32_BYTES:
            copied += model.trained_share * FLOAT32_BYTES
    elif has_lora:  # its checkpoints have the adapters alone
        copied -= model.untrained_bytes
    if config.objective.reference_kl > 0 and not has_lora:  # with adapters the reference is the same model
        held["reference model"] = model.frozen_bytes
    if device == "cpu" and is_written_in_background(config):  # on a GPU the copy is in the memory of the host
        held["copy for a checkpoint"] = copied
    return held


def _pass_bytes(config: RunConfig, model: PreTrainedModel, device: str) -> dict[str, int]:
    """Return the bytes of a forward and backward pass of one micro-batch, by component."""
    longest = config.sampling.max_prompt_tokens + config.sampling.max_tokens
    tokens = max(config.optim.micro_batch_tokens, longest)
    text = model.config.get_text_config()
    attended = attended_tokens(config, text, tokens)
    tile = min(TILE_BYTES[device], tokens * text.vocab_size * FLOAT32_BYTES)
    # AdamW's fused kernel (`training.optimizer`) allocates nothing, so the peak of an update is that of its gradient.
    found = {
        f"activations of {tokens:,} tokens": activation_bytes(model, tokens, config.model, attended),
        # two tiles of logits, and the hidden states, their scaled copy and their gradient in float32
        "log-probs and their gradient": 2 * tile + 3 * tokens * text.hidden_size * FLOAT32_BYTES,
    }
    if config.model.lora is None:
        # before it is added to the gradient of the other micro-batches
        output = text.vocab_size * text.hidden_size * model.dtype.itemsize
        found["gradient of the output layer"] = output
    return found


def _sampling_bytes(config: RunConfig, model: PreTrainedModel, ranks: int) -> dict[str, int]:
    """Return the bytes of sampling with the transformers engine, a share of the prompts per rank, by component."""
    text = model.config.get_text_config()
    longest = config.sampling.max_prompt_tokens + config.sampling.max_tokens
    prompts = math.ceil(config.sampling.prompts / ranks)
    sequences = min(prompts * config.sampling.samples, config.sampling.max_sequences)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    cache_bytes = (
        2 * text.num_hidden_layers * heads * head_dim * model.dtype.itemsize
    )  # per token: keys and values
    # float32 logits and their log-softmax, float64 probabilities and their cumulative sum
    distribution_bytes = text.vocab_size * (4 + 4 + 8 + 8)
    return {
        f"key-value cache of {sequences:,} × {longest:,} tokens": sequences * longest * cache_bytes,
        f"next-token distributions of {sequences:,} sequences": sequences * distribution_bytes,
    }


def build_on_meta_device(config: ModelConfig) -> PreTrainedModel:
    """Return the model on the meta device, built from its config.json without its weights, with adapters if configured.

    Raises:
        UserError: there is no config, transformers does not support its architecture, or the adapters cannot be added.
    """
    model_config = read_config(config)
    with loading_errors(config.path, "its config cannot be read"):
        check_declared_size(model_location(config), model_config, config)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                model_config,
                dtype=dtype_here(config),
                attn_implementation=_SHAPES_ONLY,
                trust_remote_code=config.trust_remote_code,
            )
            model.tie_weights()
            if config.lora is not None:
                add_adapters(model, config.lora, seed=0, base=config.path)
    return model.eval()


def attended_tokens(config: RunConfig, text: PreTrainedConfig, tokens: int) -> AttendedTokens:
    """Return the most that attention holds of a micro-batch of `tokens` tokens.

    It depends on the lengths of the completions: short ones leave room for more copies of the prompt. Prompts of the
    maximum length are packed with completions of each power of two up to the maximum.
    """
    heads = text.num_attention_heads
    key_value_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    longest = config.sampling.max_tokens
    lengths = [*takewhile(lambda length: length < longest, (2**i for i in count())), longest]
    return max(
        (_attended_with(config, length, tokens) for length in lengths),
        key=lambda each: each.saved_elements(heads, key_value_heads, head_dim),
    )


def _attended_with(config: RunConfig, length: int, tokens: int) -> AttendedTokens:
    """Return what attention holds of a micro-batch of groups whose completions have `length` tokens."""
    prompt, samples = config.sampling.max_prompt_tokens, config.sampling.samples
    group = Row(range(prompt), [range(length)] * samples)
    rows = chain.from_iterable(batch_rows([group], min(tokens, MAX_SHARED_ROW_TOKENS)))
    packing = Packing(tuple((prompt, *map(len, row.completions)) for row in rows), torch.device("cpu"))
    groups = tokens / sum(map(sum, packing.rows))
    if config.model.attention == "flash_attention_2":
        return AttendedTokens(0, math.ceil(groups * len(packing.gather_index)), 0)
    masked = [block.shape for block in packing.blocks if block.segments is not None]
    plain = [block.shape for block in packing.blocks if block.segments is None]
    return AttendedTokens(
        math.ceil(groups * sum(size * width for size, width in masked)),
        math.ceil(groups * sum(size * width for size, width in plain)),
        math.ceil(groups * sum(size * width**2 for size, width in masked)),
    )


def activation_bytes(
    model: PreTrainedModel, tokens: int, config: ModelConfig, attended: AttendedTokens | None = None
) -> int:
    """Return the bytes that autograd saves for the backward pass of `tokens` packed tokens.

    The output layer is not included; `estimate_memory` counts it separately.

    With gradient checkpointing these are the input of every layer and all activations of one layer at a time.

    Args:
        attended: what attention holds; None for one sequence that is not packed.
    """
    layers = model.config.get_text_config().num_hidden_layers
    all_layers = _activation_bytes_one_pass(model, tokens, attended)
    if not config.gradient_checkpointing:
        return all_layers
    layer_input = tokens * model.config.get_text_config().hidden_size * model.dtype.itemsize
    return int(layers * layer_input + all_layers // layers)


def _activation_bytes_one_pass(model: PreTrainedModel, tokens: int, attended: AttendedTokens | None) -> int:
    """Return the bytes of all distinct tensors that a forward pass saves, without the parameters."""
    parameters = {_storage_address(parameter) for parameter in model.parameters()}
    saved: dict[int, int] = {}
    references: list[torch.Tensor] = []  # the address of a storage may be reused after its tensor is freed

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        address = _storage_address(tensor)
        if address not in parameters and address not in saved:
            saved[address] = tensor.untyped_storage().nbytes()
            references.append(tensor)
        return tensor

    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    positions = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(input_ids=ids, position_ids=positions, use_cache=False, attended=attended)
    return sum(saved.values())


def _storage_address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _FusedAttention(torch.autograd.Function):
    """Saves what fused kernels save: queries, keys, values and the output, but not the matrix of scores."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(query).transpose(1, 2).contiguous()
        ctx.save_for_backward(query, key, value, output)
        return output


class _PackedAttention(torch.autograd.Function):
    """Saves what packed attention saves: gathered queries, keys and values, masks, and the output in their order."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attended: AttendedTokens
    ) -> torch.Tensor:
        _, heads, tokens, width = query.shape
        ctx.save_for_backward(query.new_empty(attended.saved_elements(heads, key.shape[1], width)))
        return query.new_empty(1, tokens, heads, width)


def _shapes_only(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    attended: AttendedTokens | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    if attended is None:
        return _FusedAttention.apply(query, key, value), None  # type: ignore[no-untyped-call]
    return _PackedAttention.apply(query, key, value, attended), None  # type: ignore[no-untyped-call]


_SHAPES_ONLY = "bandpo_shapes_only"
_register: Callable[..., None] = AttentionInterface.register
_register(_SHAPES_ONLY, _shapes_only)
