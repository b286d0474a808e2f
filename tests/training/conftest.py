"""Fixtures: a small model and a recorded run, created once per session."""

from pathlib import Path

import pytest

from bandpo_cli.config.run import ModelConfig
from bandpo_cli.models.load import Policy, load_policy
from tests.training.recording import Recording, run, save_small_model


@pytest.fixture(scope="session")
def embedded() -> Policy:
    """Return the bundled model; tests must not change it."""
    return load_policy(ModelConfig())


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Recording:
    """Return a run of 5 steps with `recording.SETTINGS`; tests must not change it."""
    return run(tmp_path_factory.mktemp("recorded") / "run", small_model)
