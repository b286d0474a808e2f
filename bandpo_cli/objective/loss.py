"""Policy losses: the interface that every method implements, and the objective that is computed from it.

A method's loss is a function from the tokens of a micro-batch to one loss per token (`PolicyLoss.token_losses`). What
depends on π_old alone, such as ratio bounds, is computed once per batch (`PolicyLoss.prepare`). `policy_objective`
weights the losses, adds the penalty to the reference model, and returns the gradient with respect to the log-probs.
`importance_weights` corrects for the gap between the sampler's and the trainer's log-probs.

Notation: r = π/π_old, a = advantage. Dimensions: N tokens and S completions of an update, n tokens and s completions
of a micro-batch. Per-token tensors are flat, without padding, in the order of the completions; a micro-batch holds
complete completions, so that losses of a sequence can be computed from its tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from pydantic import BaseModel
from torch import Tensor

from bandpo_cli.bounds.intervals import ClipState
from bandpo_cli.config.methods import MethodSettings
from bandpo_cli.config.run import ObjectiveConfig
from bandpo_cli.registries import METHODS, load_attribute
from bandpo_cli.settings_validation import Section

MAX_LOG_RATIO = 20.0
"""Limit of |log ratio|: exp(20) = 5e8 is far beyond any bound and far below overflow."""

Columns = Mapping[str, Tensor]
"""Named values per token, [N] or [n] each: what a method computed from π_old."""


@dataclass(frozen=True)
class LossBatch:
    """The tokens of an update, or of one of its micro-batches, with all values that a loss needs beside log π.

    Attributes:
        lengths: [S] int64, tokens per completion.
        advantages: [N] float32, the advantage of the token's completion.
        old_logprobs: [N] float32, log π_old(token), nats: the denominator of the ratio.
        columns: what `PolicyLoss.prepare` returned, [N] each; for interval methods `lower` and `upper`.
        importance_weights: [N] float32, the weight of `objective.importance`, an estimate of π_old/π_sampler; None
            where the ratio is taken to the sampler's log-probs, or where no correction is configured. Masked tokens
            have the weight 0; a loss with a value of the completion leaves them out of this value.
        ref_logprobs: [N] float32, log π_reference(token), nats; None without a reference model.
        wrong_peers: [S] float32, for a correct completion the share of the other completions of its group that are not
            correct, 0 for the others; None where the completions come in no groups.
    """

    lengths: Tensor
    advantages: Tensor
    old_logprobs: Tensor
    columns: Columns = field(default_factory=dict)
    importance_weights: Tensor | None = None
    ref_logprobs: Tensor | None = None
    wrong_peers: Tensor | None = None

    def ratios(self, logprobs: Tensor) -> Tensor:
        """Return π/π_old for the log-probs of π, [N], with their gradient."""
        return policy_ratio(logprobs, self.old_logprobs)


@dataclass(frozen=True)
class LossOutputs:
    """The result of `policy_objective`; no tensor has a gradient.

    Attributes:
        loss: scalar, the micro-batch's share of the update's loss.
        gradient: [n], ∂loss/∂logprobs.
        ratios: [n], r.
        gradient_weights: [n], w in the gradient −weight·w·a·∇log π of a token's loss, without the penalty to the
            reference model: 1 for an unclipped token with r = 1, 0 for a clipped one. 0 where a or the weight is 0.
        entropy_gradient: [n], ∂loss/∂entropy of the distribution of each token.
    """

    loss: Tensor
    gradient: Tensor
    ratios: Tensor
    gradient_weights: Tensor
    entropy_gradient: Tensor


class PolicyLoss(ABC):
    """The policy loss of a method, built from the method's settings and `objective`; see `policy_loss`.

    A user names a subclass as `bounds.method: module:Class`; see CONTRIBUTING.md.

    Attributes:
        settings: the settings of the method; a subclass names their class.
        Options: the pydantic class of `bounds.options`, for a user's subclass.
        options: an object of this class; None for other losses.
        interval: the interval of ratios outside which a token counts as outside, for a method that has one for all
            tokens; None for others.
        needs_all_tokens: False where `prepare` treats each completion separately and tokens with an advantage of 0
            have a loss and a gradient of 0. Then the update leaves out groups without an advantage, and the first
            update of a step takes π_old from its own forward pass, micro-batch by micro-batch.
    """

    settings: MethodSettings
    Options: ClassVar[type[BaseModel]] = Section
    options: Any
    interval: tuple[float, float] | None = None
    needs_all_tokens: bool = False

    def __init__(self, settings: MethodSettings, objective: ObjectiveConfig) -> None:
        self.settings, self.objective = settings, objective
        self.options = getattr(settings, "options", None)

    def prepare(self, old_logprobs: Tensor, advantages: Tensor) -> Columns:
        """Return the values per token that depend on π_old alone, [N] each, without gradient.

        Called with all tokens of an update, and also with those of a micro-batch unless `needs_all_tokens` is set.
        """
        return {}

    @abstractmethod
    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return the loss of each token, [n], before it is weighted.

        Args:
            logprobs: [n] float32, log π(token) under the policy being updated, nats, with gradient.
            batch: the n tokens of a micro-batch.
        """

    def clip_state(
        self, columns: Columns, ratios: Tensor, advantages: Tensor, gradient_weights: Tensor
    ) -> ClipState:
        """Return which tokens the method clips; here those with an advantage and no gradient.

        Args:
            columns: what `prepare` returned, [N] each.
            ratios, advantages, gradient_weights: [N], as in `LossBatch` and `LossOutputs`.
        """
        zero, outside = gradient_weights == 0, None
        if self.interval is not None:
            outside = (ratios < self.interval[0]) | (ratios > self.interval[1])
        return ClipState(zero & (advantages > 0), zero & (advantages < 0), outside)


