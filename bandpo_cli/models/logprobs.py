"""Log-probabilities and entropy of sampled tokens under a policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

import bandpo_cli.models.attention  # noqa: F401  teaches models what `packing` means
from bandpo_cli.models.batch import TokenBatch
from bandpo_cli.models.linear_logprobs import linear_logprobs


class TokenLogprobs(NamedTuple):
    """[N] float32 each, nats: log π(token) at the sampling temperature; the entropy of π (T=1) where it was drawn."""

    logprobs: torch.Tensor
    entropy: torch.Tensor | None


def token_logprobs(
    model: PreTrainedModel, batch: TokenBatch, temperature: float = 1.0, with_entropy: bool = False
) -> TokenLogprobs:
    """Run the model on a batch and read off its completion tokens.

    The trunk runs on the T packed tokens. The output layer sees the N completion positions alone, never the prompts,
    and never all of them at once. Gradients flow when enabled.

    Args:
        temperature: the sampling temperature, so that these agree with what the sampler drew from.
        with_entropy: also return the entropy at T=1 (detached).
    """
    with _checkpointing(model):
        hidden = model.base_model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            # Four axes: passed on as it is, where None would become a [T, T] mask. `packing` stands in its place.
            attention_mask=batch.input_ids.new_ones((1, 1, 1, 1), dtype=torch.bool),
            packing=batch.packing,
            use_cache=False,
        ).last_hidden_state
    head = model.get_output_embeddings()
    predicting = hidden[0].index_select(0, batch.predictors)
    return TokenLogprobs(
        *linear_logprobs(predicting, head.weight, head.bias, batch.targets, temperature, with_entropy)
    )


@contextmanager
def _checkpointing(model: PreTrainedModel) -> Iterator[None]:
    """Let layers with gradient checkpointing know that they are in training, where gradients are wanted.

    Transformers asks for training mode before it discards activations. The modules within the layers stay in
    evaluation mode, so there is no dropout; and so do the layers outside of this context, where training mode would
    take the sampler's cache from them.
    """
    layers = [
        module
        for module in model.modules()
        if torch.is_grad_enabled() and isinstance(module, GradientCheckpointingLayer) and not module.training
    ]
    for layer in layers:
        layer.training = layer.gradient_checkpointing
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
