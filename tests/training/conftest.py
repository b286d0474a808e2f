"""A recorded run that several tests read, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.recording import Recording, run, save_small_model


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Recording:
    """A run of 5 steps under `recording.SETTINGS`; read it only."""
    return run(tmp_path_factory.mktemp("recorded") / "run", small_model)
