"""Estimate of the memory of a run, from shapes: the model is built on the meta device, without its weights."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from bandpo_cli.config.batch_and_sampling import resolve_engine
from bandpo_cli.config.layers import with_values
from bandpo_cli.config.run import ModelConfig, RunConfig, with_dtype
from bandpo_cli.errors import UserError
from bandpo_cli.models.attention import attention_elements, attention_heads, update_tokens
from bandpo_cli.models.load import meta_model, read_config, resolved_dtype, uses_gradient_checkpointing
from bandpo_cli.models.logprobs import TILE_BYTES
from bandpo_cli.models.lora import add_adapters
from bandpo_cli.models.model_files import base_config, loading_errors
from bandpo_cli.models.weights import MIN_BLOCKED, checkpointed_layers
from bandpo_cli.registries import ENGINES

GIB = 2**30
SLEEPING_ENGINE_BYTES = 3 * GIB
"""An allowance for a sleeping vLLM engine: CUDA graphs, buffers of NCCL and workspaces. Not a measurement."""
ENGINE_BYTES_PER_LOGIT = 20
"""float32 logits, log-probs, probabilities and random numbers, and the int32 counts of vLLM's penalties."""
_USABLE_SHARE = 0.95  # Largest share of a device that an estimate may take and still count as fitting
_AMPLE_SHARE = 0.95  # Largest share of that which an update may take by values chosen for `auto`
_MIN_PASS_TOKENS = 8192  # Gradient checkpointing comes before smaller micro-batches. Not measured on a GPU.
_FLOAT32 = 4
_COPY = "copy for a checkpoint"
Bytes = dict[str, int]  # Number of bytes by component


class NoEstimateError(UserError):
    """The forward pass of the model needs more than the shapes of tensors."""


