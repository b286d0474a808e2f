"""Builds the task that the settings describe; the kinds of tasks are the entries of `registries.TASKS`."""

from __future__ import annotations

from bandpo_cli.config.task import TaskSettings
from bandpo_cli.registries import TASKS, load_attribute, task_kind
from bandpo_cli.tasks.base import Task


def build_task(config: TaskSettings) -> Task:
    """Return the task of these settings; raise ConfigError for settings that leave it no problems.

    Files and data sets are read when their problems are first needed, and raise ConfigError then.
    """
    task: Task = load_attribute(TASKS[task_kind(config.name)].build)(config)
    return task
