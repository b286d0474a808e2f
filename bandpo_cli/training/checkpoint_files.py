"""Files of a checkpoint: writing and loading the weights and the optimizer state.

A checkpoint is a Hugging Face model folder with a subfolder `trainer/` for the optimizer state and the progress. It
contains no pickle: tensors are safetensors, everything else is JSON. vLLM loads every *.safetensors file at the top
level of a model folder, so the optimizer state is one level below. `bandpo_cli.storage.checkpoints` defines when a
checkpoint is complete.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from bandpo_cli.errors import RunError, UserError, first_line
from bandpo_cli.models.load import Policy, save_policy
from bandpo_cli.storage.checkpoints import (
    STATE,
    TRAINER,
    Progress,
    delete_checkpoint,
    read_trainer_state,
    staging_folder,
    write_trainer_state,
)
from bandpo_cli.storage.files import apply_umask, sync_file, sync_folder
from bandpo_cli.training.optimizer import Optimizer
from bandpo_cli.training.update import check_finite_weights

OPTIMIZER = f"{TRAINER}/optimizer.safetensors"

RESERVED_BYTES = 64 * 2**20
"""Disk space reserved for tokenizer, config and file system overhead; the largest tokenizers take about 30 MB."""


def save_checkpoint(policy: Policy, optimizer: Optimizer, progress: Progress, folder: Path) -> None:
    """Write the checkpoint `folder`: into a hidden folder, flushed file by file, then renamed to its final name.

    Raises:
        NonFiniteError: weights are not finite.
        RunError: the disk is full or the files cannot be written. An existing checkpoint stays unchanged.
    """
    check_finite_weights(policy.model)
    state = optimizer.state()
    _check_disk_space(policy, state, folder)
    hidden = staging_folder(folder, "writing")
    try:
        (hidden / TRAINER).mkdir(parents=True)
        save_policy(policy, hidden)
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, hidden / OPTIMIZER)
        for path in hidden.rglob("*"):
            if path.is_dir():
                sync_folder(path)
            else:
                apply_umask(path)  # safetensors makes files that only their owner can read
                sync_file(path)
        write_trainer_state(hidden, progress)  # flushes its file itself
        sync_folder(hidden)
        if folder.exists():
            delete_checkpoint(folder)
        os.rename(hidden, folder)
        sync_folder(folder.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(hidden, ignore_errors=True)
        raise RunError(f"{folder}: the checkpoint cannot be written: {_reason(error)}") from error


def load_checkpoint(policy: Policy, optimizer: Optimizer, folder: Path) -> Progress:
    """Load weights and optimizer state from a checkpoint of the same model and return its progress.

    Raises:
        UserError: the checkpoint is damaged or belongs to another model.
    """
    progress = read_trainer_state(folder)
    try:
        saved = type(policy.model).from_pretrained(folder, dtype=policy.model.dtype, use_safetensors=True)
        # Copied into the existing tensors, because optimizer, masters and sampler hold references to them.
        policy.model.load_state_dict(saved.state_dict())
        state = load_file(folder / OPTIMIZER)
        optimizer.load_state(state, progress.updates, progress.skipped_in_a_row)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"{folder}: the checkpoint cannot be loaded: {_reason(error)}; remove {folder / STATE} to resume from the "
            "previous one"
        ) from None
    return progress


def _check_disk_space(policy: Policy, state: dict[str, torch.Tensor], folder: Path) -> None:
    """Raise RunError if the disk has less free space than the checkpoint needs."""
    weights = {each.data_ptr(): each for each in policy.model.state_dict().values()}  # tied tensors once
    needed = sum(each.nbytes for each in [*weights.values(), *state.values()]) + RESERVED_BYTES
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
