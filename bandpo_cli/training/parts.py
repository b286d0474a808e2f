"""What a run is built of."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bandpo_cli.bounds import ratio_bounds
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import UserError
from bandpo_cli.evaluation.sets import check_context, fitting_problems, fitting_sets
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.models.load import Policy, frozen_copy, load_policy
from bandpo_cli.sampling import Sampler, SamplingParams, build_sampler
from bandpo_cli.sampling.prompts import PromptEncoder
from bandpo_cli.seeds import derive_seed
from bandpo_cli.tasks.base import Task
from bandpo_cli.tasks.stream import ProblemStream
from bandpo_cli.tracking.checkpoints import Progress
from bandpo_cli.training.checkpoint import load_checkpoint
from bandpo_cli.training.experience import BoundsOf
from bandpo_cli.training.optimizer import Optimizer
from bandpo_cli.types import Problem


@dataclass(frozen=True)
class Parts:
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

    def go_on_from(self, checkpoint: Path) -> Progress:
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


def build(config: RunConfig, task: Task) -> Parts:
    """Load the model and set up everything that the config names. Raises UserError for what cannot be loaded."""
    torch.manual_seed(config.seed)
    policy = load_policy(config.model)
    check_context(policy, config)
    encoder = PromptEncoder(policy.tokenizer, config.model.prompts)
    notes: list[str] = []
    train = fitting_problems(encoder, "training", task.train_problems(), config, notes)
    heldout = fitting_sets(encoder, task.heldout_sets(), config, notes)
    # The reference is copied before the optimizer and the sampler claim memory of their own.
    reference = replace(policy, model=frozen_copy(policy)) if config.objective.reference_kl > 0 else None
    sampling = config.sampling
    return Parts(
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
        problems=_digest(train, heldout),
        notes=notes,
    )


def _digest(train: Sequence[Problem], heldout: Mapping[str, Sequence[Problem]]) -> str:
    """Return a hash of every problem in its place."""
    found = hashlib.blake2b(digest_size=16)
    for label, problems in (("", train), *heldout.items()):
        found.update(f"{label}\n".encode())
        for problem in problems:
            found.update(f"{problem.id}\n{problem.prompt}\n{problem.answer}\n".encode(errors="surrogatepass"))
    return found.hexdigest()
