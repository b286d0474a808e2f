"""Components of a run: building them from the config, and loading them from a checkpoint."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import UserError, find_out_of_memory, warn_on_failure
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.models.load import Policy, load_reference
from bandpo_cli.models.weights import ShardError, load_weights, read_shards, reason_of, saved_shapes
from bandpo_cli.processes.ranks import SINGLE, Ranks
from bandpo_cli.sampling.engine_process import EngineProcess
from bandpo_cli.sampling.rollouts import SamplingSetup, set_up_sampling
from bandpo_cli.sampling.sampler import Sampler, SamplingParams, build_sampler
from bandpo_cli.storage import checkpoints
from bandpo_cli.storage.checkpoints import Progress
from bandpo_cli.tasks.task import ProblemStream, Task
from bandpo_cli.training.optimizer import Optimizer
from bandpo_cli.training.rollout_batches import SampledGroups, read_sampled
from bandpo_cli.types import derive_seed


@dataclass
class Components(SamplingSetup):
    """The objects that the training loop uses."""

    reference: Policy | None  # the initial policy, frozen; None without `objective.reference_kl`
    stream: ProblemStream  # the training problems in the order of the run's seed
    grader: GraderPool  # the worker processes that grade completions
    sampler: Sampler  # the sampling engine, with the policy's weights
    optimizer: Optimizer
    params: SamplingParams  # of training
    ranks: Ranks
    ahead: deque[SampledGroups] = field(default_factory=deque)  # for the next steps
    entropy_coefficient: float = 0.0  # as in `Progress`
    entropy_bonus: float = 0.0

    @cached_property
    def problems_digest(self) -> str:
        """Hash of all problems in their order."""
        digest = hashlib.blake2b(digest_size=16)
        for label, problems in (("", self.train), *self.heldout.items()):
            digest.update(f"{label}\n".encode())
            for problem in problems:
                text = f"{problem.id}\n{problem.prompt}\n{problem.answer}\n"
                digest.update(text.encode(errors="surrogatepass"))
        return digest.hexdigest()

    def progress(self, step: int) -> Progress:
        """Return the progress of the run after `step`."""
        scaler = self.optimizer.scaler.state_dict()  # empty without float16
        return Progress(
            step=step,
            updates=self.optimizer.update,
            skipped_in_a_row=self.optimizer.skipped_in_a_row,
            position=self.stream.position,
            problems=self.problems_digest,
            entropy_coefficient=self.entropy_coefficient,
            entropy_bonus=self.entropy_bonus,
            loss_scale=scaler.get("scale", 1.0),
            scaled_updates=scaler.get("_growth_tracker", 0),
        )

    def resume_from(
        self, checkpoint: Path, progress: Progress | None = None, with_batches: bool = True
    ) -> Progress:
        """Load the state of a checkpoint; the reference stays the initial policy.

        A fork has its own `progress`, and may leave out the batches that were sampled ahead. Raise UserError if the
        checkpoint is damaged or belongs to another model, or the problems are not those of the run. Raise
        StaleEngineError if the weights could not be sent to the sampler.
        """
        progress = load_checkpoint(self.policy, self.optimizer, checkpoint, progress)
        if progress.problems not in (checkpoints.ANY_PROBLEMS, self.problems_digest):
            raise UserError(
                f"{checkpoint}: the run trained on other problems than its task has now and cannot be resumed; "
                "restore the original data, or start a new run"
            )
        self.stream.position = progress.position
        self.entropy_coefficient, self.entropy_bonus = progress.entropy_coefficient, progress.entropy_bonus
        if with_batches:
            self.ranks.agree(partial(self._read_ahead, checkpoint, progress.step))
        self.sampler.sync(self.policy.model, progress.updates)
        return progress

    def _read_ahead(self, checkpoint: Path, step: int) -> None:
        """Load the batches of the steps after `step` that the checkpoint has."""
        if (path := checkpoint / checkpoints.ROLLOUTS).exists():
            with reading_errors(checkpoint):
                self.ahead = deque(read_sampled(path, self.stream, self.encoder, self.policy.tokenizer))
                steps = [batch.step for batch in self.ahead]
                if steps != [*range(step + 1, step + 1 + len(steps))]:
                    raise ValueError(f"{checkpoints.ROLLOUTS} holds steps {steps}")

    def close(self) -> None:
        """Shut down the sampling engine and the grading processes.

        If one of them fails, the other one is closed all the same, and then the error is raised.
        """
        with ExitStack() as stack:
            if self.conversations is not None:
                stack.callback(self.conversations.pool.close)
            stack.callback(self.grader.close)
            stack.callback(self.sampler.close)


def build_components(config: RunConfig, task: Task, ranks: Ranks = SINGLE) -> Components:
    """Load the model and build all components from the config; all ranks call this together.

    Raises:
        UserError: the model or the data cannot be loaded, or a prompt limit leaves no problem.
    """
    torch.manual_seed(config.seed)
    setup = set_up_sampling(config, task, ranks)
    policy = setup.policy
    # The reference before the optimizer and the sampler allocate memory.
    reference = load_reference(policy, config.model) if config.objective.reference_kl > 0 else None
    sampling = config.sampling
    limits = sampling.samples, sampling.temperature, sampling.max_tokens, setup.stop_ids
    build = EngineProcess if sampling.max_lag and sampling.engine_process else build_sampler
    sampler: Sampler = build(config, policy)
    try:
        return Components(
            **vars(setup),
            reference=reference,
            stream=ProblemStream(setup.train, derive_seed(config.seed, "problems")),
            grader=GraderPool(config.grading),
            sampler=sampler,
            optimizer=Optimizer(policy.model, config.optim, config.steps * config.optim.updates),
            # The entropies of older weights are of no use.
            params=SamplingParams(*limits, entropy=sampling.max_lag == 0),
            ranks=policy.ranks,
        )
    except BaseException:
        with warn_on_failure("the sampling engine could not be closed"):
            sampler.close()
        raise


def load_checkpoint(
    policy: Policy, optimizer: Optimizer, folder: Path, progress: Progress | None = None
) -> Progress:
    """Load weights and optimizer state from a checkpoint of the same model and return its progress, or that of a fork.

    The checkpoint may have been written by another number of ranks. All ranks must call this together; an error on one
    of them is raised on all. Raise UserError if the checkpoint is damaged or belongs to another model.
    """
    ranks = policy.ranks
    stored = ranks.agree(lambda: checkpoints.read_trainer_state(folder))[0]
    progress = stored if progress is None else progress
    with reading_errors(folder):
        # Copied into the existing tensors, because optimizer, masters and sampler hold references to them.
        load_weights(policy.model, folder, ranks)
        one_file = (folder / checkpoints.OPTIMIZER).exists()
        if ranks.size == 1 and one_file:
            state = load_file(folder / checkpoints.OPTIMIZER)
        else:  # each rank reads its shards
            saved = folder / (checkpoints.TRAINER if one_file else checkpoints.SHARDS)
            state = optimizer.empty_state(ranks.agree(lambda: saved_shapes(saved))[0])
            read_shards(saved, state, ranks)
        optimizer.load_state(state, progress.updates, progress.skipped_in_a_row)
        scale = {"scale": progress.loss_scale, "_growth_tracker": progress.scaled_updates}
        optimizer.scaler.load_state_dict(optimizer.scaler.state_dict() | scale)
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
            f"{folder}: the checkpoint cannot be loaded: {reason_of(error)}; remove {folder / checkpoints.STATE} to "
            "resume from the previous one"
        ) from None
