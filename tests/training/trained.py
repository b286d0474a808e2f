"""Small policies and runs for tests of checkpoints, and comparisons of what they have written."""

from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from bandpo_cli.config.batch_and_sampling import OptimConfig
from bandpo_cli.metric_names import without_clock
from bandpo_cli.models.load import Policy
from bandpo_cli.models.weights import weights_to_save
from bandpo_cli.storage.checkpoints import Progress
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.training.checkpoint_writer import TrainedState, check_savable, write_checkpoint
from bandpo_cli.training.optimizer import Optimizer
from bandpo_cli.training.rollout_batches import SampledGroups
from tests.conftest import random_model

FOLDERS = ("samples", "tokens", "token_values", "evals", "checkpoints")
STEP = Progress(step=10, updates=3, skipped_in_a_row=1, position=640, problems="abc")


SMALL: dict[str, Any] = {
    "steps": 3,
    "task": {
        "max_number": 5
    },  # a seventh of the problems: building a run takes half of the time of some tests
    "sampling": {"prompts": 4, "samples": 4},
    "optim": {"updates": 2, "lr": 1e-3},
    "evaluation": {"every": 2, "problems": 4, "samples": 4, "k": [1, 4]},
    "checkpoint": {"every": 2},
}
"""Settings of a run on the bundled model that takes about a second."""


class Trained(NamedTuple):
    """A policy with its optimizer."""

    policy: Policy
    optimizer: Optimizer


@dataclass
class State:
    """A small policy in place of a run's components."""

    policy: Policy
    optimizer: Optimizer
    ahead: deque[SampledGroups] = field(default_factory=deque)

    def progress(self, step: int) -> Progress:
        return replace(STEP, step=step, skipped_in_a_row=0)


def state_of(policy: Policy, optimizer: Optimizer, progress: Progress = STEP) -> TrainedState:
    return TrainedState(weights_to_save(policy.model, policy.ranks), optimizer.state(), progress)


def save_checkpoint(policy: Policy, optimizer: Optimizer, progress: Progress, folder: Path) -> None:
    """Check the state and write it as the checkpoint `folder`."""
    state = state_of(policy, optimizer, progress)
    check_savable(policy, state, folder)
    write_checkpoint(policy, state, folder)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of every file by its name relative to the folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def fresh(embedded: Policy, dtype: torch.dtype, kind: str = "qwen2") -> Trained:
    policy = replace(embedded, model=random_model(kind).to(dtype))
    return Trained(policy, Optimizer(policy.model, OptimConfig(lr=1e-2, warmup_steps=0), 100))


def update(trained: Trained, *seeds: int) -> None:
    """Apply one update per seed, with gradients that depend on the seed and not on the number of ranks."""
    for seed in seeds:
        torch.manual_seed(seed)
        trained.optimizer.zero_grad()
        for parameter in trained.policy.model.parameters():
            if not parameter.requires_grad:
                continue
            gradient = torch.randn(parameter.shape).bfloat16().to(parameter.dtype)
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                parameter.grad = distribute_tensor(gradient, mesh, placements, src_data_rank=None)
            else:
                (parameter * gradient).sum().backward()  # the masters get it from the hook
        trained.optimizer.step()


def tensors(trained: Trained) -> dict[str, torch.Tensor]:
    return {**trained.policy.model.state_dict(), **trained.optimizer.state()}


def record(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without what depends on the clock."""
    return [without_clock(line) for line in folder.read_metrics()]


def check_equal(one: RunFolder, other: RunFolder) -> None:
    """Require two runs to have the same lines and, byte by byte, the same files that do not depend on the clock."""
    assert record(one) == record(other)
    ours, theirs = (
        {(name, path): data for name in FOLDERS for path, data in contents(folder.path / name).items()}
        for folder in (one, other)
    )
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if ours[name] != theirs[name]]
