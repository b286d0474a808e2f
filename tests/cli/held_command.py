"""`bandpo` in a process that is held at one place: python -m tests.cli.held_command KIND train|eval ...

kill: the process sends itself SIGKILL while a thread writes the checkpoint of step 4 and step 5 is done.
hold: the thread that writes a checkpoint waits until the file `release` is in the current folder.
step: the line of step 3 is written once the file `release` is in the current folder; until then there is `reached`.
load: loading the model takes minutes; it has begun when the file `loading` is in the current folder.
slow: the files of an evaluation take half a second each.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from bandpo_cli.__main__ import main
from bandpo_cli.models import load as models_load
from bandpo_cli.storage import tables
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.training import checkpoint_writer

WRITE = checkpoint_writer.write_tensors
WRITE_TABLE = tables.write_eval_table
APPEND = RunFolder.append_metrics


def kill(path: Path, tensors: Mapping[str, torch.Tensor], check: Callable[[], None]) -> str:
    checkpoint = path.parents[1]
    if checkpoint.name == ".step-000004.writing":
        assert threading.current_thread() is not threading.main_thread()
        metrics = checkpoint.parents[1] / "metrics.jsonl"
        while metrics.read_text().count("\n") < 6:
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGKILL)
    return WRITE(path, tensors, check)


def hold(path: Path, tensors: Mapping[str, torch.Tensor], check: Callable[[], None]) -> str:
    while threading.current_thread() is not threading.main_thread() and not Path("release").exists():
        time.sleep(0.002)
        check()
    return WRITE(path, tensors, check)


def step(folder: RunFolder, record: Mapping[str, object]) -> None:
    if record["step"] == 3:
        Path("reached").touch()
        while not Path("release").exists():
            time.sleep(0.002)
    APPEND(folder, record)


def load(config: object, training: bool) -> None:
    """Do not choose kernels, with which loading begins."""
    Path("loading").touch()
    for _ in range(30_000):  # a signal between two instructions does not end one long sleep
        time.sleep(0.02)


def slow(path: Path, rows: list) -> Path:
    time.sleep(0.5)
    return WRITE_TABLE(path, rows)


if __name__ == "__main__":
    if (place := sys.argv.pop(1)) == "load":
        models_load.deterministic_kernels = load
    elif place == "step":
        RunFolder.append_metrics = step
    elif place == "slow":
        tables.write_eval_table = slow
    else:
        checkpoint_writer.write_tensors = {"kill": kill, "hold": hold}[place]
    main()
