"""Metrics of a step: phase times, metrics of rollouts and tokens, and the columns of the clip map."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch.profiler import record_function

from bandpo_cli.config.run import RunConfig
from bandpo_cli.metric_names import PROFILER_PREFIX
from bandpo_cli.objective.advantages import has_reward_spread
from bandpo_cli.training.experience import Experience
from bandpo_cli.training.update import UpdateMetrics
from bandpo_cli.types import Grade, Group, Rollout, is_ungraded

CLIP_MAP_TOKENS = 20_000
"""Maximum number of tokens stored for a clip map: enough to show the bounds, few enough to plot."""


class StepTimer:
    """Seconds per phase of a step, reported under `time/`.

    Args:
        watch: called with the name of each phase when it starts.
    """

    def __init__(self, watch: Callable[[str], None]) -> None:
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
    """Return the mean reward, and that of each of `task.rewards` before its weight, over those that have a value."""
    values = {"train/reward": [grade.reward for grade in grades if grade.has_reward]}
    for name in grades[0].components:
        found = (grade.components[name] for grade in grades)
        values[f"train/reward/{name}"] = [value for value in found if value is not None]
    means = {key: sum(each) / len(each) for key, each in values.items() if each}
    without = sum(not grade.has_reward and not is_ungraded(grade) for grade in grades)
    return means | ({"grade/not_applicable_fraction": without / len(grades)} if without else {})


def token_metrics(experiences: Sequence[Experience]) -> dict[str, float]:
    """Return the metrics of π_old on the tokens of the step: entropy, log-prob gap, importance weights.

    Each is the metric of the tokens whose values are known. If no entropy is, it is NaN; the others are absent.
    `train/entropy_token_share` is the share of the tokens with an entropy; absent where all have one.
    """
    parts = [*experiences, *(each.left_out for each in experiences if each.left_out is not None)]
    entropies = [each.entropy for each in parts if each.entropy is not None]
    metrics = {"train/entropy": torch.cat(entropies).mean().item() if entropies else math.nan}
    share = sum(map(len, entropies)) / sum(len(each.sampler_logprobs) for each in parts)
    if share < 1:
        metrics["train/entropy_token_share"] = share
    gaps = [
        (each.sampler_logprobs - each.trainer_logprobs).abs()
        for each in parts
        if each.trainer_logprobs is not None
    ]
    if gaps:
        gap = torch.cat(gaps)
        metrics["sampler/logprob_gap_mean"] = gap.mean().item()
        metrics["sampler/logprob_gap_max"] = gap.max().item()
    corrections = [each.correction for each in parts if each.correction is not None]
    if corrections:
        weights = torch.cat(corrections)
        metrics["sampler/importance_mean"] = weights.mean().item()
        metrics["sampler/importance_max"] = weights.max().item()
        metrics["sampler/importance_masked_fraction"] = (weights == 0).double().mean().item()
    return metrics


def schedule_metrics(config: RunConfig, step: int) -> dict[str, float]:
    """Return the scheduled settings of the method at a step, `bounds/delta`; empty where nothing is scheduled."""
    scheduled = config.bounds.scheduled(step, config.steps)
    return {f"bounds/{name}": value for name, value in scheduled.items()}


def clip_map_columns(updates: UpdateMetrics) -> dict[str, NDArray[np.float32]]:
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
