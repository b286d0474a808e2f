"""Components of a run: building them from the config, and saving and loading checkpoints.

A checkpoint is a Hugging Face model folder with a subfolder `trainer/` for the optimizer state and the progress. It
contains no pickle: tensors are safetensors, everything else is JSON. vLLM loads every *.safetensors file at the top
level of a model folder, so the optimizer state is one level below. `bandpo_cli.storage.checkpoints` defines when a
checkpoint is complete.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import RunError, UserError, first_line
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.models.load import Policy, frozen_copy, load_policy, save_policy
from bandpo_cli.sampling.base import Sampler, SamplingParams, build_sampler
from bandpo_cli.sampling.rollouts import (
    PromptEncoder,
    check_context_length,
    drop_long_prompts,
    drop_long_prompts_in_sets,
)
from bandpo_cli.seeds import derive_seed
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
from bandpo_cli.tasks.base import ProblemStream, Task
from bandpo_cli.training.optimizer import Optimizer
from bandpo_cli.training.update import check_finite_weights
from bandpo_cli.types import Problem

OPTIMIZER = f"{TRAINER}/optimizer.safetensors"

RESERVED_BYTES = 64 * 2**20
"""Disk space reserved for tokenizer, config and file system overhead; the largest tokenizers take about 30 MB."""


@dataclass(frozen=True)
class Components:
    """The objects that the training loop uses.

    Attributes:
        policy: the model being trained, with its tokenizer.
        reference: a frozen copy of the initial policy for the KL penalty; None without `objective.reference_kl`.
        encoder: converts prompts to tokens.
        stream: the training problems in the order of the run's seed.
        heldout: the problems of each evaluation set, by label.
        grader: the worker processes that grade completions.
        sampler: the sampling engine, with the policy's weights.
        optimizer: the optimizer of the policy's weights.
        params: sampling parameters of training.
        problems_digest: hash of the problems of `stream` and `heldout`.
        notes: messages about the data for the user, one line each.
    """

    policy: Policy
    reference: Policy | None
    encoder: PromptEncoder
    stream: ProblemStream
    heldout: Mapping[str, Sequence[Problem]]
    grader: GraderPool
    sampler: Sampler
    optimizer: Optimizer
    params: SamplingParams
    problems_digest: str
    notes: list[str]

    def progress(self, step: int) -> Progress:
        """Return the progress of the run after `step`."""
        return Progress(
            step=step,
            updates=self.optimizer.update,
            skipped_in_a_row=self.optimizer.skipped_in_a_row,
            position=self.stream.position,
            problems=self.problems_digest,
        )

    def resume_from(self, checkpoint: Path) -> Progress:
        """Load the state of a checkpoint of the same run; the reference stays the initial policy.

        Raises:
            UserError: the checkpoint is damaged or belongs to another model, or the problems are not those of the run.
            StaleEngineError: the weights could not be sent to the sampler.
        """
        progress = load_checkpoint(self.policy, self.optimizer, checkpoint)
        if progress.problems != self.problems_digest:
            raise UserError(
                f"{checkpoint}: the run trained on other problems than its task has now and cannot be resumed; "
                "restore the original data, or start a new run"
            )
        self.stream.position = progress.position
        self.sampler.sync(self.policy.model, progress.updates)
        return progress

    def close(self) -> None:
        """Shut down the sampling engine and the grading processes."""
        self.sampler.close()
        self.grader.close()


def build_components(config: RunConfig, task: Task) -> Components:
    """Load the model and build all components from the config.

    Raises:
        UserError: the model or the data cannot be loaded, or a prompt limit leaves no problem.
    """
    torch.manual_seed(config.seed)
    policy = load_policy(config.model)
    check_context_length(policy, config)
    encoder = PromptEncoder(policy.tokenizer, config.model.prompts)
    notes: list[str] = []
    train = drop_long_prompts(encoder, "training", task.train_problems(), config, notes)
    heldout = drop_long_prompts_in_sets(encoder, task.heldout_sets(), config, notes)
    # Copy the reference before the optimizer and the sampler allocate memory.
    reference = replace(policy, model=frozen_copy(policy)) if config.objective.reference_kl > 0 else None
    sampling = config.sampling
    return Components(
        policy=policy,
        reference=reference,
        encoder=encoder,
        stream=ProblemStream(train, derive_seed(config.seed, "problems")),
        heldout=heldout,
        grader=GraderPool(config.grading),
        sampler=build_sampler(config, policy),
        optimizer=Optimizer(policy.model, config.optim, config.steps * config.optim.updates),
        params=SamplingParams(
            sampling.samples, sampling.temperature, sampling.max_tokens, policy.stop_ids, entropy=True
        ),
        problems_digest=_problems_digest(train, heldout),
        notes=notes,
    )


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


def _problems_digest(train: Sequence[Problem], heldout: Mapping[str, Sequence[Problem]]) -> str:
    """Return a hash of all problems in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for label, problems in (("", train), *heldout.items()):
        digest.update(f"{label}\n".encode())
        for problem in problems:
            digest.update(
                f"{problem.id}\n{problem.prompt}\n{problem.answer}\n".encode(errors="surrogatepass")
            )
    return digest.hexdigest()
