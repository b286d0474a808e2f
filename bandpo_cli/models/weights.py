"""Weights of a policy under their names in a checkpoint, one complete tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from bandpo_cli.models.sharding import forward_dtype, full_tensor


def checkpoint_weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of every weight, in the dtype of forward passes; tied weights appear once.

    A sharded model gathers each tensor when it is taken: at no time does a rank hold a second copy of the model. All
    ranks must iterate together.
    """
    dtype = forward_dtype(model)
    for name, parameter in model.named_parameters():
        # Rounded before it is gathered: half as many bytes to send.
        yield name, full_tensor(parameter.detach().to(dtype))
