"""Performance metrics of a step, under `perf/`: throughput, padding, peak memory, model FLOP utilisation.

The forward passes over packed batches are counted by a hook on the model, so the counts are those of the passes that
ran. All metrics here are left out where runs are compared (`metric_names.CLOCK_PREFIXES`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from bandpo_cli.models.packing import Packing
from bandpo_cli.models.sharding import forward_dtype
from bandpo_cli.ranks import SINGLE, Ranks
from bandpo_cli.training.experience import Experience
from bandpo_cli.training.metrics import StepTimer
from bandpo_cli.training.sampled_groups import SampledGroups

GIB = 2**30

PEAK_FLOPS = {
    "A100": 312e12,
    "H100": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200": 989.4e12,
    "H200 NVL": 835e12,
    "B200": 2250e12,
    "L4": 121e12,
    "L40S": 362e12,
    "A10": 125e12,
    "A40": 149.7e12,
    "RTX A6000": 154.8e12,
    "RTX 3090": 71e12,
    "RTX 4090": 165.2e12,
}
"""Peak FLOP/s of dense bfloat16 matrix products with float32 sums, by the words in the name that CUDA reports.

From NVIDIA's data sheets of the cards, half of the values that are given with sparsity, and for the RTX cards from the
white papers of the GA102 and AD102 chips. Names without PCIe or NVL mean the SXM form."""


_OTHER_CARDS = {"Laptop", "Ti", "D", "MIG"}
"""Words in the names of cards that are slower or faster than the card without the word, or a part of it."""


def peak_flops(device_name: str) -> float | None:
    """Return the peak FLOP/s in bfloat16 of a card; None for a card that `PEAK_FLOPS` does not have.

    A name matches if all words of the key are among its words: `H100 PCIe` in `NVIDIA H100 PCIe`. The key with most
    words wins.
    """
    words = set(device_name.replace("-", " ").split())
    if words & _OTHER_CARDS:
        return None
    matching = [key for key in PEAK_FLOPS if words >= set(key.split())]
    return PEAK_FLOPS[max(matching, key=lambda key: len(key.split()))] if matching else None


class PackedWork:
    """Counts of the packed forward passes since the last call of `metrics`.

    Attributes:
        flops: model FLOPs of the passes: a forward pass once, with its backward pass three times, but twice for weights
            that are not trained (LoRA). Recomputation (gradient checkpointing, tiles of logits) is not counted.
        positions: positions that attention computed, padding and copies of prompts included.
        padding: number of these positions that are padding.
    """

    def __init__(self, model: PreTrainedModel, ranks: Ranks = SINGLE) -> None:
        self._cost, self._ranks = _PassCost(model), ranks
        self._device: torch.device = model.device
        self._peak = None
        if self._device.type == "cuda" and forward_dtype(model) in (torch.bfloat16, torch.float16):
            self._peak = peak_flops(torch.cuda.get_device_name(self._device))
        self._clear()

    def _clear(self) -> None:
        self.flops, self.positions, self.padding = 0.0, 0, 0

    def add(self, packing: Packing, with_gradient: bool) -> None:
        """Count a forward pass over `packing`."""
        tokens = sum(map(sum, packing.rows))
        self.flops += self._cost.forward_flops(packing.rows)
        if with_gradient:
            self.flops += self._cost.backward_flops(packing.rows)
        # Kernels for sequences of any length use no blocks and so no padding.
        blocks = packing.blocks if "blocks" in vars(packing) else ()
        positions = sum(block.shape[0] * block.shape[1] for block in blocks)
        self.positions += positions or tokens
        self.padding += positions - sum(block.tokens for block in blocks)

    def metrics(
        self, timer: StepTimer, rollouts: SampledGroups, trained: Sequence[Experience]
    ) -> dict[str, float]:
        """Return the metrics of a step and start counting the next one.

        The trainer's passes run in the phases `logprobs` and `update`. On a GPU a phase may end before its kernels do,
        so that only the sum of the two is measured. With several ranks, tokens and passes are those of all of them, the
        times are those of this rank, and utilisation and memory are per GPU, the memory that of the fullest one.

        Args:
            timer: the times of the step's phases.
            rollouts: the rollouts of the step.
            trained: the batches of the applied updates; their zero-variance groups count, too.
        """
        sampled_tokens = sum(
            len(rollout.completion.token_ids) for group in rollouts.sampled for rollout in group.rollouts_G
        )
        trained_tokens = sum(int(item.all_lengths.sum()) for item in trained)
        training = timer.seconds("logprobs", "update")
        counts = self._ranks.gather((self.flops, self.positions, self.padding))
        flops, positions, padding = map(sum, zip(*counts, strict=True))
        metrics: dict[str, float] = {}
        if rollouts.seconds:
            metrics["perf/sampled_tokens_per_s"] = sampled_tokens / rollouts.seconds
        metrics |= {
            "perf/trained_tokens_per_s": trained_tokens / training,
            "perf/padding_fraction": padding / max(1, positions),
        }
        if self._peak is not None and self._cost.is_known:
            metrics["perf/model_flop_utilisation"] = flops / (training * self._peak * self._ranks.size)
        if self._device.type == "cuda":
            peak = self._ranks.max(torch.cuda.max_memory_allocated(self._device))
            metrics["perf/peak_memory_gib"] = peak / GIB
            torch.cuda.reset_peak_memory_stats(self._device)
        self._clear()
        return metrics


@contextmanager
def packed_work(model: PreTrainedModel, ranks: Ranks = SINGLE) -> Iterator[PackedWork]:
    """Yield the counts of the model's packed forward passes within the context; other passes are not counted."""
    work = PackedWork(model, ranks)

    def count(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object) -> None:
        if isinstance(packing := kwargs.get("packing"), Packing):
            work.add(packing, torch.is_grad_enabled())

    handle = model.base_model.register_forward_hook(count, with_kwargs=True)
    try:
        yield work
    finally:
        handle.remove()


