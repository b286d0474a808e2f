"""What a step leaves behind: its line in metrics.jsonl, its completions, the tokens of its clip map."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from bandpo_cli.training.experience import Experience
from bandpo_cli.training.update import UpdateFigures
from bandpo_cli.types import Group

CLIP_MAP_TOKENS = 20_000
"""Most tokens kept for a clip map: enough to see the band, small enough to draw."""


class Stopwatch:
    """Seconds by part of a step, reported under `time/`."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the body as `time/<name>`."""
        start = time.perf_counter()
        yield
        self._parts[f"time/{name}"] = self._parts.get(f"time/{name}", 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """Return the parts and `time/step`, the whole since the stopwatch was made; seconds."""
        return {**self._parts, "time/step": time.perf_counter() - self._start}


def rollout_metrics(groups: Sequence[Group], experiences: Sequence[Experience]) -> dict[str, float]:
    """Return the figures that the rollouts alone decide."""
    rollouts = [rollout for group in groups for rollout in group.rollouts_G]
    count = len(rollouts)
    entropy = torch.cat([experience.entropy for experience in experiences])
    gap = torch.cat(
        [(experience.sampler_logprobs - experience.old_logprobs).abs() for experience in experiences]
    )
    return {
        "train/reward": sum(rollout.grade.reward for rollout in rollouts) / count,
        "train/accuracy": sum(rollout.grade.correct for rollout in rollouts) / count,
        "train/entropy": entropy.mean().item(),
        "train/response_length": sum(len(rollout.completion.token_ids) for rollout in rollouts) / count,
        "train/truncated_fraction": sum(rollout.completion.finish_reason == "length" for rollout in rollouts)
        / count,
        "sampler/logprob_gap_mean": gap.mean().item(),
        "sampler/logprob_gap_max": gap.max().item(),
    }


def token_columns(
    experiences: Sequence[Experience], figures: UpdateFigures
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
