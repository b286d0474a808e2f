"""Memory of one rank of a sharded model: its share, and what FSDP2 holds complete for a while.

`models.sharding` makes one FSDP group of each decoder layer and one of all other parameters, mostly the embedding and
the output layer. The counts of buffers follow torch's FSDP2 (`torch.distributed.fsdp._fully_shard`), which gathers a
group into one buffer and copies it into the parameters, and copies gradients into a buffer of the reduction. A test
compares the sums with the memory that torch's profiler records.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class ShardedModel:
    """Numbers of parameters (not bytes) of a model that is sharded over ranks; tied parameters count once.

    Attributes:
        share: parameters that a rank stores: the first dimension of each is divided, rounded up.
        trained_share: those of them that require a gradient.
        total: parameters of the model.
        trained: those of them that require a gradient.
        layer: parameters of the largest decoder layer.
        trained_layer: the most parameters that require a gradient in a decoder layer.
        outside: parameters outside of the layers.
        trained_outside: those of them that require a gradient.
        largest: elements of the largest parameter.
        itemsize: bytes of an element in forward and backward passes.
        ranks: number of ranks.
    """

    share: int
    trained_share: int
    total: int
    trained: int
    layer: int
    trained_layer: int
    outside: int
    trained_outside: int
    largest: int
    itemsize: int
    ranks: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters that a rank stores: those that are trained are float32, the master weights."""
        return FLOAT32_BYTES * self.trained_share + self.itemsize * (self.share - self.trained_share)

    @property
    def untrained_bytes(self) -> int:
        """Bytes of the parameters that a rank stores and does not train."""
        return self.itemsize * (self.share - self.trained_share)

    @property
    def frozen_bytes(self) -> int:
        """Bytes of the parameters that a rank stores of a model that is not trained."""
        return self.itemsize * self.share

    def update_bytes(self) -> dict[str, int]:
        """Return the bytes of a backward pass while activations are held, by component."""
        # The parameters of a layer, the next layer gathered ahead, and gradients; the float32 buffer of the reduction
        # of the layer before, and its result.
        gathered = self.itemsize * (2 * self.layer + self.trained_layer)
        reduced = FLOAT32_BYTES * (self.trained_layer + math.ceil(self.trained_layer / self.ranks))
        # In their place at the beginning, before there is a gradient of the output layer: the buffer that the
        # parameters outside of the layers are gathered into.
        buffer = self.itemsize * (self.outside - (self.largest if self.trained_outside else 0))
        return {
            "complete parameters outside of the layers": self.itemsize * self.outside,
            "two complete layers and a gradient to reduce": max(gathered + reduced, buffer),
        }

    def reduction_bytes(self) -> dict[str, int]:
        """Return the bytes at the end of a backward pass, when no activations are left, by component.

        Here the gradient of the parameters outside of the layers is reduced: in its own dtype, in float32, and the
        result. The parameters themselves have been released.
        """
        trained = self.trained_outside
        reduced = FLOAT32_BYTES * (trained + math.ceil(trained / self.ranks))
        return {"gradient outside of the layers to reduce": self.itemsize * trained + reduced}

    def sampling_bytes(self) -> int:
        """Return the bytes of all parameters, complete, and of the buffer that a group is gathered into."""
        return self.itemsize * max(self.total + self.layer, 2 * self.outside)

    def sync_bytes(self) -> int:
        """Return the bytes of the largest weight while it is sent to an engine: gathered and copied."""
        return 2 * self.itemsize * self.largest


def sharded_model(model: nn.Module, itemsize: int, ranks: int) -> ShardedModel:
    """Return the numbers of parameters of a model, which may be on the meta device, sharded over `ranks` ranks."""
    parameters = list(model.parameters())
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    sizes = [_count(list(layer.parameters())) for layer in layers]
    of_layers = [_count(_trained(list(layer.parameters()))) for layer in layers]
    trained = _count(_trained(parameters))
    return ShardedModel(
        share=_share(parameters, ranks),
        trained_share=_share(_trained(parameters), ranks),
        total=_count(parameters),
        trained=trained,
        layer=max(sizes, default=0),
        trained_layer=max(of_layers, default=0),
        outside=_count(parameters) - sum(sizes),
        trained_outside=trained - sum(of_layers),
        largest=max(parameter.numel() for parameter in parameters),
        itemsize=itemsize,
        ranks=ranks,
    )


def _trained(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def _count(parameters: list[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _share(parameters: list[nn.Parameter], ranks: int) -> int:
    """Return the number of elements that the first rank stores: no rank stores more."""
    return sum(
        math.ceil(len(parameter) / ranks) * (parameter.numel() // len(parameter)) for parameter in parameters
    )