class _PassCost:
    """Model FLOPs of a forward pass, from the shapes of the model.

    Two FLOPs per weight and token for the layers, two per weight and predicted token for the output layer, and four
    per layer, head dimension and pair of a token with one that it attends to. (Chowdhery et al. 2022, arXiv:2204.02311,
    appendix B, but with causal pairs, and a prompt that completions share counts once.)

    Attributes:
        is_known: False for a mixture of experts, where a token passes only some of the weights, and for models
            without attention heads.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        text = model.config.get_text_config()
        embeddings = {
            id(module.weight) for module in model.base_model.modules() if isinstance(module, nn.Embedding)
        }
        weights = [
            parameter
            for parameter in model.base_model.parameters()
            if parameter.ndim > 1 and id(parameter) not in embeddings
        ]
        self._weights = sum(parameter.numel() for parameter in weights)
        self._frozen = sum(parameter.numel() for parameter in weights if not parameter.requires_grad)
        head = model.get_output_embeddings().weight
        self._head: int = head.numel()
        self._frozen_head: int = 0 if head.requires_grad else self._head
        heads = getattr(text, "num_attention_heads", 0)
        head_dim = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
        self._per_pair = 4 * text.num_hidden_layers * heads * head_dim
        experts = ("num_experts", "num_local_experts", "n_routed_experts")
        self.is_known = bool(heads) and not any(getattr(text, name, None) for name in experts)

    def forward_flops(self, rows: Sequence[Sequence[int]]) -> float:
        """Return the FLOPs of a pass over rows, each the length of its prompt and those of its completions."""
        total = 0.0
        for prompt, *completions in rows:
            tokens = prompt + sum(completions)
            pairs = _causal_pairs(prompt) + sum(
                prompt * completion + _causal_pairs(completion) for completion in completions
            )
            total += 2 * self._weights * tokens + 2 * self._head * sum(completions) + self._per_pair * pairs
        return total

    def backward_flops(self, rows: Sequence[Sequence[int]]) -> float:
        """Return the FLOPs of the backward pass: twice the forward pass, less the gradients of frozen weights."""
        tokens: int = sum(map(sum, rows))
        predicted: int = sum(sum(completions) for _, *completions in rows)
        frozen: float = 2 * self._frozen * tokens + 2 * self._frozen_head * predicted
        return 2 * self.forward_flops(rows) - frozen


def _causal_pairs(length: int) -> int:
    """Return the number of pairs of a token with itself or one before it."""
    return length * (length + 1) // 2
