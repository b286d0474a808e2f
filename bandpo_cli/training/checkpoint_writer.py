"""Writer of a run's checkpoints: a copy of the state is written by a thread while training continues.

The order at a step with a checkpoint: the state is copied; the step's line is appended to metrics.jsonl; the thread
flushes metrics.jsonl, writes and renames the checkpoint, and removes older ones. So a visible checkpoint has its line
on the disk, and after a kill in between the run resumes from the checkpoint before. One checkpoint is written at a
time. That of the last step is written without a thread, before the step's line; so are all of them with
`checkpoint.background=false`, or where there is too little memory for the copy.

With several ranks each has a writer and calls its methods in the same order. Rank 0 flushes metrics.jsonl and removes
older checkpoints.
"""

from __future__ import annotations

import copy
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import RunError, SignalExit
from bandpo_cli.models.load import Policy
from bandpo_cli.models.sharding import local_tensor
from bandpo_cli.ranks import Ranks
from bandpo_cli.storage.checkpoints import (
    complete_checkpoints,
    is_written_in_background,
    prune_checkpoints,
)
from bandpo_cli.storage.environment import available_memory
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.training.checkpoint_files import (
    AbandonedError,
    TrainedState,
    check_savable,
    write_checkpoint,
)
from bandpo_cli.training.components import Components

MAX_SHARE = 0.5
"""Largest share of the available memory that the copy may take: the next step needs memory, too."""

log = logging.getLogger("bandpo_cli")


class StateCopy:
    """Copy of a training state in host memory, pinned where the state is on a GPU.

    Its tensors are allocated once and overwritten by each copy. Tied weights share their memory in the copy too. With
    several ranks each copies its shards of the optimizer state; the weights, which rank 0 has gathered in host memory,
    are kept as they are.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._mesh: DeviceMesh | None = None

    def missing_bytes(self, state: TrainedState) -> int:
        """Return the bytes that `allocate` would take; torch allocates pinned memory in powers of two."""
        missing = [tensor for key, tensor in _distinct(_local(state)).items() if key not in self._tensors]
        return sum(
            1 << (item.nbytes - 1).bit_length() if item.device.type == "cuda" else item.nbytes
            for item in missing
        )

    def allocate(self, state: TrainedState) -> None:
        """Allocate what a copy of `state` lacks.

        Raises:
            RuntimeError, MemoryError: there is not enough memory.
        """
        for key, tensor in _distinct(_local(state)).items():
            self._target(key, tensor)

    def take(self, state: TrainedState) -> TrainedState:
        """Copy `state` and return the copy, which the next call overwrites."""
        local = _local(state)
        copies: dict[tuple[int, torch.Size], torch.Tensor] = {}
        for key, tensor in _distinct(local).items():
            copies[_place(tensor)] = target = self._target(key, tensor)
            target.copy_(tensor.detach(), non_blocking=True)
        for device in {tensor.device for tensor in local.values()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the copies to pinned memory are asynchronous
        copied = {key: copies[_place(tensor)] for key, tensor in local.items()}
        if not _is_sharded(state):
            weights = {name: copied[f"weights/{name}"] for name in state.weights}
            return TrainedState(weights, {name: copied[f"optimizer/{name}"] for name in state.optimizer})
        optimizer = {
            name: self._sharded_as(tensor, copied[f"optimizer/{name}"])
            for name, tensor in state.optimizer.items()
        }
        return TrainedState(state.weights, optimizer)

    def _sharded_as(self, tensor: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        """Return the copy of this rank's shard as a DTensor in host memory, where `tensor` is a DTensor.

        All ranks call this together the first time.
        """
        if not isinstance(tensor, DTensor):
            return shard
        mesh = tensor.device_mesh
        if mesh.device_type != "cpu":
            mesh = self._mesh = self._mesh or init_device_mesh("cpu", (mesh.size(),))
        return DTensor.from_local(shard, mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride())

    def _target(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that receives the copy: the last copy's if it has the same form, else a new tensor."""
        target = self._tensors.get(key)
        if target is None or (target.shape, target.dtype) != (tensor.shape, tensor.dtype):
            target = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
            self._tensors[key] = target
        return target


def _is_sharded(state: TrainedState) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in state.optimizer.values())


def _local(state: TrainedState) -> dict[str, torch.Tensor]:
    """Return the tensors of this rank that are to be copied."""
    weights = {} if _is_sharded(state) else state.weights
    return {
        **{f"weights/{name}": tensor for name, tensor in weights.items()},
        **{f"optimizer/{name}": local_tensor(tensor) for name, tensor in state.optimizer.items()},
    }


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    """Return what tied weights have in common."""
    return tensor.data_ptr(), tensor.shape


