"""Log-probabilities and entropy of sampled tokens under a policy, without the matrix of all logits.

`token_logprobs` runs a model on a packed batch. `linear_logprobs` computes log-probs and entropy from hidden states and
the output layer. The [tokens, vocabulary] matrix of logits is computed tile by tile: each tile is reduced while it is
in cache, and the next tile overwrites it. The backward pass computes the tiles again. This takes four matrix products
where the direct computation takes three, and its memory use depends neither on the number of tokens nor on the
vocabulary. Tiles are limited in both directions, with a running softmax over the vocabulary (Milakov & Gimelshein
2018, arXiv:1805.02867): a product of few tokens with the complete vocabulary would be bound by reading the weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function
from transformers import PreTrainedModel

import bandpo_cli.models.attention  # noqa: F401  registers the attention functions that take `packing`
from bandpo_cli.errors import UserError, find_out_of_memory, first_line
from bandpo_cli.metric_names import PROFILER_PREFIX
from bandpo_cli.models.packing import Row, TokenBatch, collate
from bandpo_cli.models.weights import checkpointed_layers, forward_dtype, run_forward
from bandpo_cli.processes.watch import progress

TILE_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
"""Size of a float32 tile: about a CPU's last-level cache, or enough to keep a GPU busy. Two tiles exist at a time."""
TILE_ATTRIBUTE = "bandpo_tile_bytes"  # Attribute of an output layer with another size (`model.head`)
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Maximum difference in nats between packed and unpacked log-probs. Rounding stays well below it; attention across rows
or a scale factor on the logits does not."""
PACKED_LAYERS = {"full_attention", "sliding_attention"}
"""Layer types that keep packed rows separate; others carry a state across tokens or split rows into chunks."""


class TokenLogprobs(NamedTuple):
    """Values of N tokens, [N] float32, nats; entropies that were not asked for are None."""

    logprobs: Tensor  # at the sampling temperature
    entropy: Tensor | None  # at temperature 1, without gradient
    sampling_entropy: Tensor | None  # at the sampling temperature, with gradient


@record_function(f"{PROFILER_PREFIX}forward")
def token_logprobs(
    model: PreTrainedModel,
    batch: TokenBatch,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_sampling_entropy: bool = False,
) -> TokenLogprobs:
    """Run the model on a batch and return the log-probs of its completion tokens.

    The model without its output layer runs on the T packed tokens. The output layer runs only on the N tokens that
    predict completion tokens, tile by tile. Gradients flow into the model's parameters if autograd is enabled.

    Args:
        temperature: the sampling temperature; the log-probs are those of the distribution that the sampler used.
        with_entropy, with_sampling_entropy: also return the entropy at temperature 1, or at the sampling temperature.
    """
    progress()
    return run_forward(_token_logprobs, model, batch, temperature, with_entropy, with_sampling_entropy)


def _token_logprobs(
    model: PreTrainedModel, batch: TokenBatch, temperature: float, entropy: bool, sampling_entropy: bool
) -> TokenLogprobs:
    with _checkpointing(model):
        # The model passes a mask with four axes on unchanged and would expand None to a [T, T] mask. Attention uses
        # `packing` instead of it.
        mask = batch.input_ids.new_ones((1, 1, 1, 1), dtype=torch.bool)
        layout = {"position_ids": batch.position_ids, "packing": batch.packing, "attention_mask": mask}
        output = model.base_model(input_ids=batch.input_ids, **layout, use_cache=False)
    head = model.get_output_embeddings()
    predicting = output.last_hidden_state[0].index_select(0, batch.predictor_index)
    tile_bytes: int | None = getattr(head, TILE_ATTRIBUTE, None)
    options = temperature, entropy, sampling_entropy, tile_bytes
    return linear_logprobs(predicting, head.weight, head.bias, batch.targets, *options)


def check_compiler(device: torch.device) -> None:
    """Compile a small function. Raise UserError if torch.compile does not work on this machine."""
    try:
        torch.compile(torch.nn.functional.silu)(torch.ones(2, device=device))
    except (RuntimeError, ImportError, OSError) as error:  # a missing compiler, a failed build, an old Triton
        needs = f"torch.compile, which needs {'Triton' if device.type == 'cuda' else 'a C++ compiler'}"
        raise UserError(f"model.compile: {needs}, fails: {first_line(error)}") from None


def compile_layers(model: PreTrainedModel) -> None:
    """Compile the modules of each layer in place, except its attention, whose shapes differ in every pass."""
    for layer in checkpointed_layers(model):
        for name, module in layer.named_children():
            if not name.endswith(("attn", "attention")):
                module.compile(dynamic=True)


@torch.no_grad()
def check_packed_forward(model: PreTrainedModel) -> None:
    """Compare `token_logprobs` on packed rows with the model's own forward pass on each sequence separately.

    A few tokens detect layers that carry a state from one packed row into the next, and other logits. Raise UserError
    if the log-probs differ, the model does not accept packed rows, or it scales or caps its logits.
    """
    kind, text = f"model.path: {model.config.model_type}", model.config.get_text_config()
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(text, name, None) not in (None, 1.0):
            raise UserError(f"{kind} models change their logits by '{name}', which is not supported")
    if others := set(getattr(text, "layer_types", None) or ()) - PACKED_LAYERS:
        raise UserError(f"{kind} models have {min(others)} layers, which do not run on packed rows")
    vocabulary = min(text.vocab_size, 1000)
    ids = [(7 * i + 3) % vocabulary for i in range(12)]
    rows = [Row(ids[:3], [ids[3:6], ids[6:8]]), Row(ids[8:10], [ids[10:]])]
    try:
        packed = token_logprobs(model, collate(rows, model.device)).logprobs
    except (TypeError, AttributeError, KeyError, ValueError, RuntimeError) as error:
        if find_out_of_memory(error):  # independent of the architecture
            raise
        raise UserError(f"{kind} models do not run on packed rows: {first_line(error)}") from None
    unpacked = []
    for prompt_ids, completion in ((row.prompt_ids, item) for row in rows for item in row.completions):
        ids_1T, first = torch.tensor([[*prompt_ids, *completion]], device=model.device), len(prompt_ids)
        logits = model(input_ids=ids_1T, use_cache=False).logits[0, first - 1 : -1].float()
        unpacked.append(torch.log_softmax(logits, dim=-1).gather(1, ids_1T[0, first:, None]).squeeze(1))
    gap = (packed - torch.cat(unpacked)).abs().max().item()
    if not gap <= TOLERANCE.get(forward_dtype(model), TOLERANCE[torch.bfloat16]):
        differ = f"log-probs in rows without padding differ by {gap:.3g} nats"
        raise UserError(f"{kind} models are not supported: {differ}")


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_sampling_entropy: bool = False,
    tile_bytes: int | None = None,
) -> TokenLogprobs:
    """Return log softmax((hidden·weightᵀ + bias) / temperature) at the targets, and optionally entropies.

    Softmax and sums are float32 for all dtypes of the weights. A GPU multiplies weights of lower precision unchanged,
    with float32 results; a CPU multiplies them as float32. Gradients flow into hidden, weight and bias.

    Args:
        hidden, weight, bias, targets: [N, H], [V, H], [V] or None, and [N] int64.
        with_entropy, with_sampling_entropy: also return the entropy of the softmax at temperature 1, without gradient,
            or at `temperature`, with gradient.
        tile_bytes: the size of a float32 tile of logits; None for that of the device (`TILE_BYTES`).
    """
    arguments = hidden, weight, bias, targets, temperature, with_entropy, with_sampling_entropy, tile_bytes
    logprobs, entropy, sampling_entropy = _LinearLogprobs.apply(*arguments)  # type: ignore[no-untyped-call]
    entropies = entropy if with_entropy else None, sampling_entropy if with_sampling_entropy else None
    return TokenLogprobs(logprobs, *entropies)


@contextmanager
def _checkpointing(model: PreTrainedModel) -> Iterator[None]:
    """Set layers with gradient checkpointing to training mode while gradients are enabled.

    Transformers discards activations only in training mode, which disables the sampler's cache. The modules within the
    layers stay in evaluation mode, so there is no dropout.
    """
    layers = checkpointed_layers(model) if torch.is_grad_enabled() and not model.training else []
    for layer in layers:
        layer.training = layer.gradient_checkpointing
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


@dataclass
class _Softmax:
    """Running sums over the vocabulary of exp(x) and of exp(x)·x per token, for logits x less the highest so far."""

    total: Tensor
    weighted: Tensor

    def add(self, rows: slice, tile: Tensor, drop: Tensor, scratch: Tensor) -> None:
        """Add a tile of logits less the new highest; `drop`, at most 0, is by how much the highest has risen."""
        powers = torch.exp(tile, out=scratch[: tile.numel()].view_as(tile))
        decayed = (self.weighted[rows] + self.total[rows] * drop) * drop.exp()
        self.weighted[rows] = decayed + torch.linalg.vecdot(powers, tile)
        self.total[rows] = self.total[rows] * drop.exp() + powers.sum(dim=1)

    def entropy(self) -> Tensor:
        """Return the entropy of each token's distribution, [N], nats."""
        return self.total.log() - self.weighted / self.total


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight, bias, targets, *options = arguments
        temperature, with_entropy, with_sampling_entropy, tile_bytes = options
        tiles = _Tiles(hidden, weight, bias, tile_bytes)
        zeros = torch.zeros(len(hidden), device=hidden.device)
        highest = torch.full_like(zeros, torch.finfo(zeros.dtype).min)
        chosen = zeros.clone()
        plain, sampling = (_Softmax(zeros.clone(), zeros.clone()) for _ in range(2))
        # At temperature 1 both entropies are the same.
        at_one = with_entropy or (with_sampling_entropy and temperature == 1.0)
        scratch = torch.empty_like(tiles.buffer if at_one or with_sampling_entropy else tiles.buffer[:0])
        for _ in tiles.columns():
            for rows, tile in tiles.logits():
                target_columns, in_tile = tiles.target_columns(targets[rows])
                chosen[rows] += tile.gather(1, target_columns).squeeze(1).where(in_tile, 0.0)
                top = torch.maximum(highest[rows], tile.amax(dim=1))
                drop = highest[rows] - top
                highest[rows] = top
                tile.sub_(top[:, None])
                if at_one:
                    plain.add(rows, tile, drop, scratch)
                if temperature != 1.0:
                    tile.div_(temperature)
                    # not −inf for the first tile, whose sums are 0
                    drop = (drop / temperature).clamp(min=torch.finfo(drop.dtype).min)
                if with_sampling_entropy and temperature != 1.0:
                    sampling.add(rows, tile, drop, scratch)
                elif not at_one or temperature != 1.0:
                    sampling.total[rows] = sampling.total[rows] * drop.exp() + tile.exp_().sum(dim=1)
        if at_one and temperature == 1.0:
            sampling = plain
        entropy, sampling_entropy = plain.entropy(), sampling.entropy()
        ctx.save_for_backward(hidden, weight, bias, targets, highest, sampling.total, sampling_entropy)
        ctx.temperature, ctx.with_sampling_entropy = temperature, with_sampling_entropy
        ctx.tile_bytes = tile_bytes
        ctx.mark_non_differentiable(*([entropy] if with_sampling_entropy else [entropy, sampling_entropy]))
        return (chosen - highest) / temperature - sampling.total.log(), entropy, sampling_entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor, _: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, highest, total, entropy = ctx.saved_tensors
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        # Tokens outside the bounds and tokens of groups without an advantage have no gradient; skip them.
        with_entropy = ctx.with_sampling_entropy
        has_gradient = grad_logprobs != 0
        if with_entropy:
            has_gradient |= grad_entropy != 0
        active = has_gradient.nonzero().squeeze(1)
        if some_inactive := len(active) < len(hidden):
            hidden = hidden[active]
        highest, targets = highest[active, None], targets[active]
        inverse_total, grad = total[active, None].reciprocal(), grad_logprobs[active, None].float()
        # ∂ log p/∂x = (onehot − p)/temperature, and a tile becomes p − onehot; hence the sign.
        scale, at_target = grad / -ctx.temperature, torch.full_like(grad, -1.0)
        tiles = _Tiles(hidden, weight, bias, ctx.tile_bytes)
        if with_entropy:
            # ∂ entropy/∂x = −p·(log p + entropy)/temperature: with both gradients a tile becomes
            # p·(grad + grad_entropy·(log p + entropy)) − grad·onehot.
            scale, at_target = torch.full_like(grad, -1.0 / ctx.temperature), -grad
            offset, grad_entropy = (entropy - total.log())[active, None], grad_entropy[active, None].float()
            scratch = torch.empty_like(tiles.buffer)
        grad_hidden = torch.zeros(hidden.shape, device=hidden.device) if for_hidden else None
        grad_weight = torch.empty_like(weight) if for_weight else None
        grad_bias = torch.zeros_like(bias) if for_bias else None
        for columns in tiles.columns():
            weight_slice = tiles.weight_slice
            slice_grad = torch.zeros(weight_slice.shape, device=hidden.device)
            for rows, tile in tiles.logits():
                # Probabilities; the highest logit is subtracted first, so that those of likely tokens are exact.
                tile.sub_(highest[rows])
                if ctx.temperature != 1.0:
                    tile.div_(ctx.temperature)
                if with_entropy:
                    surplus = torch.add(tile, offset[rows], out=scratch[: tile.numel()].view_as(tile))
                    surplus.mul_(grad_entropy[rows]).add_(grad[rows])
                tile.exp_().mul_(inverse_total[rows])
                if with_entropy:
                    tile.mul_(surplus)
                target_columns, in_tile = tiles.target_columns(targets[rows])
                tile.scatter_add_(1, target_columns, at_target[rows].where(in_tile[:, None], 0.0))
                if grad_bias is not None:
                    grad_bias[columns] += (tile.t() @ scale[rows]).squeeze(1).to(grad_bias.dtype)
                factor = tile.to(weight_slice.dtype)
                if grad_hidden is not None:
                    _add_product(grad_hidden[rows], factor, weight_slice)
                if for_weight:
                    scaled_hidden = (tiles.hidden[rows] * scale[rows]).to(weight_slice.dtype)
                    _add_product(slice_grad, factor.t(), scaled_hidden)
            if grad_weight is not None:
                grad_weight[columns] = slice_grad.to(grad_weight.dtype)
        if grad_hidden is not None:
            grad_hidden = grad_hidden.mul_(scale).to(hidden.dtype)
            if some_inactive:
                all_rows = hidden.new_zeros(len(grad_logprobs), hidden.shape[1])
                grad_hidden = all_rows.index_copy_(0, active, grad_hidden)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


