"""Weights of a policy under their names in a checkpoint: one complete tensor at a time, and to and from a folder."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from bandpo_cli.models import lora, sharding
from bandpo_cli.ranks import Ranks


def checkpoint_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of every weight, in the dtype of forward passes; tied weights appear once.

    Adapters are merged into the weights of their layers, which have the names that they have without adapters. A
    sharded model gathers each tensor when it is taken: at no time does a rank hold a second copy of the model. All
    ranks must iterate together.
    """
    dtype = sharding.forward_dtype(model)
    layers = lora.lora_layers(model)
    adapters = {id(parameter) for _, parameter in lora.adapter_parameters(model)}
    for name, parameter in model.named_parameters():
        if id(parameter) in adapters:
            continue
        # Rounded before it is gathered: half as many bytes to send.
        weight = sharding.full_tensor(parameter.detach().to(dtype))
        layer, _, kind = name.rpartition(".base_layer.")
        if layer in layers:
            name = f"{layer}.{kind}"  # without adapters
            if kind == "weight":  # A and B are rounded first, since passes compute with them
                adapter = layers[layer]
                parts = (item[lora.ADAPTER_NAME].weight for item in (adapter.lora_A, adapter.lora_B))
                a, b = (sharding.full_tensor(part.detach().to(dtype)) for part in parts)
                weight = lora.merged_weight(name, weight, a, b, adapter.scaling[lora.ADAPTER_NAME])
        yield name, weight


def weights_to_save(model: PreTrainedModel, ranks: Ranks) -> Mapping[str, Tensor]:
    """Return the weights of a checkpoint, which rank 0 writes: those of the model, or of its adapters alone.

    Without further ranks this is the state dict, without a copy; tied weights share their memory. Of a sharded model
    rank 0 gets a copy in host memory, gathered tensor by tensor, and the others get nothing; all ranks must call this
    together.
    """
    saved = lora.adapter_weights(model) if lora.has_adapters(model) else checkpoint_weights(model)
    if not sharding.is_sharded(model):
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
    if not sharding.is_sharded(model):
        saved = type(model).from_pretrained(folder, dtype=model.dtype, use_safetensors=True)
        model.load_state_dict(saved.state_dict())
        return
    parameters = dict(model.named_parameters()).keys()
    aliases = dict(model.named_parameters(remove_duplicate=False)).keys() - parameters
    targets = {name: value.detach() for name, value in model.state_dict().items() if name not in aliases}
    shapes = ranks.agree(lambda: sharding.saved_shapes(folder))[0]
    if all(shapes.get(name) == target.shape for name, target in targets.items()):
        sharding.read_shards(folder, targets, ranks)
        return

    def copy_complete() -> None:
        dtype = sharding.forward_dtype(model)
        complete = type(model).from_pretrained(folder, dtype=dtype, use_safetensors=True)
        with torch.no_grad():
            for name, tensor in complete.state_dict().items():
                if name in targets:
                    targets[name].copy_(sharding.sharded_like(targets[name], tensor))

    ranks.agree(copy_complete)
