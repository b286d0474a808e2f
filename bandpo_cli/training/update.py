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
from bandpo_cli.objective.loss import LossInputs, clipped_objective, k3
from bandpo_cli.training.experience import Experience, micro_batches
from bandpo_cli.training.optimizer import Optimizer


@dataclass
class UpdateFigures:
    """Sums over the tokens of a batch, each token at the time of its own update."""

    counts: dict[str, torch.Tensor] = field(default_factory=dict)
    ratios: list[torch.Tensor] = field(default_factory=list)
    old_new: list[torch.Tensor] = field(default_factory=list)
    ref: list[torch.Tensor] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    lr: float = 0.0

    def add_tokens(self, inputs: LossInputs, ratios: torch.Tensor) -> None:
        """Count a micro-batch in."""
        logprobs = inputs.logprobs.detach()
        counts = clip_counts(ratios, inputs.lower, inputs.upper, inputs.advantages, inputs.old_logprobs)
        for name, count in counts.items():
            self.counts[name] = self.counts[name] + count if name in self.counts else count
        self.ratios.append(ratios)
        self.old_new.append(k3(inputs.old_logprobs, logprobs))
        if inputs.ref_logprobs is not None:
            self.ref.append(k3(logprobs, inputs.ref_logprobs))

    def metrics(self) -> dict[str, float]:
        """Return the step's figures under their names in metrics.jsonl."""
        ratios = torch.cat(self.ratios)
        figures = {
            **clip_fractions(self.counts),
            "ratio/mean": ratios.mean().item(),
            "ratio/max": ratios.max().item(),
            "kl/old_new": torch.cat(self.old_new).mean().item(),
            "optim/loss": sum(self.losses) / len(self.losses),
            "optim/grad_norm": sum(self.grad_norms) / len(self.grad_norms),
            "optim/lr": self.lr,
        }
        if self.ref:
            figures["kl/ref"] = torch.cat(self.ref).mean().item()
        return figures


def update_policy(
    policy: Policy, optimizer: Optimizer, experiences: Sequence[Experience], config: RunConfig
) -> UpdateFigures:
    """Apply one update for each experience, in order.

    Raises:
        NonFiniteError: before the update that would have spoiled the weights.
    """
    figures = UpdateFigures()
    for experience in experiences:
        optimizer.zero_grad()
        figures.losses.append(_accumulate_gradient(policy, experience, config, figures))
        figures.lr = optimizer.lr
        figures.grad_norms.append(optimizer.step())
    return figures


def _accumulate_gradient(
    policy: Policy, experience: Experience, config: RunConfig, figures: UpdateFigures
) -> float:
    """Add up the gradient of one update over its micro-batches and return its loss."""
    aggregate = AGGREGATIONS[config.objective.aggregation]
    weights = aggregate(experience.lengths, config.sampling.max_tokens).repeat_interleave(experience.lengths)
    loss = 0.0
    for span, batch in micro_batches(policy, experience.rows, config.optim.micro_batch_tokens):
        new = token_logprobs(policy.model, batch, config.sampling.temperature)
        inputs = experience.loss_inputs(span, new.logprobs, weights)
        out = clipped_objective(inputs, config.objective.dual_clip, config.objective.reference_kl)
        out.loss.backward()  # type: ignore[no-untyped-call]
        figures.add_tokens(inputs, out.ratios)
        loss += out.loss.item()
    return loss
