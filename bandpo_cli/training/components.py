"""Checkpoints: the policy as a Hugging Face folder, and in a folder below it what training goes on from.

No pickle: tensors are safetensors, all else is JSON. vLLM loads every *.safetensors at the top of a model's folder, so
the optimizer's state lies one level below. See `bandpo_cli.storage.checkpoints` for when one counts as whole.
"""

# MERGED: What a run is built of.
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

from bandpo_cli.bounds import ratio_bounds
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import RunError, UserError
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.models.load import Policy, frozen_copy, load_policy, save_policy
from bandpo_cli.sampling.engines import Sampler, SamplingParams, build_sampler
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
from bandpo_cli.storage.files import sync_file, sync_folder
from bandpo_cli.tasks.base import ProblemStream, Task
from bandpo_cli.training.experience import BoundsOf
from bandpo_cli.training.optimizer import Optimizer
from bandpo_cli.training.update import check_finite_weights
from bandpo_cli.types import Problem

OPTIMIZER = f"{TRAINER}/optimizer.safetensors"

RESERVED_BYTES = 64 * 2**20
"""Bytes left for tokenizer, config and the file system's own books; the largest tokenizers take some 30 MB."""


def save_checkpoint(policy: Policy, optimizer: Optimizer, progress: Progress, folder: Path) -> None:
    """Write the checkpoint `folder`: aside, flushed to the disk file by file, then renamed into place.

    Raises:
        NonFiniteError: there are weights that are no numbers.
        RunError: the disk has no room for it, or does not take it. What was there before is untouched.
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
            sync_folder(path) if path.is_dir() else sync_file(path)
        write_trainer_state(hidden, progress)  # which flushes itself
        sync_folder(hidden)
        if folder.exists():
            delete_checkpoint(folder)
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
    progress = read_trainer_state(folder)
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


def _check_disk_space(policy: Policy, state: dict[str, torch.Tensor], folder: Path) -> None:
    """Raise RunError where the disk has less room than the checkpoint takes."""
    weights = {each.data_ptr(): each for each in policy.model.state_dict().values()}  # tied ones once
    takes = sum(each.nbytes for each in [*weights.values(), *state.values()]) + RESERVED_BYTES
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


@dataclass(frozen=True)
class Components:
    """Everything that the loop works with.

    Attributes:
        reference: the frozen start of the policy, where a KL penalty needs it.
        stream: the training problems, in the order in which they come.
        heldout: the problems of each evaluation set, by label.
        params: what training samples with.
        problems: tells the problems of `stream` and `heldout` from others.
        notes: what a user should know of the data: a line each.
    """

    policy: Policy
    reference: Policy | None
    encoder: PromptEncoder
    stream: ProblemStream
    heldout: Mapping[str, Sequence[Problem]]
    grader: GraderPool
    sampler: Sampler
    optimizer: Optimizer
    bounds_of: BoundsOf
    params: SamplingParams
    problems: str
    notes: list[str]

    def progress(self, step: int) -> Progress:
        """Return where the run is when `step` is done."""
        return Progress(
            step=step,
            updates=self.optimizer.update,
            skipped_in_a_row=self.optimizer.skipped_in_a_row,
            position=self.stream.position,
            problems=self.problems,
        )

    def resume_from(self, checkpoint: Path) -> Progress:
        """Take over the state of a checkpoint of the same run; the reference stays the start of the policy.

        Raises:
            UserError: the checkpoint is damaged or of another model, or the problems are not those of the run.
            StaleEngineError: the sampler could not be given the weights.
        """
        progress = load_checkpoint(self.policy, self.optimizer, checkpoint)
        if progress.problems != self.problems:
            raise UserError(
                f"{checkpoint}: the run learnt from other problems than its task has now, so it cannot go on; bring "
                "back the data that it began with, or start a new run"
            )
        self.stream.position = progress.position
        self.sampler.sync(self.policy.model, progress.updates)
        return progress

    def close(self) -> None:
        """End the engine and the grading processes."""
        self.sampler.close()
        self.grader.close()


def build_components(config: RunConfig, task: Task) -> Components:
    """Load the model and set up everything that the config names. Raises UserError for what cannot be loaded."""
    torch.manual_seed(config.seed)
    policy = load_policy(config.model)
    check_context_length(policy, config)
    encoder = PromptEncoder(policy.tokenizer, config.model.prompts)
    notes: list[str] = []
    train = drop_long_prompts(encoder, "training", task.train_problems(), config, notes)
    heldout = drop_long_prompts_in_sets(encoder, task.heldout_sets(), config, notes)
    # The reference is copied before the optimizer and the sampler claim memory of their own.
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
        bounds_of=ratio_bounds(config.bounds),
        params=SamplingParams(sampling.samples, sampling.temperature, sampling.max_tokens, policy.stop_ids),
        problems=_problems_digest(train, heldout),
        notes=notes,
    )


def _problems_digest(train: Sequence[Problem], heldout: Mapping[str, Sequence[Problem]]) -> str:
    """Return a hash of every problem in its place."""
    found = hashlib.blake2b(digest_size=16)
    for label, problems in (("", train), *heldout.items()):
        found.update(f"{label}\n".encode())
        for problem in problems:
            found.update(f"{problem.id}\n{problem.prompt}\n{problem.answer}\n".encode(errors="surrogatepass"))
    return found.hexdigest()
