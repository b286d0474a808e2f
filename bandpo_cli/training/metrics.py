"""Metrics of a step: phase times, metrics of rollouts, tokens and updates, the columns of the clip map, performance.

A token is *clipped* ("active") where the method removes its gradient; for interval methods where a bound binds, which
depends on the sign of the advantage. Its ratio is *outside* where it is not within the bounds, for any sign. The
*gradient weight* is the factor w in the gradient w·a·∇log π (`objective.loss.LossOutputs`).

Performance metrics are under `perf/`: throughput, padding, peak memory, model FLOP utilisation. A hook on the model
counts the packed forward passes, so the counts are those of the passes that ran. `time/` and `perf/` are left out where
runs are compared (`metric_names.CLOCK_PREFIXES`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.profiler import record_function
from transformers import PreTrainedModel

from bandpo_cli.bounds.intervals import ClipState
from bandpo_cli.metric_names import PROFILER_PREFIX
from bandpo_cli.models.packing import Packing
from bandpo_cli.models.sharding import forward_dtype
from bandpo_cli.objective.advantages import has_reward_spread
from bandpo_cli.objective.policy_objective import k3
from bandpo_cli.processes.ranks import SINGLE, Ranks, rank_count, silent_ranks
from bandpo_cli.processes.watch import Wait
from bandpo_cli.training.checkpoint_files import SampledGroups
from bandpo_cli.training.experience import Experience
from bandpo_cli.training.update import AppliedUpdates
from bandpo_cli.types import Completion, Grade, Group, Rollout, is_ungraded

CLIP_MAP_TOKENS = 20_000
"""Maximum number of tokens stored for a clip map: enough to show the bounds, few enough to plot."""

PROBABILITY_EDGES = (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0)
"""Edges of the bins of π_old(token); a bin includes its upper edge and excludes its lower one."""

BIN_NAMES = tuple(f"p_{low:g}_{high:g}" for low, high in pairwise(PROBABILITY_EDGES))


class StepTimer:
    """Seconds per phase of a step, reported under `time/`.

    Args:
        watch: called with the name of each phase when it starts.
    """

    def __init__(self, watch: Callable[[str], None] = lambda phase: None) -> None:
        self._watch = watch
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the body to `time/<name>`, and label it in a profiler trace."""
        self._watch(name)
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


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the metrics of all groups sampled in a step, including those that dynamic sampling dropped."""
    rollouts = [rollout for group in groups for rollout in group.rollouts_G]

    def mean(value: Callable[[Rollout], float]) -> float:
        return sum(map(value, rollouts)) / len(rollouts)

    return {
        **reward_metrics([rollout.grade for rollout in rollouts]),
        "train/accuracy": mean(lambda rollout: rollout.grade.correct),
        "train/response_length": mean(lambda rollout: len(rollout.completion.token_ids)),
        "train/truncated_fraction": mean(lambda rollout: rollout.completion.finish_reason == "length"),
        "train/uniform_group_fraction": sum(not has_reward_spread(group) for group in groups) / len(groups),
        "train/groups_drawn": len(groups),
        "grade/malformed_fraction": mean(lambda rollout: rollout.grade.verdict == "malformed"),
        "grade/timeout_fraction": mean(lambda rollout: rollout.grade.verdict == "timeout"),
        "grade/error_fraction": mean(lambda rollout: rollout.grade.verdict == "grader-error"),
        "train/ungraded_fraction": mean(lambda rollout: is_ungraded(rollout.grade)),
        **conversation_metrics([rollout.completion for rollout in rollouts]),
    }


def conversation_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Return the means per completion of turns, calls and inserted tokens, and the shares of calls and results.

    Empty for completions of a single turn; without a call, or an inserted message, there is no share of them.
    """
    turns = [item.conversation for item in completions if item.conversation is not None]
    if not turns:
        return {}
    calls = sum(item.calls for item in turns)
    results = sum(len(item.messages) - item.turns for item in turns)
    wholes = {
        "failed_call": calls,
        "malformed_call": calls,
        "timed_out_call": calls,
        "truncated_result": results,
    }
    shares = {
        f"conversation/{name}_fraction": sum(getattr(item, f"{name}s") for item in turns) / whole
        for name, whole in wholes.items()
        if whole
    }
    inserted = sum(len(part.token_ids) for item in completions for part in item.inserted)
    return {
        "conversation/turns": sum(item.turns for item in turns) / len(turns),
        "conversation/calls": calls / len(turns),
        "conversation/inserted_tokens": inserted / len(turns),
        **shares,
    }


