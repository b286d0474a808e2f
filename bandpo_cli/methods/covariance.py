"""The methods that choose tokens by the covariance of log-prob and advantage: Clip-Cov and KL-Cov."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from bandpo_cli.bounds.arrays import namespace
from bandpo_cli.methods.loss import FixedIntervalLoss, LossBatch, MethodLoss, clipped_losses, log_ratio
from bandpo_cli.methods.settings import IntervalSettings, MethodSettings, Share
from bandpo_cli.settings_validation import NotNegative

if TYPE_CHECKING:
    from torch import Tensor

    from bandpo_cli.bounds.arrays import namespace
from bandpo_cli.methods.loss import Columns


def token_covariance(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return (log π − mean)·(a − mean) of each token, [N]; its mean is the covariance over the tokens."""
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


class ClipCovSettings(IntervalSettings):
    """The fixed interval, without gradient for some tokens of high covariance (Clip-Cov, arXiv 2505.22617)."""

    text = (
        "Clip-Cov: {s.interval}, no gradient for {s.share:.2%} of the tokens, with a covariance in "
        "[{s.cov_low:g}, {s.cov_high:g}]"
    )
    method: Literal["clip-cov"] = "clip-cov"
    eps_low: float = Field(1.0, gt=0, le=1)
    eps_high: float = Field(1.0, gt=0)
    """The authors' scripts widen the interval to [0, 2], so that the covariance decides and not the ratio."""
    share: Share = 2e-4
    """Share of the update's tokens whose gradient is removed, at random among those in the range."""
    cov_low: float = 1.0
    cov_high: float = 5.0
    """Range of the covariance of a token's log-prob and advantage in which gradients are removed."""


class ClipCovLoss(FixedIntervalLoss[ClipCovSettings]):
    """PPO's clipped loss, without gradient for some tokens whose covariance is in (cov_low, cov_high).

    Source of Clip-Cov and KL-Cov: arXiv 2505.22617; PRIME-RL/Entropy-Mechanism-of-RL and verl 0.9.1,
    verl/trainer/ppo/core_algos.py, `compute_policy_loss_clip_cov` and `..._kl_cov`. Two departures: the covariance is
    computed with π_old over the update, and not with π over a micro-batch, so that the choice of tokens does not depend
    on the size of micro-batches (the source leaves out tokens that the interval clips, which is not known then); and
    the random choice of Clip-Cov is a function of the number of tokens, so that a resumed run repeats it. For the same
    tokens, losses and gradients equal verl's.
    """

    needs_all_tokens = True

    def prepare(self, old_logprobs: Tensor, advantages: Tensor) -> Columns:
        """Return `kept`, 0 for the tokens without gradient and 1 for the others: share·N of them, at least one."""
        return {"kept": self.choose(token_covariance(old_logprobs, advantages))}

    def choose(self, covariance: Tensor) -> Tensor:
        """Return 0 for up to share·N tokens (at least one) with a covariance in the range, 1 for the others, [N]."""
        xp, kept = namespace(covariance), covariance.new_ones(len(covariance))
        in_range = (covariance > self.settings.cov_low) & (covariance < self.settings.cov_high)
        candidates = in_range.nonzero().squeeze(1)
        number = max(int(self.settings.share * len(covariance)), 1)
        generator = xp.Generator().manual_seed(len(covariance))
        order = xp.randperm(len(candidates), generator=generator)[:number]
        kept[candidates[order.to(candidates.device)]] = 0.0
        return kept

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        losses = clipped_losses(batch.ratios(logprobs), batch.advantages, self._lower, self._upper)
        return losses * batch.columns["kept"]


class KlCovSettings(MethodSettings):
    """No interval; a penalty |log r| on the tokens of the highest covariance (KL-Cov, arXiv 2505.22617)."""

    text = "KL-Cov: penalty {s.kl_coef:g}·|log r| on {s.share:.2%} of the tokens"
    method: Literal["kl-cov"] = "kl-cov"
    share: Share = 2e-4
    """Share of the update's tokens with the penalty, those with the highest covariance of log-prob and advantage.

    The authors' scripts have 2e-3 at 7B and 2e-4 at 32B.
    """
    kl_coef: NotNegative = 1.0
    """Coefficient of |log r|; 1 in the authors' scripts, 0.1 in verl's configuration."""


class KlCovLoss(MethodLoss[KlCovSettings]):
    """−r·a, plus kl_coef·|log r| for the share of tokens with the highest covariance."""

    needs_all_tokens = True

    def prepare(self, old_logprobs: Tensor, advantages: Tensor) -> Columns:
        """Return `penalized`, 1 for the tokens with the penalty and 0 for the others: share·N of them, at least one."""
        return {"penalized": self.choose(token_covariance(old_logprobs, advantages))}

    def choose(self, covariance: Tensor) -> Tensor:
        """Return 1 for the share·N tokens, at least one, with the highest covariance, and 0 for the others, [N]."""
        number = max(int(self.settings.share * len(covariance)), 1)
        penalized = covariance.new_zeros(len(covariance))
        penalized[covariance.topk(number).indices] = 1.0
        return penalized

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        penalty = self.settings.kl_coef * log_ratio(logprobs, batch.old_logprobs).abs()
        return -batch.ratios(logprobs) * batch.advantages + batch.columns["penalized"] * penalty
