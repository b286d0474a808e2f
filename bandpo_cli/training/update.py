"""One batch of rollouts, several optimizer updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from bandpo_cli.config.run import RunConfig
from bandpo_cli.models.load import Policy
from bandpo_cli.models.logprobs import token_logprobs
from bandpo_cli.objective.aggregation import AGGREGATIONS
from bandpo_cli.objective.clip_figures import clip_counts, clip_fractions
from bandpo_cli.objective.loss import clipped_objective, k3
from bandpo_cli.training.experience import Experience, Forward, micro_batches
from bandpo_cli.training.nonfinite import BadUpdate, OnBadUpdate, check_experience, check_forward, stop
from bandpo_cli.training.optimizer import NonFiniteError, Optimizer


@dataclass
class UpdateFigures:
    """Sums over the tokens of a batch, each token at the time of its own update; those of skipped updates left out.

    Attributes:
        learnt: the experiences that were learnt from, in the order of the other lists.
        lr: of the last update, skipped or not.
        skipped: updates that were skipped.
    """

    learnt: list[Experience] = field(default_factory=list)
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
        self.learnt.append(experience)
        self.ratios.append(ratios)
        self.old_new.append(k3(old, forward.logprobs))
        if experience.ref_logprobs is not None:
            self.ref.append(k3(forward.logprobs, experience.ref_logprobs))
        self.losses.append(forward.loss)
        self.grad_norms.append(grad_norm)

    def metrics(self) -> dict[str, float]:
        """Return the step's figures under their names in metrics.jsonl; only those there are if all were skipped."""
        figures = {"optim/lr": self.lr, "optim/skipped_updates": float(self.skipped)}
        if not self.learnt:
            return figures
        ratios = torch.cat(self.ratios)
        figures |= {
            **clip_fractions(self.counts),
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
    on_bad: OnBadUpdate = stop,
) -> UpdateFigures:
    """Apply one update for each experience, in order.

    A batch without spread has a gradient of 0, and AdamW steps all the same: on its momentum.

    Args:
        on_bad: hears of each update whose numbers are not finite, before it could spoil the weights. If it returns,
            the update is skipped: weights and moments stay, and the schedule goes on.

    Raises:
        NonFiniteError: `on_bad` raised it.
    """
    figures = UpdateFigures()
    for number, experience in enumerate(experiences, start=1):
        figures.lr = optimizer.lr
        optimizer.zero_grad()
        forward: Forward | None = None
        try:
            check_experience(experience)
            forward = _accumulate_gradient(policy, experience, config)
            check_forward(forward)
            figures.add(experience, forward, optimizer.step())
        except NonFiniteError as error:
            on_bad(BadUpdate(number, experience, forward, error))
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
