"""Pretrained models in BANDPO_REAL_MODELS, a Hugging Face folder or a folder of such folders.

`make test-real MODELS=FOLDER` sets the variable. Without it, these tests are skipped.
"""

import os
from pathlib import Path

import pytest

VARIABLE = "BANDPO_REAL_MODELS"


def model_folders() -> list[Path]:
    """Return the model folders that the environment variable names."""
    named = os.environ.get(VARIABLE)
    if not named:
        return []
    configs = [Path(named, "config.json"), *sorted(Path(named).glob("*/config.json"))]
    found = [path.parent for path in configs if path.is_file()]
    if not found:
        raise pytest.UsageError(f"{VARIABLE} = {named}: no model folder there")
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test with `folder` once per model; skip it where there is none."""
    if "folder" not in metafunc.fixturenames:
        return
    skip = pytest.mark.skip(reason="needs pretrained models: make test-real MODELS=FOLDER")
    folders = [pytest.param(model_folder, id=model_folder.name) for model_folder in model_folders()]
    metafunc.parametrize("folder", folders or [pytest.param(None, marks=skip)], scope="module")
