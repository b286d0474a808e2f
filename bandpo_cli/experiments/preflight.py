"""Checks of names, settings and model references before torch is imported.

Functions here do not import torch; `check_config` imports numpy.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bandpo_cli.config.hardware import dtype_on
from bandpo_cli.config.run import EMBEDDED_MODEL, RunConfig
from bandpo_cli.config.sampling import check_engine
from bandpo_cli.config.task import CountdownTask
from bandpo_cli.errors import ConfigError, UserError, nearest
from bandpo_cli.grading.pool import check_grader
from bandpo_cli.paths import (
    GGUF_ADVICE,
    MODEL_CONFIG,
    folders_containing,
    gguf_file,
    is_adapter_folder,
    path_exists,
    user_path,
)
from bandpo_cli.registries import ENGINES, METHODS, MethodEntry
from bandpo_cli.storage.checkpoints import STATE, check_contents, model_checkpoints
from bandpo_cli.storage.files import step_of
from bandpo_cli.storage.run_folder import (
    RunFolder,
    check_name,
    find_run,
    is_run_folder,
    timestamped,
    unused_name,
)
from bandpo_cli.tasks.task import Task, build_task
from bandpo_cli.types import Problem

# Without an owner the hub has only ids from before it had owners: any other name is a run or a mistake.
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|gpt2(-medium|-large|-xl)?|distilgpt2")


FEW_HELDOUT = 10
"""Evaluation sets with fewer problems are warned about: one problem moves their accuracy by more than a tenth, which is
more than runs usually differ by. The smallest public sets in use, AIME and AMC, have 30 and 40."""


def default_name(config: RunConfig) -> str:
    """Return the name of a run to which the user gives none: method, task, seed and time."""
    return timestamped(f"{config.bounds.slug()}-{config.task.name}-s{config.seed}")


def choose_run_name(runs_dir: Path, asked: str | None, default: str) -> str:
    """Return the name of a new folder in `runs_dir`: `asked`, or `default` with a suffix if it is taken.

    Raises:
        UserError: `asked` is taken or is no valid folder name, or `runs_dir` is not writable.
    """
    # `runs_dir` is created with the run, inside the innermost of its parents that exists.
    existing = next(
        folder for folder in (runs_dir.absolute(), *runs_dir.absolute().parents) if path_exists(folder)
    )
    if not existing.is_dir():
        raise UserError(f"--runs-dir {runs_dir}: {existing} is a file; name a folder")
    if not os.access(existing, os.W_OK):
        raise UserError(f"--runs-dir {runs_dir}: {existing} is not writable; name another folder")
    if asked is None:
        return unused_name(default, runs_dir)
    name = check_name(asked, runs_dir)
    if path_exists(runs_dir / name):
        raise UserError(
            f"--name {name}: {runs_dir / name} exists already; try --name {unused_name(name, runs_dir)}"
        )
    return name


def check_config(config: RunConfig) -> Task:
    """Check settings that validation alone cannot check, and return the task with its problems loaded.

    Raises:
        ConfigError: a custom divergence or grader cannot be used, the model path does not exist, an engine is not
            installed or cannot use the GPU of the policy, or a task has no problems.
    """
    import numpy as np

    from bandpo_cli.bounds import ratio_bounds

    if METHODS[config.bounds.method].bounds is not None:
        ratio_bounds(config.bounds)(np.zeros(1))  # raises for a custom divergence that cannot be used
    check_model_path(config.model.path)
    check_is_no_adapter(config.model.path)
    is_local = config.model.path == EMBEDDED_MODEL or path_exists(user_path(config.model.path))
    if config.model.revision is not None and is_local:
        raise ConfigError(
            f"model.revision = {config.model.revision!r}: only a model on the hub has revisions, and model.path = "
            f"{config.model.path!r} is a folder; leave it out"
        )
    check_engine(config.sampling.engine, config.model.device, config.sampling.max_lag)
    check_embedded_task(config, f"task.name = {config.task.name!r}")
    task = build_task(config.task)
    check_graders(task.train_problems())
    for reward in config.task.rewards or ():
        if reward.grader is not None:
            check_grader(reward.grader)
    return task


def check_embedded_task(config: RunConfig, setting: str) -> None:
    """Raise ConfigError, with a message that begins with `setting`, for the bundled model on another task."""
    if config.model.path == EMBEDDED_MODEL and not isinstance(config.task, CountdownTask):
        raise ConfigError(
            f"{setting}: the bundled model was trained on countdown only; choose another model, for example --model "
            f"Qwen/Qwen2.5-0.5B-Instruct"
        )


def check_graders(problems: Iterable[Problem]) -> None:
    """Raise ConfigError if a grader of these problems is unknown or cannot be imported."""
    for grader in sorted({problem.grader for problem in problems}):
        check_grader(grader)


def config_warnings(config: RunConfig) -> list[str]:
    """Return warnings about the settings of the optimizer."""
    warnings = []
    method = METHODS[config.bounds.method]
    if _ratio_is_one(config) and not method.control:
        warnings.append(_one_update_warning(method))
    if config.optim.warmup_steps >= config.steps * config.optim.updates:
        warnings.append(
            f"the learning rate never reaches {config.optim.lr:g}: the warm-up is {config.optim.warmup_steps} updates, "
            f"the run {config.steps * config.optim.updates}"
        )
    return warnings


def _ratio_is_one(config: RunConfig) -> bool:
    """Return whether the ratio is 1 in every update: one update per batch, and log π_old as the trainer computes it."""
    objective, engine = config.objective, ENGINES.get(config.sampling.engine)
    # Before torch is imported it is not known whether there is a GPU, where the dtype `auto` is bfloat16.
    dtype = dtype_on(config.model.dtype, on_gpu=config.model.device != "cpu")
    is_exact = engine is not None and engine.shares_weights and dtype == "float32"
    by_trainer = objective.old_logprobs == "trainer" or is_exact
    return config.optim.updates == 1 and by_trainer


def _one_update_warning(method: MethodEntry) -> str:
    """Return which effect the method keeps where every ratio is 1."""
    others = " and ".join(entry.name for entry in METHODS.values() if entry.differs_at_ratio_one)
    effect = (
        f"and all that {method.name} changes is the gradient of the tokens that it chooses"
        if method.differs_at_ratio_one
        else f"and {method.name} gives the same run as every method{f' but {others}' if others else ''}"
    )
    return (
        f"clipping never has an effect: with one update per batch the ratio is always 1, {effect}; {method.name} needs "
        "several updates: use --set optim.updates=4 or more to compare methods"
    )


def checkpoint_warnings(config: RunConfig) -> list[str]:
    """Return a warning where the best checkpoint is to be kept and no step before the last can have it.

    The step of a checkpoint needs an evaluation to be compared. Where the only evaluations are those before the first
    and after the last step, there is nothing to compare, and no interval of checkpoints changes that.
    """
    saved, evaluated, metric = config.checkpoint.every, config.evaluation.every, config.checkpoint.best_metric
    by_evaluation = metric is None or metric.startswith("eval/")
    if not (config.checkpoint.keep_best and by_evaluation and 0 < saved < config.steps):
        return []
    if not 0 < evaluated < config.steps or math.lcm(saved, evaluated) < config.steps:
        return []
    better = max(interval for interval in range(1, min(saved, evaluated) + 1) if evaluated % interval == 0)
    return [
        f"no checkpoint but the last can be kept as the best: before the last step, checkpoints (every {saved} steps) "
        f"and evaluations (every {evaluated}) never coincide; use --set checkpoint.every={better}"
    ]


def data_warnings(config: RunConfig, task: Task) -> list[str]:
    """Return warnings about few problems: held out, and to train on."""
    warnings = []
    sets = task.heldout_sets() if config.evaluation.every else {}
    for label, problems in sets.items():
        if len(problems) < FEW_HELDOUT:
            one = len(problems) == 1
            warnings.append(
                f"the evaluation set '{label}' has only {len(problems)} problem{'' if one else 's'}: "
                + (
                    "its accuracy is the accuracy of one question"
                    if one
                    else f"one problem moves its accuracy by {1 / len(problems):.0%}"
                )
                + "; hold out more (task.heldout, task.heldout_fraction)"
            )
    count, wanted = len(task.train_problems()), config.sampling.prompts
    if count < wanted:
        warnings.append(
            f"{count:,} training problem{'' if count == 1 else 's'} for {wanted:,} prompts per step: each step repeats "
            f"problems, about {wanted / count:.1f} times each; lower sampling.prompts, or give more problems"
        )
    return warnings


def check_model_path(path: str) -> None:
    """Check that `path` is the folder of a model or an adapter, or can be a hub id.

    Raises:
        ConfigError: no such folder, a folder without config.json, or a malformed id.
    """
    if path == EMBEDDED_MODEL:
        return
    folder = user_path(path)
    if path_exists(folder):
        if not (folder / MODEL_CONFIG).is_file() and not is_adapter_folder(folder):
            raise ConfigError(f"model.path = {path!r}: {_missing_config(folder)}")
        return
    if path.startswith((".", "~")) or not _HUB_ID.fullmatch(path):
        hint = nearest(path, [EMBEDDED_MODEL])
        raise ConfigError(
            f"model.path = {path!r}: no such folder{hint}; give a Hugging Face folder, a hub id such as "
            f"Qwen/Qwen2.5-0.5B-Instruct, or '{EMBEDDED_MODEL}'"
        )


def _missing_config(path: Path) -> str:
    """Return what is needed in place of a path that is neither the folder of a model nor of an adapter."""
    gguf = gguf_file(path)
    if gguf is not None:
        return GGUF_ADVICE if gguf == path else f"no config.json there, only {gguf.name}; {GGUF_ADVICE}"
    if path.is_file():
        return "a file; name the folder that save_pretrained wrote, with config.json and model.safetensors"
    return "no config.json there; name the folder that save_pretrained wrote"


def check_is_no_adapter(path: str) -> None:
    """Raise ConfigError for an adapter in place of a model: training starts from a complete model."""
    if path != EMBEDDED_MODEL and is_adapter_folder(user_path(path)):
        raise ConfigError(
            f"model.path = {path!r}: an adapter, and training starts from a complete model; write it with "
            f"bandpo export merged {path} --out DIR"
        )


@dataclass(frozen=True)
class ModelRef:
    """A model to load from `path`; the run and step that trained it, where they are known."""

    path: str
    run: RunFolder | None = None
    step: int | None = None

    @property
    def stem(self) -> str:
        """The part of an evaluation's name that names the model."""
        if self.run is not None:
            return f"{self.run.name}@{self.step}"
        return Path(self.path).absolute().name or "model"


