"""What becomes of an update whose numbers are not finite: its batch is kept, and the run stops or goes on without it.

Weights are only ever moved by finite gradients. What was not finite, and at how many tokens, is said in the error.
"""

# MERGED: One batch of rollouts, several optimizer updates.
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from bandpo_cli.config.run import ModelConfig, OptimConfig, RunConfig
from bandpo_cli.models.load import Policy
from bandpo_cli.models.logprobs import token_logprobs
from bandpo_cli.objective.loss import AGGREGATIONS, clip_counts, clip_metrics, clipped_objective, k3
from bandpo_cli.storage.tables import MAX_BAD_BATCHES, BadCompletion, count_bad_batches, write_bad_batch
from bandpo_cli.training.experience import Experience, Forward, micro_batches
from bandpo_cli.training.optimizer import NonFiniteError, Optimizer


@dataclass(frozen=True)
class BadUpdate:
    """An update that cannot be applied.

    Attributes:
        number: which of its step's updates, from 1.
        forward: None where the experience itself was not finite, so that nothing was computed from it.
        error: says what was not finite.
    """

    number: int
    experience: Experience
    forward: Forward | None
    error: NonFiniteError


BadUpdateCallback = Callable[[BadUpdate], None]
"""Raises where the run is to stop; returns where the update is to be skipped."""


def raise_bad_update(bad: BadUpdate) -> None:
    """Stop at the first."""
    raise bad.error


def check_finite_experience(experience: Experience) -> None:
    """Raise NonFiniteError where the log-probs or advantages that an update would learn from are not finite."""
    _check_tokens(
        {
            "the policy's log-probs": experience.trainer_logprobs,
            "the sampler's log-probs": experience.sampler_logprobs,
            "the reference model's log-probs": experience.ref_logprobs,
            "the advantages": experience.advantages,
        }
    )


def check_finite_forward(forward: Forward) -> None:
    """Raise NonFiniteError where the log-probs or the loss of the policy under update are not finite."""
    _check_tokens({"the policy's log-probs under update": forward.logprobs})
    if not math.isfinite(forward.loss):
        raise NonFiniteError(f"the loss is {forward.loss}")


def check_finite_weights(model: nn.Module) -> None:
    """Raise NonFiniteError where weights are not finite: they belong in no checkpoint."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise NonFiniteError(
                f"the weights are not finite (the first such tensor is {name}); none were written"
            )


@dataclass(frozen=True)
class BadUpdateHandler:
    """Keeps the batch of a bad update in the run's folder, then skips the update or stops the run.

    Attributes:
        optimizer: its count of updates skipped in a row decides, against `optim.max_skips`.
        run: the folder of the run.
    """

    config: RunConfig
    optimizer: Optimizer
    run: Path
    step: int

    def __call__(self, bad: BadUpdate) -> None:
        """Return where the update is to be skipped.

        Raises:
            NonFiniteError: the run is to stop; the line says where, where the batch is, and what to try.
        """
        done, optim = self.optimizer.skipped_in_a_row, self.config.optim
        skips = done < optim.max_skips
        if skips and count_bad_batches(self.run) >= MAX_BAD_BATCHES:
            return
        try:
            path = write_bad_batch(
                self.run, self.step, bad.number, _bad_completions(bad), _token_columns(bad)
            )
            kept = f"its batch is in {path}"
        except OSError as error:
            kept = f"its batch could not be written ({error})"
        if not skips:
            what = f"step {self.step}, update {bad.number} of {optim.updates}: {bad.error}"
            before = f", after {done} skipped in a row" if done else ""
            advice = _suggestions(optim, self.config.model)
            raise NonFiniteError(f"{what}; the update was not applied{before}; {kept}; {advice}") from None


def _check_tokens(named: Mapping[str, torch.Tensor | None]) -> None:
    for name, values in named.items():
        if values is not None and (bad := int((~torch.isfinite(values)).sum())):
            raise NonFiniteError(f"{name} are not finite at {bad:,} of {values.numel():,} tokens")


def _suggestions(optim: OptimConfig, model: ModelConfig) -> str:
    """Name the settings that may help, of those that can still be moved."""
    tries = [f"a lower optim.lr than {optim.lr:g}"]
    if model.dtype != "float32":
        tries.append("model.dtype=float32")
    if optim.max_grad_norm is None or optim.max_grad_norm > 1:
        tries.append("optim.max_grad_norm=1")
    if not optim.max_skips:
        tries.append("optim.max_skips=5, which goes on without such updates")
    return f"try {' or '.join(tries)}"


def _bad_completions(bad: BadUpdate) -> list[BadCompletion]:
    return [
        BadCompletion(
            error=str(bad.error),
            problem_id=rollout.problem.id,
            prompt=rollout.prompt,
            text=rollout.text,
            reference=rollout.problem.answer,
            reward=rollout.grade.reward,
            verdict=rollout.grade.verdict,
            prompt_ids=list(rollout.prompt_ids),
            token_ids=list(rollout.completion.token_ids),
        )
        for group in bad.experience.groups
        for rollout in group.rollouts_G
    ]


def _token_columns(bad: BadUpdate) -> dict[str, list[list[float] | None]]:
    """Cut what is known of each token into completions."""
    experience, forward = bad.experience, bad.forward
    lengths = experience.lengths.tolist()
    columns = {
        "old_logprobs": experience.old_logprobs,
        "new_logprobs": None if forward is None else forward.logprobs,
        "trainer_logprobs": experience.trainer_logprobs,
        "sampler_logprobs": experience.sampler_logprobs,
        "ref_logprobs": experience.ref_logprobs,
        "ratios": None if forward is None else forward.ratios,
        "lower": experience.bounds.lower,
        "upper": experience.bounds.upper,
        "importance": experience.correction,
        "advantages": experience.advantages,
    }
    return {
        name: [None] * len(lengths) if column is None else [each.tolist() for each in column.split(lengths)]
        for name, column in columns.items()
    }


@dataclass
class UpdateMetrics:
    """Sums over the tokens of a batch, each token at the time of its own update; those of skipped updates left out.

    Attributes:
        learnt: the experiences that were learnt from, in the order of the other lists.
        lr: of the last update, skipped or not.
        skipped: updates that were skipped.
    """

    trained: list[Experience] = field(default_factory=list)
    counts: dict[str, torch.Tensor] = field(default_factory=dict)
    ratios: list[torch.Tensor] = field(default_factory=list)
    old_new: list[torch.Tensor] = field(default_factory=list)
    ref: list[torch.Tensor] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    lr: float = 0.0
    skipped: int = 0

    def add(self, experience: Experience, forward: Forward, grad_norm: float) -> None:
        """Count an applied update in."""
        old, bounds, ratios = experience.old_logprobs, experience.bounds, forward.ratios
        counts = clip_counts(ratios, bounds.lower, bounds.upper, experience.advantages, old)
        for name, count in counts.items():
            self.counts[name] = self.counts[name] + count if name in self.counts else count
        self.trained.append(experience)
        self.ratios.append(ratios)
        self.old_new.append(k3(old, forward.logprobs))
        if experience.ref_logprobs is not None:
            self.ref.append(k3(forward.logprobs, experience.ref_logprobs))
        self.losses.append(forward.loss)
        self.grad_norms.append(grad_norm)

    def metrics(self) -> dict[str, float]:
        """Return the step's figures under their names in metrics.jsonl; only those there are if all were skipped."""
        figures = {"optim/lr": self.lr, "optim/skipped_updates": float(self.skipped)}
        if not self.trained:
            return figures
        ratios = torch.cat(self.ratios)
        figures |= {
            **clip_metrics(self.counts),
            "ratio/mean": ratios.mean().item(),
            "ratio/max": ratios.max().item(),
            "kl/old_new": torch.cat(self.old_new).mean().item(),
            "optim/loss": sum(self.losses) / len(self.losses),
            "optim/grad_norm": sum(self.grad_norms) / len(self.grad_norms),
        }
        if self.ref:
            figures["kl/ref"] = torch.cat(self.ref).mean().item()
        return figures