class Device(NamedTuple):
    """A CUDA GPU (`on_gpu`), or this machine without one: its name, the bytes of its memory, and the unused bytes."""

    name: str
    total: int
    free: int
    on_gpu: bool = True

    @property
    def usable(self) -> int:
        """The most bytes that a run should take; an idle GPU, of which the driver holds a little, counts as free."""
        return int(_USABLE_SHARE * (self.total if self.is_idle else self.free))

    @property
    def is_idle(self) -> bool:
        """Whether no other process holds a relevant part of the memory."""
        return self.free >= _USABLE_SHARE * self.total


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by component; with several ranks, those of one rank."""

    parameters: int  # their number in the model, its adapters included; tied parameters count once
    trained: int  # number of parameters that are trained: all of them, or those of the adapters (LoRA)
    ranks: int
    always: Bytes  # of the complete run: weights, optimizer, reference, an engine that never sleeps
    update: Bytes  # additional, of a forward and backward pass and its gradients
    reduction: Bytes  # with several ranks, additional at the end of a backward pass, in place of `update`
    sampling: Bytes  # additional, of sampling, or of sending the weights to another engine
    engine_gpu: Bytes  # held on `engine_device`, where the engine process has a GPU of its own
    device: Device
    engine_device: Device | None
    vllm: int  # bytes of the vLLM engine, also part of a phase; 0 without one
    vllm_minimum: int  # the fewest bytes with which that engine can sample the completions of one prompt
    memory_fraction: float | None  # of the settings, or chosen; None without vLLM on a GPU
    is_ample: bool  # the updates leave a margin, and an engine that never sleeps has all it can use
    chosen: Mapping[str, Any] = field(default_factory=dict)  # the values of the settings that are `auto`

    @property
    def peak(self) -> int:
        """Maximum bytes on the device of the trainer: updates and sampling alternate."""
        return _peak(self.always, self.update, self.reduction, self.sampling)

    @property
    def engine_peak(self) -> int:
        """Bytes on the GPU of the engine process."""
        return sum(self.engine_gpu.values())

    @property
    def fits(self) -> bool:
        """Whether every device has some memory left at the peak."""
        engine_fits = self.engine_device is None or self.engine_peak <= self.engine_device.usable
        return engine_fits and self.peak <= self.device.usable and self.vllm >= self.vllm_minimum

    @property
    def can_start(self) -> bool:
        """Whether every device has what the run certainly needs: all but the cache of the transformers engine."""
        certain = _peak(self.always, self.update, self.reduction, self.sampling if self.vllm else {})
        engine_fits = self.engine_device is None or self.engine_peak <= self.engine_device.free
        return engine_fits and certain <= self.device.free and self.vllm >= self.vllm_minimum


def _peak(always: Bytes, *phases: Bytes) -> int:
    return sum(always.values()) + max(sum(phase.values()) for phase in phases)


def estimate_memory(
    config: RunConfig,
    device: Device,
    ranks: int = 1,
    engine_device: Device | None = None,
    training: bool = True,
) -> MemoryEstimate:
    """Estimate the memory of a run, with the first values for settings that are `auto` that leave a margin.

    Args:
        device: the device of the trainer, which need not exist here; each rank has such a device.
        ranks: number of ranks; with more than one the model is sharded.
        engine_device: the GPU of the engine process if there is one and it is not the trainer's.
        training: False for an evaluation, which has a complete model on each rank and no updates.

    Raises:
        UserError: the model's config cannot be read, or (`NoEstimateError`) its memory does not follow from shapes.
    """
    config = with_dtype(config, device.on_gpu)
    model = build_on_meta_device(config.model)
    for chosen in _choices(config, model, device.on_gpu, training):
        run = _Run(with_values(config, chosen) if chosen else config, model, ranks, device.on_gpu, training)
        estimate = _estimate(run, device, engine_device)
        if estimate.is_ample:
            break
    return replace(estimate, chosen=chosen)


def smaller_passes(config: RunConfig) -> list[int]:
    """Return smaller values of `optim.micro_batch_tokens`, down to the tokens of the longest sequence."""
    longest, tokens = config.sampling.max_prompt_tokens + config.sampling.max_tokens, config.optim.pass_tokens
    smaller = []
    while tokens > longest:
        smaller.append(tokens := max(tokens // 2, longest))
    return smaller


def _choices(
    config: RunConfig, model: PreTrainedModel, on_gpu: bool, training: bool
) -> Iterator[dict[str, Any]]:
    """Yield values for the settings that are `auto`: the fastest ones first, those that need least memory last."""
    sampling = config.sampling
    has_vllm = on_gpu and not ENGINES[resolve_engine(sampling.engine, on_gpu)].shares_weights
    values: dict[str, list[Any]] = {}
    if training and config.model.gradient_checkpointing == "auto":
        values["model.gradient_checkpointing"] = [False, True] if checkpointed_layers(model) else [False]
    if training and config.optim.micro_batch_tokens == "auto":
        sizes = [config.optim.pass_tokens, *smaller_passes(config)]
        large = [size for size in sizes if size >= _MIN_PASS_TOKENS] or sizes[:1]
        values["optim.micro_batch_tokens"] = large
    if has_vllm and not (sampling.max_lag and sampling.engine_process) and sampling.vllm.sleep == "auto":
        values["sampling.vllm.sleep"] = [False, True]
    for combination in product(*values.values()):
        yield dict(zip(values, combination, strict=True))
    if "optim.micro_batch_tokens" in values:
        most_saving = {key: options[-1] for key, options in values.items()}
        yield from ({**most_saving, "optim.micro_batch_tokens": size} for size in sizes[len(large) :])


def _estimate(run: "_Run", device: Device, engine_device: Device | None) -> MemoryEstimate:
    """Return the estimate of a run without settings that are `auto`."""
    config, ranks, training = run.config, run.ranks, run.training
    backward, reduction, gathered, sampling = Bytes(), Bytes(), Bytes(), Bytes()
    if training and ranks > 1:
        backward, reduction, gathered, sampling = fsdp_bytes(run.model, ranks)
    always, update, process = {"weights": run.weights}, Bytes(), Bytes()
    if training:
        always = run.held_bytes()
        gradients = {"gradients": _FLOAT32 * run.trained_stored}
        update, reduction = gradients | run.pass_bytes() | backward, gradients | reduction
    vllm, minimum, fraction, is_limited = 0, 0, None, False
    has_process = training and config.sampling.max_lag > 0 and config.sampling.engine_process
    if run.shares_weights:
        held = run.generation_bytes()
        process = {"weights of the engine process": run.weights} | held if has_process else {}
        sampling = sampling if has_process else held | gathered
    else:
        sleeps = device.on_gpu and config.sampling.vllm.sleep and not has_process
        if sleeps:
            update["vLLM while it sleeps"] = reduction["vLLM while it sleeps"] = SLEEPING_ENGINE_BYTES
        beside = _peak(always, sampling) if sleeps else _peak(always, sampling, update, reduction)
        place, taken = (engine_device, 0) if engine_device else (device, beside)
        vllm, minimum, fraction, is_limited = run.vllm_bytes(place, taken)
        is_limited = is_limited and not sleeps
        share = {"vLLM: weights and cache": vllm}
        sampling, process = (sampling | share, process) if sleeps else (sampling, share)
    if engine_device is None:
        always, process = always | process, {}
    is_ample = _peak(always, update, reduction) <= _AMPLE_SHARE * device.usable and not is_limited
    estimate = MemoryEstimate(
        run.total, run.trained, ranks, always, update, reduction, sampling, process, device, engine_device,
        vllm, minimum, fraction, is_ample,
    )  # fmt: skip
    if not estimate.fits:  # a run that lacks the memory for the copy takes none
        always.pop(_COPY, None)
    return estimate


class _Run:
    """A run whose model is on the meta device."""

    def __init__(
        self, config: RunConfig, model: PreTrainedModel, ranks: int, on_gpu: bool, training: bool
    ) -> None:
        self.config, self.ranks, self.on_gpu, self.training = config, ranks, on_gpu, training
        self.shares_weights = ENGINES[resolve_engine(config.sampling.engine, on_gpu)].shares_weights
        self.model, self.text, self.itemsize = model, model.config.get_text_config(), model.dtype.itemsize
        self.total, self.trained = stored_parameters(self.model.parameters())
        self.stored, self.trained_stored = stored_parameters(self.model.parameters(), ranks)
        self.has_lora, sampling = config.model.lora is not None, config.sampling
        # An engine with weights of its own has them complete and without adapters.
        self.weights = self.itemsize * (self.total - (self.trained if self.has_lora else 0))
        self.longest = sampling.max_prompt_tokens + sampling.max_tokens
        prompts, self.samples = sampling.prompts, sampling.samples
        if not training:
            evaluation, self.samples = config.evaluation, config.evaluation.samples
            prompts = evaluation.problems or sampling.max_sequences
            if self.shares_weights:  # it samples one batch at a time
                prompts = min(prompts, max(1, evaluation.batch // self.samples))
        self.sequences = min(math.ceil(prompts / ranks) * self.samples, sampling.max_sequences)
        _, heads, width = attention_heads(self.text)
        self.cache = self.longest * 2 * self.text.num_hidden_layers * heads * width * self.itemsize

    def held_bytes(self) -> Bytes:
        """Return the bytes that are held during a complete training run."""
        masters = _FLOAT32 * self.trained_stored if self.itemsize != _FLOAT32 else 0
        held = {"weights": self.itemsize * self.total}
        if self.ranks > 1:  # those that are trained are float32, the masters
            frozen = self.itemsize * (self.stored - self.trained_stored)
            held = {"weights (float32)": _FLOAT32 * self.trained_stored + frozen}
        held["AdamW"] = 2 * _FLOAT32 * self.trained_stored
        copied = held["AdamW"] + masters
        if self.ranks == 1:
            copied += self.itemsize * self.trained
            held |= {"master weights": masters} if masters else {}
        if self.config.objective.reference_kl > 0 and not self.has_lora:  # with adapters it is the same model
            held["reference model"] = self.itemsize * self.stored
        if self.on_gpu:  # copies for checkpoints are in the memory of the host
            return held
        if self.ranks > 1:  # rank 0 has them
            held["complete weights for a checkpoint"] = self.itemsize * self.trained
        return held | ({_COPY: copied} if self.config.checkpoint.copies_memory(self.config.steps) else {})

    def pass_bytes(self) -> Bytes:
        """Return the bytes of a forward and backward pass of one micro-batch."""
        config, text = self.config, self.text
        tokens = min(max(config.optim.pass_tokens, self.longest), update_tokens(config, self.ranks))
        attention = attention_elements(config, text, tokens)
        activations = activation_bytes(self.model, tokens, config.model, attention, self.on_gpu)
        mebibytes = config.model.head
        tile_bytes = TILE_BYTES["cuda" if self.on_gpu else "cpu"] if mebibytes == "auto" else mebibytes << 20
        tile = min(tile_bytes, tokens * text.vocab_size * _FLOAT32)
        # AdamW's fused kernel (`training.optimizer`) allocates nothing, so an update peaks where its gradient does.
        held = {
            f"activations of {tokens:,} tokens": activations,
            # two tiles of logits, and the hidden states, their scaled copy and their gradient in float32
            "log-probs and their gradient": 2 * tile + 3 * tokens * text.hidden_size * _FLOAT32,
        }
        # before it is added to the gradient of the other micro-batches
        head = {"gradient of the output layer": text.vocab_size * text.hidden_size * self.itemsize}
        return held if self.has_lora else held | head

    def generation_bytes(self) -> Bytes:
        """Return the bytes that the transformers engine holds while it samples, at most."""
        # float32 logits and their log-softmax, float64 probabilities and their cumulative sum
        distributions = self.sequences * self.text.vocab_size * (4 + 4 + 8 + 8)
        cache = f"at most: key-value cache of {self.sequences:,} × {self.longest:,} tokens"
        name = f"at most: next-token distributions of {self.sequences:,} sequences"
        layers = () if self.on_gpu or self.itemsize < _FLOAT32 else self.model.parameters()
        copied = sum(weight.nbytes for weight in layers if weight.numel() >= MIN_BLOCKED)
        return {cache: self.sequences * self.cache, name: distributions, "at most: copied weights": copied}

    def vllm_bytes(self, device: Device, already_taken: int) -> tuple[int, int, float | None, bool]:
        """Return the bytes of the vLLM engine on its device, the fewest to sample with, and its share of the GPU.

        Where the settings leave the share open, it is what a full batch needs, and at most the room beside the bytes
        that the trainer takes while the engine is awake; the last value is whether that room is less. What stays while
        the engine sleeps is part of the share.
        """
        sampling = self.config.sampling
        settings, gpus = sampling.vllm, sampling.vllm.tensor_parallel
        if not device.on_gpu:
            return self.weights + int(settings.kv_cache_gb * GIB), 0, None, False
        logits = sampling.max_sequences * self.text.vocab_size * ENGINE_BYTES_PER_LOGIT
        fixed = self.weights // gpus + logits + SLEEPING_ENGINE_BYTES
        full = fixed + self.sequences * self.cache // gpus
        fewest = fixed + min(self.sequences, self.samples) * self.cache // gpus
        fraction, is_limited, room = settings.memory_fraction, False, device.usable - already_taken
        if fraction is None:
            percent, is_limited = math.floor(100 * min(full, room) / device.total), room < full
            fraction = max(percent, math.ceil(100 * fewest / device.total)) / 100
        return int(device.total * fraction), fewest, fraction, is_limited


def stored_parameters(parameters: Iterable[nn.Parameter], ranks: int = 1) -> tuple[int, int]:
    """Return how many parameters, and trained ones, the first of some ranks stores: of each tensor, the most rows."""
    total = trained = 0
    for tensor in parameters:
        size = math.ceil(len(tensor) / ranks) * (tensor.numel() // len(tensor))
        total, trained = total + size, trained + size * tensor.requires_grad
    return total, trained


def fsdp_bytes(model: PreTrainedModel, ranks: int) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Return the bytes that FSDP adds on a rank, in four phases.

    The phases are a backward pass while activations are held, its end, the gathering of all parameters, and the sending
    of the largest weight to an engine. The buffers follow torch's FSDP2 (`torch.distributed.fsdp._fully_shard`), which
    gathers a group into one buffer and copies it, and copies gradients into a buffer of the reduction.
    """

    def reduced(gradients: int) -> int:
        """Return the bytes of the float32 buffer that gradients are reduced in, and of the result on a rank."""
        return _FLOAT32 * (gradients + math.ceil(gradients / ranks))

    itemsize = model.dtype.itemsize
    total, trained = stored_parameters(model.parameters())
    sizes = [stored_parameters(layer.parameters()) for layer in checkpointed_layers(model)] or [(0, 0)]
    layer, trained_layer = map(max, zip(*sizes, strict=True))
    inside, trained_inside = map(sum, zip(*sizes, strict=True))
    outside, trained_outside = total - inside, trained - trained_inside
    largest = max(parameter.numel() for parameter in model.parameters())
    # The parameters of a layer, the next layer gathered ahead, and gradients; the float32 buffer of the reduction of
    # the layer before, and its result.
    backward = itemsize * (2 * layer + trained_layer) + reduced(trained_layer)
    # In their place, before the output layer has a gradient: the buffer of the parameters outside of the layers.
    buffer = itemsize * (outside - (largest if trained_outside else 0))
    update = {
        "complete parameters outside of the layers": itemsize * outside,
        "two complete layers and a gradient to reduce": max(backward, buffer),
    }
    # The gradient of the parameters outside of the layers: in its own dtype, in float32, and the result.
    reduction = itemsize * trained_outside + reduced(trained_outside)
    gathered = {"complete parameters": itemsize * max(total + layer, 2 * outside)}
    sync = {"a complete weight, to send it to the engine": 2 * itemsize * largest}
    return update, {"gradient outside of the layers to reduce": reduction}, gathered, sync


