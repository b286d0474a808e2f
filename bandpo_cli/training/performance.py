"""Performance of a step: seconds per phase (`time/`); throughput, padding, memory, FLOP utilisation (`perf/`).

The totals of a run (`compute/`, `time/total`) are the sums over its steps, without evaluations and checkpoints. A hook
on the model counts the packed forward passes, so the counts are those of the passes that ran. Comparisons of runs leave
the metrics of the clock out (`metric_names.CLOCK_PREFIXES`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress, pairwise
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.profiler import record_function
from transformers import PreTrainedModel

from bandpo_cli.metric_names import FLOPS, PROFILER_PREFIX, SAMPLED_TOKENS, TRAINED_TOKENS
from bandpo_cli.models.packing import Packing
from bandpo_cli.models.weights import forward_dtype
from bandpo_cli.processes.ranks import SINGLE, Ranks, rank_count, silent_ranks
from bandpo_cli.processes.watch import Wait
from bandpo_cli.types import Group

if TYPE_CHECKING:
    from bandpo_cli.training.experience import Experience
    from bandpo_cli.training.rollout_batches import SampledGroups

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


@dataclass
class StepTimer:
    """Seconds per phase of a step, reported under `time/`; `watch` is called with the name of each phase."""

    watch: Callable[[str], None] = lambda phase: None
    _start: float = field(default_factory=time.perf_counter)
    _seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the body to `time/<name>`, and label it in a profiler trace."""
        self.watch(name)
        start = time.perf_counter()

        def described() -> str:
            return f"{silent_ranks() if rank_count() > 1 else 'progress'} in the phase '{name}' of the step"

        phase = Wait(described, f"compare time/{name} of earlier steps: it may only be slow", is_work=True)
        with record_function(f"{PROFILER_PREFIX}{name}"), phase:
            yield
        self._seconds[f"time/{name}"] = self._seconds.get(f"time/{name}", 0.0) + time.perf_counter() - start

    def seconds(self, *names: str) -> float:
        """Return the seconds of these phases up to now, 0 for phases that did not begin."""
        return sum(self._seconds.get(f"time/{name}", 0.0) for name in names)

    def metrics(self) -> dict[str, float]:
        """Return the seconds of each phase, and as `time/step` those since the timer was created."""
        return {**self._seconds, "time/step": time.perf_counter() - self._start}


def add_to_totals(totals: dict[str, float], taken: Mapping[str, float]) -> dict[str, float]:
    """Add what a step, or a part of it, has taken to the totals of its run, in place; return a copy of them."""
    for name, amount in taken.items():
        totals[name] += amount
    return {**totals}


