"""Files of a checkpoint: writing and loading the weights, the optimizer state, and rollouts sampled ahead.

A checkpoint is a Hugging Face model folder with a subfolder `trainer/` for the optimizer state and the progress. It
contains no pickle: tensors are safetensors, everything else is JSON. vLLM loads every *.safetensors file at the top
level of a model folder, so the optimizer state is one level below: one file, or files with the shards of several ranks.
`bandpo_cli.storage.checkpoints` defines when a checkpoint is complete.

A batch that was sampled ahead cannot be sampled again after a resume: it is from the weights before those of the
checkpoint. Its file has what sampling and grading gave; problems and prompts follow from their place in the stream,
texts from the tokens.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice, pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase
from xxhash import xxh3_64

from bandpo_cli.config.run import RewardConfig
from bandpo_cli.errors import RunError, UserError, find_out_of_memory, first_line
from bandpo_cli.models.load import Policy
from bandpo_cli.models.weights import (
    ShardError,
    load_weights,
    read_shards,
    save_policy,
    saved_shapes,
    write_shards,
)
from bandpo_cli.processes.ranks import Ranks
from bandpo_cli.sampling.prompt_encoding import PromptEncoder
from bandpo_cli.sampling.rollouts import decode_completions, graded_groups
from bandpo_cli.storage.checkpoints import (
    ROLLOUTS,
    STATE,
    TRAINER,
    Progress,
    delete_checkpoint,
    hidden_folder,
    read_trainer_state,
    remove_tree,
    write_trainer_state,
)
from bandpo_cli.storage.files import apply_umask, file_checksum, sync
from bandpo_cli.tasks.task import ProblemStream
from bandpo_cli.training.optimizer import Optimizer
from bandpo_cli.training.update import check_finite_weights
from bandpo_cli.types import Completion, Conversation, Grade, Group, Insertion

OPTIMIZER = f"{TRAINER}/optimizer.safetensors"
SHARDS = f"{TRAINER}/optimizer"
"""Folder of the optimizer state that several ranks have written, in place of the file."""

RESERVED_BYTES = 64 * 2**20
"""Disk space reserved for tokenizer, config and file system overhead; the largest tokenizers take about 30 MB."""

CHUNK_BYTES = 64 * 2**20
"""Bytes of the optimizer state that are written and flushed at a time: a fraction of a second on a local disk."""

_DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = list(_DTYPE_NAMES)
"""The order of tensors in a safetensors file: wide types first, then by name."""


class BackgroundCall(threading.Thread):
    """A call in a thread; without a further thread (the system limits their number) `start` makes the call itself.

    Assign the object to a variable before `start`, because a signal may come while the thread starts.
    """

    def __init__(self, name: str, call: Callable[[], object], daemon: bool = False) -> None:
        super().__init__(name=name, daemon=daemon)
        self._call = call
        self._error: BaseException | None = None

    def start(self) -> None:
        """Start the call."""
        try:
            super().start()
        except RuntimeError:
            self.run()

    def run(self) -> None:
        """Make the call and keep its error, for the thread that trains."""
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001
            self._error = error

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the call, at most `timeout` seconds; return at once if no thread has started."""
        if self.ident is not None:
            super().join(timeout)

    def finish(self) -> None:
        """Wait for the end of the call and raise its error."""
        self.join()
        if self._error is not None:
            raise self._error


@dataclass(frozen=True)
class SampledGroups:
    """The graded rollouts of a step.

    Attributes:
        step: the step that trains on them.
        version: number of optimizer updates of the weights that sampled them.
        position: place of their first problem in the stream of training problems.
        seconds: the time that sampling took; 0 after a resume, for which it is not stored.
        groups: the groups that the step trains on, `sampling.prompts` of them.
        sampled: all groups sampled for the step, of consecutive problems, also those that dynamic sampling dropped.
    """

    step: int
    version: int
    position: int
    seconds: float
    groups: Sequence[Group]
    sampled: Sequence[Group]

    @property
    def nbytes(self) -> int:
        """Approximate size of the file that `write_sampled` writes, in bytes."""
        completions = [rollout.completion for group in self.sampled for rollout in group.rollouts_G]
        return sum(12 * len(completion.token_ids) + 128 for completion in completions)


