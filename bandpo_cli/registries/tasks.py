"""Kinds of tasks, and the names that `--task` accepts."""

from __future__ import annotations

from dataclasses import dataclass

from bandpo_cli.registries.datasets import DATASETS
from bandpo_cli.registries.registry import Entry, Registry


@dataclass(frozen=True)
class TaskEntry(Entry):
    """A kind of task (`task.name`).

    Attributes:
        settings: a subclass of `config.task.TaskSettings`.
        build: a function from these settings to a `tasks.base.Task`.
        defaults: a mapping of settings by section that replace the general defaults for this task, where the user sets
            nothing; None for the general ones.
        members: a function that returns a description of each member of the task, by name. `--task TASK:MEMBER` selects
            members, the setting `names`; None for a task that is one set of problems.
        package: the optional package that the task needs; None for none.
        install: how to install that package, for the error message.
    """

    settings: str
    build: str
    defaults: str | None = None
    members: str | None = None
    package: str | None = None
    install: str = ""


# fmt: off
DATA_TASK = "data"
"""The task whose problems come from data sets and files. The name of a data set, as a task, stands for it."""

TASKS = Registry("task", [
    TaskEntry("countdown", "reach a target with +, − and * from given numbers",
              settings="bandpo_cli.config.task:CountdownTask", build="bandpo_cli.tasks.countdown:Countdown"),
    TaskEntry(DATA_TASK, "questions with reference answers from data sets and files",
              settings="bandpo_cli.config.task:DataTask",
              build="bandpo_cli.tasks.question_answers:QuestionAnswerTask",
              defaults="bandpo_cli.config.task:LANGUAGE_MODEL_DEFAULTS"),
    TaskEntry("reasoning-gym", "problems from the generators of the library reasoning-gym, scored by the library",
              settings="bandpo_cli.config.task:ReasoningGymTask",
              build="bandpo_cli.tasks.reasoning_gym:ReasoningGym",
              defaults="bandpo_cli.config.task:LANGUAGE_MODEL_DEFAULTS",
              members="bandpo_cli.tasks.reasoning_gym:describe_generators",
              package="reasoning_gym", install='pip install "bandpo[gym]"'),
])
# fmt: on


def task_kind(name: str) -> str:
    """Return the name of the entry of `TASKS` for a task's name: `data` for the name of a data set."""
    return DATA_TASK if name in DATASETS else name


def generated_tasks() -> list[str]:
    """Return the names of the tasks that need no data: all but `data`."""
    return [name for name in TASKS if name != DATA_TASK]


def split_member(text: str) -> tuple[str, str] | None:
    """Return the task and the member of `TASK:MEMBER`; None for any other text."""
    task, colon, member = text.partition(":")
    return (task, member) if colon and task in TASKS and TASKS[task].members else None


def tasks_text() -> str:
    """Return what `--task` accepts beside files, for a help text."""
    generated = [
        f"{name}:NAME (repeatable; {name}:list prints the names)" if TASKS[name].members else name
        for name in generated_tasks()
    ]
    return f"{', '.join(generated)}, a known data set ({', '.join(DATASETS)})"
