"""One torch thread for commands in the process of the tests, since small models make threads wait; a shared run."""

from pathlib import Path

import pytest

from tests.cli.eval_command import succeed
from tests.cli.train_runs import SMALL


@pytest.fixture(scope="module", autouse=True)
def every_command_with_one_thread(one_thread: None) -> None:
    """Set torch to one thread in all modules."""


@pytest.fixture(scope="session")
def six_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted run of 6 steps, with all checkpoints; tests must not change it."""
    import torch

    place, threads = tmp_path_factory.mktemp("six-steps"), torch.get_num_threads()
    torch.set_num_threads(1)
    succeed("train", "--steps", "6", *SMALL, "--name", "a", cwd=place)
    torch.set_num_threads(threads)
    return place / "runs" / "a"
