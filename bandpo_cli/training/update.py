"""Policy updates: the loss and optimizer step of each experience, and the handling of updates with non-finite values.

Only finite gradients move the weights. An update in which a log-prob, an advantage, the loss or the gradient norm is
NaN or infinite raises NonFiniteError before the optimizer step; its batch is stored, and the run stops or skips the
update (`handle_bad_update`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.profiler import record_function

from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import log
from bandpo_cli.metric_names import PROFILER_PREFIX
from bandpo_cli.models.load import Policy
from bandpo_cli.models.logprobs import token_logprobs
from bandpo_cli.models.packing import host_copy
from bandpo_cli.models.weights import local_tensor
from bandpo_cli.objective.policy_objective import policy_objective
from bandpo_cli.storage.tables import BAD_BATCHES, MAX_BAD_BATCHES, write_bad_batch
from bandpo_cli.training.experience import Experience, adapted
from bandpo_cli.training.optimizer import GradientNormError, NonFiniteError, Optimizer


class Forward(NamedTuple):
    """The forward passes of an update, at the weights before it; all tensors are detached."""

    loss: Tensor  # of the update, a scalar on the device
    logprobs: Tensor  # [N], log π(token) in nats
    ratios: Tensor  # [N], π/π_old
    gradient_weights: Tensor  # [N], as in `LossOutputs`
    entropy: Tensor | None = None  # [N], entropy of π at T=1, nats; None where it was not asked for


@dataclass
class AppliedUpdates:
    """The applied updates of a step: their experiences, forward passes, and gradient norms before clipping."""

    trained: list[Experience] = field(default_factory=list)
    forwards: list[Forward] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    lr: float = 0.0  # of the last update, applied or skipped
    loss_scale: float | None = None  # after the last update; None for a model that is not in float16
    skipped: list[Experience] = field(default_factory=list)  # those of skipped updates

    def on_host(self) -> Self:
        """Return the updates with their tensors in memory of the host; a GPU is waited for once."""
        trained, skipped = ([item.on_host() for item in items] for items in (self.trained, self.skipped))
        forwards = [
            Forward._make(None if value is None else host_copy(value) for value in item)
            for item in self.forwards
        ]
        if any(item.lengths.is_cuda for item in (*self.trained, *self.skipped)):
            torch.cuda.synchronize()
        return replace(self, trained=trained, skipped=skipped, forwards=forwards)


def update_policy(
    policy: Policy,
    optimizer: Optimizer,
    experiences: Sequence[Experience],
    config: RunConfig,
    on_bad_update: Callable[[int, Experience, Forward, NonFiniteError], None] | None = None,
) -> AppliedUpdates:
    """Apply one optimizer update per experience, in order: loss, gradient, AdamW step; the weights change in place.

    A batch whose rewards are all equal has a gradient of 0; AdamW still steps, by its momentum.

    Args:
        experiences: those of `prepare_updates`. One that needs its own pass for its values under π_old must come first,
            while the policy is still π_old: its ratios are exactly 1.
        on_bad_update: called for each update with non-finite values, before the weights change. If it returns, the
            update is skipped: weights and moments stay, the learning-rate schedule advances. None to raise the error.

    Raises:
        NonFiniteError: an update has non-finite values, unless `on_bad_update` returns.
    """
    updates = AppliedUpdates()
    for number, experience in enumerate(experiences, start=1):
        updates.lr = optimizer.lr
        optimizer.zero_grad()
        if experience.loss.adapts and experience.old.source != "own pass":
            experience = adapted(policy, experience, config.sampling.temperature)
        forward = accumulate_gradient(policy, experience, config, optimizer.scaler)
        try:
            norm = optimizer.step(partial(finite_norm, experience, forward))
        except NonFiniteError as error:
            overflow = isinstance(error, GradientNormError) and optimizer.scaler.get_scale() > 1.0
            if not overflow:
                if on_bad_update is None:
                    raise
                on_bad_update(number, experience, forward, error)
            optimizer.skip(overflow)
            if overflow and policy.ranks.is_main:
                skipped = "the gradient of update %d overflows in float16; it is skipped, the loss scale falls to %g"
                log.warning(skipped, optimizer.update, optimizer.scaler.get_scale())
            updates.skipped.append(experience)
            continue
        updates.trained.append(experience.updated(forward.logprobs, forward.entropy))
        updates.forwards.append(forward)
        updates.grad_norms.append(norm)
    if optimizer.scaler.is_enabled():
        updates.loss_scale = optimizer.scaler.get_scale()
    return updates


def finite_norm(experience: Experience, forward: Forward, norm: Tensor) -> float:
    """Return the gradient norm of an update as a number, with one transfer from the device for all that is checked.

    Raises:
        NonFiniteError: the first of the experience, the log-probs, the loss and the norm that is not finite.
    """
    columns = {
        "the policy's log-probs": experience.trainer_logprobs,
        "the sampler's log-probs": experience.sampler_logprobs,
        "the reference model's log-probs": experience.ref_logprobs,
        "the advantages": experience.advantages,
        "the policy's log-probs under update": forward.logprobs,
    }
    known = {name: values for name, values in columns.items() if values is not None}
    counts = [(~torch.isfinite(values)).sum() for values in known.values()]
    # float64 has the counts and both float32 values exactly
    *bad_counts, loss, value = torch.stack([item.double() for item in (*counts, forward.loss, norm)]).tolist()
    for name, bad in zip(known, bad_counts, strict=True):
        if bad:
            raise NonFiniteError(f"{name} are not finite at {int(bad):,} of {experience.tokens:,} tokens")
    for name, number, kind in (("loss", loss, NonFiniteError), ("gradient norm", value, GradientNormError)):
        if not math.isfinite(number):
            raise kind(f"the {name} is {number}")
    return float(value)


def accumulate_gradient(
    policy: Policy, experience: Experience, config: RunConfig, scaler: GradScaler
) -> Forward:
    """Compute the loss of an update and add its gradient, scaled by `scaler`, to the parameters, pass by pass.

    The aggregation weights are those of the complete update, so the sum over micro-batches of any size, and over ranks,
    is its loss.
    """
    objective, temperature = config.objective, config.sampling.temperature
    with_entropy, with_bonus = experience.measures_entropy, objective.entropy_bonus > 0
    weights = experience.loss_weights(objective.aggregation, config.sampling.max_tokens)
    losses, columns = [], []  # of each micro-batch; columns as in `Forward`
    for micro in experience.micro_batches:
        # forward pass: log π of each sampled token
        new = token_logprobs(policy.model, micro.tokens, temperature, with_entropy, with_bonus)
        # loss, and its derivative by each of these log-probs
        batch, share = experience.batch(micro, new.logprobs), weights[micro.span]
        out = policy_objective(experience.loss, new.logprobs, batch, share, new.sampling_entropy)
        # backward pass: from this derivative to the gradients of the weights
        with record_function(f"{PROFILER_PREFIX}backward"):
            outputs, gradients = [new.logprobs], [out.gradient]
            if new.sampling_entropy is not None:
                outputs.append(new.sampling_entropy)
                gradients.append(out.entropy_gradient)
            torch.autograd.backward(outputs, scaler.scale(gradients))
        micro.tokens.packing.drop_masks()
        losses.append(out.loss)
        tokens = (new.logprobs.detach(), out.ratios, out.gradient_weights, new.entropy)
        columns.append([column for column in tokens if column is not None])
    # The gradients have been summed over the ranks in the backward passes.
    (all_losses,) = policy.ranks.concatenate([torch.stack(losses)])
    joined = [torch.cat(column) for column in zip(*columns, strict=True)]
    return Forward(all_losses.sum(), *experience.gather(policy.ranks, joined))


def handle_bad_update(
    config: RunConfig,
    optimizer: Optimizer,
    step: int,
    run: Path | None,
    number: int,
    experience: Experience,
    forward: Forward,
    fault: NonFiniteError,
) -> None:
    """Store the batch of update `number` (from 1) of a step, and return if the update is to be skipped.

    Args:
        run: the run folder, where the batch is stored; None on all ranks but one.
        fault: names the non-finite quantity.

    Raises:
        NonFiniteError: the run stops; the message names the update, the file of its batch and settings to try.
    """
    skipped, optim = optimizer.skipped_in_a_row, config.optim
    is_skipped = skipped < optim.max_skips
    stored = ""
    if run and not (is_skipped and len([*(run / BAD_BATCHES).glob("step-*.parquet")]) >= MAX_BAD_BATCHES):
        try:
            columns = _token_columns(experience, forward)
            path = write_bad_batch(run, step, number, str(fault), experience.groups, columns)
            stored = f"its batch is in {path}; "
        except OSError as error:
            stored = f"its batch could not be written ({error}); "
    if is_skipped:
        return
    tries = {
        f"a lower optim.lr than {optim.lr:g}": True,
        "model.dtype=float32": config.model.dtype in ("bfloat16", "float16"),
        "optim.max_grad_norm=1": optim.max_grad_norm is None or optim.max_grad_norm > 1,
        "optim.max_skips=5, which skips such updates": not optim.max_skips,
    }
    before = f", after {skipped} skipped in a row" if skipped else ""
    raise NonFiniteError(
        f"step {step}, update {number} of {optim.updates}: {fault}; the update was not applied{before}; "
        f"{stored}try {' or '.join(compress(tries, tries.values()))}"
    ) from None


def check_finite_weights(model: nn.Module) -> None:
    """Raise NonFiniteError if weights are not finite; a checkpoint must not contain such weights.

    Of a sharded model, the shards of this rank are checked.
    """
    for name, parameter in model.named_parameters():
        # A sum is finite only if each of its terms is, and takes a tenth of the time of looking at each.
        values = local_tensor(parameter)
        if not torch.isfinite(values.sum()) and not torch.isfinite(values).all():
            raise NonFiniteError(
                f"the weights are not finite (the first such tensor is {name}); no checkpoint was written"
            )


def _token_columns(experience: Experience, forward: Forward) -> dict[str, list[list[float] | None]]:
    """Return the columns of a bad batch with token values (docs/metrics.md); None where a value was not computed."""
    lengths = experience.lengths.tolist()
    columns: dict[str, Tensor | None] = {
        "old_logprobs": None if experience.old.measured == "own pass" else experience.old_logprobs,
        "new_logprobs": forward.logprobs,
        "trainer_logprobs": experience.trainer_logprobs,
        "sampler_logprobs": experience.sampler_logprobs,
        "ref_logprobs": experience.ref_logprobs,
        "ratios": forward.ratios,
        "lower": experience.columns.get("lower"),
        "upper": experience.columns.get("upper"),
        "importance": experience.importance_weights,
        "advantages": experience.advantages,
    }
    nothing: list[list[float] | None] = [None] * len(lengths)
    return {
        name: nothing if column is None else [item.tolist() for item in torch.split(column, lengths)]
        for name, column in columns.items()
    }
