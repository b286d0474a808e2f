"""Where the rows of a source in the config lie: a local file, a folder, or the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from bandpo_cli.config.data import DATASETS, FILE_ENDINGS, Fields, Source
from bandpo_cli.errors import ConfigError, nearest
from bandpo_cli.paths import is_there, user_path
from bandpo_cli.tasks.files import read_file
from bandpo_cli.tasks.hub import read_hub
from bandpo_cli.tasks.known import KNOWN

Part = Literal["train", "heldout"]
"""The setting that a source stands in: `task.train` or `task.heldout`."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_LABEL_CHARS = re.compile(r"[^A-Za-z0-9_.-]+")


def label_of(source: Source) -> str:
    """Return the source's name in metrics: its label, else the data set's name, else the file's without its ending.

    Raises:
        ConfigError: nothing of the file's name may stand in a metric's name.
    """
    if source.label or source.name:
        return str(source.label or source.name)
    path = Path(str(source.path))
    base = path.stem if path.suffix.lower() in FILE_ENDINGS else path.name
    label = _LABEL_CHARS.sub("-", base).strip("-_.")[:60]
    if not label:
        raise ConfigError(f"'{source.path}': its name cannot stand in a metric's name; give it a label:")
    return label


def known_fields(source: Source) -> Fields:
    """Return the fields of the known data set that the source is, or is a copy of; none for any other."""
    known = KNOWN[source.name] if source.name else None
    return Fields(question=known.question, answer=known.answer, level=known.level) if known else Fields()


def rows_of(source: Source, part: Part) -> Iterator[dict[str, Any]]:
    """Read the rows of a source.

    Raises:
        ConfigError: there is no such file or data set, or it cannot be read.
    """
    if source.path is None:
        return _hub_rows(source, part, KNOWN[source.name].hub_id)  # type: ignore[index]  # a name or a path
    path = user_path(source.path)
    there = is_there(path)
    if there and path.is_dir():
        return _hub_rows(source, part, str(path))
    if (there and path.is_file()) or path.suffix.lower() in FILE_ENDINGS:
        for name in ("subset", "split"):
            if getattr(source, name) is not None:
                raise ConfigError(f"task.{part}: {name} is for data sets on the hub; '{path}' is a file")
        return read_file(path)
    if _HUB_ID.fullmatch(source.path):
        return _hub_rows(source, part, source.path)
    raise ConfigError(
        f"task.{part} = '{source.path}': no such file, and no known data set of that name"
        f"{nearest(source.path, DATASETS)}; known: {', '.join(DATASETS)}"
    )


def _hub_rows(source: Source, part: Part, place: str) -> Iterator[dict[str, Any]]:
    """Read a data set on the hub, or a folder in its layout; a copy of a known set has its subset and splits."""
    if source.name is None:
        split = source.split or {"train": "train", "heldout": "test"}[part]
        return read_hub(place, source.subset, split, f"give a local file: --set task.{part}=FILE")
    known = KNOWN[source.name]
    known_split = source.split or {"train": known.train_split, "heldout": known.eval_split}[part]
    if known_split is None:
        raise ConfigError(f"task.{part}: {_MISSING_PART[part].format(source.name)}")
    instead = f"give a local copy: --set 'task.{part}={{name: {source.name}, path: FILE}}'"
    return read_hub(place, source.subset or known.subset, known_split, instead)


_MISSING_PART = {
    "train": "'{}' is for evaluation only; use it in task.heldout",
    "heldout": "'{}' has no evaluation part; name a split: of it, or another data set",
}
