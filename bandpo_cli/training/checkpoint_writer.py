"""Writer of a run's checkpoints: a copy of the state is written by a thread while training continues.

The order at a step with a checkpoint: the state is copied; the step's line is appended to metrics.jsonl; the thread
flushes metrics.jsonl, writes and renames the checkpoint, and removes older ones. So a visible checkpoint has its line
on the disk, and after a kill in between the run resumes from the checkpoint before. One checkpoint is written at a
time. That of the last step is written without a thread, before the step's line; so are all of them with
`checkpoint.background=false`, or where there is too little memory for the copy. Each of several ranks has a writer and
calls its methods in the same order.
"""

import copy
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from xxhash import xxh3_64

from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import RunError, SignalExit, log
from bandpo_cli.models.load import Policy, save_policy
from bandpo_cli.models.weights import ShardError, local_tensor, reason_of, weights_to_save, write_shards
from bandpo_cli.processes.ranks import Ranks
from bandpo_cli.processes.watch import Wait
from bandpo_cli.storage import checkpoints
from bandpo_cli.storage.files import apply_umask, file_checksum, sync
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.storage.run_record import available_memory
from bandpo_cli.training.build import Components
from bandpo_cli.training.rollout_batches import BackgroundCall, SampledGroups, write_sampled
from bandpo_cli.training.update import check_finite_weights

RESERVED_BYTES = 64 * 2**20
"""Disk space for tokenizer, config and file system overhead; the largest tokenizers take about 30 MB."""

CHUNK_BYTES = 64 * 2**20
"""Bytes of the optimizer state that are written and flushed at a time: a fraction of a second on a local disk."""

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Names of types in the order of the tensors in a safetensors file: wide types first, then by name."""

MAX_SHARE = 0.5
"""Largest share of the available memory that the copy may take: the next step needs memory, too."""


@dataclass(frozen=True)
class TrainedState:
    """The content of a checkpoint; the tensors are those in use, or a copy of them."""

    weights: Mapping[str, Tensor]  # of `weights_to_save`; tied ones share their memory
    optimizer: Mapping[str, Tensor]  # what `Optimizer.state` returns
    progress: checkpoints.Progress
    ahead: Sequence[SampledGroups] = ()  # the batches that are sampled ahead

    @property
    def nbytes(self) -> int:
        """Bytes of the checkpoint's tensors, of sharded ones those of all ranks; tied weights count once."""
        distinct = {weight.data_ptr(): weight for weight in self.weights.values()}
        ahead = sum(12 * batch.tokens + 128 * len(batch.completions) for batch in self.ahead)
        return ahead + sum(item.nbytes for item in (*distinct.values(), *self.optimizer.values()))


def check_savable(policy: Policy, state: TrainedState, folder: Path) -> None:
    """Check that the weights can be saved and that the disk has space; all ranks must call this together.

    Raises:
        NonFiniteError: weights are not finite.
        RunError: the disk has less free space than the checkpoint needs.
    """
    policy.ranks.agree(lambda: check_finite_weights(policy.model))
    needed = state.nbytes + RESERVED_BYTES

    def check_disk_space() -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(folder.parent).free) < needed:
            raise RunError(
                f"not enough disk space for the checkpoint {folder.name}: it takes {needed / 2**20:,.0f} MiB and "
                f"{folder.parent} has {free / 2**20:,.0f} MiB; free disk space, or keep fewer checkpoints "
                "(checkpoint.keep_last, checkpoint.keep_best)"
            )

    policy.ranks.on_main(check_disk_space)


