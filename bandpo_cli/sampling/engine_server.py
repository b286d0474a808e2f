"""Commands of an engine process: build the engine, receive weights, sample, describe, close.

A command is the name of a method of `EngineServer` with its arguments, and ends with one `Answer`; both are pickled, so
that floats keep their bits. Weights go through memory that both processes map (`send_slots`, `send_weights`).
"""

import logging
import mmap
import os
import sys
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from logging.handlers import BufferingHandler
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from bandpo_cli.config.batch_and_sampling import SamplingConfig
from bandpo_cli.config.run import ModelConfig, RunConfig
from bandpo_cli.errors import EngineMemoryError, RunError, UserError, find_out_of_memory, first_line
from bandpo_cli.models.load import load_policy
from bandpo_cli.sampling.sampler import (
    EngineModel,
    Sampler,
    SamplingParams,
    StaleEngineError,
    Weights,
    build_sampler,
    error_text,
)

SLOTS = 2  # Weights in the shared memory: the trainer writes one while the engine reads the other

NO_MORE = "no more requests"  # The trainer's answer where an engine has room for a request

_ALIGNMENT = 256
_HANDLE_DEVICE = 6  # Index of the number of the GPU in the arguments of `rebuild_cuda_tensor`


class Answer(NamedTuple):
    """The end of a command: its value, or the error that the trainer raises, and level and text of logged warnings."""

    value: Any = None
    error: Exception | None = None
    warnings: Sequence[tuple[int, str]] = ()


class EngineServer:
    """An engine whose weights the trainer sends; one that runs the trainer's own model has a policy for it here."""

    _slots: torch.Tensor
    _device: torch.device
    _sampler: Sampler
    _is_current = False
    _has_sampled = False

    def __init__(self, pipe: Connection) -> None:
        """Serve the trainer at the other end of the connection."""
        self._pipe = pipe
        self._log = BufferingHandler(sys.maxsize)  # the trainer logs the warnings
        self._log.setLevel(logging.WARNING)
        logger = logging.getLogger("bandpo_cli")
        logger.addHandler(self._log)
        logger.propagate = False

    def serve(self) -> None:
        """Carry out commands, one after the other, until `close` or the end of the connection."""
        try:
            while (command := self._pipe.recv())[0] != "close":
                self._pipe.send(self._answer(*command))
        except (EOFError, OSError):  # the trainer has ended
            return
        if hasattr(self, "_sampler"):
            self._sampler.close()

    def _answer(self, name: str, *arguments: Any) -> Answer:
        value, sent = None, None
        try:
            value = getattr(self, name)(*arguments)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:  # noqa: BLE001 - the trainer raises it
            traceback.print_exc()
            sent = portable_error(error)
            if not self._has_sampled and type(error) is RunError and isinstance(sent, RunError):
                sent = UserError(f"the engine process cannot run this model here: {error}")
        warnings = [(record.levelno, record.getMessage()) for record in self._log.buffer]
        self._log.buffer.clear()
        return Answer(value, sent, warnings)

    def build(
        self,
        model: ModelConfig | EngineModel,
        sampling: SamplingConfig,
        threads: int,
        deterministic: bool,
        gpu: int | None,
    ) -> None:
        """Build the engine, with a policy if it gets the settings of the model.

        `gpu` is the number of the trainer's GPU in this process if the weights come through its memory.
        """
        self._slots = receive_slots(self._pipe, gpu)
        torch.set_num_threads(threads)
        if deterministic:
            torch.use_deterministic_algorithms(True)
        # Its parameters require gradients, as the trainer's do: on a CPU the last bits of log-probs depend on that.
        policy = load_policy(model, for_training=False) if isinstance(model, ModelConfig) else model
        self._device = policy.device
        self._sampler = build_sampler(RunConfig().model_copy(update={"sampling": sampling}), policy)

    def sync(self, version: int) -> None:
        """Receive all weights of the policy and load them into the engine, one at a time."""
        self._is_current = False
        weights = receive_weights(self._pipe, self._slots)
        # vLLM keeps the tensors of a layer until it has all of them, longer than they are valid.
        copies = ((name, tensor.to(self._device, copy=True)) for name, tensor in weights)
        try:
            self._sampler.load(copies, version)
        finally:
            deque(weights, maxlen=0)  # the trainer sends all of them in any case
        self._is_current = True

    def stream(self, params: SamplingParams, in_order: bool) -> None:
        """Send number and completions of each request; the trainer answers each with whether it takes more."""
        if not self._is_current:
            raise StaleEngineError("the engine process has no complete weights since the last sync failed")

        def requests() -> Iterator[Any]:
            self._pipe.send(None)
            while (request := self._pipe.recv()) != NO_MORE:
                yield request
                self._pipe.send(None)

        with closing(self._sampler.sample_stream(requests(), params, in_order)) as stream:
            for item in stream:
                self._has_sampled = True
                self._pipe.send(item)
                if not self._pipe.recv():
                    break

    def describe(self) -> dict[str, str]:
        """Return what the engine describes."""
        return self._sampler.describe()


def serve(descriptor: int) -> None:
    """Serve the trainer at the other end of a socket pair, in the engine process, until the trainer ends it."""
    os.set_inheritable(descriptor, False)
    EngineServer(Connection(descriptor)).serve()
    # Without the interpreter's shutdown, which waits for threads of the engine.
    os._exit(0)


def send_slots(pipe: Connection, size: int, gpu: torch.device | None = None) -> torch.Tensor:
    """Return memory for weights of up to `size` bytes, [SLOTS, bytes], which the other process receives too.

    It is memory of the GPU `gpu` (CUDA IPC), or an anonymous file of the host: tensors that torch shares are files of
    /dev/shm, of which a container has 64 MiB.
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
    """Return the memory that `send_slots` has sent; `gpu` is the number of its GPU in this process."""
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
    """Yield each weight, which is valid until the next one is taken; the receiver must take all of them."""
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
        return EngineMemoryError(f"engine process: {first_line(failed, max_chars=1000)}")
    if isinstance(error, UserError | RunError):
        return type(error)(str(error))
    return RunError(f"the engine process failed: {error_text(error)}")