def _distinct(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors without those that share the memory of an earlier one."""
    keys: dict[tuple[int, torch.Size], str] = {}
    for key, tensor in tensors.items():
        keys.setdefault(_place(tensor), key)
    return {key: tensors[key] for key in keys.values()}


class CheckpointWriter:
    """Writes the checkpoints of a run; a context manager, within which the run is trained.

    `prepare` comes before the step's line, `commit` after it. At the end of the block the writer waits for the thread,
    also after an exception; only a second signal (`SignalExit`) abandons the checkpoint. An error in the thread is
    raised by the next call of any other method, or at the end of the block; where another exception ends the block, the
    error is logged.
    """

    def __init__(self, config: RunConfig, components: Components, folder: RunFolder) -> None:
        self._config, self._components, self._folder = config, components, folder
        self._ranks = components.policy.ranks
        self._in_background = is_written_in_background(config)
        self._thread_ranks = self._ranks.for_thread() if self._in_background else self._ranks
        self._copy = StateCopy()
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._pending: Callable[[], None] | None = None  # writes the state that is copied
        self._thread: threading.Thread | None = None
        self._is_writing = False
        self._error: BaseException | None = None
        self._abandoned = threading.Event()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, SignalExit):
            self._abandon()
            return
        try:
            self.wait()
        except (RunError, OSError, RuntimeError, MemoryError) as failure:
            if error is None:
                raise
            log.warning("%s", failure)
        except BaseException:  # a signal during the wait
            self._abandon()
            raise

    def prepare(self, step: int) -> None:
        """Copy the state after `step`, or write its checkpoint at once; wait for the one before.

        Raises:
            NonFiniteError: weights are not finite.
            RunError: the disk is too full for the checkpoint, or cannot be written to.
        """
        self.wait()
        state = self._savable_state(step)
        copied = self._copied(state) if self._in_background and step < self._config.steps else None
        if copied is None:
            self._write_directly(state, step)
        else:
            self._pending = partial(
                write_checkpoint,
                self._policy_of_thread(),
                copied,
                self._components.progress(step),
                self._folder.checkpoint_dir(step),
                self._check_abandoned,
                self._components.ahead,
            )

    def commit(self) -> None:
        """Write the copy of `prepare` in a thread; the step's line is in metrics.jsonl by now.

        Where `prepare` has written the checkpoint, remove the older ones.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            self._prune(self._ranks)
            return
        self._is_writing = True
        self._thread = threading.Thread(target=self._write, args=(pending,), name="checkpoint")
        try:
            self._thread.start()
        except RuntimeError:  # the limit on threads is reached
            self._thread = None
            self._write(pending)

    def check(self) -> None:
        """Raise the error of a write that has failed; do not wait for one in progress.

        All ranks must call this together: where the thread of one rank has ended, those of the others are about to.
        """
        if self._is_writing and self._ranks.any(self._thread is None or not self._thread.is_alive()):
            self.wait()

    def wait(self) -> None:
        """Wait until the pending checkpoint is on the disk. Raise the error of its write."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._is_writing = False
        self._raise_error()

    def save_on_stop(self, step: int) -> None:
        """Save the state after `step`, unless no step was done or the step has a checkpoint already."""
        self.wait()
        if step > 0 and self._ranks.on_main(lambda: step not in complete_checkpoints(self._folder).complete):
            self._write_directly(self._savable_state(step), step)
            self._prune(self._ranks)

    def _savable_state(self, step: int) -> TrainedState:
        """Return the state after `step`. Raises NonFiniteError or RunError if it cannot be saved."""
        components = self._components
        state = TrainedState.of(components.policy, components.optimizer)
        check_savable(components.policy, state, self._folder.checkpoint_dir(step), components.ahead)
        return state

    def _prune(self, ranks: Ranks) -> None:
        """Remove the checkpoints that the settings do not keep."""
        ranks.on_main(lambda: prune_checkpoints(self._folder, self._config.checkpoint))

    def _copied(self, state: TrainedState) -> TrainedState | None:
        """Return a copy of `state`. Without enough memory warn, return None and take no further copies."""
        needed, available = self._missing_bytes(state), available_memory()
        if not self._ranks.any(available is not None and needed > MAX_SHARE * available):
            allocated = True
            try:
                self._copy.allocate(state)
            except (RuntimeError, MemoryError):  # torch's allocators raise RuntimeError
                allocated = False
            if not self._ranks.any(not allocated):
                return self._copy.take(state)
        self._in_background, self._copy = False, StateCopy()
        free = "" if available is None else f", and {available / 2**20:,.0f} MiB are available"
        log.warning(
            "training waits for its checkpoints: to write them in the background takes a copy of %s MiB in memory%s",
            f"{needed / 2**20:,.0f}",
            free,
        )
        return None

    def _missing_bytes(self, state: TrainedState) -> int:
        """Return the bytes that the copies of all ranks on this machine would take."""
        here = socket.gethostname()
        missing = self._ranks.gather((here, self._copy.missing_bytes(state)))
        return sum(size for host, size in missing if host == here)

    def _write_directly(self, state: TrainedState, step: int) -> None:
        """Write the checkpoint of `step`; the lines before it are flushed first, which a resume needs."""
        self._ranks.on_main(self._folder.sync_metrics)
        write_checkpoint(
            self._components.policy,
            state,
            self._components.progress(step),
            self._folder.checkpoint_dir(step),
            ahead=self._components.ahead,
        )

    def _write(self, pending: Callable[[], None]) -> None:
        """Write a pending checkpoint and keep its error; runs in the thread."""
        device = self._components.policy.device
        try:
            if device.type == "cuda":
                # A new thread has GPU 0, and DCP synchronizes a stream of its thread's GPU: each rank would take
                # memory of GPU 0 for a context.
                torch.cuda.set_device(device)
            self._thread_ranks.on_main(self._folder.sync_metrics)
            pending()
            self._prune(self._thread_ranks)
        except AbandonedError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised in the thread that trains
            self._error = error

    def _policy_of_thread(self) -> Policy:
        """Return the policy for the thread, with a tokenizer of its own: it refuses calls from two threads."""
        if self._tokenizer is None:
            self._tokenizer = copy.deepcopy(self._components.policy.tokenizer)
        return replace(self._components.policy, tokenizer=self._tokenizer, ranks=self._thread_ranks)

    def _abandon(self) -> None:
        """Give up the pending checkpoint and wait until the thread has removed its files."""
        self._abandoned.set()
        if self._thread is not None and self._thread.ident is not None:  # the signal may come while it starts
            self._thread.join()

    def _check_abandoned(self) -> None:
        """Raise AbandonedError if the checkpoint is given up; runs in the thread."""
        if self._abandoned.is_set():
            raise AbandonedError("the checkpoint was given up")

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
