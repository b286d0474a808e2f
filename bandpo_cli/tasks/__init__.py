"""Problems, prompts and graders. A task is chosen by its config class, in one dict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bandpo_cli.config.task import CountdownTask, TaskConfig
from bandpo_cli.tasks.base import Task
from bandpo_cli.tasks.countdown import Countdown
from bandpo_cli.tasks.stream import ProblemStream

__all__ = ["Countdown", "ProblemStream", "Task", "build_task"]

_BUILDERS: dict[type, Callable[[Any], Task]] = {CountdownTask: Countdown}


def build_task(config: TaskConfig) -> Task:
    """Build the task of these settings; raise ConfigError when they leave no problems."""
    return _BUILDERS[type(config)](config)
