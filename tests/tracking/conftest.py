"""The run folder of the storage tests; its current folder is empty, so that MLflow's own files would show there."""

from __future__ import annotations

from tests.storage.conftest import run

__all__ = ["run"]
