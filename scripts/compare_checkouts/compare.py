"""Comparers by file type: each file is read as plain values, and values are compared exactly."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import safetensors
import yaml

from bandpo_cli.metric_names import CLOCK_PREFIXES

Plain = Callable[[str], str]
"""Replaces the paths of one side in a text by names that both sides share."""

CLOCK_KEYS = {
    **{f"{prefix}*": "depends on the machine and its load" for prefix in CLOCK_PREFIXES},
    "seconds": "of a run, in a report",
    "seconds_per_step*": "seconds, in the leaderboard of a report",
}
"""Keys that are ignored in every file, at any depth, with the reason."""

WORDING_KEYS = {
    "error": "the message of the error that ended a run",
    "about": "a sentence of a report",
    "finding": "a sentence of a report",
    "notes": "sentences of a report",
    "verdict": "a phrase of a report; in a table of completions it is data and is compared",
}
"""Keys of JSON files and JSON output that hold sentences, which are not compared."""

FILE_KEYS = {
    "env.json": {"git": "the commit differs by design", "resumes": "holds dates and the step of the kill"},
    "eval.json": {"sha256": "digest of a stored file whose content is compared itself"},
    "summary.json": {
        "started_ms": "depends on the clock",
        "overview_of": "the size of metrics.jsonl, which contains durations",
    },
    "stdout": {"sha256": "as in eval.json"},
    "trackers.json": {
        "id": "random",
        "remote_id": "random",
        "files": "digests of files that contain durations",
    },
}
"""Keys that are ignored in files of these names, and in JSON on standard output, with the reason."""

PRESENCE_ONLY = {
    ".png": "plots of durations differ, and the data behind all plots is compared",
    ".html": "wording and embedded plots; the same data is in the CSV and JSON output",
    ".md": "wording; the same data is in the CSV and JSON output",
    ".log": "console output with durations",
    ".lock": "process id and host",
}
"""Endings of the files that are compared by presence alone, with the reason."""

MLFLOW_DB = "mlflow.db"
MLFLOW_ARTIFACTS = "mlartifacts"
MLFLOW_TAGS = ("bandpo.run", "mlflow.source.git.commit", "git.dirty")
"""Tags that are ignored: a random key, and the state of the repository."""


@dataclass(frozen=True)
class Difference:
    """The first place at which two values differ."""

    where: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.where.lstrip(': ')}: {_short(self.old)} != {_short(self.new)}"


@dataclass(frozen=True)
class Tensor:
    """A tensor of a safetensors file, as bytes."""

    dtype: str
    shape: list[int]
    data: bytes

    def __repr__(self) -> str:
        return f"{self.dtype}{self.shape}"


class Missing:
    """The value of a key, an item or a file that one side lacks."""

    def __repr__(self) -> str:
        return "missing"


MISSING = Missing()


def first_difference(old: Any, new: Any, where: str = "") -> Difference | None:
    """Return the first difference between two values, or None where they are equal.

    Types must be equal too. Floats are equal when they are the same number: NaN equals NaN, 0.0 differs from -0.0.
    """
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return _tensor_difference(old, new, where)
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        pairs = [
            (f"{where}: {key}" if where else str(key), old.get(key, MISSING), new.get(key, MISSING))
            for key in {**old, **new}
        ]
    elif isinstance(old, list) and isinstance(new, list):
        longest = zip_longest(old, new, fillvalue=MISSING)
        pairs = [(f"{where}[{index}]", a, b) for index, (a, b) in enumerate(longest)]
    else:
        equal = type(old) is type(new) and (repr(old) == repr(new) if type(old) is float else old == new)
        return None if equal else Difference(where, old, new)
    differences = (first_difference(a, b, place) for place, a, b in pairs)
    return next((difference for difference in differences if difference is not None), None)


def without_keys(value: Any, patterns: Sequence[str]) -> Any:
    """Return `value` without the keys that match one of `patterns`, at any depth."""
    if isinstance(value, dict):
        return {
            key: without_keys(inner, patterns)
            for key, inner in value.items()
            if not any(fnmatchcase(str(key), pattern) for pattern in patterns)
        }
    return [without_keys(inner, patterns) for inner in value] if isinstance(value, list) else value


def ignored_keys(name: str) -> list[str]:
    """Return the patterns of the keys that are ignored in a file of this name."""
    return [*CLOCK_KEYS, *FILE_KEYS.get(name, ()), *WORDING_KEYS]


def compare_files(old: Path, new: Path, plain: tuple[Plain, Plain]) -> Difference | None:
    """Return the first difference between two files, of which one may be missing.

    Args:
        plain: replaces the paths of the old side and of the new side.
    """
    states = ["present" if path.is_file() else MISSING for path in (old, new)]
    if MISSING in states:
        return None if states == [MISSING, MISSING] else Difference("file", *states)
    if presence_only(old):
        return None
    try:
        values = [read_values(path, replace) for path, replace in zip((old, new), plain, strict=True)]
    except (ValueError, KeyError, yaml.YAMLError, sqlite3.Error, safetensors.SafetensorError) as error:
        return Difference(f"cannot be read ({error})", old, new)
    return first_difference(*values)


def presence_only(path: Path) -> bool:
    """Return True for a file that is compared by presence alone."""
    return path.suffix in PRESENCE_ONLY or path.name in PRESENCE_ONLY


def read_values(path: Path, plain: Plain) -> Any:
    """Return the content of a file as plain values, without the keys that are ignored."""
    if path.name == MLFLOW_DB:
        return without_keys(read_mlflow(path, plain), list(CLOCK_KEYS))
    if path.suffix == ".parquet":
        return read_parquet(path)
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    try:
        text = plain(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        return path.read_bytes()
    read = _READERS.get(path.suffix, str.splitlines)
    return without_keys(read(text), ignored_keys(path.name))


_READERS: dict[str, Callable[[str], Any]] = {
    ".json": json.loads,
    ".jsonl": lambda text: [json.loads(line) for line in text.splitlines()],
    ".yaml": yaml.safe_load,
    ".csv": lambda text: list(csv.DictReader(io.StringIO(text))),
}


def read_parquet(path: Path) -> dict[str, Any]:
    """Return the types and the values of the columns."""
    table = pq.read_table(path)
    types = {field.name: str(field.type) for field in table.schema}
    return {"types": types, "columns": table.to_pydict()}


def read_safetensors(path: Path) -> dict[str, Any]:
    """Return the metadata of the file, and type, shape and bytes of each tensor by name."""
    with safetensors.safe_open(path, "np") as file:
        metadata = file.metadata()
    tensors = {name: Tensor(**entry) for name, entry in safetensors.deserialize(path.read_bytes())}
    return {"__metadata__": metadata, **tensors}


def read_mlflow(path: Path, plain: Plain) -> dict[str, Any]:
    """Return status, params, tags, metrics and names of artifacts by run, from the SQLite store of MLflow."""
    runs: dict[str, Any] = {}
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as store:
        names = store.execute("SELECT run_uuid, name, status FROM runs ORDER BY name").fetchall()
        for run_id, name, status in names:
            if name in runs:
                raise ValueError(f"two MLflow runs are named {name!r}")
            params, tags, metrics = (
                store.execute(f"SELECT {columns} WHERE run_uuid = ? ORDER BY 1, 2", (run_id,)).fetchall()
                for columns in (
                    "key, value FROM params",
                    "key, value FROM tags",
                    "key, step, value, is_nan FROM metrics",
                )
            )
            steps: dict[str, list[Any]] = {}
            for key, step, value, is_nan in metrics:
                steps.setdefault(key, []).append([step, math.nan if is_nan else value])
            folder = path.parent / MLFLOW_ARTIFACTS / run_id
            runs[name] = {
                "status": status,
                "params": {key: plain(value) for key, value in params},
                "tags": {key: plain(value) for key, value in tags if key not in MLFLOW_TAGS},
                "metrics": steps,
                "artifacts": sorted(
                    item.relative_to(folder).as_posix() for item in folder.rglob("*") if item.is_file()
                ),
            }
    return runs


def numbers_in(text: str) -> list[str]:
    """Return the numbers of a text in their order."""
    return re.findall(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?", text)


def settings_in(text: str) -> dict[str, Any]:
    """Return the settings that a dry run prints as YAML, and the numbers of what it prints after them.

    Raises ValueError where the text has no settings.
    """
    match = re.search(r"^(?:seed|steps): \d.*?(?=^\s*$|\Z)", text, re.DOTALL | re.MULTILINE)
    if match is None:
        raise ValueError("no settings in the output of a dry run")
    return {"settings": yaml.safe_load(match[0]), "numbers": numbers_in(text[match.end() :])}


def _tensor_difference(old: Tensor, new: Tensor, where: str) -> Difference | None:
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        return Difference(where, old, new)
    size = len(old.data) // max(1, math.prod(old.shape))
    arrays = [np.frombuffer(tensor.data, dtype=f"V{size}") for tensor in (old, new)]
    unequal = np.flatnonzero(arrays[0] != arrays[1])
    if not len(unequal):
        return None
    place = f"{where}[{unequal[0]}] ({len(unequal)} of {len(arrays[0])} elements differ, bytes)"
    return Difference(place, *(array[unequal[0]].tobytes().hex() for array in arrays))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