@dataclass(frozen=True)
class TrainedState:
    """The content of a checkpoint; the tensors are those in use, or a copy of them.

    Attributes:
        weights: what `weights_to_save` returns; tied weights share their memory. With several ranks, those that a
            checkpoint contains, on rank 0 only.
        optimizer: what `Optimizer.state` returns.
        progress: the progress of the run.
        ahead: the batch of the next step, where it was sampled ahead.
    """

    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    progress: Progress
    ahead: SampledGroups | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, of sharded ones those of all ranks; weights that share their memory count once."""
        distinct = {weight.data_ptr(): weight for weight in self.weights.values()}
        return sum(item.nbytes for item in (*distinct.values(), *self.optimizer.values()))


def check_savable(policy: Policy, state: TrainedState, folder: Path) -> None:
    """Check that the weights can be saved and that the disk has space for the checkpoint `folder`; write nothing.

    All ranks must call this together; an error on one of them is raised on all.

    Raises:
        NonFiniteError: weights are not finite.
        RunError: the disk has less free space than the checkpoint needs.
    """
    policy.ranks.agree(lambda: check_finite_weights(policy.model))
    needed = state.nbytes + (0 if state.ahead is None else state.ahead.nbytes) + RESERVED_BYTES

    def check_disk_space() -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if free < needed:
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

    With several ranks, which must call this together, rank 0 writes the model and each rank its shards of the optimizer
    state; rank 0 renames the folder when all files are on the disk. An error on one rank is raised on all.

    Args:
        policy: the model's configuration and the tokenizer; the weights are those of `state`.
        check: called before each file and within large ones; what it raises gives up the checkpoint.

    Raises:
        RunError: the disk is full or the files cannot be written. An existing checkpoint stays unchanged, and the
            hidden folder is removed, as after any other exception.
    """
    ranks, hidden = policy.ranks, hidden_folder(folder, "writing")
    checksums: dict[str, str] = {}

    @_write_errors(folder)
    def write_files() -> None:
        remove_tree(hidden)  # that a crash left
        (hidden / TRAINER).mkdir(parents=True)
        save_policy(policy, hidden, state.weights)
        check()
        if state.ahead is not None:
            (hidden / ROLLOUTS).parent.mkdir()
            write_sampled(hidden / ROLLOUTS, state.ahead)
        if ranks.size == 1:
            checksums[OPTIMIZER] = write_tensors(hidden / OPTIMIZER, state.optimizer, check)

    @_write_errors(folder)
    def complete() -> None:
        for path in sorted(hidden.rglob("*")):
            check()
            if path.is_file():
                apply_umask(path)  # safetensors makes files that only their owner can read
            sync(path)
        write_trainer_state(hidden, state.progress, checksums)  # flushes its file itself
        sync(hidden)
        check()
        if os.path.lexists(folder):
            delete_checkpoint(folder)
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
    shards = hidden_folder(folder, "writing") / SHARDS
    with _write_errors(folder):
        write_shards(shards, state.optimizer, ranks)
    # Read by each rank after its write: on a file system that is not shared, a rank does not find all files.
    names, *others = ranks.agree(lambda: sorted(path.name for path in shards.glob("*.safetensors")))
    for rank, value in enumerate(others, start=1):
        if value != names:
            raise RunError(
                f"{folder}: the checkpoint cannot be written: rank {rank} has other files in {shards} than rank 0; "
                "the run folder must be on a file system that all machines share"
            )

    @_write_errors(folder)
    def checksums() -> dict[str, str]:
        return {f"{SHARDS}/{name}": file_checksum(shards / name) for name in ranks.share(names)}

    return {name: value for part in ranks.agree(checksums) for name, value in part.items()}


@contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    """Raise RunError in one line in place of an error of the file system."""
    try:
        yield
    except (OSError, SafetensorError, ShardError) as error:
        raise RunError(f"{folder}: the checkpoint cannot be written: {_reason(error)}") from error


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], check: Callable[[], None] = lambda: None
) -> str:
    """Write tensors of floating-point types as a safetensors file and return the `file_checksum` of the file.

    The bytes are those of `safetensors.torch.save_file`, which writes a file in one call. This function writes and
    flushes chunks, so that `check`, called before each of them, can give up a file of many GB. A thread hashes the
    chunks meanwhile: both release the interpreter's lock.
    """
    ordered = sorted(tensors.items(), key=lambda item: (_DTYPES.index(item[1].dtype), item[0]))
    header: dict[str, object] = {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        dtype = _DTYPE_NAMES[tensor.dtype]
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
                hashing = BackgroundCall("checksum", partial(checksum.update, chunk))
                hashing.start()
                written += file.write(chunk)
                if written >= CHUNK_BYTES:
                    file.flush()
                    os.fsync(file.fileno())
                    written = 0
                hashing.finish()
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
        one_file = (folder / OPTIMIZER).exists()
        if ranks.size == 1 and one_file:
            state = load_file(folder / OPTIMIZER)
        else:  # each rank reads its shards
            saved = folder / (TRAINER if one_file else SHARDS)
            state = optimizer.empty_state(ranks.agree(lambda: saved_shapes(saved))[0])
            read_shards(saved, state, ranks)
        optimizer.load_state(state, progress.updates, progress.skipped_in_a_row)
    return progress


@contextmanager
def reading_errors(folder: Path) -> Iterator[None]:
    """Raise UserError in one line in place of an error of a damaged file of the checkpoint `folder`."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, SafetensorError, ShardError) as error:
        if find_out_of_memory(error):
            raise
        raise UserError(
            f"{folder}: the checkpoint cannot be loaded: {_reason(error)}; remove {folder / STATE} to resume from the "
            "previous one"
        ) from None


def write_sampled(path: Path, batch: SampledGroups) -> None:
    """Write a batch as a safetensors file: a tensor per value of the tokens, the rest as JSON in its metadata."""
    rollouts = [rollout for group in batch.sampled for rollout in group.rollouts_G]
    completions = [rollout.completion for rollout in rollouts]
    tensors = {
        "lengths": torch.tensor([len(completion.token_ids) for completion in completions], dtype=torch.int32),
        "token_ids": _joined(completion.token_ids for completion in completions),
        "logprobs": _joined(completion.logprobs for completion in completions),
        "entropies": _joined(completion.entropies for completion in completions),
    }
    indices = {id(group): index for index, group in enumerate(batch.sampled)}
    metadata = {
        "step": batch.step,
        "version": batch.version,
        "position": batch.position,
        "trained": [indices[id(group)] for group in batch.groups],
        "group_sizes": [len(group.rollouts_G) for group in batch.sampled],
        "finish_reasons": [completion.finish_reason for completion in completions],
        "grades": [[*vars(rollout.grade).values()] for rollout in rollouts],
        "inserted": [completion.inserted for completion in completions],
        "conversations": [
            None if item.conversation is None else vars(item.conversation) for item in completions
        ],
    }
    save_file(tensors, path, {"rollouts": json.dumps(metadata)})


def read_sampled(
    path: Path, stream: ProblemStream, encoder: PromptEncoder, tokenizer: PreTrainedTokenizerBase
) -> SampledGroups:
    """Return the batch that `write_sampled` wrote, with its problems, prompts and texts.

    Raises:
        OSError, ValueError, LookupError, TypeError, SafetensorError: the file is damaged.
    """
    with safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()["rollouts"])
        names = ("lengths", "token_ids", "logprobs", "entropies")
        lengths, tokens, logprobs, entropies = (file.get_tensor(name).tolist() for name in names)
    spans = pairwise(accumulate(lengths, initial=0))
    columns = (
        metadata.get(name, [()] * len(lengths)) for name in ("finish_reasons", "inserted", "conversations")
    )
    about, version = zip(spans, *columns, strict=True), metadata["version"]
    completions = [
        Completion(
            tokens[start:end],
            logprobs[start:end],
            reason,
            version,
            entropies[start:end],
            tuple(Insertion(place, tuple(ids)) for place, ids in inserted),
            Conversation(**turns | {"messages": tuple(turns["messages"])}) if turns else None,
        )
        for (start, end), reason, inserted, turns in about
    ]
    texts = decode_completions(tokenizer, [completions])
    grades = [Grade(*values) for values in metadata["grades"]]
    answers = iter(completions)
    completions_PG = [[*islice(answers, size)] for size in metadata["group_sizes"]]
    problems = stream.take(metadata["position"], len(completions_PG))
    # The rewards are shaped already.
    unshaped = RewardConfig(), 0
    sampled = graded_groups(problems, encoder.encode(problems), completions_PG, texts, grades, *unshaped)
    groups = [sampled[index] for index in metadata["trained"]]
    step, position = metadata["step"], metadata["position"]
    return SampledGroups(step, version, position, 0.0, groups, sampled)


def _joined(arrays: Iterable[array[int] | array[float]]) -> torch.Tensor:
    """Return the concatenated arrays, [N] int32 or float32."""
    return torch.from_numpy(np.concatenate([np.asarray(values) for values in arrays]))


def _reason(error: Exception) -> str:
    """Return the system's text of the error, else the first line of its message."""
    return getattr(error, "strerror", None) or first_line(error, max_chars=500)
