"""Files of a checkpoint: writing and loading the weights and the optimizer state.

A checkpoint is a Hugging Face model folder with a subfolder `trainer/` for the optimizer state and the progress. It
contains no pickle: tensors are safetensors, everything else is JSON. vLLM loads every *.safetensors file at the top
level of a model folder, so the optimizer state is one level below: one file, or files with the shards of several ranks.
`bandpo_cli.storage.checkpoints` defines when a checkpoint is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from xxhash import xxh3_64

from bandpo_cli.errors import RunError, UserError, first_line, is_out_of_memory
from bandpo_cli.models.load import Policy, save_policy
from bandpo_cli.models.sharding import ShardError, read_shards, saved_shapes, write_shards
from bandpo_cli.models.weights import load_weights, weights_to_save
from bandpo_cli.ranks import Ranks
from bandpo_cli.storage.checkpoints import (
    STATE,
    TRAINER,
    Progress,
    delete_checkpoint,
    hidden_folder,
    read_trainer_state,
    staging_folder,
    write_trainer_state,
)
from bandpo_cli.storage.files import apply_umask, file_checksum, sync_file, sync_folder
from bandpo_cli.training.optimizer import Optimizer
from bandpo_cli.training.sampled_groups import SampledGroups, write_sampled
from bandpo_cli.training.update import check_finite_weights

OPTIMIZER = f"{TRAINER}/optimizer.safetensors"
SHARDS = f"{TRAINER}/optimizer"
"""Folder of the optimizer state that several ranks have written, in place of the file."""
ROLLOUTS = f"{TRAINER}/ahead/rollouts.safetensors"
"""The batch of the next step, where it is sampled ahead (`sampling.max_lag`); not in the folder of the optimizer state,
of which several ranks read all safetensors files."""

RESERVED_BYTES = 64 * 2**20
"""Disk space reserved for tokenizer, config and file system overhead; the largest tokenizers take about 30 MB."""

CHUNK_BYTES = 64 * 2**20
"""Bytes of the optimizer state that are written and flushed at a time: a fraction of a second on a local disk."""

_DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = list(_DTYPE_NAMES)
"""The order of tensors in a safetensors file: wide types first, then by name."""


class AbandonedError(RunError):
    """The run gave up a checkpoint while it was being written."""


@dataclass(frozen=True)
class TrainedState:
    """The tensors of a checkpoint: those in use, or a copy of them.

    Attributes:
        weights: what `weights_to_save` returns; tied weights share their memory. With several ranks, those that a
            checkpoint contains, on rank 0 only.
        optimizer: what `Optimizer.state` returns.
    """

    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, policy: Policy, optimizer: Optimizer) -> TrainedState:
        """Return the tensors in use, without a copy; of a sharded policy, `weights` is a copy on rank 0.

        All ranks must call this together.
        """
        return cls(weights_to_save(policy.model, policy.ranks), optimizer.state())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, of sharded ones those of all ranks; weights that share their memory count once."""
        distinct = {weight.data_ptr(): weight for weight in self.weights.values()}
        return sum(item.nbytes for item in (*distinct.values(), *self.optimizer.values()))


def _never_abandon() -> None:
    """Do nothing; the default of `check`."""


def save_checkpoint(policy: Policy, optimizer: Optimizer, progress: Progress, folder: Path) -> None:
    """Check the state and write it as the checkpoint `folder`; see `check_savable` and `write_checkpoint`."""
    state = TrainedState.of(policy, optimizer)
    check_savable(policy, state, folder)
    write_checkpoint(policy, state, progress, folder)


def check_savable(
    policy: Policy, state: TrainedState, folder: Path, ahead: SampledGroups | None = None
) -> None:
    """Check that the weights can be saved and that the disk has space for the checkpoint `folder`; write nothing.

    All ranks must call this together; an error on one of them is raised on all.

    Raises:
        NonFiniteError: weights are not finite.
        RunError: the disk has less free space than the checkpoint needs.
    """
    policy.ranks.agree(lambda: check_finite_weights(policy.model))
    nbytes = state.nbytes + (0 if ahead is None else ahead.nbytes)
    policy.ranks.on_main(lambda: _check_disk_space(nbytes, folder))