def write_checkpoint(
    policy: Policy, state: TrainedState, folder: Path, check: Callable[[], None] = lambda: None
) -> None:
    """Write the checkpoint `folder`: into a hidden folder, flushed file by file, then renamed to its final name.

    All ranks must call this together: rank 0 writes the model and each rank its shards of the optimizer state. An error
    on one rank is raised on all. The weights are those of `state`.

    Args:
        check: called before each file and within large ones; what it raises gives up the checkpoint.

    Raises:
        RunError: the files cannot be written. An existing checkpoint stays, and the hidden folder is removed, as after
            any other exception.
    """
    ranks, hidden = policy.ranks, checkpoints.hidden_folder(folder, "writing")
    checksums: dict[str, str] = {}

    @_write_errors(folder)
    def write_files() -> None:
        checkpoints.remove_tree(hidden)  # that a crash left
        (hidden / checkpoints.TRAINER).mkdir(parents=True)
        save_policy(policy, hidden, state.weights)
        check()
        if state.ahead:
            (hidden / checkpoints.ROLLOUTS).parent.mkdir()
            write_sampled(hidden / checkpoints.ROLLOUTS, state.ahead)
        if ranks.size == 1:
            file = hidden / checkpoints.OPTIMIZER
            checksums[checkpoints.OPTIMIZER] = write_tensors(file, state.optimizer, check)

    @_write_errors(folder)
    def complete() -> None:
        for path in sorted(hidden.rglob("*")):
            check()
            if path.is_file():
                apply_umask(path)  # safetensors makes files that only their owner can read
            sync(path)
        checkpoints.write_trainer_state(hidden, state.progress, checksums)  # flushes its file itself
        sync(hidden)
        check()
        if os.path.lexists(folder):
            checkpoints.delete_checkpoint(folder)
        os.rename(hidden, folder)
        sync(folder.parent)

    try:
        ranks.on_main(write_files)
        if ranks.size > 1:
            checksums |= _write_sharded_optimizer(state, folder, ranks)
        ranks.on_main(complete)
    except BaseException:
        if ranks.is_main:
            shutil.rmtree(hidden, ignore_errors=True)
        raise


def _write_sharded_optimizer(state: TrainedState, folder: Path, ranks: Ranks) -> dict[str, str]:
    """Write the optimizer state of all ranks into the hidden folder; return the checksums of the files by name."""
    shards = checkpoints.hidden_folder(folder, "writing") / checkpoints.SHARDS
    with _write_errors(folder):
        write_shards(shards, state.optimizer, ranks)
    # Read by each rank after its write: on a file system that is not shared, a rank does not find all files.
    names, *others = ranks.agree(lambda: sorted(path.name for path in shards.glob("*.safetensors")))
    for rank in (rank for rank, value in enumerate(others, start=1) if value != names):
        raise RunError(
            f"{folder}: the checkpoint cannot be written: rank {rank} has other files in {shards} than rank 0; "
            "the run folder must be on a file system that all machines share"
        )

    @_write_errors(folder)
    def checksums() -> dict[str, str]:
        own = names[ranks.share(len(names))]
        return {f"{checkpoints.SHARDS}/{name}": file_checksum(shards / name) for name in own}

    return {name: value for part in ranks.agree(checksums) for name, value in part.items()}


@contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    """Raise RunError in one line in place of an error of the file system."""
    try:
        yield
    except (OSError, SafetensorError, ShardError) as error:
        raise RunError(f"{folder}: the checkpoint cannot be written: {reason_of(error)}") from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor], check: Callable[[], None] = lambda: None) -> str:
    """Write tensors of floating-point types as a safetensors file and return the `file_checksum` of the file.

    The bytes are those of `safetensors.torch.save_file`, which writes a file in one call. This function writes and
    flushes chunks, so that `check`, called before each of them, can give up a file of many GB.
    """
    ordered = sorted(tensors.items(), key=lambda item: ([*_DTYPES].index(item[1].dtype), item[0]))
    header: dict[str, object] = {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        dtype = _DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start_of_file = len(text).to_bytes(8, "little") + text
    checksum, written = xxh3_64(start_of_file), 0
    with path.open("wb") as file:
        file.write(start_of_file)
        for _, tensor in ordered:
            data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
            for start in range(0, len(data), CHUNK_BYTES):
                check()
                chunk = data[start : start + CHUNK_BYTES].data
                checksum.update(chunk)
                written += file.write(chunk)
                if written >= CHUNK_BYTES:
                    file.flush()
                    os.fsync(file.fileno())
                    written = 0
    return checksum.hexdigest()


class AbandonedError(RunError):
    """The run gave up a checkpoint while it was being written."""


class StateCopy:
    """Copy of a training state in host memory, pinned where the state is on a GPU.

    Its tensors are allocated once and overwritten by each copy; the state must keep its tensors in their places. Each
    of several ranks copies its shards of the optimizer state, on `mesh`, but not the weights, which are in host memory.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self._mesh = mesh
        self._copies: dict[Hashable, Tensor] = {}

    def missing_bytes(self, state: TrainedState) -> int:
        """Return the bytes that `take` would allocate; torch allocates pinned memory in powers of two."""
        return sum(
            1 << (item.nbytes - 1).bit_length() if item.device.type == "cuda" else item.nbytes
            for place, item in _by_place(state).items()
            if place not in self._copies
        )

    def take(self, state: TrainedState) -> TrainedState:
        """Copy `state` and return the copy. Raises RuntimeError or MemoryError if there is not enough memory."""
        tensors = _by_place(state)
        for place, tensor in tensors.items():
            if place not in self._copies:
                pinned = tensor.device.type == "cuda"
                self._copies[place] = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
            self._copies[place].copy_(tensor.detach(), non_blocking=True)
        for device in {tensor.device for tensor in tensors.values()}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the copies to pinned memory are asynchronous
        weights = {name: self._copies.get(_place(item), item) for name, item in state.weights.items()}
        optimizer = {name: self._copy_of(item) for name, item in state.optimizer.items()}
        return replace(state, weights=weights, optimizer=optimizer)

    def _copy_of(self, tensor: Tensor) -> Tensor:
        """Return the copy of a tensor; that of this rank's shard of a DTensor is a DTensor in host memory."""
        copied = self._copies[_place(local_tensor(tensor))]
        if not isinstance(tensor, DTensor):
            return copied
        mesh, shape, stride = self._mesh or tensor.device_mesh, tensor.shape, tensor.stride()
        return DTensor.from_local(copied, mesh, tensor.placements, shape=shape, stride=stride)


def _place(tensor: Tensor) -> Hashable:
    """Return device, address, shape and type of a tensor: what tied weights have in common."""
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.dtype


def _by_place(state: TrainedState) -> dict[Hashable, Tensor]:
    """Return the tensors of this rank that are to be copied, tied weights once."""
    is_sharded = any(isinstance(tensor, DTensor) for tensor in state.optimizer.values())
    weights = () if is_sharded else state.weights.values()
    return {_place(tensor): tensor for tensor in (*weights, *map(local_tensor, state.optimizer.values()))}


class CheckpointWriter(AbstractContextManager["CheckpointWriter"]):
    """Writes the checkpoints of a run; a context manager, within which the run is trained.

    `prepare` comes before the step's line, `commit` after it. At the end of the block the writer waits for the thread,
    also after an exception; only a second signal (`SignalExit`) abandons the checkpoint. An error in the thread is
    raised by the next call or at the end of the block; where another exception ends the block, it is logged.
    """

    def __init__(self, config: RunConfig, components: Components, folder: RunFolder) -> None:
        self._config, self._components, self._folder = config, components, folder
        self._ranks, self._thread_policy = components.policy.ranks, components.policy
        self._copy: StateCopy | None = None  # None where training waits for the checkpoints
        if config.checkpoint.copies_memory(config.steps):
            tokenizer = copy.deepcopy(components.policy.tokenizer)  # it refuses calls from two threads
            ranks = self._ranks.for_thread()
            self._thread_policy = replace(components.policy, tokenizer=tokenizer, ranks=ranks)
            on_gpus = ranks.size > 1 and components.policy.device.type == "cuda"
            self._copy = StateCopy(init_device_mesh("cpu", (ranks.size,)) if on_gpus else None)
        self._pending: TrainedState | None = None  # the copy of `prepare`
        self._call: BackgroundCall | None = None
        self._abandoned = threading.Event()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for the thread, or abandon the checkpoint after a second signal."""
        try:
            if isinstance(error, SignalExit):
                raise error
            self.wait()
        except Exception as failure:
            if error is None:
                raise
            log.warning("%s", failure)
        except BaseException:  # a second signal, perhaps during the wait
            self._abandoned.set()
            if self._call is not None:
                self._call.join()  # the thread removes its files
            raise

    def prepare(self, step: int) -> None:
        """Copy the state after `step`, or write its checkpoint at once; wait for the one before.

        Raises:
            NonFiniteError, RunError: see `check_savable` and `write_checkpoint`.
        """
        self.wait()
        components, policy = self._components, self._components.policy
        weights, optimizer = weights_to_save(policy.model, self._ranks), components.optimizer.state()
        state = TrainedState(weights, optimizer, components.progress(step), (*components.ahead,))
        check_savable(policy, state, self._folder.checkpoint_dir(step))
        self._pending = self._copied(state) if step < self._config.steps else None
        if self._pending is None:
            self._write(policy, state)

    def commit(self) -> None:
        """Write the copy in a thread, now that the step's line is in metrics.jsonl; without one, remove older ones."""
        pending, self._pending = self._pending, None
        if pending is None:
            self._ranks.on_main(lambda: checkpoints.prune_checkpoints(self._folder, self._config.checkpoint))
        else:
            self._call = BackgroundCall("checkpoint", partial(self._write_in_thread, pending))
            self._call.start()

    def check(self) -> None:
        """Raise the error of a write that has failed, on all ranks; do not wait for one in progress."""
        # Where the thread of one rank has ended, those of the others are about to.
        if self._call is not None and any(self._ranks.gather(not self._call.is_alive())):
            self.wait()

    def wait(self) -> None:
        """Wait until the pending checkpoint is on the disk. Raise the error of its write."""
        if (call := self._call) is not None:
            with Wait("the thread that writes a checkpoint", "see whether the disk answers", is_work=True):
                call.join()
            self._call = None
            call.finish()

    def save_on_stop(self, step: int) -> None:
        """Save the state after `step`, unless no step was done or it has a checkpoint already."""
        self.wait()
        saved = self._ranks.on_main(lambda: checkpoints.complete_checkpoints(self._folder).complete)
        if step > 0 and step not in saved:
            self._copy = None
            self.prepare(step)
            self.commit()

    def _copied(self, state: TrainedState) -> TrainedState | None:
        """Return a copy of `state` to write in the background, or None; warn once if there is too little memory."""
        if self._copy is None:
            return None
        here = socket.gethostname()
        missing = self._ranks.gather((here, self._copy.missing_bytes(state)))
        needed = sum(size for host, size in missing if host == here)  # of all ranks on this machine
        available, copied = available_memory(), None
        if available is None or needed <= MAX_SHARE * available:
            with suppress(RuntimeError, MemoryError):  # torch's allocators raise RuntimeError
                copied = self._copy.take(state)
        if not any(self._ranks.gather(copied is None)):
            return copied
        self._copy = None
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
        policy = self._thread_policy
        if policy.device.type == "cuda":
            # A new thread has GPU 0, and DCP synchronizes a stream of its thread's GPU: each rank would take memory of
            # GPU 0 for a context.
            torch.cuda.set_device(policy.device)
        with suppress(AbandonedError):
            self._write(policy, state)
            policy.ranks.on_main(lambda: checkpoints.prune_checkpoints(self._folder, self._config.checkpoint))

    def _check_abandoned(self) -> None:
        if self._abandoned.is_set():
            raise AbandonedError("the checkpoint was given up")
