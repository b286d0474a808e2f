"""Model folders for the comparison with the reference implementation, written once per test run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.oracle.comparison import save_model


@pytest.fixture(scope="session")
def random_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 folder: tied output layer, biases in the attention."""
    return save_model(tmp_path_factory.mktemp("oracle") / "qwen2")


@pytest.fixture(scope="session")
def random_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama folder: separate output layer, no biases."""
    return save_model(tmp_path_factory.mktemp("oracle") / "llama", "llama")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
