"""Plans: a training run that has been checked and not started, and where it starts.

A plan is made by `plan_training` (a new run), or by a function of `plan_from_checkpoint` (a run that continues in its
folder, or a new run from a checkpoint of another one). `run.run_plan` executes every plan in the same way. Nothing
heavy is imported here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bandpo_cli.config.run import WITHOUT_EFFECT, RunConfig, check_ranks
from bandpo_cli.experiments.preflight import check_config, choose_run_name, run_warnings
from bandpo_cli.processes.ranks import rank_count
from bandpo_cli.storage.checkpoints import (
    Progress,
)
from bandpo_cli.storage.run_folder import (
    RunFolder,
    timestamped,
)
from bandpo_cli.tasks.task import Task

CHANGEABLE_SETTINGS = (
    *WITHOUT_EFFECT,
    "optim.max_skips",
    "sampling.vllm.kv_cache_gb",
    "sampling.weight_transfer",
    "sampling.vllm.sleep",
)
"""Settings and complete sections that a resume may change: those without effect on the record, and limits that a run
may have to change to continue after an error. `steps` may change too, under conditions."""

RESOLVED = "resolved"
"""The entry of env.json with what settings such as `auto` resolved to."""


@dataclass(frozen=True)
class Fork:
    """The checkpoint of another run that a new run continues.

    Attributes:
        run: the other run, the parent.
        progress: of the checkpoint, as the new run counts it.
        keeps_batch: whether the new run trains on the batch that the parent has sampled ahead, if there is one.
        changes: the settings that differ: the values of the parent and of the fork.
    """

    run: RunFolder
    progress: Progress
    keeps_batch: bool
    changes: Mapping[str, tuple[Any, Any]]


@dataclass(frozen=True)
class Start:
    """Where a run starts; without arguments from scratch.

    Attributes:
        step: the step of the checkpoint that the run continues; -1 for the initial weights.
        text: the checkpoint and the number of steps to train, for the user.
        fork: the checkpoint of another run that a new run continues.
        is_resume: the run continues in its folder.
    """

    step: int = -1
    text: str = ""
    fork: Fork | None = None
    is_resume: bool = False


@dataclass(frozen=True)
class Plan:
    """A training run that has been checked and not started.

    Attributes:
        config: the settings, for config.yaml.
        pinned: the same with the engine, the dtype and the commits that the run, or the parent of a fork, started with.
        task: the problems, loaded; None for a resume of a run whose steps are all done.
        folder: the run folder, which a new run has yet to create.
        start: where the run starts.
        warnings: what the user should know before the run starts, one line each.
    """

    config: RunConfig
    pinned: RunConfig
    task: Task | None
    folder: RunFolder
    start: Start
    warnings: Sequence[str]

    @property
    def first_step(self) -> int:
        """The first step to train; 0 is the evaluation before training."""
        return self.start.step + 1


def plan_training(
    config: RunConfig,
    runs_dir: Path | str = "runs",
    name: str | None = None,
    ranks: int | None = None,
) -> Plan:
    """Check everything that can be checked without torch, and load the problems.

    Args:
        name: name of the run folder; None for method, task, seed and time.
        ranks: number of processes; None for those that torchrun has started, 1 without it.

    Raises:
        ConfigError: a setting cannot be used, or not with so many processes.
        UserError: the name is taken, or nothing can be written to `runs_dir`.
    """
    task_name = re.sub(r"[^A-Za-z0-9_.+=-]+", "-", config.task.title)[:60]
    default = timestamped(f"{config.bounds.slug()}-{task_name}-s{config.seed}")
    folder = RunFolder(Path(runs_dir) / choose_run_name(Path(runs_dir), name, default))
    check_ranks(config, rank_count() if ranks is None else ranks)
    config, task = check_config(config)
    return Plan(config, config, task, folder, Start(), run_warnings(config, task))
