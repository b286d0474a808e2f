"""Metrics of a step: phase times, metrics of rollouts, tokens and updates, and the columns of the clip map.

A token is *clipped* ("active") where the method removes its gradient; for interval methods where a bound binds, which
depends on the sign of the advantage. Its ratio is *outside* where it is not within the bounds, for any sign. The
*gradient weight* is the factor w in the gradient w·a·∇log π (`objective.loss.LossOutputs`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch.profiler import record_function

from bandpo_cli.bounds.intervals import ClipState
from bandpo_cli.config.run import RunConfig
from bandpo_cli.metric_names import PROFILER_PREFIX
from bandpo_cli.objective.advantages import has_reward_spread
from bandpo_cli.objective.loss import k3
from bandpo_cli.training.experience import Experience
from bandpo_cli.training.update import AppliedUpdates
from bandpo_cli.types import Grade, Group, Rollout, is_ungraded

CLIP_MAP_TOKENS = 20_000
"""Maximum number of tokens stored for a clip map: enough to show the bounds, few enough to plot."""

PROBABILITY_EDGES = (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0)
"""Edges of the bins of π_old(token); a bin includes its upper edge and excludes its lower one."""

BIN_NAMES = tuple(f"p_{low:g}_{high:g}" for low, high in pairwise(PROBABILITY_EDGES))


def ignore_phase(phase: str) -> None:
    """Do nothing; the default where phases can be observed."""


class StepTimer:
    """Seconds per phase of a step, reported under `time/`.

    Args:
        watch: called with the name of each phase when it starts.
    """

    def __init__(self, watch: Callable[[str], None] = ignore_phase) -> None:
        self._watch = watch
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the body to `time/<name>`, and label it in a profiler trace."""
        self._watch(name)
        start = time.perf_counter()
        with record_function(f"{PROFILER_PREFIX}{name}"):
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


def token_metrics(experiences: Sequence[Experience]) -> dict[str, float]:
    """Return the metrics of π_old on the tokens of the step: entropy, log-prob gap, importance weights.

    Each is the metric of the tokens whose values are known. If no entropy is, it is NaN; the others are absent.
    `train/entropy_token_share` is the share of the tokens with an entropy; absent where all have one.
    """
    parts = [
        *experiences,
        *(experience.left_out for experience in experiences if experience.left_out is not None),
    ]
    entropies = [part.entropy for part in parts if part.entropy is not None]
    metrics = {"train/entropy": torch.cat(entropies).mean().item() if entropies else math.nan}
    share = sum(map(len, entropies)) / sum(len(part.sampler_logprobs) for part in parts)
    if share < 1:
        metrics["train/entropy_token_share"] = share
    gaps = [
        (part.sampler_logprobs - part.trainer_logprobs).abs()
        for part in parts
        if part.trainer_logprobs is not None
    ]
    if gaps:
        gap = torch.cat(gaps)
        metrics["sampler/logprob_gap_mean"] = gap.mean().item()
        metrics["sampler/logprob_gap_max"] = gap.max().item()
    importance_weights = [part.importance_weights for part in parts if part.importance_weights is not None]
    if importance_weights:
        weights = torch.cat(importance_weights)
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
    logprobs = torch.cat([forward.logprobs for forward in forwards])
    ratios = torch.cat([forward.ratios for forward in forwards])
    gradient_weights = torch.cat([forward.gradient_weights for forward in forwards])
    old_logprobs = torch.cat([experience.old_logprobs for experience in trained])
    advantages = torch.cat([experience.trained_advantages for experience in trained])
    states = [
        experience.loss.clip_state(
            experience.columns, forward.ratios, experience.trained_advantages, forward.gradient_weights
        )
        for experience, forward in zip(trained, forwards, strict=True)
    ]
    outside = [state.outside for state in states if state.outside is not None]
    state = ClipState(
        torch.cat([state.at_upper for state in states]),
        torch.cat([state.at_lower for state in states]),
        torch.cat(outside) if outside else None,
    )
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
    references = [batch.ref_logprobs for batch in trained if batch.ref_logprobs is not None]
    if references:
        metrics["kl/ref"] = k3(logprobs, torch.cat(references)).mean().item()
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
    metrics = {
        "clip/active_fraction": int(state.active.sum()) / tokens,
        "clip/upper_fraction": int(state.at_upper.sum()) / tokens,
        "clip/lower_fraction": int(state.at_lower.sum()) / tokens,
    }
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
    metrics = _weight_metrics(weights, "")
    bins = probability_bins(old_logprobs[used])
    for sign, has_sign in (("positive", positive), ("negative", ~positive)):
        for index, name in enumerate(BIN_NAMES):
            chosen = weights[has_sign & (bins == index)]
            if len(chosen):
                metrics |= _weight_metrics(chosen, f"/{sign}/{name}")
    return metrics


def _weight_metrics(weights: torch.Tensor, suffix: str) -> dict[str, float]:
    return {
        f"gradient/zero_fraction{suffix}": (weights == 0).double().mean().item(),
        f"gradient/weight_mean{suffix}": weights.mean().item(),
        f"gradient/weight_min{suffix}": weights.min().item(),
        f"gradient/weight_max{suffix}": weights.max().item(),
    }


def schedule_metrics(config: RunConfig, step: int) -> dict[str, float]:
    """Return the scheduled settings of the method at a step, `bounds/delta`; empty where nothing is scheduled."""
    scheduled = config.bounds.scheduled(step, config.steps)
    return {f"bounds/{name}": value for name, value in scheduled.items()}


def clip_map_columns(updates: AppliedUpdates) -> dict[str, NDArray[np.float32]]:
    """Return the columns of the clip map, [n] each: the tokens with a ratio, each at its own update.

    A method without ratio bounds has the bounds 0 and infinity, a token that the importance correction masks has the
    advantage 0. If there are more than `CLIP_MAP_TOKENS` tokens, only every second, third, ... of them.
    """
    experiences = updates.trained
    ratios = torch.cat([forward.ratios for forward in updates.forwards])
    columns = {
        "old_logprob": torch.cat([experience.old_logprobs for experience in experiences]),
        "ratio": ratios,
        "lower": _column(experiences, "lower", torch.zeros_like(ratios)),
        "upper": _column(experiences, "upper", torch.full_like(ratios, math.inf)),
        "advantage": torch.cat([experience.trained_advantages for experience in experiences]),
        "gradient_weight": torch.cat([forward.gradient_weights for forward in updates.forwards]),
    }
    stride = -(-len(columns["ratio"]) // CLIP_MAP_TOKENS)
    return {name: column[::stride].cpu().numpy() for name, column in columns.items()}


def _column(experiences: Sequence[Experience], name: str, default: torch.Tensor) -> torch.Tensor:
    """Return a column of the method over all experiences, [N]; `default` for a method that has no such column."""
    if name not in experiences[0].columns:
        return default
    return torch.cat([experience.columns[name] for experience in experiences])