def update_policy(
    policy: Policy,
    optimizer: Optimizer,
    experiences: Sequence[Experience],
    config: RunConfig,
    on_bad_update: BadUpdateCallback = raise_bad_update,
) -> UpdateMetrics:
    """Apply one update for each experience, in order.

    A batch without spread has a gradient of 0, and AdamW steps all the same: on its momentum.

    Args:
        on_bad_update: hears of each update whose numbers are not finite, before it could spoil the weights. If it returns,
            the update is skipped: weights and moments stay, and the schedule goes on.

    Raises:
        NonFiniteError: `on_bad_update` raised it.
    """
    figures = UpdateMetrics()
    for number, experience in enumerate(experiences, start=1):
        figures.lr = optimizer.lr
        optimizer.zero_grad()
        forward: Forward | None = None
        try:
            check_finite_experience(experience)
            forward = _accumulate_gradient(policy, experience, config)
            check_finite_forward(forward)
            figures.add(experience, forward, optimizer.step())
        except NonFiniteError as error:
            on_bad_update(BadUpdate(number, experience, forward, error))
            optimizer.skip()
            figures.skipped += 1
    return figures


def _accumulate_gradient(policy: Policy, experience: Experience, config: RunConfig) -> Forward:
    """Add up the gradient of one update over its micro-batches."""
    aggregate = AGGREGATIONS[config.objective.aggregation]
    weights = aggregate(experience.lengths, config.sampling.max_tokens).repeat_interleave(experience.lengths)
    losses: list[float] = []
    logprobs: list[torch.Tensor] = []
    ratios: list[torch.Tensor] = []
    for span, batch in micro_batches(policy, experience.rows, config.optim.micro_batch_tokens):
        new = token_logprobs(policy.model, batch, config.sampling.temperature)
        inputs = experience.loss_inputs(span, new.logprobs, weights)
        out = clipped_objective(inputs, config.objective.dual_clip, config.objective.reference_kl)
        out.loss.backward()  # type: ignore[no-untyped-call]
        losses.append(out.loss.item())
        logprobs.append(new.logprobs.detach())
        ratios.append(out.ratios)
    return Forward(sum(losses), torch.cat(logprobs), torch.cat(ratios))
