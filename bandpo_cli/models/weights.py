"""Weights of a policy: sharded over ranks, sent to an engine, copied for sampling on a CPU, saved and loaded.

Sharding is FSDP2 (`fully_shard`), with one group per decoder layer and one for the rest. A sharded model has DTensor
parameters. A policy is stored in float32 (these are the master weights) and computes in its own dtype, with gradients
reduced in float32. Every forward pass of it gathers the parameters layer by layer, so all ranks must run the same
number of passes; within `unsharded` they need not. Gradients are sums over the ranks. All functions also accept a model
that is not sharded.

torch.distributed.checkpoint (DCP) writes and reads safetensors. Each rank writes files with its own shards; the header
of a file says at which offsets of the complete tensors they begin. A file without that header, such as a file of a
model folder, holds complete tensors. Ranks of any number read the files of a folder, each rank only the parts that its
own shards need. There is no pickle: the writer of Hugging Face's format leaves out DCP's `.metadata`.
"""

import json
import os
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from bandpo_cli.errors import first_line
from bandpo_cli.models import lora
from bandpo_cli.paths import ADAPTER_CONFIG
from bandpo_cli.processes.ranks import Ranks

T = TypeVar("T")

FILE_BYTES = 2**30
"""Bytes of a rank's shards per file. The writer holds a copy of one file in host memory."""
MIN_BLOCKED = 2**16  # Smallest number of elements of a weight whose product gains from the blocked layout
MAX_BLOCKED_SHARE = 0.25  # Largest share of the machine's memory that the copies take
_RUN = "run_as_forward"


