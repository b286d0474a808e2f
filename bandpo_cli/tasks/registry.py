"""Problems and prompts. A task is chosen by its config class, in one dict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bandpo_cli.config.task import CountdownTask, DataTask, TaskConfig
from bandpo_cli.tasks.base import ProblemStream, Task
from bandpo_cli.tasks.countdown import Countdown
from bandpo_cli.tasks.question_answers import QuestionAnswerTask

__all__ = ["Countdown", "ProblemStream", "QuestionAnswerTask", "Task", "build_task"]

_BUILDERS: dict[type, Callable[[Any], Task]] = {CountdownTask: Countdown, DataTask: QuestionAnswerTask}


def build_task(config: TaskConfig) -> Task:
    """Build the task of these settings; raise ConfigError for settings that leave it no problems.

    Files and data sets are read when their problems are first asked for, and raise ConfigError then.
    """
    return _BUILDERS[type(config)](config)
