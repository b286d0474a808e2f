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
from collections.abc import Hashable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import RunError, SignalExit
from bandpo_cli.models.load import Policy
from bandpo_cli.models.sharding import local_tensor
from bandpo_cli.models.weights import weights_to_save
from bandpo_cli.processes.ranks import Ranks
from bandpo_cli.processes.watch import Wait
from bandpo_cli.storage.checkpoints import complete_checkpoints, is_written_in_background, prune_checkpoints
from bandpo_cli.storage.environment import available_memory
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.training.checkpoint_files import (
    BackgroundCall,
    TrainedState,
    check_savable,
    write_checkpoint,
)
from bandpo_cli.training.components import Components

MAX_SHARE = 0.5
"""Largest share of the available memory that the copy may take: the next step needs memory, too."""

log = logging.getLogger("bandpo_cli")


class AbandonedError(RunError):
    """The run gave up a checkpoint while it was being written."""


class StateCopy:
    """Copy of a training state in host memory, pinned where the state is on a GPU.

    Its tensors are allocated once and overwritten by each copy; the state must keep its tensors in their places. Tied
    weights share their memory in the copy too. With several ranks each copies its shards of the optimizer state; the
    weights, which rank 0 has gathered in host memory, are kept as they are.

    Args:
        mesh: the ranks of the shards of a state on GPUs, for its copy.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self._mesh = mesh
        self._copies: dict[Hashable, torch.Tensor] = {}

    def missing_bytes(self, state: TrainedState) -> int:
        """Return the bytes that `take` would allocate; torch allocates pinned memory in powers of two."""
        return sum(
            1 << (item.nbytes - 1).bit_length() if item.device.type == "cuda" else item.nbytes
            for place, item in _by_place(state).items()
            if place not in self._copies
        )

    def take(self, state: TrainedState) -> TrainedState:
        """Copy `state` and return the copy, which the next call overwrites.

        Raises:
            RuntimeError, MemoryError: there is not enough memory.
        """
        tensors = _by_place(state)
        for place, tensor in tensors.items():
            if place not in self._copies:
                pinned = tensor.device.type == "cuda"
                self._copies[place] = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
            self._copies[place].copy_(tensor.detach(), non_blocking=True)
        for device in {tensor.device for tensor in tensors.values()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the copies to pinned memory are asynchronous
        return replace(
            state,
            weights={name: self._copies.get(_place(item), item) for name, item in state.weights.items()},
            optimizer={name: self._copy_of(item) for name, item in state.optimizer.items()},
        )

    def _copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy of a tensor; of a DTensor, the copy of this rank's shard as a DTensor in host memory."""
        copied = self._copies[_place(local_tensor(tensor))]
        if not isinstance(tensor, DTensor):
            return copied
        mesh = self._mesh or tensor.device_mesh
        return DTensor.from_local(copied, mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride())


def _place(tensor: torch.Tensor) -> Hashable:
    """Return device, address, shape and type of a tensor: what tied weights have in common."""
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.dtype


def _by_place(state: TrainedState) -> dict[Hashable, torch.Tensor]:
    """Return the tensors of this rank that are to be copied, tied weights once."""
    is_sharded = any(isinstance(tensor, DTensor) for tensor in state.optimizer.values())
    weights = [] if is_sharded else [*state.weights.values()]
    return {_place(tensor): tensor for tensor in (*weights, *map(local_tensor, state.optimizer.values()))}


