"""Policy losses that treat tokens with a high covariance of log-prob and advantage: Clip-Cov and KL-Cov.

Source: arXiv 2505.22617; PRIME-RL/Entropy-Mechanism-of-RL and verl 0.9.1, verl/trainer/ppo/core_algos.py,
`compute_policy_loss_clip_cov` and `..._kl_cov`. Two departures: the covariance is computed with π_old over the update,
and not with π over a micro-batch, so that the choice of tokens does not depend on the size of micro-batches (the source
leaves out tokens that the interval clips, which is not known then); and the random choice of Clip-Cov is a function of
the number of tokens, so that a resumed run repeats it. For the same tokens, losses and gradients equal verl's.

Dimensions as in `objective.loss`: N tokens of an update, n of a micro-batch. `objective.dual_clip` does not apply.
"""

from __future__ import annotations

import torch

from bandpo_cli.config.policy_losses import ClipCovSettings, KlCovSettings
from bandpo_cli.config.run import ObjectiveConfig
from bandpo_cli.objective.loss import Columns, LossBatch, PolicyLoss, log_ratio


def token_covariance(logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Return (log π − mean)·(a − mean) of each token, [N]; its mean is the covariance over the tokens."""
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


class ClipCovLoss(PolicyLoss):
    """PPO's clipped loss, without gradient for some tokens whose covariance is in (cov_low, cov_high)."""

    needs_all_tokens = True

    def __init__(self, settings: ClipCovSettings, objective: ObjectiveConfig) -> None:
        self._lower, self._upper = self.interval = (1.0 - settings.eps_low, 1.0 + settings.eps_high)
        self._share, self._cov_low, self._cov_high = settings.share, settings.cov_low, settings.cov_high

    def prepare(self, old_logprobs: torch.Tensor, advantages: torch.Tensor) -> Columns:
        """Return `kept`, 0 for the tokens without gradient and 1 for the others: share·N of them, at least one."""
        covariance = token_covariance(old_logprobs, advantages)
        return {"kept": self.choose(covariance)}

    def choose(self, covariance: torch.Tensor) -> torch.Tensor:
        """Return 0 for up to share·N tokens (at least one) with a covariance in the range, 1 for the others, [N]."""
        kept = torch.ones_like(covariance)
        (candidates,) = torch.nonzero(
            (covariance > self._cov_low) & (covariance < self._cov_high), as_tuple=True
        )
        number = max(int(self._share * len(covariance)), 1)
        generator = torch.Generator().manual_seed(len(covariance))
        order = torch.randperm(len(candidates), generator=generator)[:number]
        kept[candidates[order.to(candidates.device)]] = 0.0
        return kept

    def token_losses(self, logprobs: torch.Tensor, batch: LossBatch) -> torch.Tensor:
        """Return the loss of each token, [n]."""
        ratios, advantages = batch.ratios(logprobs), batch.advantages
        clamped = ratios.clamp(self._lower, self._upper)
        return -torch.minimum(ratios * advantages, clamped * advantages) * batch.columns["kept"]


class KlCovLoss(PolicyLoss):
    """−r·a, plus kl_coef·|log r| for the share of tokens with the highest covariance."""

    needs_all_tokens = True

    def __init__(self, settings: KlCovSettings, objective: ObjectiveConfig) -> None:
        self._share, self._kl_coef = settings.share, settings.kl_coef

    def prepare(self, old_logprobs: torch.Tensor, advantages: torch.Tensor) -> Columns:
        """Return `penalized`, 1 for the tokens with the penalty and 0 for the others: share·N of them, at least one."""
        covariance = token_covariance(old_logprobs, advantages)
        return {"penalized": self.choose(covariance)}

    def choose(self, covariance: torch.Tensor) -> torch.Tensor:
        """Return 1 for the share·N tokens, at least one, with the highest covariance, and 0 for the others, [N]."""
        number = max(int(self._share * len(covariance)), 1)
        penalized = torch.zeros_like(covariance)
        penalized[torch.topk(covariance, number).indices] = 1.0
        return penalized

    def token_losses(self, logprobs: torch.Tensor, batch: LossBatch) -> torch.Tensor:
        """Return the loss of each token, [n]."""
        penalty = self._kl_coef * log_ratio(logprobs, batch.old_logprobs).abs()
        return -batch.ratios(logprobs) * batch.advantages + batch.columns["penalized"] * penalty
