"""The objective of an update: weighted losses of a method, penalty to the reference model, entropy bonus, gradients."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bandpo_cli.config.run import ObjectiveConfig
from bandpo_cli.methods.loss import LossBatch, PolicyLoss, log_ratio, sequence_index, sequence_sum


@dataclass(frozen=True)
class LossOutputs:
    """The result of `policy_objective`; no tensor has a gradient.

    The gradient weight of a token is w in the gradient −weight·w·a·∇log π of its loss, without the penalty to the
    reference model: 1 for an unclipped token with r = 1, 0 for a clipped one or where a or the weight is 0.
    """

    loss: Tensor  # scalar, the micro-batch's share of the update's loss
    gradient: Tensor  # [n], ∂loss/∂logprobs
    ratios: Tensor  # [n], r
    gradient_weights: Tensor  # [n]
    entropy_gradient: Tensor  # [n], ∂loss/∂entropy of the distribution of each token


def policy_objective(
    loss: PolicyLoss, logprobs: Tensor, batch: LossBatch, weights: Tensor, entropy: Tensor | None = None
) -> LossOutputs:
    """Return Σ weight·(keep·loss + reference_kl·k3 + drift_penalty·log²r) − bonus of a micro-batch, with its gradients.

    keep is 0 for the completions that `objective.off_policy_mask` drops and the tokens that are not `batch.chosen`. The
    penalties apply to them, as in TRL 1.16; the bonus is that of chosen tokens.
    The gradient is computed here, and not by a backward pass through the model, so that the part of the method alone
    is known per token. A token with the weight 0 has no gradient, even where the loss of another token depends on it.

    Args:
        logprobs: [n] float32, log π(token) under the policy being updated, nats.
        weights: [n], weight of the token in the update's loss (`AGGREGATIONS`), without its importance weight.
        entropy: [n], entropy of the distribution of each token, nats. The bonus is `objective.entropy_bonus` times its
            sum with `weights`, as in verl; None without a bonus.
    """
    objective, chosen = loss.objective, 1.0 if batch.chosen is None else batch.chosen
    entropy_gradient = -objective.entropy_bonus * weights * chosen
    if batch.importance_weights is not None:
        weights = weights * batch.importance_weights
    logprobs = logprobs.detach().requires_grad_()
    policy_weights = weights * chosen
    if objective.off_policy_mask is not None:
        dropped = off_policy_tokens(logprobs, batch, objective.off_policy_mask)
        policy_weights = policy_weights.masked_fill(dropped, 0.0)
    policy_part = (policy_weights * loss.token_losses(logprobs, batch)).sum()
    (policy_gradient,) = torch.autograd.grad(policy_part, logprobs)
    # A custom loss may couple the tokens of a completion.
    policy_gradient = policy_gradient.where(policy_weights != 0, 0.0)
    total, gradient, penalties = policy_part, policy_gradient, []
    if batch.ref_logprobs is not None:
        factor = batch.ratios(logprobs) if objective.reference_kl_estimator == "unbiased" else 1.0
        penalties.append(objective.reference_kl * factor * k3(logprobs, batch.ref_logprobs))
    if objective.drift_penalty:
        penalties.append(objective.drift_penalty * log_ratio(logprobs, batch.old_logprobs).square())
    for penalty in penalties:
        weighted = (weights * penalty).sum()
        (penalty_gradient,) = torch.autograd.grad(weighted, logprobs)
        total, gradient = total + weighted, gradient + penalty_gradient
    if entropy is not None:
        total = total + (entropy_gradient * entropy.detach()).sum()
    scale = -policy_weights * batch.advantages
    gradient_weights = torch.where(scale == 0, 0.0, policy_gradient / scale)
    ratios = batch.ratios(logprobs).detach()
    return LossOutputs(total.detach(), gradient, ratios, gradient_weights, entropy_gradient)


def off_policy_tokens(logprobs: Tensor, batch: LossBatch, threshold: float) -> Tensor:
    """Return whether each token's completion has a < 0 and mean(log μ − log π) > threshold, bool [n].

    The mean is over the tokens of the completion, and μ is the policy that sampled them as the sampler reported it, so
    that it includes stale weights and the gap between the engines.

    Source: DeepSeek-V3.2, arXiv 2512.02556, equation 9; equal to `get_off_policy_mask` of TRL 1.16.
    """
    means = sequence_sum(batch.sampled_logprobs - logprobs.detach(), batch.lengths) / batch.lengths
    return (batch.advantages < 0) & (means > threshold)[sequence_index(batch.lengths, logprobs)]


def entropy_threshold(entropy: Tensor, share: float) -> Tensor:
    """Return the lowest entropy that `objective.top_entropy` trains, of n > 0 tokens: that of rank ⌊share·(n − 1)⌋ + 1.

    The tokens at or above it are those above the quantile 1 − share in TRL 1.16, `get_high_entropy_mask`, which
    interpolates between two tokens.
    """
    return entropy.sort(descending=True).values[int(share * (len(entropy) - 1))]


def next_entropy_bonus(objective: ObjectiveConfig, coefficient: float, entropy: float) -> tuple[float, float]:
    """Return the coefficient after a step with this entropy, and that of the bonus of the next step: the same, or 0.

    Source: Skywork-OR1, arXiv 2505.22312, and `EntController` in verl/trainer/ppo/core_algos.py, which has
    no bonus where the entropy is the target itself; there the entropy is the mean of −log π_old.
    """
    if math.isnan(entropy):  # of no token is known
        return coefficient, coefficient
    is_low = entropy <= (objective.entropy_target or 0.0)
    change = objective.entropy_bonus_step if is_low else -objective.entropy_bonus_step
    coefficient = min(max(coefficient + change, 0.0), objective.entropy_bonus_max)
    return coefficient, coefficient if is_low else 0.0


def k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return the k3 estimate of KL(π‖π_other) per token, [n], nats: u − 1 − log u with u = π_other/π.

    It is unbiased for tokens sampled from π, and not negative (Schulman, "Approximating KL divergence").
    """
    log_u = log_ratio(other_logprobs, logprobs)
    return torch.expm1(log_u) - log_u


AGGREGATIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    # the mean over the tokens of a sequence, then over sequences (GRPO, BandPO)
    "seq-mean-token-mean": lambda lengths_S, _: 1.0 / (len(lengths_S) * lengths_S.float()),
    # the mean over all tokens of the update (DAPO)
    "token-mean": lambda lengths_S, _: (1.0 / lengths_S.sum().double()).float().expand(len(lengths_S)),
    # a sequence's sum over a constant, then the mean over sequences (Dr. GRPO)
    "seq-sum-norm": lambda lengths_S, max_tokens: torch.full_like(
        lengths_S, 1.0 / max(1, len(lengths_S) * max_tokens), dtype=torch.float32
    ),
}
"""(lengths_S int64 [S], max_tokens) → weight of each token of sequence s, float32 [S], by `objective.aggregation`.

The loss of an update is the sum of weight·loss over its tokens. The weights depend on the completion lengths of the
complete update, so eight passes of one sequence and one pass of eight give the same gradient."""
