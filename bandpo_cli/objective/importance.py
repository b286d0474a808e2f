"""Importance corrections for the gap between the sampler's and the trainer's log-probs.

The tokens were sampled from the sampler's π, while the ratio of the objective is computed relative to the trainer's
π_old. The two differ where the sampler is another engine than the trainer, by kernels, number formats and batch shapes.
Each token's loss is weighted by w, an estimate of π_old/π_sampler of limited variance (`objective.importance`):

- truncated, min(w, cap): truncated importance sampling (Ionides 2008);
- masked, 0 outside [floor, cap] and w within: per token as in IcePop, per completion as in masked importance sampling
  (verl 0.9.1, `rollout_corr_helper.py`), or 0 for a completion with any token outside (TRM, arXiv 2512.23075).

Dimensions: N tokens of S completions, flat, in the order of the completions.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bandpo_cli.config.run import ObjectiveConfig
from bandpo_cli.objective.loss import MAX_LOG_RATIO, policy_ratio, sequence_index, sequence_sum

Rule = Callable[[Tensor, Tensor, float, float], Tensor]
"""(ratios [N], lengths [S], floor, cap) -> weights [N]."""


def importance_weights(
    trainer_logprobs: Tensor, sampler_logprobs: Tensor, lengths: Tensor, objective: ObjectiveConfig
) -> Tensor | None:
    """Return the weight of each token's loss; None where `objective.importance_cap` is null.

    Args:
        trainer_logprobs, sampler_logprobs: [N] float32, nats, of the same weights at the same temperature.
        lengths: [S] int64, tokens per completion.

    Returns:
        [N] float32, without gradient.
    """
    cap = objective.importance_cap
    if cap is None:
        return None
    floor = 1.0 / cap if objective.importance_floor is None else objective.importance_floor
    ratios = policy_ratio(trainer_logprobs.detach(), sampler_logprobs)
    return RULES[objective.importance](ratios, lengths, floor, cap)


def token_truncate(ratios: Tensor, lengths: Tensor, floor: float, cap: float) -> Tensor:
    """Return min(w, cap) of each token."""
    return ratios.clamp(max=cap)


def sequence_truncate(ratios: Tensor, lengths: Tensor, floor: float, cap: float) -> Tensor:
    """Return min(w, cap) of each token's completion."""
    return sequence_ratios(ratios, lengths).clamp(max=cap)


def token_mask(ratios: Tensor, lengths: Tensor, floor: float, cap: float) -> Tensor:
    """Return w of each token within [floor, cap], 0 for the others."""
    return torch.where(_within(ratios, floor, cap), ratios, 0.0)


def sequence_mask(ratios: Tensor, lengths: Tensor, floor: float, cap: float) -> Tensor:
    """Return w of each token's completion where it is within [floor, cap], 0 for the other completions."""
    return token_mask(sequence_ratios(ratios, lengths), lengths, floor, cap)


def sequence_mask_any(ratios: Tensor, lengths: Tensor, floor: float, cap: float) -> Tensor:
    """Return w of each token; 0 for all tokens of a completion of which any is outside [floor, cap]."""
    outside = sequence_sum((~_within(ratios, floor, cap)).float(), lengths)
    return torch.where(outside[sequence_index(lengths)] == 0, ratios, 0.0)


RULES: dict[str, Rule] = {
    "token-truncate": token_truncate,
    "sequence-truncate": sequence_truncate,
    "token-mask": token_mask,
    "sequence-mask": sequence_mask,
    "sequence-mask-any": sequence_mask_any,
}
"""The rules by their names in `objective.importance`."""


def sequence_ratios(ratios: Tensor, lengths: Tensor) -> Tensor:
    """Return the geometric mean of the ratios of each token's completion, [N]."""
    means = sequence_sum(ratios.log(), lengths) / lengths
    return torch.exp(means.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))[sequence_index(lengths)]


def _within(ratios: Tensor, floor: float, cap: float) -> Tensor:
    return (ratios >= floor) & (ratios <= cap)