def shard(model: PreTrainedModel, ranks: Ranks, device: torch.device) -> None:
    """Move the shards of this rank to `device`, layer by layer, in place; there are several ranks.

    Parameters of a sharded model that require a gradient become float32, the others keep their dtype.
    """
    dtype = model.dtype
    mesh = init_device_mesh(device.type, (ranks.size,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*reversed(checkpointed_layers(model)), model):  # a layer within another one comes first
        for parameter in module.parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.float()
        # Also the parameters outside of the layers are freed after a forward pass, so that no pass uses old ones.
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    # FSDP would divide by the number of ranks, for losses that are means over the data of one rank.
    for module in _groups(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    model.forward_dtype = dtype
    setattr(model, _RUN, MethodType(lambda model, function, *args: function(model, *args), model))
    register_fsdp_forward_method(model, _RUN)


def is_sharded(model: nn.Module) -> bool:
    """Return whether the model's parameters are distributed over ranks."""
    return isinstance(model, FSDPModule)


def forward_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of forward and backward passes; parameters that are trained may be stored in float32."""
    return cast(torch.dtype, getattr(model, "forward_dtype", model.dtype))


def run_forward(function: Callable[..., T], model: PreTrainedModel, *args: Any) -> T:
    """Return `function(model, ...)`, which runs modules of the model other than the model itself.

    FSDP gathers the parameters outside of the layers, such as those of the embedding, before the model's own forward
    method; here it does so before `function`.
    """
    if not is_sharded(model):
        return function(model, *args)
    return cast(T, getattr(model, _RUN)(function, *args))


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Hold all parameters complete on every rank within the block, which all ranks must enter together."""
    groups = _groups(model)
    for group in groups:
        group.set_reshard_after_forward(False, recurse=False)
        group.unshard()
    try:
        yield
    finally:
        for group in groups:
            group.reshard()
            group.set_reshard_after_forward(True, recurse=False)


@contextmanager
def layers_for_sampling(model: PreTrainedModel) -> Iterator[None]:
    """Change how linear layers multiply within the block, which is without gradients and without updates.

    The output layer of a model in lower precision returns float32 logits, as `models.logprobs` computes them: a logit
    from 16 to 32 is a multiple of 1/8 in bfloat16, and the log-probs of sampler and trainer would differ by as much.

    On an x86 CPU, float32 layers multiply by copies of their weights in oneDNN's blocked layout. A product of few rows,
    one per completion, is bound by bringing the weights into such a layout, which MKL does in every call. Compiled
    layers are left as they are: each copy would compile them again.
    """
    forwards: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
    head, on_cpu = model.get_output_embeddings(), model.device.type == "cpu"
    if head is not None and head.weight.dtype != torch.float32:
        # On a CPU torch has no product of low-precision factors with a float32 result.
        weight = head.weight.detach().float() if on_cpu else head.weight.detach()
        forwards[head] = partial(_float32_product, weight, head.bias)
    has_layout = platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    is_compiled = any(module._compiled_call_impl is not None for module in model.modules())
    if on_cpu and has_layout and not is_compiled:
        linear = [module for module in model.modules() if type(module) is nn.Linear]
        large = [layer for layer in linear if layer.weight.numel() >= MIN_BLOCKED]
        layers = [layer for layer in large if layer.weight.dtype == torch.float32]
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if sum(layer.weight.nbytes for layer in layers) <= MAX_BLOCKED_SHARE * memory:
            for layer in layers:
                blocked = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
                forwards[layer] = partial(_blocked_product, blocked, layer.bias)
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.forward


def _blocked_product(blocked: Tensor, bias: Tensor | None, hidden: Tensor) -> Tensor:
    """Return hidden·weightᵀ + bias, for a weight in oneDNN's layout."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, blocked, bias, "none", [], "")
    return product


def _float32_product(weight: Tensor, bias: Tensor | None, hidden: Tensor) -> Tensor:
    """Return hidden·weightᵀ + bias in float32, for a weight that is in lower precision on a GPU."""
    options: Any = {} if weight.dtype == torch.float32 else {"out_dtype": torch.float32}
    logits: Tensor = torch.mm(hidden.flatten(0, -2).to(weight.dtype), weight.t(), **options)
    if bias is not None:
        logits += bias
    return logits.view(*hidden.shape[:-1], len(weight))


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a parameter complete, on every rank; all ranks must call this together."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the part of a parameter that this rank holds, which shares its memory."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def sharded_like(target: Tensor, tensor: Tensor) -> Tensor:
    """Return a complete tensor on the device of `target` and sharded as it is, without communication."""
    tensor = tensor.to(target.device)
    if not isinstance(target, DTensor):
        return tensor
    return distribute_tensor(tensor, target.device_mesh, target.placements, src_data_rank=None)


def _groups(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def checkpointed_layers(model: nn.Module) -> list[Any]:
    """Return the layers that can discard their activations: the decoder layers."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def adapter_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield name and complete tensor of the adapters, in the dtype of forward passes; names as in a file of peft.

    All ranks must iterate together. The tensors of a model that is not sharded are those in use.
    """
    for name, parameter in lora.adapter_parameters(model):
        yield name, full_tensor(parameter.detach().to(forward_dtype(model)))


def save_adapter(model: PreTrainedModel, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write the adapters in the format of peft: `PeftModel.from_pretrained(base, folder)` loads them.

    `weights` are what `adapter_weights` returns, or a copy; None for the tensors in use.
    """
    tensors = {name: tensor.contiguous() for name, tensor in dict(weights or adapter_weights(model)).items()}
    save_file(tensors, folder / lora.ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config = model.peft_config[lora.ADAPTER_NAME].to_dict() | {"inference_mode": True}
    # peft would write its sets in an order that changes from process to process.
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(plain, indent=2, sort_keys=True) + "\n", "utf-8")


def load_adapter(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the adapters of the model, in place. Raise ValueError if they belong to other adapters."""
    parameters = dict(lora.adapter_parameters(model))
    if parameters.keys() != tensors.keys():
        other = min(parameters.keys() ^ tensors.keys())
        raise ValueError(f"the adapters belong to other layers ({other} among them)")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.shape != tensors[name].shape:
                raise ValueError(f"the adapters have another rank ({name})")
            parameter.copy_(sharded_like(parameter, tensors[name]))


def checkpoint_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of every weight, in the dtype of forward passes; tied weights appear once.

    Adapters are merged into the weights of their layers, which have the names that they have without adapters. A
    sharded model gathers each tensor when it is taken: at no time does a rank hold a second copy of the model. All
    ranks must iterate together.
    """
    dtype = forward_dtype(model)
    layers = lora.lora_layers(model)
    adapters = {id(parameter) for _, parameter in lora.adapter_parameters(model)}
    for name, parameter in model.named_parameters():
        if id(parameter) in adapters:
            continue
        # Rounded before it is gathered: half as many bytes to send.
        weight = full_tensor(parameter.detach().to(dtype))
        layer, _, kind = name.rpartition(".base_layer.")
        if layer in layers:
            name = f"{layer}.{kind}"  # without adapters
            if kind == "weight":  # A and B are rounded first, since passes compute with them
                adapter = layers[layer]
                parts = (item[lora.ADAPTER_NAME].weight for item in (adapter.lora_A, adapter.lora_B))
                a, b = (full_tensor(part.detach().to(dtype)) for part in parts)
                weight = lora.merged_weight(name, weight, a, b, adapter.scaling[lora.ADAPTER_NAME])
        yield name, weight


def weights_to_save(model: PreTrainedModel, ranks: Ranks) -> Mapping[str, Tensor]:
    """Return the weights of a checkpoint, which rank 0 writes: those of the model, or of its adapters alone.

    Without further ranks this is the state dict, not copied. Of a sharded model rank 0 gets a copy in host memory,
    gathered tensor by tensor, and the others get nothing; all ranks must call this together.
    """
    saved = adapter_weights(model) if lora.has_adapters(model) else checkpoint_weights(model)
    if not is_sharded(model):
        return dict(saved) if lora.has_adapters(model) else cast(Mapping[str, Tensor], model.state_dict())
    weights = {name: tensor.cpu() for name, tensor in saved if ranks.is_main}
    if ranks.is_main and not lora.has_adapters(model):
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = {name: value for name, value in model.state_dict().items() if name not in parameters}
        weights |= {name: buffer.cpu().clone() for name, buffer in buffers.items()}
    return weights


def load_weights(model: PreTrainedModel, folder: Path, ranks: Ranks) -> None:
    """Load the weights of a model folder into the existing tensors; all ranks must call this together.

    Of a sharded model each rank reads its shards. Where the folder has other names or forms than the parameters, which
    transformers converts for some architectures, each rank loads the complete model into host memory instead. Raise
    OSError, ValueError, RuntimeError or SafetensorError if the folder is damaged or belongs to another model.
    """
    if lora.has_adapters(model):
        ranks.agree(lambda: load_adapter(model, load_file(folder / lora.ADAPTER_WEIGHTS)))
        return
    if not is_sharded(model):
        saved = type(model).from_pretrained(folder, dtype=model.dtype, use_safetensors=True)
        model.load_state_dict(saved.state_dict())
        return
    parameters = dict(model.named_parameters()).keys()
    aliases = dict(model.named_parameters(remove_duplicate=False)).keys() - parameters
    targets = {name: value.detach() for name, value in model.state_dict().items() if name not in aliases}
    shapes = ranks.agree(lambda: saved_shapes(folder))[0]
    if all(shapes.get(name) == target.shape for name, target in targets.items()):
        read_shards(folder, targets, ranks)
        return

    def copy_complete() -> None:
        dtype = forward_dtype(model)
        complete = type(model).from_pretrained(folder, dtype=dtype, use_safetensors=True)
        with torch.no_grad():
            for name, tensor in complete.state_dict().items():
                if name in targets:
                    targets[name].copy_(sharded_like(targets[name], tensor))

    ranks.agree(copy_complete)


class ShardError(Exception):
    """Shards could not be written or read on a rank; raised on every rank, with the rank's error as the cause."""


def write_shards(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Write the shards of all ranks into the empty folder `folder`; all ranks must call this together.

    Each rank writes its shards of DTensors; one rank writes tensors that are equal on all ranks. The names are the same
    on every rank.

    Raises:
        ShardError: a rank failed to write.
    """
    numbers = _file_numbers(tensors, ranks)
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=numbers, save_distributed=True)
    with _shard_errors(ranks):
        save(dict(tensors), storage_writer=writer, process_group=ranks.group)


def saved_shapes(folder: Path) -> dict[str, torch.Size]:
    """Return the shape of every complete tensor in the safetensors files of a folder, by name.

    Raises:
        OSError, SafetensorError, ValueError, KeyError: a file is missing or damaged.
    """
    saved = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    shapes: dict[str, torch.Size] = {}
    for name, value in saved.items():
        assert isinstance(value, TensorStorageMetadata)
        # DCP leaves parts of a target unchanged that no file has.
        if sum(chunk.sizes.numel() for chunk in value.chunks) != value.size.numel():
            raise ValueError(f"{folder}: parts of {name} are missing")
        shapes[name] = value.size
    return shapes


def read_shards(folder: Path, targets: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Read tensors from the safetensors files of a folder into `targets`; all ranks must call this together.

    The values are converted to the dtype of the target. Of a DTensor, each rank reads its shard.

    Raises:
        ShardError: a rank failed to read, for example a tensor that is missing, damaged or of another shape.
    """
    reader, alone = HuggingFaceStorageReader(str(folder)), ranks.size == 1
    with _shard_errors(ranks), warnings.catch_warnings():
        if alone:  # DCP warns of what is intended
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(dict(targets), storage_reader=reader, no_dist=alone)


def _file_numbers(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, int]:
    """Return the number of the file, from 1, for the shards of each tensor: about `FILE_BYTES` per rank and file."""
    numbers, number, used = {}, 1, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size() // ranks.size
        if used and used + size > FILE_BYTES:
            number, used = number + 1, 0
        numbers[name] = number
        used += size
    return numbers


@contextmanager
def _shard_errors(ranks: Ranks) -> Iterator[None]:
    """Raise ShardError in place of DCP's error with the tracebacks of all ranks. Signals pass through unchanged."""
    try:
        yield
    except CheckpointException as error:
        failures = {rank: cause for rank, (cause, _) in error.failures.items()}
        own = failures.get(ranks.rank)
        if own is not None and not isinstance(own, Exception):
            raise own from None
        rank, cause = min(failures.items(), key=lambda item: item[0])
        where = f" (rank {rank})" if ranks.size > 1 else ""
        raise ShardError(f"{reason_of(cause)}{where}") from cause


def reason_of(error: BaseException) -> str:
    """Return the system's text of the error, else the first line of its message."""
    return getattr(error, "strerror", None) or first_line(error, max_chars=500)
