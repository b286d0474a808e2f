"""An engine in the trainer's process, without leaving its marks there."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LEFT_TO_CHILDREN = ("LD_PRELOAD", "LD_LIBRARY_PATH")


def prepare_environment() -> None:
    """Set what vLLM reads when it is imported. What the user has set stays, the engine's process apart."""
    # The weights are handed over as tensors, so the engine has to live in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Undo what the start of an engine changes for the whole process.

    vLLM replaces torch.set_num_threads on a CPU and sets the number to 1 on a GPU, may bind the process to cores,
    seeds torch's generators, and preloads libraries into every process started later (the graders, for one).
    """
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    environment = {name: os.environ.get(name) for name in _LEFT_TO_CHILDREN}
    try:
        with torch.random.fork_rng(
            devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []
        ):
            yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        if cores is not None and os.sched_getaffinity(0) != cores:
            os.sched_setaffinity(0, cores)
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def engine_turn(count: int) -> Iterator[None]:
    """Run with `count` torch threads, and put torch's CPU dice back as they were.

    What was compiled under one number of threads would be compiled again under another. On a CPU the engine throws
    torch's own dice even where every request has a seed.
    """
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        if count != before:
            torch.set_num_threads(before)


@contextmanager
def hushed() -> Iterator[None]:
    """Hold back what compiled code writes to standard error, and print it only when the block fails.

    A logging level of the user's own (VLLM_LOGGING_LEVEL below ERROR) says that the engine's words are wanted.
    """
    if os.environ.get("VLLM_LOGGING_LEVEL", "ERROR") not in ("ERROR", "CRITICAL"):
        yield
        return
    sys.stderr.flush()
    original = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(original, held.read())
            raise
        finally:
            os.dup2(original, 2)
            os.close(original)
