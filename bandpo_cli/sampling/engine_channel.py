"""What trainer and engine process exchange: answers, errors, and weights in memory that both map.

Everything but weights is pickled, so that floats arrive with the bits that they were sent with.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, cast

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from bandpo_cli.errors import (
    EngineMemoryError,
    RunError,
    UserError,
    find_out_of_memory,
    first_line,
)

SLOTS = 2
"""Weights in the shared memory: the trainer writes one while the engine reads the other."""

_ALIGNMENT = 256
_HANDLE_DEVICE = 6
"""Index of the number of the GPU in the arguments of `rebuild_cuda_tensor`."""
_MAX_ERROR_CHARS = 1000

Weights = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Answer:
    """The end of a command.

    Attributes:
        value: what the command returns.
        error: what the trainer raises in its place.
        warnings: level and text of the warnings that were logged since the last answer.
    """

    value: Any = None
    error: Exception | None = None
    warnings: Sequence[tuple[int, str]] = ()


def send_slots(pipe: Connection, size: int, gpu: torch.device | None = None) -> torch.Tensor:
    """Return memory for weights of up to `size` bytes, [SLOTS, bytes], which the other process receives too.

    Args:
        gpu: the GPU of the memory (CUDA IPC); None for memory of the host. That is an anonymous file: tensors that
            torch shares are files of /dev/shm, of which a container has 64 MiB.
    """
    size = -(-size // _ALIGNMENT) * _ALIGNMENT
    if gpu is not None:
        slots = torch.empty(SLOTS, size, dtype=torch.uint8, device=gpu)
        pipe.send(cast(Any, reduce_tensor)(slots)[1])
        return slots
    file = os.memfd_create("bandpo-weights")
    try:
        os.ftruncate(file, SLOTS * size)
        reduction.send_handle(pipe, file, 0)
        return _mapped(file)
    finally:
        os.close(file)


def receive_slots(pipe: Connection, gpu: int | None = None) -> torch.Tensor:
    """Return the memory that the other process has sent with `send_slots`.

    Args:
        gpu: the number of its GPU in this process, which may differ from that in the other one.
    """
    if gpu is not None:
        handle = [*pipe.recv()]
        handle[_HANDLE_DEVICE] = gpu
        return cast(torch.Tensor, cast(Any, rebuild_cuda_tensor)(*handle))
    file = reduction.recv_handle(pipe)
    try:
        return _mapped(file)
    finally:
        os.close(file)


def _mapped(file: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8).view(SLOTS, -1)


def send_weights(pipe: Connection, slots: torch.Tensor, weights: Weights) -> None:
    """Send tensors of any shape, dtype and device, none larger than a slot."""
    count = 0
    for count, (name, tensor) in enumerate(weights, start=1):
        if count > SLOTS:
            pipe.recv()  # the other process has read this slot
        _view(slots[count % SLOTS], tensor.dtype, tensor.shape).copy_(tensor.detach())
        _wait_for_gpus(slots)
        pipe.send((name, tensor.dtype, tensor.shape, count % SLOTS))
    pipe.send(None)
    for _ in range(min(count, SLOTS)):
        pipe.recv()


def receive_weights(pipe: Connection, slots: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each weight; the tensor is valid until the next one is taken.

    All of them have to be taken, also after one that cannot be used.
    """
    while (header := pipe.recv()) is not None:
        name, dtype, shape, slot = header
        yield name, _view(slots[slot], dtype, shape)
        _wait_for_gpus(slots)
        pipe.send(None)


def _wait_for_gpus(slots: torch.Tensor) -> None:
    """Wait for copies to or from slots on a GPU; those to or from the host are complete when they return."""
    if slots.is_cuda:
        for gpu in range(torch.cuda.device_count()):
            torch.cuda.synchronize(gpu)


def _view(slot: torch.Tensor, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """Return a tensor in the memory of a slot."""
    return slot[: shape.numel() * dtype.itemsize].view(dtype).view(shape)


def portable_error(error: Exception) -> Exception:
    """Return an error with the same line that can be sent to the trainer: of the same type where `errors` has it."""
    failed = find_out_of_memory(error)
    if failed is not None:
        return EngineMemoryError(f"engine process: {first_line(failed, _MAX_ERROR_CHARS)}")
    if isinstance(error, UserError | RunError):
        return type(error)(str(error))
    line = first_line(str(error), _MAX_ERROR_CHARS)
    return RunError(f"the engine process failed: {type(error).__name__}" + (f": {line}" if line else ""))
