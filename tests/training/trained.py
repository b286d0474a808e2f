"""A small policy with its optimizer, for tests of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from bandpo_cli.config.run import OptimConfig
from bandpo_cli.models.load import Policy
from bandpo_cli.storage.checkpoints import Progress
from bandpo_cli.training.optimizer import Optimizer
from bandpo_cli.training.sampled_groups import SampledGroups
from tests.conftest import random_model

STEP = Progress(step=10, updates=3, skipped_in_a_row=1, position=640, problems="abc")


class Trained(NamedTuple):
    """A policy with its optimizer."""

    policy: Policy
    optimizer: Optimizer


@dataclass
class State:
    """A small policy in place of a run's components."""

    policy: Policy
    optimizer: Optimizer
    ahead: SampledGroups | None = None

    def progress(self, step: int) -> Progress:
        return replace(STEP, step=step, skipped_in_a_row=0)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of every file by its name relative to the folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def fresh(embedded: Policy, dtype: torch.dtype, kind: str = "qwen2") -> Trained:
    policy = replace(embedded, model=random_model(kind).to(dtype))
    return Trained(policy, Optimizer(policy.model, OptimConfig(lr=1e-2, warmup_steps=0), 100))


def update(trained: Trained, *seeds: int) -> None:
    """Apply one update per seed, with gradients generated from the seed."""
    for seed in seeds:
        torch.manual_seed(seed)
        trained.optimizer.zero_grad()
        sum(
            (parameter * torch.randn_like(parameter)).sum() for parameter in trained.policy.model.parameters()
        ).backward()
        trained.optimizer.step()


def tensors(trained: Trained) -> dict[str, torch.Tensor]:
    return {**trained.policy.model.state_dict(), **trained.optimizer.state()}
