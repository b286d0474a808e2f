"""Log-probs and entropy straight from hidden states and the output layer: the matrix of all logits never exists.

The [tokens, vocabulary] matrix is computed tile by tile, each tile reduced while it is in cache and then overwritten
by the next; the backward pass computes the tiles a second time. That is a fourth matrix product where the plain way
has three, for a memory need that depends on neither the number of tokens nor the vocabulary. Tiles are narrow in both
directions, with a running softmax over the vocabulary (Milakov & Gimelshein 2018, arXiv:1805.02867), since a product
of few tokens with a whole vocabulary would spend its time on reading the weights.
"""

# MERGED: Log-probabilities and entropy of sampled tokens under a policy.
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

import bandpo_cli.models.attention  # noqa: F401  teaches models what `packing` means
from bandpo_cli.models.packing import TokenBatch

TILE_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
"""Size of a float32 tile: about what a CPU's last cache holds, or what keeps a GPU busy. Two exist at a time."""
TILE_ROWS = {"cpu": 2048, "cuda": 8192}
"""Most tokens in a tile; its width follows from the size."""


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log softmax((hidden·weightᵀ + bias) / temperature) at the targets, with the entropy where it is wanted.

    Softmax and sums are float32 whatever the weights' type. Weights of lower precision are multiplied as they are on
    a GPU, with float32 results, and as float32 on a CPU. Gradients flow into hidden, weight and bias.

    Args:
        hidden: [N, H].
        weight, bias: [V, H] and [V] or None.
        targets: [N] int64.
        with_entropy: also return the entropy of the softmax at temperature 1, without gradient.

    Returns:
        (log-probs [N] float32, entropy [N] float32 or None), nats.
    """
    logprobs, entropy = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperature, with_entropy
    )
    return logprobs, entropy if with_entropy else None


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tiles = _Tiles(hidden, weight, bias)
        zeros = torch.zeros(len(hidden), device=hidden.device)
        highest = torch.full_like(zeros, torch.finfo(zeros.dtype).min)
        chosen, total = zeros.clone(), zeros.clone()
        # The entropy's own sums: of exp(x) and of exp(x)·x, for logits x above the highest so far, at temperature 1.
        plain_total, weighted = zeros.clone(), zeros.clone()
        for columns in tiles.columns():
            tiles.load(columns)
            for rows in tiles.rows():
                tile = tiles.logits(rows)
                places, held = tiles.places(targets[rows])
                chosen[rows] += tile.gather(1, places).squeeze(1).where(held, 0.0)
                top = torch.maximum(highest[rows], tile.amax(dim=1))
                drop = highest[rows] - top
                highest[rows] = top
                tile.sub_(top[:, None])
                if with_entropy:
                    powers = torch.exp(tile, out=tiles.scratch(tile))
                    decayed = (weighted[rows] + plain_total[rows] * drop) * drop.exp()
                    weighted[rows] = decayed + torch.linalg.vecdot(powers, tile)
                    plain_total[rows] = plain_total[rows] * drop.exp() + powers.sum(dim=1)
                if temperature != 1.0:
                    tile.div_(temperature)
                if not with_entropy or temperature != 1.0:
                    total[rows] = total[rows] * (drop / temperature).exp() + tile.exp_().sum(dim=1)
        if with_entropy and temperature == 1.0:
            total = plain_total
        entropy = plain_total.log() - weighted / plain_total
        ctx.save_for_backward(hidden, weight, bias, targets, highest, total)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return (chosen - highest) / temperature - total.log(), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, highest, total = ctx.saved_tensors
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        # Tokens outside the bounds and those of groups without an advantage have no gradient: they cost nothing here.
        active = grad_logprobs.nonzero().squeeze(1)
        if partly := len(active) < len(hidden):
            hidden = hidden[active]
        highest, share, targets = highest[active, None], total[active, None].reciprocal(), targets[active]
        # ∂ log p/∂x = (onehot − p)/temperature, and a tile becomes p − onehot; hence the sign.
        scale = grad_logprobs[active, None].float() / -ctx.temperature
        tiles = _Tiles(hidden, weight, bias)
        grad_hidden = torch.zeros(hidden.shape, device=hidden.device) if for_hidden else None
        grad_weight = torch.empty_like(weight) if for_weight else None
        grad_bias = torch.zeros_like(bias) if for_bias else None
        minus_one = torch.tensor(-1.0, device=hidden.device)
        for columns in tiles.columns():
            loaded = tiles.load(columns)
            slice_grad = torch.zeros(loaded.shape, device=hidden.device)
            for rows in tiles.rows():
                # The probabilities; the highest logit goes first, so that a likely token's is exact where it counts.
                tile = tiles.logits(rows).sub_(highest[rows])
                if ctx.temperature != 1.0:
                    tile.div_(ctx.temperature)
                tile.exp_().mul_(share[rows])
                places, held = tiles.places(targets[rows])
                tile.scatter_add_(1, places, minus_one.where(held, 0.0)[:, None])
                if grad_bias is not None:
                    grad_bias[columns] += (tile.t() @ scale[rows]).squeeze(1).to(grad_bias.dtype)
                factor = tile.to(loaded.dtype)
                if grad_hidden is not None:
                    _add_product(grad_hidden[rows], factor, loaded)
                if for_weight:
                    _add_product(slice_grad, factor.t(), (tiles.hidden[rows] * scale[rows]).to(loaded.dtype))
            if grad_weight is not None:
                grad_weight[columns] = slice_grad.to(grad_weight.dtype)
        if grad_hidden is not None:
            grad_hidden = grad_hidden.mul_(scale).to(hidden.dtype)
            if partly:
                every = torch.zeros(
                    len(grad_logprobs), hidden.shape[1], dtype=hidden.dtype, device=hidden.device
                )
                grad_hidden = every.index_copy_(0, active, grad_hidden)
        return grad_hidden, grad_weight, grad_bias, None, None, None


class _Tiles:
    """The logits of N hidden states a tile at a time, all in one buffer."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        device = hidden.device
        # CPUs have no product of low-precision factors with a float32 result.
        factors = weight.dtype if device.type == "cuda" else torch.float32
        self.hidden = hidden.to(factors)
        self._weight, self._bias = weight, bias
        tokens, vocabulary = len(hidden), len(weight)
        size = TILE_BYTES.get(device.type, TILE_BYTES["cuda"]) // 4
        self._height = max(1, min(tokens, TILE_ROWS.get(device.type, TILE_ROWS["cuda"])))
        self._width = min(vocabulary, max(1, size // self._height))
        self._height = max(1, min(tokens, size // self._width))
        self._buffer = torch.empty(self._height * self._width, device=device)
        self._scratch: torch.Tensor | None = None
        self._first = 0
        self._loaded = weight[:0]

    def columns(self) -> Iterator[slice]:
        """Yield the vocabulary in slices."""
        return _slices(len(self._weight), self._width)

    def rows(self) -> Iterator[slice]:
        """Yield the tokens in slices."""
        return _slices(len(self.hidden), self._height)

    def load(self, columns: slice) -> torch.Tensor:
        """Make a slice of the vocabulary the current one and return its weights, as they are multiplied."""
        self._first = columns.start
        self._loaded = self._weight[columns].to(self.hidden.dtype)
        return self._loaded

    def logits(self, rows: slice) -> torch.Tensor:
        """Return the logits of some tokens over the current slice, float32; the last ones are overwritten."""
        hidden, weight = self.hidden[rows], self._loaded
        tile = self._buffer[: len(hidden) * len(weight)].view(len(hidden), len(weight))
        if hidden.dtype == torch.float32:
            torch.mm(hidden, weight.t(), out=tile)
        else:
            torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=tile)
        if self._bias is not None:
            tile += self._bias[self._first : self._first + len(weight)]
        return tile

    def scratch(self, tile: torch.Tensor) -> torch.Tensor:
        """Return a second buffer of a tile's shape."""
        if self._scratch is None:
            self._scratch = torch.empty_like(self._buffer)
        return self._scratch[: tile.numel()].view_as(tile)

    def places(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where in the current slice targets are, [n, 1], and whether they are in it at all, [n]."""
        offsets = targets - self._first
        inside = (offsets >= 0) & (offsets < len(self._loaded))
        return offsets.clamp(0, len(self._loaded) - 1)[:, None], inside


def _slices(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left·right to `total`, float32, in place."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total += torch.mm(left, right, out_dtype=torch.float32)


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
    predicting = hidden[0].index_select(0, batch.predictor_index)
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
