"""Settings of the tasks (`task:` in a config file): one class a kind of task, chosen by `name`."""

# MERGED: Defaults that depend on the task: those of the settings classes are made for countdown and a model of a million parameters, and would be wrong for worked answers of a language model.
from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from bandpo_cli.config.base import Section
from bandpo_cli.config.data import DATASETS, FILE_SUFFIXES, DatasetName, GraderName, Sources
from bandpo_cli.errors import nearest
from bandpo_cli.paths import path_exists

TEMPLATES = ("answer-line", "boxed", "plain")
"""The user messages known by name; any other is the text itself."""


def check_template(template: str) -> str:
    """Accept a known name or a text with {question} in it; raise ValueError with the nearest name otherwise."""
    if template in TEMPLATES or "{question}" in template:
        return template
    raise ValueError(
        f"no template of that name{nearest(template, TEMPLATES)}; known: {', '.join(TEMPLATES)}, "
        "or a text of your own with {question} in it"
    )


class CountdownTask(Section):
    """Reach a target with +, − and *, using each of the given numbers exactly once.

    The sizes are bounded so that all problems can be enumerated in a few seconds, without a table of them.
    """

    name: Literal["countdown"] = "countdown"
    numbers: int = Field(4, ge=2, le=5, description="how many numbers a problem gives")
    max_number: int = Field(9, ge=2, le=10, description="numbers are drawn from 1 to this")
    min_target: int = Field(0, ge=0, le=999, description="targets run from this")
    max_target: int = Field(99, ge=0, le=999, description="to this; 4 numbers up to 9 reach 36 without a *")
    heldout_fraction: float = Field(
        0.1,
        gt=0,
        le=0.1,
        description="share of the problems kept for evaluation; no more than 0.1, because the embedded model "
        "was warm-started on the other nine tenths",
    )


class DataTask(Section):
    """Questions with reference answers, from known data sets, the hub or local files."""

    name: Literal["data"] | DatasetName
    """A known data set, with its own train and evaluation parts; or `data`, which takes all from `train`."""

    train: Sources = ()
    """What training draws from, all mixed. Empty: the train part of the data set that `name` is."""

    heldout: Sources = ()
    """Evaluation sets, each scored apart as eval/<its label>/... Empty: the evaluation part of the data set that
    `name` is; where there is none, `heldout_fraction` of the training problems."""

    heldout_fraction: float = Field(0.05, gt=0, lt=1)
    """Share of the training problems kept for evaluation where no evaluation set is named (chosen by a hash)."""

    template: Annotated[str, AfterValidator(check_template)] = "answer-line"
    """The user's message: `answer-line` (the paper's), `boxed`, `plain`, or a text of your own with {question}
    in it. Sources that bring chat messages keep them as they are."""

    system: str | None = None
    """A system message put before the user's."""

    grader: GraderName | None = None
    """Judges the answers: `math`, `number`, or your own as module:function. null: what each source says."""


TaskConfig = Annotated[CountdownTask | DataTask, Field(discriminator="name")]

TASKS = ("countdown", *DATASETS, "data")


def task_from_argument(text: str) -> dict[str, Any]:
    """Read `--task NAME|FILE` as a layer of the `task` section.

    A known name is the task; a data file is what the task `data` trains on. Anything else is left as a name, which
    the check of the settings then refuses with the nearest known one.
    """
    path = Path(text)
    if text not in TASKS and (path.suffix.lower() in FILE_SUFFIXES or path_exists(path)):
        return {"name": "data", "train": [{"path": text}]}
    return {"name": text}


_COUNTDOWN = "countdown"

_LANGUAGE_MODEL_DEFAULTS: dict[str, Any] = {
    "sampling": {"max_tokens": 1024, "max_prompt_tokens": 1024},
    "optim": {"lr": 1e-6},  # the paper's, and usual for full fine-tuning of 0.5B to 8B parameters
    "evaluation": {"samples": 4, "k": [4]},
}


def task_defaults(task: Any) -> dict[str, Any]:
    """Return a layer of defaults for the `task` section as the user wrote it, whatever it is."""
    name = task.get("name", _COUNTDOWN) if isinstance(task, dict) else _COUNTDOWN
    return {} if name == _COUNTDOWN else _LANGUAGE_MODEL_DEFAULTS
