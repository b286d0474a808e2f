"""Fixtures of the tracking tests: the run folder of the storage tests, and SQLite stores copied from an empty one."""

import shutil

import pytest

from bandpo_cli.tracking import mlflow_store as stores
from tests.storage.conftest import run

__all__ = ["run"]


@pytest.fixture(autouse=True)
def _copied_tables(empty_database, monkeypatch):
    """Create every later store as a copy of `empty_database`."""

    def copy_tables(uri: str) -> None:
        path = stores.sqlite_path(uri)
        assert path is not None
        shutil.copyfile(empty_database, path)

    monkeypatch.setattr(stores, "_create_tables", copy_tables)
