"""Where the MLflow record is kept, and how a person gets to see it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bandpo_cli.config.tracking import TrackingConfig
from bandpo_cli.tracking.sqlite_store import sqlite_path, sqlite_uri

_WITH_OWN_FILES = ("http", "https", "databricks", "uc", "file", "")
"""Kinds of store that say themselves where a run's files go; a bare path is a file store."""


@dataclass(frozen=True)
class Store:
    """An MLflow store.

    Attributes:
        uri: its tracking URI.
        experiment: the experiment's name.
        artifact_location: where a *new* experiment keeps its files, None to let the store choose. A database
            would choose `./mlruns` of whatever folder the run was started in.
    """

    uri: str
    experiment: str
    artifact_location: str | None


def tracking_store(config: TrackingConfig, runs_dir: Path, environ: Mapping[str, str] = os.environ) -> Store:
    """Return the store of `config.uri`, else of MLFLOW_TRACKING_URI, else `mlflow.db` in the runs folder."""
    runs_dir = runs_dir.absolute()
    uri = config.uri or environ.get("MLFLOW_TRACKING_URI") or sqlite_uri(runs_dir / "mlflow.db")
    return Store(uri, config.experiment, _artifact_location(uri, runs_dir))


def _artifact_location(uri: str, runs_dir: Path) -> str | None:
    scheme = uri.partition(":")[0].partition("+")[0] if ":" in uri else ""
    if scheme in _WITH_OWN_FILES or uri == "databricks":
        return None
    database = sqlite_path(uri)
    folder = database.absolute().parent if database else runs_dir
    return (folder / "mlartifacts").as_uri()


def ui_command(uri: str) -> str:
    """Return what to type, or which address to open, to see the curves of the store `uri`."""
    if uri.startswith(("http://", "https://", "databricks")):
        return uri
    database = sqlite_path(uri)
    if database:
        uri = sqlite_uri(_from_here(database))
    return f"mlflow ui --backend-store-uri {shlex.quote(uri)}"


def _from_here(path: Path) -> Path:
    """Return `path` as seen from the current folder if it lies under it: shorter to read and to type."""
    try:
        return path.absolute().relative_to(Path.cwd())
    except ValueError:
        return path
