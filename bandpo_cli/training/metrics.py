"""What a step leaves behind: its line in metrics.jsonl, its completions, the tokens of its clip map."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from bandpo_cli.objective.advantages import has_reward_spread
from bandpo_cli.training.experience import Experience
from bandpo_cli.training.update import UpdateMetrics
from bandpo_cli.types import Group, Rollout

CLIP_MAP_TOKENS = 20_000
"""Most tokens kept for a clip map: enough to see the band, small enough to draw."""


class StepTimer:
    """Seconds by part of a step, reported under `time/`; `watch` hears the name of each part as it begins."""

    def __init__(self, watch: Callable[[str], None]) -> None:
        self._watch = watch
        self._start = time.perf_counter()
        self._parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the body as `time/<name>`."""
        self._watch(name)
        start = time.perf_counter()
        yield
        self._parts[f"time/{name}"] = self._parts.get(f"time/{name}", 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """Return the parts and `time/step`, the whole since the stopwatch was made; seconds."""
        return {**self._parts, "time/step": time.perf_counter() - self._start}


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the figures of everything that was sampled in a step, dropped groups included."""
    rollouts = [rollout for group in groups for rollout in group.rollouts_G]

    def share(holds: Callable[[Rollout], bool]) -> float:
        return sum(map(holds, rollouts)) / len(rollouts)

    return {
        "train/reward": sum(rollout.grade.reward for rollout in rollouts) / len(rollouts),
        "train/accuracy": share(lambda rollout: rollout.grade.correct),
        "train/response_length": sum(len(rollout.completion.token_ids) for rollout in rollouts)
        / len(rollouts),
        "train/truncated_fraction": share(lambda rollout: rollout.completion.finish_reason == "length"),
        "train/uniform_group_fraction": sum(not has_reward_spread(group) for group in groups) / len(groups),
        "train/groups_drawn": len(groups),
        "grade/malformed_fraction": share(lambda rollout: rollout.grade.verdict == "malformed"),
        "grade/timeout_fraction": share(lambda rollout: rollout.grade.verdict == "timeout"),
        "grade/error_fraction": share(lambda rollout: rollout.grade.verdict == "grader-error"),
    }


def token_metrics(experiences: Sequence[Experience]) -> dict[str, float]:
    """Return the figures of π_old on the tokens that are learnt from, and of the engine that drew them."""
    gap = torch.cat([(each.sampler_logprobs - each.trainer_logprobs).abs() for each in experiences])
    figures = {
        "train/entropy": torch.cat([experience.entropy for experience in experiences]).mean().item(),
        "sampler/logprob_gap_mean": gap.mean().item(),
        "sampler/logprob_gap_max": gap.max().item(),
    }
    corrections = [each.correction for each in experiences if each.correction is not None]
    if corrections:
        weights = torch.cat(corrections)
        figures["sampler/importance_mean"] = weights.mean().item()
        figures["sampler/importance_max"] = weights.max().item()
    return figures


def clip_map_columns(
    experiences: Sequence[Experience], figures: UpdateMetrics
) -> dict[str, NDArray[np.float32]]:
    """Return the columns of the clip map: every token at its own update, evenly thinned to `CLIP_MAP_TOKENS`."""
    columns = {
        "old_logprob": torch.cat([experience.old_logprobs for experience in experiences]),
        "ratio": torch.cat(figures.ratios),
        "lower": torch.cat([experience.bounds.lower for experience in experiences]),
        "upper": torch.cat([experience.bounds.upper for experience in experiences]),
        "advantage": torch.cat([experience.advantages for experience in experiences]),
    }
    stride = -(-len(columns["ratio"]) // CLIP_MAP_TOKENS)
    return {name: column[::stride].cpu().numpy() for name, column in columns.items()}