def policy_loss(settings: MethodSettings, objective: ObjectiveConfig) -> PolicyLoss:
    """Return the policy loss of the method that `settings` describes."""
    return cast(PolicyLoss, load_attribute(METHODS[settings.method].loss)(settings, objective))


def policy_objective(
    loss: PolicyLoss,
    logprobs: Tensor,
    batch: LossBatch,
    weights: Tensor,
    reference_kl: float = 0.0,
    entropy: Tensor | None = None,
) -> LossOutputs:
    """Return Σ weight·(loss + reference_kl·k3) − bonus of a micro-batch, with its gradients.

    The gradient is computed here, and not by a backward pass through the model, so that the part of the method alone
    is known per token. A token with the weight 0 has no gradient, even where the loss of another token depends on it.

    Args:
        logprobs: [n] float32, log π(token) under the policy being updated, nats.
        weights: [n], weight of the token in the update's loss (`AGGREGATIONS`). It is multiplied with the importance
            weight of the batch, where there is one.
        reference_kl: coefficient of the k3 estimate of KL(π‖π_reference) per token; used if `ref_logprobs` is given.
        entropy: [n], entropy of the distribution of each token, nats, for the bonus: `objective.entropy_bonus` times
            its sum with `weights`, without the importance weights, as in verl; None without a bonus.
    """
    entropy_gradient = -loss.objective.entropy_bonus * weights
    if batch.importance_weights is not None:
        weights = weights * batch.importance_weights
    logprobs = logprobs.detach().requires_grad_()
    policy_part = (weights * loss.token_losses(logprobs, batch)).sum()
    (policy_gradient,) = torch.autograd.grad(policy_part, logprobs)
    # A custom loss may couple the tokens of a completion.
    policy_gradient = policy_gradient.where(weights != 0, 0.0)
    total, gradient = policy_part, policy_gradient
    if batch.ref_logprobs is not None:
        penalty = reference_kl * (weights * k3(logprobs, batch.ref_logprobs)).sum()
        (penalty_gradient,) = torch.autograd.grad(penalty, logprobs)
        total, gradient = total + penalty, gradient + penalty_gradient
    if entropy is not None:
        total = total + (entropy_gradient * entropy.detach()).sum()
    scale = -weights * batch.advantages
    gradient_weights = torch.where(scale == 0, 0.0, policy_gradient / scale)
    ratios = batch.ratios(logprobs).detach()
    return LossOutputs(total.detach(), gradient, ratios, gradient_weights, entropy_gradient)


