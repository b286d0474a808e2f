"""Shared test set-up: small models with random weights, one torch thread, no plots, and Ctrl-C for child processes.

torch and transformers are imported by the functions that need them: most tests of settings, files and reports do not.
"""

from __future__ import annotations

import io
import logging
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from bandpo_cli.cli.console import Console
from tests.commands import save_empty_images

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# A shell that starts the tests in the background makes them ignore Ctrl-C, nohup makes them ignore SIGHUP, and their
# child processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Examples are not timed: the machine may be busy. `make test-all` runs the tests with more of them.
settings.register_profile("default", deadline=None, max_examples=40)
settings.register_profile("thorough", deadline=None, max_examples=100)

SHAPE = {"vocab_size": 23, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 128}
SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def output_of(show: Callable[..., object], *arguments: object, width: int = 100) -> str:
    """Return what a function prints on a console that is no terminal, so that no style is visible."""
    console = Console(file=io.StringIO(), width=width)
    show(console, *arguments)
    return console.file.getvalue()


def random_model(kind: str = "qwen2", seed: int = 0, scale: float = 6.0, **shape: Any) -> PreTrainedModel:
    """Return a float32 model with 2 layers and weights large enough that its distributions are far from uniform.

    A Qwen2 model has a tied output layer and biases in the attention; Llama and Mistral models have neither.
    """
    import torch
    import transformers

    name = {"qwen2": "Qwen2", "llama": "Llama", "mistral": "Mistral"}[kind]
    settings = SHAPE | {"tie_word_embeddings": kind == "qwen2"} | shape
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**settings)
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return model.eval()


@pytest.fixture(params=["qwen2", "llama"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return random_model(request.param)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a SQLite file with MLflow's tables, for tests to copy: its migrations take seconds of processor time."""
    from filelock import FileLock

    from bandpo_cli.tracking.mlflow_store import create_sqlite_store, sqlite_uri

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # the folder of all workers
    path = shared / "mlflow.db"
    with FileLock(shared / "mlflow.lock"):
        if not path.exists():
            create_sqlite_store(sqlite_uri(base / "mlflow.db"))
            (base / "mlflow.db").rename(path)
    return path


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Set torch to one thread: sums are split among threads, so bit-identical results need an equal number of them."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of a parametrized test after the first n of `slow_after(n)` as slow."""
    seen: Counter[str] = Counter()
    for item in items:
        if marker := item.get_closest_marker("slow_after"):
            function = item.nodeid.partition("[")[0]
            seen[function] += 1
            if seen[function] > marker.args[0]:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Return from `os.fsync` at once: a run calls it 40 times. Tests of the order of writes replace it themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def no_plots(request: pytest.FixtureRequest) -> Iterator[None]:
    """Write empty images for the PNG files of runs, whose plots take half a second; tests/reports renders them."""
    if "reports" in request.path.parts or find_spec("matplotlib") is None:
        yield
        return
    from matplotlib.figure import Figure

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", save_empty_images(Figure.savefig))
        yield


@pytest.fixture(autouse=True)
def package_logger() -> Iterator[None]:
    """Undo what a command that ran in this process did to the package's logger, as if its process had ended."""
    yield
    logger = logging.getLogger("bandpo_cli")
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