def resolve_model(text: str, runs_dir: Path, option: str = "--model") -> ModelRef:
    """Return what `text` means: `embedded`, RUN, RUN@STEP, a folder, or else a hub id.

    RUN is a name in `runs_dir` or the path of a run folder, and means its latest checkpoint.

    Args:
        option: the option or argument of the command line that `text` was given with, for messages.

    Raises:
        UserError: there is no such checkpoint, or nothing of that name.
    """
    if text == EMBEDDED_MODEL:
        return ModelRef(text)
    match = find_run(text, runs_dir)
    if match is not None:
        run, step = match
        return _checkpoint(run, step, option)
    folder = user_path(text).absolute()
    run_path = folder.parent.parent
    if step_of(folder) is not None and folder.parent.name == "checkpoints" and is_run_folder(run_path):
        return _checkpoint(RunFolder(run_path), step_of(folder), option)
    # An id of the hub has at most 96 characters; the first part of a missing run's path may be the runs folder.
    may_be_id = (
        len(text) <= 96
        and _HUB_ID.fullmatch(text)
        and text.partition("/")[0] not in (".", "..", runs_dir.name)
    )
    if not text or not (path_exists(folder) or may_be_id):
        names = folders_containing(runs_dir, "config.yaml")
        hint = nearest(text.removeprefix(f"{runs_dir}/"), [*names, EMBEDDED_MODEL])
        raise ConfigError(
            f"{option} {text[:200]}: no such run or folder{hint}; give a run in {runs_dir} (or RUN@STEP), a Hugging "
            f"Face folder, a hub id such as Qwen/Qwen2.5-0.5B-Instruct, or '{EMBEDDED_MODEL}'"
        )
    path = str(user_path(text)) if path_exists(folder) else text
    check_model_path(path)
    return ModelRef(path)


def _checkpoint(run: RunFolder, step: int | None, option: str) -> ModelRef:
    checkpoints = model_checkpoints(run)
    if not checkpoints:
        raise UserError(f"{option} {run.name}: the run in {run.path} has no checkpoint yet")
    if step is None:
        step = max(checkpoints)
    if step not in checkpoints:
        there = ", ".join(map(str, checkpoints))
        raise UserError(f"{option} {run.name}@{step}: no checkpoint of that step; there are: {there}")
    check_model_contents(checkpoints[step])
    return ModelRef(str(checkpoints[step]), run, step)


def check_model_contents(checkpoint: Path) -> None:
    """Raise UserError if a file of the model in `checkpoint` has changed since it was written.

    A checkpoint that was copied without its training state has no checksums.
    """
    if path_exists(checkpoint / STATE):
        check_contents(checkpoint, training_state=False)
