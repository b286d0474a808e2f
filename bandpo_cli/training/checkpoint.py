"""Checkpoints: the policy as a Hugging Face folder, and in a folder below it what training goes on from.

No pickle: tensors are safetensors, all else is JSON. vLLM loads every *.safetensors at the top of a model's folder, so
the optimizer's state lies one level below. See `bandpo_cli.tracking.checkpoints` for when one counts as whole.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from bandpo_cli.errors import RunError, UserError
from bandpo_cli.models.load import Policy, save_policy
from bandpo_cli.tracking.checkpoints import STATE, TRAINER, Progress, aside, discard, read_state, write_state
from bandpo_cli.tracking.files import sync_file, sync_folder
from bandpo_cli.training.nonfinite import check_weights
from bandpo_cli.training.optimizer import Optimizer

OPTIMIZER = f"{TRAINER}/optimizer.safetensors"

BESIDE_TENSORS = 64 * 2**20
"""Bytes left for tokenizer, config and the file system's own books; the largest tokenizers take some 30 MB."""


def save_checkpoint(policy: Policy, optimizer: Optimizer, progress: Progress, folder: Path) -> None:
    """Write the checkpoint `folder`: aside, flushed to the disk file by file, then renamed into place.

    Raises:
        NonFiniteError: there are weights that are no numbers.
        RunError: the disk has no room for it, or does not take it. What was there before is untouched.
    """
    check_weights(policy.model)
    state = optimizer.state()
    _check_room(policy, state, folder)
    hidden = aside(folder, "writing")
    try:
        (hidden / TRAINER).mkdir(parents=True)
        save_policy(policy, hidden)
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, hidden / OPTIMIZER)
        for path in hidden.rglob("*"):
            sync_folder(path) if path.is_dir() else sync_file(path)
        write_state(hidden, progress)  # which flushes itself
        sync_folder(hidden)
        if folder.exists():
            discard(folder)
        os.rename(hidden, folder)
        sync_folder(folder.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(hidden, ignore_errors=True)
        raise RunError(f"{folder}: the checkpoint cannot be written: {_reason(error)}") from error


def load_checkpoint(policy: Policy, optimizer: Optimizer, folder: Path) -> Progress:
    """Take over weights and optimizer state from a checkpoint of the same model; return how far it had come.

    Raises:
        UserError: the checkpoint is damaged, or of another model.
    """
    progress = read_state(folder)
    try:
        saved = type(policy.model).from_pretrained(folder, dtype=policy.model.dtype, use_safetensors=True)
        # Copied into the tensors that are there: optimizer, sampler and masters have hold of those.
        policy.model.load_state_dict(saved.state_dict())
        state = load_file(folder / OPTIMIZER)
        optimizer.load_state(state, progress.updates, progress.skipped_in_a_row)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"{folder}: cannot be gone on from: {_reason(error)}; remove {folder / STATE} to go on from the one before"
        ) from None
    return progress


def _check_room(policy: Policy, state: dict[str, torch.Tensor], folder: Path) -> None:
    """Raise RunError where the disk has less room than the checkpoint takes."""
    weights = {each.data_ptr(): each for each in policy.model.state_dict().values()}  # tied ones once
    takes = sum(each.nbytes for each in [*weights.values(), *state.values()]) + BESIDE_TENSORS
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < takes:
        raise RunError(
            f"no room for the checkpoint of {folder.name}: it takes {takes / 2**20:,.0f} MiB and {folder.parent} has "
            f"{free / 2**20:,.0f} MiB; make room, or keep fewer by checkpoint.keep_last and checkpoint.keep_best"
        )


def _reason(error: Exception) -> str:
    strerror = getattr(error, "strerror", None)
    return strerror or (str(error).strip() or type(error).__name__).splitlines()[0]