class CheckpointWriter(AbstractContextManager["CheckpointWriter"]):
    """Writes the checkpoints of a run; a context manager, within which the run is trained.

    `prepare` comes before the step's line, `commit` after it. At the end of the block the writer waits for the thread,
    also after an exception; only a second signal (`SignalExit`) abandons the checkpoint. An error in the thread is
    raised by the next call of any other method, or at the end of the block; where another exception ends the block, the
    error is logged.
    """

    def __init__(self, config: RunConfig, components: Components, folder: RunFolder) -> None:
        self._config, self._components, self._folder = config, components, folder
        self._ranks, self._thread_policy = components.policy.ranks, components.policy
        self._in_background = is_written_in_background(config)
        if self._in_background:
            # With a tokenizer of its own: a tokenizer refuses calls from two threads.
            own = {"tokenizer": copy.deepcopy(components.policy.tokenizer), "ranks": self._ranks.for_thread()}
            self._thread_policy = replace(components.policy, **own)
        on_gpus = self._ranks.size > 1 and components.policy.device.type == "cuda"
        self._copy = StateCopy(init_device_mesh("cpu", (self._ranks.size,)) if on_gpus else None)
        self._pending: TrainedState | None = None  # a copy that is not being written yet
        self._call: BackgroundCall | None = None
        self._abandoned = threading.Event()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for the thread, or abandon the checkpoint after a second signal."""
        if isinstance(error, SignalExit):
            self._abandon()
            return
        try:
            self.wait()
        except Exception as failure:
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
        components, policy = self._components, self._components.policy
        weights, optimizer = weights_to_save(policy.model, self._ranks), components.optimizer.state()
        state = TrainedState(weights, optimizer, components.progress(step), components.ahead)
        check_savable(policy, state, self._folder.checkpoint_dir(step))
        self._pending = self._copied(state) if self._in_background and step < self._config.steps else None
        if self._pending is None:
            self._write(policy, state)

    def commit(self) -> None:
        """Write the copy of `prepare` in a thread; the step's line is in metrics.jsonl by now.

        Where `prepare` has written the checkpoint, remove the older ones.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            self._prune(self._ranks)
        else:
            self._call = BackgroundCall("checkpoint", partial(self._write_in_thread, pending))
            self._call.start()

    def check(self) -> None:
        """Raise the error of a write that has failed; do not wait for one in progress.

        All ranks must call this together: where the thread of one rank has ended, those of the others are about to.
        """
        if self._call is not None and self._ranks.any(not self._call.is_alive()):
            self.wait()

    def wait(self) -> None:
        """Wait until the pending checkpoint is on the disk. Raise the error of its write."""
        if (call := self._call) is not None:
            with Wait("the thread that writes a checkpoint", "see whether the disk answers", is_work=True):
                call.join()
            self._call = None
            call.finish()

    def save_on_stop(self, step: int) -> None:
        """Save the state after `step`, unless no step was done or the step has a checkpoint already."""
        self.wait()
        if step > 0 and self._ranks.on_main(lambda: step not in complete_checkpoints(self._folder).complete):
            self._in_background = False
            self.prepare(step)
            self.commit()

    def _prune(self, ranks: Ranks) -> None:
        """Remove the checkpoints that the settings do not keep."""
        ranks.on_main(lambda: prune_checkpoints(self._folder, self._config.checkpoint))

    def _copied(self, state: TrainedState) -> TrainedState | None:
        """Return a copy of `state`. Without enough memory warn, return None and take no further copies."""
        here = socket.gethostname()
        missing = self._ranks.gather((here, self._copy.missing_bytes(state)))
        needed = sum(size for host, size in missing if host == here)  # of all ranks on this machine
        available, copied = available_memory(), None
        if available is None or needed <= MAX_SHARE * available:
            with suppress(RuntimeError, MemoryError):  # torch's allocators raise RuntimeError
                copied = self._copy.take(state)
        if not self._ranks.any(copied is None):
            return copied
        self._in_background, self._copy = False, StateCopy()
        log.warning(
            "training waits for its checkpoints: to write them in the background takes a copy of %s MiB in memory%s",
            f"{needed / 2**20:,.0f}",
            "" if available is None else f", and {available / 2**20:,.0f} MiB are available",
        )
        return None

    def _write(self, policy: Policy, state: TrainedState) -> None:
        """Write a checkpoint; the lines of metrics.jsonl, which a resume needs, are flushed first."""
        policy.ranks.on_main(self._folder.sync_metrics)
        folder = self._folder.checkpoint_dir(state.progress.step)
        write_checkpoint(policy, state, folder, self._check_abandoned)

    def _write_in_thread(self, state: TrainedState) -> None:
        """Write the checkpoint of a copy and remove older ones."""
        device = self._components.policy.device
        if device.type == "cuda":
            # A new thread has GPU 0, and DCP synchronizes a stream of its thread's GPU: each rank would take memory of
            # GPU 0 for a context.
            torch.cuda.set_device(device)
        with suppress(AbandonedError):
            self._write(self._thread_policy, state)
            self._prune(self._thread_policy.ranks)

    def _abandon(self) -> None:
        """Give up the pending checkpoint and wait until the thread has removed its files."""
        self._abandoned.set()
        if self._call is not None:
            self._call.join()

    def _check_abandoned(self) -> None:
        """Raise AbandonedError if the checkpoint is given up."""
        if self._abandoned.is_set():
            raise AbandonedError("the checkpoint was given up")
