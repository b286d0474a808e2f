"""What `bandpo eval --task` names: evaluation sets, as settings of the task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bandpo_cli.config.data import FILE_SUFFIXES, Source
from bandpo_cli.config.run import RunConfig
from bandpo_cli.config.task import DataTask
from bandpo_cli.errors import ConfigError, nearest
from bandpo_cli.paths import path_exists, user_path
from bandpo_cli.registries import DATASETS, generated_tasks
from bandpo_cli.tasks.rows import source_label


def eval_task_layer(tasks: Sequence[str], own: RunConfig | None) -> dict[str, Any]:
    """Return the settings of the tasks that are asked for; the run's own template, system message and grader stay.

    Raises:
        ConfigError: there is no such task or file, or countdown is asked for with others.
    """
    if not tasks:
        return {}
    problems = {"evaluation": {"problems": None}}
    for name in generated_tasks():
        if name in tasks:
            if len(tasks) > 1:
                raise ConfigError(
                    f"--task {name}: it has a model and a form of its own; evaluate it by itself"
                )
            same = own is not None and own.task.name == name
            return problems | ({} if same else {"task": {"name": name}})
    task: dict[str, Any] = {"name": "data", "heldout": _sources(tasks)}
    if own is not None and isinstance(own.task, DataTask):
        task |= {"template": own.task.template, "system": own.task.system, "grader": own.task.grader}
    return problems | {"task": task}


def _sources(tasks: Sequence[str]) -> list[Any]:
    files = [name for name in tasks if name not in DATASETS]
    for name in files:
        if name and path_exists(user_path(name)):
            continue
        if Path(name).suffix.lower() in FILE_SUFFIXES:
            raise ConfigError(f"--task {name[:200]}: no such file")
        known = [*generated_tasks(), *DATASETS]
        raise ConfigError(
            f"--task {name[:200]}: no such task or file{nearest(name, known)}; known: {', '.join(known)}, or a "
            f"{', '.join(FILE_SUFFIXES)} file"
        )
    labels = Counter(map(_label_of, files))
    sources: list[Any] = []
    for name in tasks:
        if name in DATASETS:
            sources += DATASETS[name].evaluation_sets()
        elif labels[_label_of(name)] == 1:
            sources.append({"path": name, "label": _label_of(name)})
        else:  # a/test.jsonl and b/test.jsonl are a-test and b-test
            path = user_path(name).absolute()
            sources.append({"path": name, "label": _label_of(f"{path.parent.name}-{path.name}")})
    return sources


def _label_of(path: str) -> str:
    try:
        return source_label(Source(path=path))
    except ConfigError:  # nothing of the name may stand in a metric's name
        return "data"
