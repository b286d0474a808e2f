"""LoRA: peft's low-rank adapters on the linear layers of a policy with frozen weights.

An adapted layer computes W·x + s·B·(A·x), with its weights W as they were loaded and s = alpha / rank. A and B have the
dtype of W, so that they get float32 masters as any other parameter. B starts at 0: the policy starts as the model that
was loaded. Without its adapters, the same model is the reference of the KL penalty.

Rounding to 16 bits must not drop the adapters' effect, which is far below half a unit in the last place of W and of W·x
for many updates. Forward passes round the sum of both terms once (`_round_once`), and merged weights are rounded
stochastically (`merged_weight`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bandpo_cli.config.run import LoraSettings
from bandpo_cli.errors import UserError, nearest
from bandpo_cli.types import derive_seed

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""The file with the tensors of an adapter, in the format of peft."""
ADAPTER_NAME = "default"  # The name by which peft knows the adapters of a policy

# Of the names of the tensors in that file.
PREFIX, END_A, END_B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def add_adapters(
    model: PreTrainedModel, settings: LoraSettings, seed: int, base: str, revision: str | None = None
) -> None:
    """Add an adapter to each target layer, in place, and freeze all other parameters.

    Args:
        model: the complete model, on the CPU or the meta device.
        seed: seed of the run; with the shapes of the layers it determines the initial adapters.
        base, revision: folder, or hub id and commit, of the model, for the config of the adapters.

    Raises:
        UserError: a target is no linear layer of the model or its output layer, or the rank is too large.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = target_names(model, settings)
    alpha = settings.scaling * settings.rank
    alpha = int(alpha) if alpha == int(alpha) else alpha
    origin: Any = {"task_type": "CAUSAL_LM", "base_model_name_or_path": base, "revision": revision}
    config = LoraConfig(r=settings.rank, lora_alpha=alpha, target_modules=targets, **origin)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "lora"))
        inject_adapter_in_model(config, model)
    for name, layer in lora_layers(model).items():
        dtype = model.get_submodule(name).base_layer.weight.dtype
        for adapter in (layer.lora_A, layer.lora_B):
            adapter.to(dtype)  # peft stores the adapters of 16-bit weights in float32
        if dtype != torch.float32:
            layer.forward = MethodType(_round_once, layer)


def _round_once(layer: Any, x: Tensor) -> Tensor:
    """Return W·x + s·B·(A·x), x of [..., in], rounded once: the forward method of a layer of peft in 16 bits.

    peft rounds W·x to 16 bits before it adds the adapter's term; `addmm` adds in float32. A bias does not lie on the
    grid of the sum, so adding it afterwards drops nothing on average.
    """
    base = layer.base_layer
    if layer.disable_adapters:  # the same operations: a policy at its start equals its reference exactly
        change = x.new_zeros(*x.shape[:-1], base.out_features)
    else:
        change = layer.lora_B[ADAPTER_NAME](layer.lora_A[ADAPTER_NAME](x)) * layer.scaling[ADAPTER_NAME]
    y = torch.addmm(change.flatten(0, -2), x.flatten(0, -2), base.weight.t()).view_as(change)
    return y if base.bias is None else y + base.bias


def has_adapters(model: nn.Module) -> bool:
    """Return whether `add_adapters` was called for the model."""
    return isinstance(getattr(model, "peft_config", None), dict)


def lora_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Return the layers with an adapter, by the names of the layers."""
    if not has_adapters(model):
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def target_names(model: PreTrainedModel, settings: LoraSettings) -> list[str]:
    """Return the names of the layers that get an adapter, as peft matches them: equal, or the end after a dot."""
    modules, output = dict(model.named_modules()), model.get_output_embeddings()
    linear = {name for name, item in modules.items() if isinstance(item, nn.Linear) and item is not output}
    if not linear:
        raise UserError(f"model.lora: {model.config.model_type} models have no linear layers to adapt")

    def matching(target: str) -> set[str]:
        return {name for name in modules if f".{name}".endswith(f".{target}")}

    short = sorted({name.rpartition(".")[2] for name in linear})
    targets = sorted(set(settings.target_modules or ()))
    for target in targets:
        if not matching(target) or not matching(target) <= linear:
            problem = f"{target!r} names no linear layers, or the output layer{nearest(target, short)}"
            advice = f"choose among {', '.join(short)}, or leave it out for all of them"
            raise UserError(f"model.lora.target_modules: {problem}; {advice}")
    if settings.target_modules is None:
        for name in short:  # a name that other modules have, too, is replaced by the complete names
            targets += [name] if matching(name) <= linear else sorted(matching(name) & linear)
    widest = max(min(modules[name].weight.shape) for target in targets for name in matching(target))
    if settings.rank > widest:
        advice = "use a smaller rank, or train all weights with model.lora=null"
        raise UserError(f"model.lora.rank = {settings.rank}: the largest layer has rank {widest}; {advice}")
    return targets


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield name and parameter of the adapters, by their names in a file of peft."""
    for name, layer in lora_layers(model).items():
        yield f"{PREFIX}{name}{END_A}", layer.lora_A[ADAPTER_NAME].weight
        yield f"{PREFIX}{name}{END_B}", layer.lora_B[ADAPTER_NAME].weight


@contextmanager
def adapters_disabled(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Yield the model, which computes with its own weights within the block: passes without gradient only."""
    layers = lora_layers(model).values()
    try:
        for layer in layers:
            layer.enable_adapters(False)
            # peft also freezes them. Sharding notes at its first pass which parameters are trained.
            for adapter in (layer.lora_A, layer.lora_B):
                adapter.requires_grad_(True)
        yield model
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@torch.no_grad()
def merged_weight(name: str, weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return W + s·B·A, computed in float32 and rounded stochastically to the dtype of W.

    The probability of rounding away from 0 is the distance from the number below, in units in the last place, so that
    the mean of the result is the sum. The random numbers depend on `name`, that of the parameter, alone: equal sums
    give equal weights, and an element that is rounded away from 0 stays so while its sum grows.

    Args:
        weight, a, b: W, [out, in], in float32, bfloat16 or float16; A, [rank, in]; B, [out, rank].
    """
    total = torch.addmm(weight.float(), b.float(), a.float(), alpha=scaling)
    if weight.dtype == torch.float32:
        return total
    # The last bits of a float32 that the dtype lacks. The smallest numbers of float16, below 6e-5, have fewer.
    dropped = 2 ** {torch.bfloat16: 16, torch.float16: 13}[weight.dtype]
    generator = torch.Generator(weight.device).manual_seed(derive_seed(0, "rounding", name))
    bits = total.view(torch.int32)
    bits += torch.randint(dropped, bits.shape, dtype=torch.int32, device=weight.device, generator=generator)
    bits &= -dropped
    return total.to(weight.dtype)
