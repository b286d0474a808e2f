"""Shell completion of values: names of registries, configuration files, runs, sweeps and evaluations.

A shell starts `bandpo` for each completion, so these functions read names of files only and import nothing heavy. Where
they return nothing, the shell completes file names.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import typer

from bandpo_cli.datasets import DATASETS, TASKS, generated_tasks
from bandpo_cli.paths import folders_containing
from bandpo_cli.registries import Entry

Candidates = list[tuple[str, str]]
"""Values, each with a description, which zsh and fish show; '' for none."""

Completer = Callable[[str], Candidates]
"""A function from the beginning of a value to the values that complete it. Typer drops values that do not begin so."""

PLACES = {"run": "config.yaml", "sweep": "sweep.yaml", "evaluation": "eval.json"}
"""The file by which a folder in the runs folder is recognized, by kind."""


def one_of(names: Iterable[str], several: bool = False) -> Completer:
    """Return the completer of an option that takes one of `names`; entries of a registry are described.

    Args:
        several: the option takes several names, separated by commas; the last one is completed.
    """

    def complete(incomplete: str) -> Candidates:
        before, comma, _ = incomplete.rpartition(",") if several else ("", "", "")
        given = before.split(",")
        return [(f"{before}{comma}{name}", text) for name, text in _described(names) if name not in given]

    return complete


def complete_task(incomplete: str) -> Candidates:
    """Return the tasks and the known data sets; of a task with members, the value that lists them."""
    tasks = [
        (f"{name}:list" if TASKS[name].members else name, TASKS[name].summary) for name in generated_tasks()
    ]
    return [*tasks, *_described(DATASETS)]


def complete_config(incomplete: str) -> Candidates:
    """Return the configuration files of the package by name, and the YAML files in the folder that is typed."""
    folder = incomplete.rpartition("/")[0]
    files = [path.name for path in Path(folder).glob("*.yaml")]
    own = [(f"{folder}/{name}" if folder else name, "") for name in sorted(files)]
    return [*own, *complete_shipped_config(incomplete)]


def complete_shipped_config(incomplete: str) -> Candidates:
    """Return the configuration files of the package by name."""
    from bandpo_cli.config.files import describe_config, shipped_configs

    return [(name, describe_config(path)) for name, path in shipped_configs().items()]


def folder_of(*kinds: str) -> Callable[[typer.Context, str], Candidates]:
    """Return the completer of names in --runs-dir.

    Args:
        kinds: keys of `PLACES`. Runs include those of sweeps, as `sweep/run`.
    """

    def complete(context: typer.Context, incomplete: str) -> Candidates:
        root = Path(context.params.get("runs_dir") or "runs")
        names = [(name, kind) for kind in kinds for name in folders_containing(root, PLACES[kind])]
        if "run" in kinds:
            sweeps = folders_containing(root, PLACES["sweep"])
            names += [
                (f"{sweep}/{name}", "run")
                for sweep in sweeps
                for name in folders_containing(root / sweep, PLACES["run"])
            ]
        return sorted(names)

    return complete


def _described(names: Iterable[str]) -> Candidates:
    """Return the names, with their summaries where `names` is a registry."""
    entries = names if isinstance(names, Mapping) else {}
    return [(name, entry.summary if isinstance(entry := entries.get(name), Entry) else "") for name in names]
