"""A gate that holds checkpoints while a thread writes them, for tests of what happens meanwhile."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from bandpo_cli.training import checkpoint_files

MAIN = threading.main_thread()


class Gate:
    """Holds a checkpoint that a thread writes: its weights are in the hidden folder, the optimizer state is not.

    Attributes:
        reached: set when a write is held.
        open: set it to let this write and all others pass.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self._write = checkpoint_files.write_tensors
        monkeypatch.setattr(checkpoint_files, "write_tensors", self._held)

    def _held(self, path: Path, tensors: Mapping[str, torch.Tensor], check: Callable[[], None]) -> str:
        if threading.current_thread() is not MAIN:
            self.reached.set()
            while not self.open.wait(0.002):
                check()
        return self._write(path, tensors, check)

    def wait_until_reached(self) -> None:
        """Return when a write is held."""
        assert self.reached.wait(60)
