"""The importance correction: weights for the gap between the sampler's and the trainer's log-probs."""

import torch
from torch import Tensor

from bandpo_cli.config.run import ObjectiveConfig
from bandpo_cli.methods.loss import MAX_LOG_RATIO, policy_ratio, sequence_index, sequence_sum


def importance_weights(
    trainer_logprobs: Tensor, sampler_logprobs: Tensor, lengths: Tensor, objective: ObjectiveConfig
) -> Tensor | None:
    """Return the weight of each token's loss, w, [N] without gradient; None where `objective.importance_cap` is null.

    The ratio of the objective is relative to the trainer's π_old, but the tokens were sampled from the sampler's π. The
    two differ where the sampler is another engine, by kernels, number formats and batch shapes. w is an estimate of
    π_old/π_sampler of limited variance, by the rule `objective.importance`, per token or per completion (there the
    geometric mean of the ratios of its tokens):

    - truncated, min(w, cap): truncated importance sampling (Ionides 2008);
    - masked, 0 outside [floor, cap] and w within: per token as in IcePop, per completion as in masked importance
      sampling (verl 0.9.1, `rollout_corr_helper.py`), or 0 for a completion with any token outside (TRM, arXiv
      2512.23075).

    Args:
        trainer_logprobs, sampler_logprobs: [N] float32, nats, of the same weights at the same temperature.
        lengths: [S] int64, tokens per completion.
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
