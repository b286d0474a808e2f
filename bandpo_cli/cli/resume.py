"""`bandpo train --resume`: from where a run goes on, and with which settings. Nothing heavy is loaded for it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bandpo_cli.config.layers import Layer, flatten, read_layer, resolve
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import ConfigError, UserError
from bandpo_cli.storage.checkpoints import complete_checkpoints
from bandpo_cli.storage.run_folder import RunFolder

CHANGEABLE_SETTINGS = (
    "tracking",
    "checkpoint",
    "grading.workers",
    "model.gradient_checkpointing",
    "optim.max_skips",
    "sampling.vllm.memory_fraction",
    "sampling.vllm.kv_cache_gb",
    "sampling.vllm.sleep",
)
"""Settings, or whole sections, that a resume may change: they touch no number of the record. `steps` is apart."""


@dataclass(frozen=True)
class ResumePlan:
    """How a run goes on.

    Attributes:
        config: the run's own settings with the harmless changes that were asked for.
        done: the last step in metrics.jsonl; -1 before the first line.
        step: the step after which it goes on; -1 for from the start.
        checkpoint: the state after `step`; None where it starts over.
        warnings: checkpoints that had to be passed over, a line each.
    """

    folder: RunFolder
    config: RunConfig
    done: int
    step: int
    checkpoint: Path | None
    warnings: list[str]

    @property
    def trained(self) -> bool:
        """Every step is done: what is left is the closing work."""
        return self.step >= self.config.steps

    def describe(self) -> str:
        """Say in a line from where the run goes on."""
        if self.trained:
            return f"all {self.step} steps are done; what is left is the summary and the plots"
        if self.checkpoint is None:
            again = f"; {self.done} of {self.config.steps} steps are done again" if self.done > 0 else ""
            return f"from the start: there is no checkpoint yet{again}"
        again = f", {self.done - self.step} of them done again" if self.done > self.step else ""
        return (
            f"after step {self.step} ({self.checkpoint}): {self.config.steps - self.step} steps to go{again}"
        )


def plan_resume(folder: RunFolder, layers: Sequence[Layer]) -> ResumePlan:
    """Decide how the run in `folder` goes on; `layers` are the settings that were given beside --resume.

    Raises:
        UserError: it is whole, its record is damaged, or a setting was given that cannot change.
    """
    own_layer = read_layer(folder.path / "config.yaml", f"--resume {folder.name}:")
    try:
        own = resolve([own_layer])
    except ConfigError as error:
        raise ConfigError(f"{folder.path / 'config.yaml'}: {error}") from None
    config = resolve([own_layer, *layers])
    done = _last_step(folder, own)
    _check_changes(folder.name, own, config, done)
    if done >= config.steps and _finished(folder):
        further = (
            f"; to train further: --resume {folder.name} --steps {2 * config.steps}"
            if config.optim.schedule == "constant"
            else f" (its {config.optim.schedule} schedule has come to its end)"
        )
        raise UserError(f"run {folder.name} is whole: {done} of {config.steps} steps{further}")

    whole, damaged = complete_checkpoints(folder)
    ahead = [step for step in whole if step > done + 1]
    if ahead:
        raise UserError(
            f"{folder.metrics_path}: ends with step {max(done, 0)}, and there is a checkpoint of step {min(ahead)}: "
            "lines are missing; bring the file back, or start a new run"
        )
    step = max((step for step in whole if step <= done), default=-1)
    if step < 0 and done >= own.steps:
        raise UserError(
            f"run {folder.name} has no whole checkpoint to go on from; train anew: bandpo train --config "
            f"{folder.path / 'config.yaml'} --steps {config.steps}"
        )
    warnings = [f"passed over: {why}" for each, why in damaged.items() if step < each <= done]
    return ResumePlan(
        folder, config, done, step, folder.checkpoint_dir(step) if step >= 0 else None, warnings
    )


def resume_command(folder: RunFolder, runs_dir: Path) -> str:
    """Return what to type to go on with a run."""
    in_runs_dir = (runs_dir / folder.name).absolute() == folder.path.absolute()
    words = ["bandpo", "train", "--resume", folder.name if in_runs_dir else str(folder.path)]
    if in_runs_dir and runs_dir != Path("runs"):
        words += ["--runs-dir", str(runs_dir)]
    return shlex.join(words)


def _last_step(folder: RunFolder, config: RunConfig) -> int:
    """Return the last step of the record, which has each step once.

    Before the first line it is -1, or 0 in a run that does not evaluate before training.
    """
    first = 0 if config.evaluation.every else 1
    steps = [record["step"] for record in folder.read_metrics()]
    expected = list(range(first, first + len(steps)))
    if steps != expected:
        number = next(i for i, (a, b) in enumerate(zip(steps, expected, strict=True)) if a != b)
        raise UserError(
            f"{folder.metrics_path}, line {number + 1}: step {steps[number]} where step {expected[number]} belongs; "
            "the record is damaged: bring the file back, or start a new run"
        )
    return first + len(steps) - 1


def _finished(folder: RunFolder) -> bool:
    try:
        summary = json.loads((folder.path / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(summary, dict) and summary.get("status") == "FINISHED"


def _check_changes(name: str, own: RunConfig, config: RunConfig, done: int) -> None:
    """Raise ConfigError where a setting is given that is not the run's own and not harmless."""
    before, after = (flatten(each.model_dump(mode="json")) for each in (own, config))
    changed = [key for key in {**before, **after} if before.get(key, _NOT_SET) != after.get(key, _NOT_SET)]
    refused = [key for key in changed if key != "steps" and not key.startswith(_HARMLESS_STARTS)]
    if refused:
        what = ", ".join(
            f"{key} = {after.get(key, _NOT_SET)} (the run has {before.get(key, _NOT_SET)})" for key in refused
        )
        raise ConfigError(
            f"--resume {name}: a run goes on with its own settings; leave out {what}. "
            f"What may change: {', '.join(CHANGEABLE_SETTINGS)}, and steps"
        )
    if "steps" in changed and own.optim.schedule != "constant":
        raise ConfigError(
            f"--resume {name}: steps = {config.steps}: optim.schedule = '{own.optim.schedule}' runs to its end over "
            f"the run's {own.steps} steps, so their number is part of every step; only a constant one can go on"
        )
    if "steps" in changed and config.steps <= done:
        raise ConfigError(
            f"--resume {name}: steps = {config.steps}: it has done {done} already; give more than that"
        )


_NOT_SET = "nothing"
_HARMLESS_STARTS = tuple(f"{name}." if "." not in name else name for name in CHANGEABLE_SETTINGS)