class _Tiles:
    """The logits of N hidden states, one tile at a time, in one buffer."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, tile_bytes: int | None) -> None:
        device = hidden.device
        # On a CPU, torch has no product of low-precision factors with a float32 result.
        factor_dtype = weight.dtype if device.type == "cuda" else torch.float32
        self.hidden = hidden.to(factor_dtype)
        self._weight, self._bias = weight, bias
        tokens, vocabulary = len(hidden), len(weight)
        size = (tile_bytes or TILE_BYTES.get(device.type, TILE_BYTES["cuda"])) // 4
        # About as many rows as columns: each tile reads and writes the gradients of its rows and columns.
        most_rows = 1 << (size.bit_length() - 1) // 2
        # A slice of the weights in float32 and its gradient, [width, H], are at most as large as a tile, or as those of
        # a tile with most rows: a tile of few tokens, as wide as its size allows, would hold all weights.
        widest = max(1, size // most_rows, size // hidden.shape[1])
        self._height = max(1, min(tokens, most_rows))
        self._width = min(vocabulary, widest, max(1, size // self._height))
        self._height = max(1, min(tokens, size // self._width))
        self.buffer = torch.empty(self._height * self._width, device=device)
        self.weight_slice, self._first_column = weight[:0], 0

    def columns(self) -> Iterator[slice]:
        """Yield slices of the vocabulary; `weight_slice` is the current one's weights in the dtype of the products."""
        for start in range(0, len(self._weight), self._width):
            columns = slice(start, start + self._width)
            self.weight_slice, self._first_column = self._weight[columns].to(self.hidden.dtype), start
            yield columns

    def logits(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of the tokens and their logits over the current slice of the vocabulary.

        The logits are float32, in the buffer of the previous logits.
        """
        weight = self.weight_slice
        for start in range(0, len(self.hidden), self._height):
            hidden = self.hidden[rows := slice(start, start + self._height)]
            tile = self.buffer[: len(hidden) * len(weight)].view(len(hidden), len(weight))
            if hidden.dtype == torch.float32:
                torch.mm(hidden, weight.t(), out=tile)
            else:
                torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=tile)
            if self._bias is not None:
                tile += self._bias[self._first_column : self._first_column + len(weight)]
            yield rows, tile

    def target_columns(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the targets' columns in the current slice, [n, 1], clamped to it, and which are in it, [n] bool."""
        columns = targets - self._first_column
        in_slice = (columns >= 0) & (columns < len(self.weight_slice))
        return columns.clamp(0, len(self.weight_slice) - 1)[:, None], in_slice


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left·right to `total` (float32) in place."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total += torch.mm(left, right, out_dtype=torch.float32)