def build_on_meta_device(config: ModelConfig) -> PreTrainedModel:
    """Return the model on the meta device, built from its config.json, with adapters if configured."""
    config, _ = base_config(config)  # an adapter is merged into its base while it is loaded
    with loading_errors(config.path, "its config cannot be read"):
        options = {"dtype": resolved_dtype(config), "attn_implementation": "bandpo_shapes_only"}
        model = meta_model(config, read_config(config), **options)
        model.tie_weights()
        if config.lora is not None:
            with torch.device("meta"):
                add_adapters(model, config.lora, seed=0, base=config.path)
    return model.eval()


def activation_bytes(
    model: PreTrainedModel, tokens: int, config: ModelConfig, attention: int, on_gpu: bool
) -> int:
    """Return the bytes that autograd saves for a backward pass of `tokens` packed tokens, without the output layer.

    With gradient checkpointing these are the input of every layer, the last output, its norm and its gradient, and all
    activations of one layer at a time. `attention` is the number of elements that attention saves in a layer.
    """
    text = model.config.get_text_config()
    layers: int = text.num_hidden_layers
    activations: int = _saved_bytes(model, tokens, config.path) + layers * attention * model.dtype.itemsize
    if not uses_gradient_checkpointing(model, config, on_gpu):
        return activations
    return int((layers + 3) * tokens * text.hidden_size * model.dtype.itemsize) + activations // layers


def _shapes_only(module: Any, query: Tensor, *states: Any, **settings: Any) -> tuple[Tensor, None]:
    """Return an output of the right shape and save nothing: `attention_elements` counts what attention saves."""
    return query.transpose(1, 2).clone(memory_format=torch.contiguous_format), None


AttentionInterface.register("bandpo_shapes_only", _shapes_only)


@lru_cache(maxsize=4)
def _saved_bytes(model: PreTrainedModel, tokens: int, path: str) -> int:
    """Return the bytes of the tensors that autograd saves outside of attention, without the parameters."""
    saved: dict[int, Tensor] = {}  # one tensor of each storage, whose address may be reused after it is freed

    def save(tensor: Tensor) -> Tensor:
        return saved.setdefault(tensor.untyped_storage()._cdata, tensor)

    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    try:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            # As in training: models would expand None to a matrix of all pairs of tokens.
            mask = ids.new_ones((1, 1, 1, 1), dtype=torch.bool)
            model.base_model(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False)
    except Exception as error:
        kind = model.config.model_type
        what = f"the memory of {kind} models cannot be estimated, so that it is not checked"
        raise NoEstimateError(f"model.path = {path!r}: {what}") from error
    stored = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    return sum(tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in stored)
