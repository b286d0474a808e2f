"""Sharded models: FSDP2 `fully_shard` over the ranks of a run.

There is one group per decoder layer and one for the rest. A sharded model has DTensor parameters. A policy is stored in
float32 (these are the master weights) and computes in its own dtype, with gradients reduced in float32. Every forward
pass of it gathers the parameters layer by layer, so all ranks must run the same number of passes; within `unsharded`
they need not. Gradients are sums over the ranks. All functions also accept a model that is not sharded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from bandpo_cli.processes.ranks import Ranks

T = TypeVar("T")

_RUN = "run_as_forward"


def shard(model: PreTrainedModel, ranks: Ranks, device: torch.device) -> None:
    """Move the model to `device`; with several ranks, layer by layer, and only the shards of this rank, in place.

    Parameters of a sharded model that require a gradient become float32, the others keep their dtype.
    """
    if ranks.size == 1:
        model.to(device)
        return
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


def model_class(model: nn.Module) -> type[nn.Module]:
    """Return the class of the model; `fully_shard` replaces it by a subclass of it and of `FSDPModule`."""
    return next(item for item in type(model).__mro__ if not issubclass(item, FSDPModule))  # type: ignore[return-value]


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
