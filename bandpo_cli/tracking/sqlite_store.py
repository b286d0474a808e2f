"""A new SQLite store that is whole before anyone sees it.

MLflow builds its tables by some fifty migrations, for seconds and without a lock: two runs of a sweep that start
together spoil each other's, and one killed meanwhile leaves a file that no later run can open (both seen, 3.17).
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote

from bandpo_cli.tracking.alone import alone


def sqlite_uri(path: Path) -> str:
    """Return the address of a SQLite file: SQLAlchemy reads % and ? in a path as signs of its own."""
    return "sqlite:///" + path.as_posix().replace("%", "%25").replace("?", "%3F")


def sqlite_path(uri: str) -> Path | None:
    """Return the file of a SQLite address, None for another store or one in memory."""
    path = unquote(uri.partition("?")[0].removeprefix("sqlite:///"))
    return Path(path) if uri.startswith("sqlite:///") and path not in ("", ":memory:") else None


def prepare_store(uri: str) -> None:
    """Make the SQLite file of `uri` if there is none, beside its place and then moved there. Takes seconds."""
    path = sqlite_path(uri)
    if path is None or path.exists() or os.name != "posix":
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone(path.with_name(f".{path.name}.lock")):
        if not path.exists():
            unfinished = path.with_name(f".{path.name}.new")
            unfinished.unlink(missing_ok=True)
            _make(sqlite_uri(unfinished))
            os.replace(unfinished, path)


def _make(uri: str) -> None:
    from mlflow.tracking import MlflowClient

    MlflowClient(tracking_uri=uri, registry_uri=uri).get_experiment_by_name("Default")
