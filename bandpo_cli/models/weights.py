"""Weights of a policy: those of an engine and of a checkpoint, model folders, and the shards of several ranks on disk.

torch.distributed.checkpoint (DCP) writes and reads safetensors. Each rank writes files with its own shards; the header
of a file says at which offsets of the complete tensors they begin. A file without that header, such as a file of a
model folder, holds complete tensors. Ranks of any number read the files of a folder, each rank only the parts that its
own shards need. There is no pickle: the writer of Hugging Face's format leaves out DCP's `.metadata`.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import PreTrainedModel

from bandpo_cli.errors import first_line
from bandpo_cli.models import lora
from bandpo_cli.models.load import Policy
from bandpo_cli.models.sharding import forward_dtype, full_tensor, is_sharded, sharded_like
from bandpo_cli.processes.ranks import Ranks

FILE_BYTES = 2**30
"""Bytes of a rank's shards per file. The writer holds a copy of one file in host memory."""


def save_policy(policy: Policy, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write a folder that transformers and vLLM can load: weights, or with LoRA adapters for peft, and tokenizer.

    Args:
        weights: what `weights_to_save` returns, or a copy; None for the weights in use.
    """
    if lora.has_adapters(policy.model):
        lora.save_adapter(policy.model, folder, weights)
    else:
        policy.model.save_pretrained(folder, state_dict=None if weights is None else dict(weights))
        if is_sharded(policy.model):
            # transformers states the dtype of the parameters, and the weights are rounded.
            policy.model.config.dtype = forward_dtype(policy.model)
            policy.model.config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


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

    Without further ranks this is the state dict, without a copy; tied weights share their memory. Of a sharded model
    rank 0 gets a copy in host memory, gathered tensor by tensor, and the others get nothing; all ranks must call this
    together.
    """
    saved = lora.adapter_weights(model) if lora.has_adapters(model) else checkpoint_weights(model)
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
    transformers converts for some architectures, each rank loads the complete model into host memory instead.

    Raises:
        OSError, ValueError, RuntimeError, SafetensorError: the folder is damaged or belongs to another model.
    """
    if lora.has_adapters(model):
        ranks.agree(lambda: lora.load_adapter(model, load_file(folder / lora.ADAPTER_WEIGHTS)))
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
    """Write the shards of all ranks into `folder` and flush them to the disk; all ranks must call this together.

    Args:
        folder: an empty folder that all ranks share.
        tensors: DTensors, of which each rank writes its shard, and tensors that are equal on all ranks, which one rank
            writes. The names are the same on every rank.

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

    Args:
        targets: tensors by their name in the files, which are converted to the dtype of the target. Of a DTensor, each
            rank reads its shard.

    Raises:
        ShardError: a rank failed to read, for example a tensor that is missing, damaged or of another shape.
    """
    reader = HuggingFaceStorageReader(str(folder))
    alone = ranks.size == 1
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
        reason = getattr(cause, "strerror", None) or first_line(cause, max_chars=500)
        raise ShardError(f"{reason} (rank {rank})" if ranks.size > 1 else reason) from cause