def write_checkpoint(
    policy: Policy,
    state: TrainedState,
    progress: Progress,
    folder: Path,
    check: Callable[[], None] = _never_abandon,
    ahead: SampledGroups | None = None,
) -> None:
    """Write the checkpoint `folder`: into a hidden folder, flushed file by file, then renamed to its final name.

    With several ranks, which must call this together, rank 0 writes the model and each rank its shards of the optimizer
    state; rank 0 renames the folder when all files are on the disk. An error on one rank is raised on all.

    Args:
        policy: the model's configuration and the tokenizer; the weights are those of `state`.
        check: called before each file and within large ones; raises AbandonedError to give up the checkpoint.
        ahead: the batch of the next step, where it was sampled ahead.

    Raises:
        RunError: the disk is full or the files cannot be written. An existing checkpoint stays unchanged, and the
            hidden folder is removed, as after any other exception.
    """
    ranks = policy.ranks
    hidden = hidden_folder(folder, "writing")
    checksums: dict[str, str] = {}
    try:
        ranks.on_main(partial(_write_model, policy, state, folder, check))
        if ranks.size == 1:
            with _write_errors(folder):
                checksums[OPTIMIZER] = write_tensors(hidden / OPTIMIZER, state.optimizer, check)
        else:
            _write_sharded_optimizer(state, folder, ranks)
        if ahead is not None:
            ranks.on_main(partial(_write_ahead, ahead, folder))
        for share in ranks.agree(partial(_flush, ranks, folder, check, frozenset(checksums))):
            checksums |= share
        ranks.on_main(partial(_complete, progress, checksums, folder, check))
    except BaseException:
        if ranks.is_main:
            shutil.rmtree(hidden, ignore_errors=True)
        raise


def _write_model(policy: Policy, state: TrainedState, folder: Path, check: Callable[[], None]) -> None:
    """Write the model folder of the checkpoint `folder` into its hidden folder, which is created."""
    with _write_errors(folder):
        hidden = staging_folder(folder, "writing")
        (hidden / TRAINER).mkdir(parents=True)
        save_policy(policy, hidden, state.weights)
        check()


def _write_ahead(ahead: SampledGroups, folder: Path) -> None:
    """Write the batch of the next step into the hidden folder of the checkpoint `folder`."""
    with _write_errors(folder):
        path = hidden_folder(folder, "writing") / ROLLOUTS
        path.parent.mkdir()
        write_sampled(path, ahead)


def _write_sharded_optimizer(state: TrainedState, folder: Path, ranks: Ranks) -> None:
    """Write the optimizer state of all ranks into the hidden folder of the checkpoint `folder`.

    Raises:
        RunError: a file cannot be written, or the ranks do not write to the same folder.
    """
    shards = hidden_folder(folder, "writing") / SHARDS
    with _write_errors(folder):
        write_shards(shards, state.optimizer, ranks)
    # Read by each rank after its write: on a file system that is not shared, a rank does not find all files.
    names = ranks.agree(lambda: sorted(path.name for path in shards.glob("*.safetensors")))
    if any(item != names[0] for item in names):
        rank = next(rank for rank, value in enumerate(names) if value != names[0])
        raise RunError(
            f"{folder}: the checkpoint cannot be written: rank {rank} has other files in {shards} than rank 0; the run "
            "folder must be on a file system that all machines share"
        )


def _flush(ranks: Ranks, folder: Path, check: Callable[[], None], known: Collection[str]) -> dict[str, str]:
    """Flush the files of the hidden folder and return the checksums of this rank's share of them, by name.

    Rank 0 flushes the files and reads the model folder, and each rank reads its own shards of the optimizer state. A
    thread reads them, mostly from the page cache, while the disk writes.

    Args:
        known: names of files whose checksums are known.
    """
    hidden = hidden_folder(folder, "writing")
    paths = sorted(hidden.rglob("*"))
    shards = [path for path in paths if path.parent == hidden / SHARDS]
    first, end = (len(shards) * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1))
    own = shards[first:end]  # the names begin with the number of the rank
    if ranks.is_main:
        others = [path for path in paths if path.is_file() and path not in shards]
        own += [path for path in others if path.relative_to(hidden).as_posix() not in known]
    with _write_errors(folder), ThreadPoolExecutor(1) as executor:
        read = partial(file_checksum, check=check)
        try:
            checksums: Iterator[str] = executor.map(read, own)
        except RuntimeError:  # the limit on threads is reached
            checksums = map(read, own)
        for path in paths if ranks.is_main else ():
            check()
            if path.is_dir():
                sync_folder(path)
            else:
                apply_umask(path)  # safetensors makes files that only their owner can read
                sync_file(path)
        return {
            path.relative_to(hidden).as_posix(): checksum
            for path, checksum in zip(own, checksums, strict=True)
        }


