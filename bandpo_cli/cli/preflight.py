"""Mistakes that can be told before anything heavy loads."""

from __future__ import annotations

import math
import os
import re
import time
from pathlib import Path

import numpy as np

from bandpo_cli.bounds import ratio_bounds
from bandpo_cli.config.run import EMBEDDED_MODEL, RunConfig
from bandpo_cli.config.sampling import check_engine
from bandpo_cli.config.task import CountdownTask
from bandpo_cli.errors import ConfigError, UserError, nearest
from bandpo_cli.grading import check_grader
from bandpo_cli.paths import path_exists, user_path
from bandpo_cli.storage.run_folder import check_name, unused_name
from bandpo_cli.tasks.base import Task
from bandpo_cli.tasks.registry import build_task

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def default_name(config: RunConfig) -> str:
    """Return a run's name where none is asked for."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return f"{config.bounds.slug()}-{config.task.name}-s{config.seed}-{stamp}"


def choose_run_name(runs_dir: Path, asked: str | None, default: str) -> str:
    """Return the name of a new folder in the runs folder, refusing one that is taken.

    Raises:
        UserError: the name is taken or cannot be a folder's name, or nothing can be written to the runs folder.
    """
    ground = next(
        folder for folder in (runs_dir.absolute(), *runs_dir.absolute().parents) if path_exists(folder)
    )
    if not ground.is_dir():
        raise UserError(f"--runs-dir {runs_dir}: {ground} is a file; name a folder")
    if not os.access(ground, os.W_OK):
        raise UserError(f"--runs-dir {runs_dir}: {ground} may not be written to; name another folder")
    if asked is None:
        return unused_name(default, runs_dir)
    name = check_name(asked, runs_dir)
    if path_exists(runs_dir / name):
        raise UserError(
            f"--name {name}: {runs_dir / name} exists already; try --name {unused_name(name, runs_dir)}"
        )
    return name


def check_config(config: RunConfig) -> Task:
    """Refuse settings whose mistakes only show when they are used, and return the task with its problems loaded.

    Raises:
        ConfigError: a divergence or grader of the user's own that cannot be used, a model path that leads nowhere, an
            engine that is not installed, or a task without problems.
    """
    ratio_bounds(config.bounds)(np.zeros(1))
    check_model_path(config.model.path)
    check_engine(config.sampling.engine)
    if config.model.path == EMBEDDED_MODEL and not isinstance(config.task, CountdownTask):
        raise ConfigError(
            f"task.name = {config.task.name!r}: the embedded model can read nothing but countdown; "
            "name a model, for example --model Qwen/Qwen2.5-0.5B-Instruct"
        )
    task = build_task(config.task)
    for grader in sorted({problem.grader for problem in task.train_problems()}):
        check_grader(grader)
    return task


def checkpoint_warnings(config: RunConfig) -> list[str]:
    """Return what the user should know of the checkpoints that the settings ask for."""
    each, evaluated, metric = config.checkpoint.every, config.evaluation.every, config.checkpoint.best_metric
    by_evaluation = metric is None or metric.startswith("eval/")
    if not (config.checkpoint.keep_best and by_evaluation and 0 < each < config.steps and evaluated):
        return []
    if math.lcm(each, evaluated) < config.steps:
        return []
    return [
        f"no checkpoint but the last can be kept as the best: checkpoints (every {each} steps) and evaluations (every "
        f"{evaluated}) do not fall together before; use --set checkpoint.every={evaluated}"
    ]


def check_model_path(path: str) -> None:
    """Refuse what can be neither a model's folder nor a hub id.

    Raises:
        ConfigError: no such folder, a folder without config.json, or a malformed id.
    """
    if path == EMBEDDED_MODEL:
        return
    folder = user_path(path)
    if path_exists(folder):
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"model.path = {path!r}: no config.json there; name the folder that save_pretrained wrote"
            )
        return
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or not _HUB_ID.fullmatch(path)
    if looks_local or "/" not in path:
        hint = nearest(path, [EMBEDDED_MODEL])
        raise ConfigError(
            f"model.path = {path!r}: no such folder{hint}; give a Hugging Face folder, a hub id such as "
            f"Qwen/Qwen2.5-0.5B-Instruct, or '{EMBEDDED_MODEL}'"
        )
