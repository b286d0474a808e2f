"""Several ranks, connected by gloo: forked from a process that has imported torch."""

import os
import pickle
import socket
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bandpo_cli.processes.ranks import connected, ranks_from_environment
from tests.commands import FORKSERVER

LIMIT_S = 240


def run_ranks(
    size: int, folder: Path, function: Callable[..., Any], *args: Any, context: Any = FORKSERVER
) -> list[Any]:
    """Return what `function(ranks, *args)` returns on each rank.

    Args:
        folder: an empty folder for the results.
        function: a function of a module, which the processes import; they do not inherit patches.
        context: the context of multiprocessing that starts the processes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    environment = dict(os.environ)
    processes = [
        context.Process(target=_run, args=(rank, size, port, environment, folder, function, args))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
    errors = [path.read_text() for path in sorted(folder.glob("error-*"))]
    assert not errors, "\n".join(errors)
    assert not alive, "a rank waits for another one"
    return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(size)]


def check_lines(lines: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    """Require the metrics of a run on other ranks, up to rounding.

    A prompt whose completions several ranks have goes through the model on each of them, and counts in `compute/flops`.
    """
    for line, other in zip(lines, expected, strict=True):
        assert line.keys() == other.keys()
        flops = {key: line[key] for key in line if key == "compute/flops"}
        assert line == pytest.approx(other | flops, abs=1e-5, rel=1e-5, nan_ok=True)


def free_port() -> int:
    """Return a port on which no process listens."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _run(
    rank: int,
    size: int,
    port: int,
    environment: dict[str, str],
    folder: Path,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ |= environment | {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    try:
        ranks = ranks_from_environment()
        with connected(ranks, "cpu"):
            result = function(ranks, *args)
        (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
    except BaseException:  # noqa: BLE001 - the test reports it
        (folder / f"error-{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(0)  # without the callbacks of the parent's tests
