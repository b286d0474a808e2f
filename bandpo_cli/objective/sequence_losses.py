"""Policy losses with the ratio of a complete completion: GSPO, GMPO, TOPR.

Notation as in `objective.loss`; L is the number of tokens of a completion, and a its advantage. The losses are [n],
one per token, from sums over the completions of the micro-batch, [s]. `objective.dual_clip` applies to none of them.
"""

from __future__ import annotations

import torch

from bandpo_cli.config.policy_losses import GmpoSettings, GspoSettings, ToprSettings
from bandpo_cli.config.run import ObjectiveConfig
from bandpo_cli.objective.loss import (
    MAX_LOG_RATIO,
    LossBatch,
    PolicyLoss,
    log_ratio,
    sequence_index,
    sequence_sum,
)


class GspoLoss(PolicyLoss):
    """−min(s·a, clamp(s, 1 − ε, 1 + ε)·a), s = exp(mean over the completion of log r) (arXiv 2507.18071, equation 5).

    Per token it is the GSPO-token form of the paper's section 4.3, s_t = sg(s)·π/sg(π): equal in value, and in
    gradient where the tokens of a completion have equal weights. The recommended aggregation is
    `seq-mean-token-mean`.

    Equal to verl 0.9.1, `compute_policy_loss_gspo` (which limits log s to 10, here ±20), and in the gradient to TRL
    1.16, `importance_sampling_level="sequence"`, which distributes the completion's gradient over its tokens evenly.
    """

    def __init__(self, settings: GspoSettings, objective: ObjectiveConfig) -> None:
        self._lower, self._upper = 1.0 - settings.eps_low, 1.0 + settings.eps_high

    def token_losses(self, logprobs: torch.Tensor, batch: LossBatch) -> torch.Tensor:
        """Return the loss of each token, [n]."""
        advantages = batch.advantages
        means = sequence_sum(logprobs.detach() - batch.old_logprobs, batch.lengths) / batch.lengths
        log_s = means[sequence_index(batch.lengths)] + logprobs - logprobs.detach()
        ratios = torch.exp(log_s.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
        clamped = ratios.clamp(self._lower, self._upper)
        return -torch.minimum(ratios * advantages, clamped * advantages)


class GmpoLoss(PolicyLoss):
    """−a·exp(mean over the completion of the clipped log r) (arXiv 2507.20673, equation 4).

    log r is clipped to [−ε_low, ε_high] on the side that the sign of a asks for, as in PPO; clipped tokens have no
    gradient. With `seq-mean-token-mean` the loss is the mean over completions, as in the source.

    Equal to verl 0.9.1, `compute_policy_loss_geo_mean`; the authors' code is callsys/GMPO, train_zero_math_gmpo.py.
    One departure: log r is limited to ±20 on the other side, which no finite ratio of interest reaches.
    """

    def __init__(self, settings: GmpoSettings, objective: ObjectiveConfig) -> None:
        self._low, self._high = -settings.log_eps_low, settings.log_eps_high

    def token_losses(self, logprobs: torch.Tensor, batch: LossBatch) -> torch.Tensor:
        """Return the loss of each token, [n], which is the loss of its completion."""
        log_ratios = log_ratio(logprobs, batch.old_logprobs)
        clipped = torch.where(
            batch.advantages > 0, log_ratios.clamp(max=self._high), log_ratios.clamp(min=self._low)
        )
        means = sequence_sum(clipped, batch.lengths) / batch.lengths
        return -batch.advantages * torch.exp(means)[sequence_index(batch.lengths)]


class ToprLoss(PolicyLoss):
    """−sg(w)·a·log π, w = 1 for a ≥ 0 and clamp(Π r, 0, max_weight) for a < 0 (TOPR, arXiv 2503.14286).

    Two departures: the sign and the factor are those of the paper's reward, here those of the advantage, which is the
    reward minus a baseline; and π_old takes the place of the policy that sampled the data. The paper's ratio is that
    of the complete completion, as here; public code that multiplies per-token ratios' clamps instead (Trinity-RFT,
    `TOPRPolicyLossFn`) differs.
    """

    def __init__(self, settings: ToprSettings, objective: ObjectiveConfig) -> None:
        self._max_weight = settings.max_weight

    def token_losses(self, logprobs: torch.Tensor, batch: LossBatch) -> torch.Tensor:
        """Return the loss of each token, [n]."""
        sums = sequence_sum(logprobs.detach() - batch.old_logprobs, batch.lengths)
        products = torch.exp(sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).clamp(max=self._max_weight)
        weights = torch.where(batch.advantages < 0, products[sequence_index(batch.lengths)], 1.0)
        return -weights * batch.advantages * logprobs