def importance_weights(
    trainer_logprobs: Tensor, sampler_logprobs: Tensor, lengths: Tensor, objective: ObjectiveConfig
) -> Tensor | None:
    """Return the weight of each token's loss, w; None where `objective.importance_cap` is null.

    The tokens were sampled from the sampler's π, while the ratio of the objective is computed relative to the trainer's
    π_old. The two differ where the sampler is another engine than the trainer, by kernels, number formats and batch
    shapes. w is an estimate of π_old/π_sampler of limited variance, by the rule `objective.importance`:

    - truncated, min(w, cap): truncated importance sampling (Ionides 2008);
    - masked, 0 outside [floor, cap] and w within: per token as in IcePop, per completion as in masked importance
      sampling (verl 0.9.1, `rollout_corr_helper.py`), or 0 for a completion with any token outside (TRM, arXiv
      2512.23075).

    Args:
        trainer_logprobs, sampler_logprobs: [N] float32, nats, of the same weights at the same temperature, flat, in
            the order of the completions.
        lengths: [S] int64, tokens per completion.

    Returns:
        [N] float32, without gradient. The w of a completion is the geometric mean of the ratios of its tokens.
    """
    cap = objective.importance_cap
    if cap is None:
        return None
    floor = 1.0 / cap if objective.importance_floor is None else objective.importance_floor
    level, _, rule = objective.importance.partition("-")
    ratios = policy_ratio(trainer_logprobs.detach(), sampler_logprobs)
    if level == "sequence" and rule != "mask-any":
        means = sequence_sum(ratios.log(), lengths) / lengths
        ratios = torch.exp(means.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))[sequence_index(lengths)]
    if rule == "truncate":
        return ratios.clamp(max=cap)
    within = (ratios >= floor) & (ratios <= cap)
    if rule == "mask-any":
        within = sequence_sum((~within).float(), lengths)[sequence_index(lengths)] == 0
    return torch.where(within, ratios, 0.0)


def policy_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return π/π_old per token, [n]; the log ratio is clamped to ±20 before exp, so that it cannot overflow."""
    return torch.exp(log_ratio(logprobs, old_logprobs))


def log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return log(π/π_old) per token, [n], clamped to ±20."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return the k3 estimate of KL(π‖π_other) per token, [n], nats: u − 1 − log u with u = π_other/π.

    It is unbiased for tokens sampled from π, and not negative (Schulman, "Approximating KL divergence").
    """
    log_u = log_ratio(other_logprobs, logprobs)
    return torch.expm1(log_u) - log_u


def sequence_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum of `values` [n] over the tokens of each completion, [s], with gradient."""
    return values.new_zeros(len(lengths)).index_add(0, sequence_index(lengths), values)


def sequence_index(lengths: Tensor) -> Tensor:
    """Return the number of each token's completion within the micro-batch, int64 [n]."""
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def seq_mean_token_mean(lengths_S: Tensor, max_tokens: int) -> Tensor:
    """Return 1/(S·length): the mean over the tokens of a sequence, then over sequences (GRPO, BandPO)."""
    return 1.0 / (len(lengths_S) * lengths_S.float())


def token_mean(lengths_S: Tensor, max_tokens: int) -> Tensor:
    """Return 1/Σ length: the mean over all tokens of the update (DAPO)."""
    return torch.full_like(lengths_S, 1.0 / max(1, int(lengths_S.sum())), dtype=torch.float32)


def seq_sum_norm(lengths_S: Tensor, max_tokens: int) -> Tensor:
    """Return 1/(S·max_tokens): a sequence's sum over a constant, then the mean over sequences (Dr. GRPO)."""
    return torch.full_like(lengths_S, 1.0 / max(1, len(lengths_S) * max_tokens), dtype=torch.float32)


AGGREGATIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "seq-mean-token-mean": seq_mean_token_mean,
    "token-mean": token_mean,
    "seq-sum-norm": seq_sum_norm,
}
"""(lengths_S int64 [S], max_tokens) → weight of each token of sequence s, float32 [S], by `objective.aggregation`.

The loss of an update is the sum of weight·loss over its tokens. The weights depend on the completion lengths of the
complete update, so eight passes of one sequence and one pass of eight give the same gradient."""
