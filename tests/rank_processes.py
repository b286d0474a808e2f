"""Processes that run a function as the ranks of a run, for tests of several ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
from torch import multiprocessing

from bandpo_cli.ranks import Ranks, connected, ranks_from_environment

PRELOADED = (
    "bandpo_cli.training.components",
    "torch.distributed.fsdp",
    "transformers.models.qwen2.modeling_qwen2",
)


def run_ranks(size: int, function: Callable[..., None], *args: Any) -> None:
    """Call `function(ranks, *args)` in `size` new processes, connected on the CPU; raise the first error of one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A server process imports torch and the package once, and the ranks are forks of it.
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED])
    multiprocessing.start_processes(
        _run, (size, port, function, args), nprocs=size, start_method="forkserver"
    )


def _run(rank: int, size: int, port: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    ranks: Ranks = ranks_from_environment()
    with connected(ranks, "cpu"):
        function(ranks, *args)
