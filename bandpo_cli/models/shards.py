"""Sharded tensors on disk: safetensors files written and read by torch.distributed.checkpoint (DCP).

Each rank writes files with its own shards; the header of a file says at which offsets of the complete tensors they
begin. A file without that header, such as those of a model folder, holds complete tensors. Ranks of any number read the
files of a folder, each rank only the parts that its own shards need. There is no pickle: the writer of Hugging Face's
format leaves out DCP's `.metadata`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from bandpo_cli.errors import first_line
from bandpo_cli.ranks import Ranks

FILE_BYTES = 2**30
"""Bytes of a rank's shards per file. The writer holds a copy of one file in host memory."""


class ShardError(Exception):
    """Shards could not be written or read on a rank; raised on every rank, with the rank's error as the cause."""


def write_shards(folder: Path, tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
    """Write the shards of all ranks into `folder` and flush them to the disk; all ranks must call this together.

    Args:
        folder: an empty folder that all ranks share.
        tensors: DTensors, of which each rank writes its shard, and tensors that are equal on all ranks, which one rank
            writes. The names are the same on every rank.

    Raises:
        ShardError: a rank failed to write.
    """
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=_file_numbers(tensors, ranks), save_distributed=True
    )
    with _shard_errors(ranks):
        save(dict(tensors), storage_writer=writer, process_group=ranks.group)


def saved_shapes(folder: Path) -> dict[str, torch.Size]:
    """Return the shape of every complete tensor in the safetensors files of a folder, by name.

    Raises:
        OSError, SafetensorError, ValueError, KeyError: a file is missing or damaged.
    """
    saved = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    shapes: dict[str, torch.Size] = {}
    for name, value in saved.items():
        assert isinstance(value, TensorStorageMetadata)
        # DCP leaves parts of a target unchanged that no file has.
        if sum(chunk.sizes.numel() for chunk in value.chunks) != value.size.numel():
            raise ValueError(f"{folder}: parts of {name} are missing")
        shapes[name] = value.size
    return shapes


def read_shards(folder: Path, targets: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
    """Read tensors from the safetensors files of a folder into `targets`; all ranks must call this together.

    Args:
        targets: tensors by their name in the files, which are converted to the dtype of the target. Of a DTensor, each
            rank reads its shard.

    Raises:
        ShardError: a rank failed to read, for example a tensor that is missing, damaged or of another shape.
    """
    reader = HuggingFaceStorageReader(str(folder))
    alone = ranks.size == 1
    with _shard_errors(ranks), warnings.catch_warnings():
        if alone:  # DCP warns of what is intended
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(dict(targets), storage_reader=reader, no_dist=alone)


def _file_numbers(tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> dict[str, int]:
    """Return the number of the file, from 1, for the shards of each tensor: about `FILE_BYTES` per rank and file."""
    numbers, number, used = {}, 1, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size() // ranks.size
        if used and used + size > FILE_BYTES:
            number, used = number + 1, 0
        numbers[name] = number
        used += size
    return numbers


@contextmanager
def _shard_errors(ranks: Ranks) -> Iterator[None]:
    """Raise ShardError in place of DCP's own error, which has the tracebacks of all ranks.

    A signal on this rank is raised as what it was.
    """
    try:
        yield
    except CheckpointException as error:
        failures = {rank: cause for rank, (cause, _) in error.failures.items()}
        own = failures.get(ranks.rank)
        if own is not None and not isinstance(own, Exception):
            raise own from None
        rank, cause = min(failures.items(), key=lambda item: item[0])
        reason = getattr(cause, "strerror", None) or first_line(cause, max_chars=500)
        raise ShardError(f"{reason} (rank {rank})" if ranks.size > 1 else reason) from cause