def sampling_rows(groups: Iterable[Group], prompt_once: bool) -> Iterator[tuple[int, ...]]:
    """Yield the lengths of a prompt, and of what follows it, for each forward pass of sampling; see `Packing.rows`.

    With `prompt_once` the engine computes a prompt once for its completions, and the turns of a conversation once, else
    the prompt for each completion, and all earlier turns for each turn.
    """
    for group in groups:
        prompt = len(group.rollouts_G[0].prompt_ids)
        completions = [rollout.completion for rollout in group.rollouts_G]
        if prompt_once:
            yield prompt, *(len(completion.marked_ids) for completion in completions)
            continue
        for completion in completions:
            places = [(0, ()), *completion.inserted, (len(completion.token_ids), ())]
            before = prompt
            for (start, inserted), (end, _) in pairwise(places):
                before += len(inserted)
                yield before + start, end - start


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
    """Counts of a model's packed forward passes within `counted` since the last call of `metrics`.

    Two FLOPs per weight and token for the layers, two per weight and predicted token for the output layer, and four
    per layer, head dimension and pair of a token with one that it attends to. (Chowdhery et al. 2022, arXiv:2204.02311,
    appendix B, but with causal pairs, and a prompt that completions share counts once. Of a mixture of experts, the
    weights of those that a token passes.) A backward pass counts twice as much, or as much for weights that are not
    trained (LoRA). Recomputation (gradient checkpointing, tiles of logits) is not counted.

    The passes of a `reference` model count too. `prompt_once` is how sampling counts; see `sampling_rows`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ranks: Ranks = SINGLE,
        reference: PreTrainedModel | None = None,
        prompt_once: bool = True,
    ) -> None:
        self._ranks, self._device, self._prompt_once = ranks, model.device, prompt_once
        self._models = {model.base_model, model.base_model if reference is None else reference.base_model}
        # Positions are those that attention computed, padding and copies of prompts included.
        self.flops, self.positions, self.padding, self._memory = 0.0, 0, 0, 0
        modules, head = model.base_model.modules(), model.get_output_embeddings().weight
        embeddings = {id(module.weight) for module in modules if isinstance(module, nn.Embedding)}
        parameters = model.base_model.parameters()
        layers = [item for item in parameters if item.ndim > 1 and id(item) not in embeddings]
        text = model.config.get_text_config()
        names = "num_experts", "num_local_experts", "n_routed_experts"
        experts = next(filter(None, (getattr(text, name, None) for name in names)), None)
        active: float = (getattr(text, "num_experts_per_tok", None) or experts or 1) / (experts or 1)
        sizes = [item.numel() * (active if item.ndim == 3 else 1) for item in layers]  # [experts, out, in]
        self._layers, self._head = sum(sizes), int(head.numel())
        self._trained_layers = sum(compress(sizes, (item.requires_grad for item in layers)))
        self._trained_head = self._head if head.requires_grad else 0
        heads = getattr(text, "num_attention_heads", 0)
        head_dim = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
        self._per_pair = 4 * text.num_hidden_layers * heads * head_dim
        is_known = heads and not experts
        in_16_bits = forward_dtype(model) in (torch.bfloat16, torch.float16)
        self.peak = None  # FLOP/s; for a mixture of experts, a token passes only some of the weights
        if self._device.type == "cuda" and is_known and in_16_bits:
            self.peak = peak_flops(torch.cuda.get_device_name(self._device))

    @contextmanager
    def counted(self) -> Iterator[Self]:
        """Count the passes of the body, such as a phase of training, all of which are packed."""
        hooks = [model.register_forward_hook(self._add, with_kwargs=True) for model in self._models]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()

    def _add(self, module: nn.Module, args: object, kwargs: Mapping[str, Any], output: object) -> None:
        """Count a packed forward pass; a forward hook."""
        packing: Packing = kwargs["packing"]
        tokens = sum(map(sum, packing.rows))
        self.flops += self.flops_of(packing.rows, torch.is_grad_enabled())
        # Kernels for sequences of any length use no blocks and so no padding.
        blocks = packing.blocks if "blocks" in vars(packing) else ()
        positions = sum(block.shape[0] * block.shape[1] for block in blocks)
        self.positions += positions or tokens
        self.padding += positions - sum(block.tokens for block in blocks)

    def flops_of(self, rows: Iterable[Sequence[int]], with_gradient: bool = False) -> float:
        """Return the FLOPs of a forward pass, and of its backward pass, over rows of a prompt and its completions."""
        tokens, predicted, pairs = 0, 0, 0
        for prompt, *completions in rows:
            tokens, predicted = tokens + prompt + sum(completions), predicted + sum(completions)
            # of a token with itself or one before it
            pairs += prompt * (prompt + 1) // 2
            pairs += sum(prompt * length + length * (length + 1) // 2 for length in completions)
        attention: float = self._per_pair * pairs
        forward: float = 2 * self._layers * tokens + 2 * self._head * predicted + attention
        if not with_gradient:
            return forward
        # the gradients of activations (attention has two) and of weights
        of_weights: float = 2 * self._trained_layers * tokens + 2 * self._trained_head * predicted
        return 2 * forward + of_weights + attention

    def note_memory(self, released: int = 0) -> None:
        """Take the peak memory since the last call, `released` bytes less: those of an engine that has slept since."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device) - released
            self._memory = max(self._memory, peak)
            torch.cuda.reset_peak_memory_stats(self._device)

    def metrics(
        self,
        timer: StepTimer,
        rollouts: SampledGroups,
        trained: Sequence[Experience],
        totals: dict[str, float],
        released: int = 0,
    ) -> dict[str, float]:
        """Return the metrics of a step and start counting the next one.

        The trainer's passes run in the phases `logprobs` and `update`. On a GPU a phase may end before its kernels do,
        so that only the sum of the two is measured. With several ranks, tokens and passes are those of all of them, the
        times are those of this rank, and utilisation and memory are per GPU, the memory that of the fullest one.

        Args:
            trained: the batches of the applied updates; their zero-variance groups count, too.
            totals: those of the run before the step, to which the tokens and FLOPs of the step are added.
            released: bytes that `Sampler.sleep` has released since the last `note_memory`.
        """
        trained_tokens = sum(part.tokens for item in trained for part in item.parts)
        training = timer.seconds("logprobs", "update")
        counts = self._ranks.gather((self.flops, self.positions, self.padding))
        flops, positions, padding = map(sum, zip(*counts, strict=True))
        metrics = {
            "perf/trained_tokens_per_s": trained_tokens / training,
            "perf/padding_fraction": padding / max(1, positions),
        }
        if rollouts.seconds:
            metrics["perf/sampled_tokens_per_s"] = rollouts.tokens / rollouts.seconds
        sampling = self.flops_of(sampling_rows(rollouts.sampled, self._prompt_once))
        taken = {SAMPLED_TOKENS: rollouts.tokens, TRAINED_TOKENS: trained_tokens, FLOPS: flops + sampling}
        metrics |= add_to_totals(totals, taken)
        if self.peak is not None:
            metrics["perf/model_flop_utilisation"] = flops / (training * self.peak * self._ranks.size)
        if self._device.type == "cuda":
            self.note_memory(released)
            metrics["perf/peak_memory_gib"] = max(self._ranks.gather(self._memory)) / 2**30
        self.flops, self.positions, self.padding, self._memory = 0.0, 0, 0, 0
        return metrics