def _complete(
    progress: Progress, checksums: Mapping[str, str], folder: Path, check: Callable[[], None]
) -> None:
    """List the files of the hidden folder in `trainer/state.json` and rename the folder."""
    with _write_errors(folder):
        hidden = hidden_folder(folder, "writing")
        write_trainer_state(hidden, progress, checksums)  # flushes its file itself
        sync_folder(hidden)
        check()
        if os.path.lexists(folder):
            delete_checkpoint(folder)
        os.rename(hidden, folder)
        sync_folder(folder.parent)


@contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    """Raise RunError in one line in place of an error of the file system."""
    try:
        yield
    except (OSError, SafetensorError, ShardError) as error:
        raise RunError(f"{folder}: the checkpoint cannot be written: {_reason(error)}") from error


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], check: Callable[[], None] = _never_abandon
) -> str:
    """Write tensors of floating-point types as a safetensors file and return the `file_checksum` of the file.

    The bytes are those that `safetensors` writes. That function writes a file as a whole. This one writes and flushes
    it in chunks, so that `check` can give up a file of many GB, and a thread hashes the chunks meanwhile. Both release
    the interpreter's lock.

    Args:
        check: called before each chunk; what it raises ends the writing.
    """
    ordered = sorted(tensors.items(), key=lambda item: (_DTYPES.index(item[1].dtype), item[0]))
    header: dict[str, object] = {}
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start_of_file = len(text).to_bytes(8, "little") + text
    checksum, written = xxh3_64(start_of_file), 0
    with path.open("wb") as file, ThreadPoolExecutor(1) as hasher:
        has_thread = True
        try:
            hasher.submit(int)
        except RuntimeError:  # the limit on threads is reached
            has_thread = False
        file.write(start_of_file)
        for _, tensor in ordered:
            data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
            for start in range(0, len(data), CHUNK_BYTES):
                check()
                chunk = data[start : start + CHUNK_BYTES].data
                if has_thread:
                    hasher.submit(checksum.update, chunk)
                else:
                    checksum.update(chunk)
                written += file.write(chunk)
                if written >= CHUNK_BYTES:
                    file.flush()
                    os.fsync(file.fileno())
                    written = 0
    return checksum.hexdigest()


def load_checkpoint(policy: Policy, optimizer: Optimizer, folder: Path) -> Progress:
    """Load weights and optimizer state from a checkpoint of the same model and return its progress.

    The checkpoint may have been written by another number of ranks. All ranks must call this together; an error on one
    of them is raised on all.

    Raises:
        UserError: the checkpoint is damaged or belongs to another model.
    """
    ranks = policy.ranks
    progress = ranks.agree(lambda: read_trainer_state(folder))[0]
    with reading_errors(folder):
        # Copied into the existing tensors, because optimizer, masters and sampler hold references to them.
        load_weights(policy.model, folder, ranks)
        state = _saved_optimizer(optimizer, folder, ranks)
        optimizer.load_state(state, progress.updates, progress.skipped_in_a_row)
    return progress


@contextmanager
def reading_errors(folder: Path) -> Iterator[None]:
    """Raise UserError in one line in place of an error of a damaged file of the checkpoint `folder`."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, SafetensorError, ShardError) as error:
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"{folder}: the checkpoint cannot be loaded: {_reason(error)}; remove {folder / STATE} to resume from the "
            "previous one"
        ) from None


def _saved_optimizer(optimizer: Optimizer, folder: Path, ranks: Ranks) -> Mapping[str, torch.Tensor]:
    """Return the optimizer state of a checkpoint that one or more ranks have written; each rank reads its shards."""
    one_file = (folder / OPTIMIZER).exists()
    if ranks.size == 1 and one_file:
        return load_file(folder / OPTIMIZER)
    saved = folder / (TRAINER if one_file else SHARDS)
    state = ranks.agree(lambda: saved_shapes(saved))[0]
    targets = optimizer.empty_state(state)
    read_shards(saved, targets, ranks)
    return targets


def _check_disk_space(nbytes: int, folder: Path) -> None:
    """Raise RunError if the disk has less free space than a checkpoint with `nbytes` bytes of tensors needs."""
    needed = nbytes + RESERVED_BYTES
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise RunError(
            f"not enough disk space for the checkpoint {folder.name}: it takes {needed / 2**20:,.0f} MiB and "
            f"{folder.parent} has {free / 2**20:,.0f} MiB; free disk space, or keep fewer checkpoints "
            "(checkpoint.keep_last, checkpoint.keep_best)"
        )


def _reason(error: Exception) -> str:
    """Return the system's text of the error, else the first line of its message."""
    strerror = getattr(error, "strerror", None)
    return strerror or first_line(error, max_chars=500)