def reward_metrics(grades: Sequence[Grade]) -> dict[str, float]:
    """Return the mean reward and the mean of each of `task.rewards` before its weight, over grades with a value."""
    values = {"train/reward": [grade.reward for grade in grades if grade.has_reward]}
    for name in grades[0].components:
        column = (grade.components[name] for grade in grades)
        values[f"train/reward/{name}"] = [value for value in column if value is not None]
    means = {key: sum(value) / len(value) for key, value in values.items() if value}
    without = sum(not grade.has_reward and not is_ungraded(grade) for grade in grades)
    return means | ({"grade/not_applicable_fraction": without / len(grades)} if without else {})


def _joined(columns: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the concatenated columns without those that are None, None if all are."""
    known = [column for column in columns if column is not None]
    return torch.cat(known) if known else None


def token_metrics(experiences: Sequence[Experience]) -> dict[str, float]:
    """Return the metrics of π_old on the tokens of the step: entropy, log-prob gap, importance weights.

    Each is the metric of the tokens whose values are known. If no entropy is, it is NaN; the others are absent.
    `train/entropy_token_share` is the share of the tokens with an entropy; absent where all have one.
    """
    parts = [*experiences, *(item.left_out for item in experiences if item.left_out is not None)]
    entropy = _joined(part.entropy for part in parts)
    metrics = {"train/entropy": math.nan if entropy is None else entropy.mean().item()}
    share = (0 if entropy is None else len(entropy)) / sum(len(part.sampler_logprobs) for part in parts)
    if share < 1:
        metrics["train/entropy_token_share"] = share
    pairs = [(part.sampler_logprobs, part.trainer_logprobs) for part in parts]
    gap = _joined(None if trainer is None else (sampler - trainer).abs() for sampler, trainer in pairs)
    if gap is not None:
        metrics["sampler/logprob_gap_mean"] = gap.mean().item()
        metrics["sampler/logprob_gap_max"] = gap.max().item()
    if (weights := _joined(part.importance_weights for part in parts)) is not None:
        metrics["sampler/importance_mean"] = weights.mean().item()
        metrics["sampler/importance_max"] = weights.max().item()
        metrics["sampler/importance_masked_fraction"] = (weights == 0).double().mean().item()
    return metrics


def update_metrics(updates: AppliedUpdates) -> dict[str, float]:
    """Return the metrics of each token at its own update; if all updates were skipped, only learning rate and skips."""
    metrics = {"optim/lr": updates.lr, "optim/skipped_updates": float(updates.skipped)}
    trained, forwards = updates.trained, updates.forwards
    if not trained:
        return metrics
    per_token = zip(*((item.logprobs, item.ratios, item.gradient_weights) for item in forwards), strict=True)
    logprobs, ratios, gradient_weights = map(torch.cat, per_token)
    old_logprobs = torch.cat([batch.old_logprobs for batch in trained])
    advantages = torch.cat([batch.trained_advantages for batch in trained])
    states = [
        batch.loss.clip_state(batch.columns, item.ratios, batch.trained_advantages, item.gradient_weights)
        for batch, item in zip(trained, forwards, strict=True)
    ]
    state = ClipState(*map(_joined, zip(*states, strict=True)))
    left_out = [batch.left_out.old_logprobs for batch in trained if batch.left_out is not None]
    metrics |= {
        **clip_metrics(state, old_logprobs, *left_out),
        **gradient_metrics(gradient_weights, advantages, old_logprobs),
        "ratio/mean": ratios.mean().item(),
        "ratio/max": ratios.max().item(),
        "kl/old_new": k3(old_logprobs, logprobs).mean().item(),
        "optim/loss": torch.stack([forward.loss for forward in forwards]).double().mean().item(),
        "optim/grad_norm": sum(updates.grad_norms) / len(updates.grad_norms),
    }
    if (of_reference := _joined(batch.ref_logprobs for batch in trained)) is not None:
        metrics["kl/ref"] = k3(logprobs, of_reference).mean().item()
    return metrics


def probability_bins(old_logprobs: torch.Tensor) -> torch.Tensor:
    """Return the bin of each token's π_old, int64 [N]."""
    edges = torch.tensor(PROBABILITY_EDGES[1:-1], device=old_logprobs.device, dtype=torch.float64)
    return torch.bucketize(old_logprobs.double().exp(), edges)


def clip_metrics(
    state: ClipState, old_logprobs: torch.Tensor, *left_out_logprobs: torch.Tensor
) -> dict[str, float]:
    """Return the `clip/` metrics; a bin without tokens has no active fraction.

    Args:
        state: [N] each.
        old_logprobs: [N], nats.
        left_out_logprobs: nats: log π_old of the tokens that have an advantage of 0 and no ratio; not clipped.
    """
    all_logprobs = torch.cat([old_logprobs, *left_out_logprobs])
    tokens = max(len(all_logprobs), 1)
    sides = {"active": state.active, "upper": state.at_upper, "lower": state.at_lower}
    metrics = {f"clip/{name}_fraction": int(side.sum()) / tokens for name, side in sides.items()}
    if state.outside is not None:
        metrics["clip/outside_fraction"] = int(state.outside.sum()) / max(len(old_logprobs), 1)
    by_bin = torch.bincount(probability_bins(all_logprobs), minlength=len(BIN_NAMES))
    active_by_bin = torch.bincount(probability_bins(old_logprobs)[state.active], minlength=len(BIN_NAMES))
    for name, active, in_bin in zip(BIN_NAMES, active_by_bin.tolist(), by_bin.tolist(), strict=True):
        metrics[f"clip/token_share/{name}"] = in_bin / tokens
        if in_bin:
            metrics[f"clip/active_fraction/{name}"] = active / in_bin
    return metrics


def gradient_metrics(
    gradient_weights: torch.Tensor, advantages: torch.Tensor, old_logprobs: torch.Tensor
) -> dict[str, float]:
    """Return the `gradient/` metrics of a step's tokens; tokens with an advantage of 0 are left out.

    Args:
        gradient_weights, advantages, old_logprobs: [N] each.

    Returns:
        The share of tokens with zero gradient, and the mean, smallest and largest weight: of all tokens, and by sign
        of the advantage and bin of π_old. Empty where every advantage is 0.
    """
    used = advantages != 0
    if not used.any():
        return {}
    weights, positive = gradient_weights[used].double(), advantages[used] > 0
    bins = probability_bins(old_logprobs[used])
    parts = {"": weights}
    for sign, has_sign in (("positive", positive), ("negative", ~positive)):
        for index, name in enumerate(BIN_NAMES):
            parts[f"/{sign}/{name}"] = weights[has_sign & (bins == index)]
    metrics = {}
    for suffix, part in parts.items():
        if len(part):
            metrics[f"gradient/zero_fraction{suffix}"] = (part == 0).double().mean().item()
            metrics[f"gradient/weight_mean{suffix}"] = part.mean().item()
            metrics[f"gradient/weight_min{suffix}"] = part.min().item()
            metrics[f"gradient/weight_max{suffix}"] = part.max().item()
    return metrics


def clip_map_columns(updates: AppliedUpdates) -> dict[str, NDArray[np.float32]]:
    """Return the columns of the clip map, [n] each: the tokens with a ratio, each at its own update.

    A method without ratio bounds has the bounds 0 and infinity, a token that the importance correction masks has the
    advantage 0. If there are more than `CLIP_MAP_TOKENS` tokens, only every second, third, ... of them.
    """
    experiences, forwards = updates.trained, updates.forwards
    ratios = torch.cat([forward.ratios for forward in forwards])
    lower, upper = (_joined(item.columns.get(name) for item in experiences) for name in ("lower", "upper"))
    columns = {
        "old_logprob": torch.cat([experience.old_logprobs for experience in experiences]),
        "ratio": ratios,
        "lower": torch.zeros_like(ratios) if lower is None else lower,
        "upper": torch.full_like(ratios, math.inf) if upper is None else upper,
        "advantage": torch.cat([experience.trained_advantages for experience in experiences]),
        "gradient_weight": torch.cat([forward.gradient_weights for forward in forwards]),
    }
    stride = -(-len(ratios) // CLIP_MAP_TOKENS)
    return {name: column[::stride].cpu().numpy() for name, column in columns.items()}


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

    Two FLOPs per weight and token for the layers, two per weight and predicted token for the output layer, and four
    per layer, head dimension and pair of a token with one that it attends to. (Chowdhery et al. 2022, arXiv:2204.02311,
    appendix B, but with causal pairs, and a prompt that completions share counts once.)

    Attributes:
        flops: model FLOPs of the passes: a forward pass once, with its backward pass three times, but twice for weights
            that are not trained (LoRA). Recomputation (gradient checkpointing, tiles of logits) is not counted.
        positions: positions that attention computed, padding and copies of prompts included.
        padding: number of these positions that are padding.
        peak: peak FLOP/s of the GPU; None where it is unknown, for a mixture of experts, where a token passes only some
            of the weights, and for models without attention heads.
    """

    def __init__(self, model: PreTrainedModel, ranks: Ranks = SINGLE) -> None:
        self._ranks, self._device = ranks, model.device
        self.flops, self.positions, self.padding, self._memory = 0.0, 0, 0, 0
        modules, head = model.base_model.modules(), model.get_output_embeddings().weight
        embeddings = {id(module.weight) for module in modules if isinstance(module, nn.Embedding)}
        layers = [
            item for item in model.base_model.parameters() if item.ndim > 1 and id(item) not in embeddings
        ]
        self._layers, self._head = sum(item.numel() for item in layers), int(head.numel())
        self._trained_layers = sum(item.numel() for item in layers if item.requires_grad)
        self._trained_head = self._head if head.requires_grad else 0
        text = model.config.get_text_config()
        heads = getattr(text, "num_attention_heads", 0)
        head_dim = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
        self._per_pair = 4 * text.num_hidden_layers * heads * head_dim
        experts = ("num_experts", "num_local_experts", "n_routed_experts")
        is_known = heads and not any(getattr(text, name, None) for name in experts)
        in_16_bits = forward_dtype(model) in (torch.bfloat16, torch.float16)
        self.peak = None
        if self._device.type == "cuda" and is_known and in_16_bits:
            self.peak = peak_flops(torch.cuda.get_device_name(self._device))

    def add(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object
    ) -> None:
        """Count a forward pass if it is packed; a forward hook."""
        if not isinstance(packing := kwargs.get("packing"), Packing):
            return
        tokens, predicted, pairs = 0, 0, 0
        for prompt, *completions in packing.rows:
            tokens, predicted = tokens + prompt + sum(completions), predicted + sum(completions)
            pairs += _causal_pairs(prompt)
            pairs += sum(prompt * length + _causal_pairs(length) for length in completions)
        attention = self._per_pair * pairs
        forward = 2.0 * self._layers * tokens + 2 * self._head * predicted + attention
        self.flops += forward
        if (
            torch.is_grad_enabled()
        ):  # the gradients of activations and of weights; attention has two activations
            self.flops += forward + 2 * self._trained_layers * tokens + 2 * self._trained_head * predicted
            self.flops += attention
        # Kernels for sequences of any length use no blocks and so no padding.
        blocks = packing.blocks if "blocks" in vars(packing) else ()
        positions = sum(block.shape[0] * block.shape[1] for block in blocks)
        self.positions += positions or tokens
        self.padding += positions - sum(block.tokens for block in blocks)

    def note_memory(self, released: int = 0) -> None:
        """Take the peak memory since the last call, `released` bytes less: those of an engine that has slept since."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device) - released
            self._memory = max(self._memory, peak)
            torch.cuda.reset_peak_memory_stats(self._device)

    def metrics(
        self, timer: StepTimer, rollouts: SampledGroups, trained: Sequence[Experience], released: int = 0
    ) -> dict[str, float]:
        """Return the metrics of a step and start counting the next one.

        The trainer's passes run in the phases `logprobs` and `update`. On a GPU a phase may end before its kernels do,
        so that only the sum of the two is measured. With several ranks, tokens and passes are those of all of them, the
        times are those of this rank, and utilisation and memory are per GPU, the memory that of the fullest one.

        Args:
            timer: the times of the step's phases.
            rollouts: the rollouts of the step.
            trained: the batches of the applied updates; their zero-variance groups count, too.
            released: bytes that `Sampler.sleep` has released since the last `note_memory`.
        """
        completions = [rollout.completion for group in rollouts.sampled for rollout in group.rollouts_G]
        sampled_tokens = sum(len(completion.token_ids) for completion in completions)
        trained_tokens = sum(int(item.all_lengths.sum()) for item in trained)
        training = timer.seconds("logprobs", "update")
        counts = self._ranks.gather((self.flops, self.positions, self.padding))
        flops, positions, padding = map(sum, zip(*counts, strict=True))
        metrics = {"perf/sampled_tokens_per_s": sampled_tokens / rollouts.seconds} if rollouts.seconds else {}
        metrics["perf/trained_tokens_per_s"] = trained_tokens / training
        metrics["perf/padding_fraction"] = padding / max(1, positions)
        if self.peak is not None:
            metrics["perf/model_flop_utilisation"] = flops / (training * self.peak * self._ranks.size)
        if self._device.type == "cuda":
            self.note_memory(released)
            metrics["perf/peak_memory_gib"] = self._ranks.max(self._memory) / 2**30
        self.flops, self.positions, self.padding, self._memory = 0.0, 0, 0, 0
        return metrics


@contextmanager
def packed_work(model: PreTrainedModel, ranks: Ranks = SINGLE) -> Iterator[PackedWork]:
    """Yield the counts of the model's packed forward passes within the context; other passes are not counted."""
    work = PackedWork(model, ranks)
    handle = model.base_model.register_forward_hook(work.add, with_kwargs=True)
    try:
        yield work
    finally:
        handle.remove()


def _causal_pairs(length: int) -> int:
    """Return the number of pairs of a token with itself or one before it."""
    return length * (length + 1) // 2
