"""Fork of a run: a new run that continues a checkpoint of another run, its parent, with changed settings.

The new folder begins with the record of the parent up to the checkpoint, and with the checkpoint. From there the run
continues as a resume does, so plots, reports, resumes and MLflow have the complete curves of a fork. Nothing heavy is
imported at module level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bandpo_cli.callbacks import RunResult, TrainCallback
from bandpo_cli.config.layers import Layer, changes_text, resolve, setting_changes, with_values
from bandpo_cli.config.run import RunConfig
from bandpo_cli.custom_code import changed_code
from bandpo_cli.errors import ConfigError, UserError, plural
from bandpo_cli.experiments.monitor import stop_reason
from bandpo_cli.experiments.plan import Fork, Plan, Start, plan_training
from bandpo_cli.experiments.preflight import inherited_layers
from bandpo_cli.experiments.resume_plan import CHANGEABLE_PREFIXES, FIXED_SETTINGS, last_step, pin
from bandpo_cli.experiments.run import Stop
from bandpo_cli.experiments.run import run as run_plan
from bandpo_cli.paths import path_exists, relative_to_cwd
from bandpo_cli.storage.checkpoints import (
    ANY_PROBLEMS,
    Progress,
    check_contents,
    complete_checkpoints,
    position_before_batch,
)
from bandpo_cli.storage.run_folder import VERL_FILE, RunFolder, find_run, not_found, shell_command
from bandpo_cli.tracking.mlflow_store import tracking_store

_OF_THE_PROBLEMS = ("model.", "task.", "sampling.", "evaluation.")
"""Sections that the problems of a run and of its evaluations depend on."""

_OF_THE_BATCH = ("seed", "model.", "task.", "sampling.", "grading.", "reward.", "optim.updates")
"""Settings and sections that a batch depends on which the parent has sampled ahead, and its number of updates."""

FORK_USES_OTHER = "which the parent was trained with; the fork uses the other file"


@dataclass(frozen=True)
class ForkPoint:
    """A checkpoint that new runs continue.

    Attributes:
        run: the parent.
        progress: the progress of the checkpoint.
        layers: the settings of the parent, except `tracking`: the defaults of its forks.
        config: the same settings, validated.
    """

    run: RunFolder
    progress: Progress
    layers: Sequence[Layer]
    config: RunConfig

    @property
    def checkpoint(self) -> Path:
        """The folder of the checkpoint."""
        return self.run.checkpoint_dir(self.progress.step)

    @property
    def text(self) -> str:
        """PATH@STEP, the value of `--fork` in any folder."""
        return f"{self.run.path.absolute()}@{self.progress.step}"

    def changes(self, config: RunConfig) -> dict[str, tuple[Any, Any]]:
        """Return the settings that a fork changes, except `tracking`: the values of the parent and of the fork.

        Raises:
            ConfigError: a setting cannot change, or no step is left to train, also by a criterion of `stop`.
        """
        differing = setting_changes(self.config, config).items()
        changes = {key: values for key, values in differing if not key.startswith("tracking.")}
        where, step = f"--fork {self.run.name}@{self.progress.step}", self.progress.step
        if fixed := {key: values for key, values in changes.items() if key.startswith(FIXED_SETTINGS)}:
            why = "weights and optimizer state are those of the checkpoint"
            raise ConfigError(f"{where}: leave out {changes_text(fixed)}; {why}")
        if config.steps <= step:
            more = f"give more, such as --steps {step + self.config.steps}, or an earlier checkpoint"
            raise ConfigError(f"{where}: steps = {config.steps}: all are done at this checkpoint; {more}")
        records = [record for record in self.run.read_metrics() if record["step"] <= step]
        if reason := stop_reason(config, records):
            raise ConfigError(f"{where}: the fork ends at once: {reason}; add --set {reason.split()[0]}=null")
        return changes


def fork(
    run: str,
    runs_dir: Path | str = "runs",
    settings: Sequence[Layer] = (),
    name: str | None = None,
    callbacks: Sequence[TrainCallback] = (),
    stop_requested: Stop = None,
) -> RunResult:
    """Train a new run that continues a checkpoint of another run.

    Args:
        run: RUN or RUN@STEP. RUN is a name in `runs_dir` or a folder, and means its last complete checkpoint.
        settings: changes of the settings of RUN.
        name: name of the new run folder; None for method, task, seed and time.

    Raises:
        UserError: there is no such checkpoint, or a setting cannot be used or cannot be changed.
        RunError: as `train`.
    """
    return run_plan(plan_fork(run, settings, runs_dir, name), callbacks, stop_requested)


def plan_fork(
    run: str,
    settings: Sequence[Layer] = (),
    runs_dir: Path | str = "runs",
    name: str | None = None,
    ranks: int | None = None,
) -> Plan:
    """Check everything about a fork that can be checked without torch, and load the problems.

    `ranks` is the number of processes; None for those that torchrun has started, 1 without it.

    Raises UserError as `fork`.
    """
    runs_dir = Path(runs_dir)
    point = fork_point(run, runs_dir)
    config = resolve([*point.layers, *settings])
    changes = point.changes(config)
    tracking = config.tracking
    place = tracking_store(tracking, runs_dir).place(point.run.path) if tracking.with_mlflow else None
    if place is not None and place.remote_id and tracking.parent is None:
        config = with_values(config, {"tracking.parent": place.remote_id.rpartition("/")[2]})
    pinned, warnings = pin(config, point.run)
    warnings += changed_code(pinned.model_dump_json(), point.run.path, FORK_USES_OTHER)
    if config.task != point.config.task:  # the commits are those of other data
        pinned = pinned.model_copy(update={"task": config.task})
    plan = plan_training(pinned, runs_dir, name, ranks)
    with_effect = [key for key in changes if not key.startswith(CHANGEABLE_PREFIXES)]
    keeps_batch = not any(key.startswith(_OF_THE_BATCH) for key in with_effect)
    same_problems = not any(key.startswith(_OF_THE_PROBLEMS) for key in with_effect)
    begin = None if keeps_batch else position_before_batch(point.checkpoint)  # a dropped batch comes again
    progress = replace(
        point.progress,
        position=point.progress.position if begin is None else begin,
        # Schedules are where a run with these settings is after this step: that of the learning rate counts updates.
        updates=point.progress.updates * config.optim.updates // point.config.optim.updates,
        problems=point.progress.problems if same_problems else ANY_PROBLEMS,
    )
    config = config.model_copy(update={"bounds": plan.config.bounds})  # with all options of a custom method
    left = plural(config.steps - progress.step, "step")
    where = f"{relative_to_cwd(point.checkpoint)}: {left} to go"
    text = "\n".join([where, *filter(None, [changes_text(changes, separator="\n")])])
    start = Start(progress.step, text, Fork(point.run, progress, keeps_batch, changes))
    return replace(plan, config=config, start=start, warnings=[*warnings, *plan.warnings])


def fork_point(text: str, runs_dir: Path) -> ForkPoint:
    """Return the checkpoint that RUN or RUN@STEP means: the last complete one of RUN, or that of the step.

    Raises:
        UserError: there is no such run or no such checkpoint, or its files are damaged.
    """
    match = find_run(text, runs_dir)
    if match is None:
        raise not_found("run", text.rpartition("@")[0] or text, runs_dir, RunFolder.marker)
    (run, step), where = match, f"--fork {text[:200]}"
    if path_exists(run.path / VERL_FILE):
        raise UserError(f"{where}: the run was imported from verl, which has its checkpoints; use verl's own")
    layers = inherited_layers(run)
    config = resolve(layers)
    complete, damaged = complete_checkpoints(run)
    done = last_step(run, config)
    steps = sorted(number for number in complete if number <= done)
    if not steps:
        defect = next(iter(damaged.values()), f"checkpoint.every = {config.checkpoint.every}")
        resume = shell_command("train --resume", run.path, runs_dir)
        raise UserError(f"{where}: the run has no complete checkpoint ({defect}); train it further: {resume}")
    step = steps[-1] if step is None else step
    if step not in steps:
        defect = damaged.get(step, f"there is no checkpoint of step {step}")
        raise UserError(f"{where}: {defect}; steps with a checkpoint: {', '.join(map(str, steps))}")
    check_contents(run.checkpoint_dir(step))
    return ForkPoint(run, complete[step], layers, config)
