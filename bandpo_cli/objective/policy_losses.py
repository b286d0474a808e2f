"""Policy losses of the methods that treat every token separately, and of the methods that compare tokens by covariance.

The clipped loss comes first. It is the loss of the interval methods: the Band, clip, clip-higher, DCPO, RIPO and none.
A ratio outside its interval loses its gradient there. `objective.completion_losses` has the other methods.

Notation as in `objective.loss`: N tokens of an update, n of a micro-batch, a the advantage of a completion; sg(·) is a
value without gradient. All losses are [n], one per token. Each class names its paper, public code and where it departs
from them; docs/methods.md lists all methods. The gradient of a loss −w·a·log π with a weight w that has no gradient is
−w·a·∇log π, just as the gradient of −r·a is −r·a·∇log π; such losses differ from others by a value, and not by a
gradient. `objective.dual_clip` applies only to the clipped loss.
"""

import math
from typing import Generic, TypeVar

import torch
from torch import Tensor

from bandpo_cli.bounds.intervals import ClipState, clip_state, ratio_bounds
from bandpo_cli.config import methods
from bandpo_cli.config.run import ObjectiveConfig
from bandpo_cli.objective.loss import Columns, LossBatch, PolicyLoss, log_ratio

Bound = Tensor | float
Settings = TypeVar("Settings", bound=methods.MethodSettings)
Interval = TypeVar("Interval", bound=methods.IntervalSettings)


def clipped_losses(ratios: Tensor, advantages: Tensor, lower: Bound, upper: Bound) -> Tensor:
    """Return −min(r·a, clamp(r, lower, upper)·a) of each token, [n]."""
    # Not torch.clamp: from torch 2.15 on, it passes on half the gradient of a ratio that equals a bound, as the ratio 1
    # of an on-policy token of probability 1 does.
    clamped = torch.where(ratios > upper, upper, torch.where(ratios < lower, lower, ratios))
    return -torch.minimum(ratios * advantages, clamped * advantages)


def masked_losses(logprobs: Tensor, batch: LossBatch, outside: Tensor, max_weight: float | None) -> Tensor:
    """Return −sg(mask·min(r, max_weight))·a·log π of each token, [n]; the mask is 0 for moves away from π_old outside.

    Args:
        outside: [n] bool, whether the token is outside of the trust region.
        max_weight: truncation of the ratio; None for none.
    """
    ratios = batch.ratios(logprobs).detach()
    away = torch.where(batch.advantages > 0, ratios > 1, ratios < 1)
    capped = ratios.clamp(max=math.inf if max_weight is None else max_weight)
    return -torch.where(outside & away, 0.0, capped) * batch.advantages * logprobs


def by_sign(advantages: Tensor, positive: float, other: float) -> Tensor:
    """Return `positive` for the tokens with a positive advantage and `other` for the other tokens, [n]."""
    return torch.full_like(advantages, other).masked_fill(advantages > 0, positive)


class IntervalLoss(PolicyLoss):
    """−min(r·a, clamp(r, lower, upper)·a), with bounds that are computed from π_old (PPO, arXiv 1707.06347).

    Equation 7 of the paper has one fixed interval; `bounds.intervals` has the bounds of each method. For a < 0 the loss
    is at most −dual_clip·a (`objective.dual_clip`; dual-clip PPO, arXiv 1912.09729), so that a single very large ratio
    does not dominate the update.

    Equal to verl 0.9.1, `compute_policy_loss_vanilla` (dual clip `clip_ratio_c`), and to TRL 1.16,
    `loss_type` "grpo", "bnpo" and "dapo" (no dual clip), for the methods clip and clip-higher.
    """

    def __init__(self, settings: methods.MethodSettings, objective: ObjectiveConfig) -> None:
        super().__init__(settings, objective)
        self._bounds = ratio_bounds(settings)

    def prepare(self, old_logprobs: Tensor, advantages: Tensor) -> Columns:
        """Return the bounds of the ratio, `lower` and `upper`, 0 ≤ lower ≤ 1 ≤ upper; upper may be inf."""
        return self._bounds(old_logprobs)._asdict()

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        advantages, dual_clip = batch.advantages, self.objective.dual_clip
        lower, upper = batch.columns["lower"], batch.columns["upper"]
        losses = clipped_losses(batch.ratios(logprobs), advantages, lower, upper)
        if dual_clip is not None:
            losses = torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)
        return losses

    def clip_state(
        self, columns: Columns, ratios: Tensor, advantages: Tensor, gradient_weights: Tensor
    ) -> ClipState:
        """Return the tokens that a bound clips, dual clip apart, and those outside the bounds."""
        return clip_state(ratios, columns["lower"], columns["upper"], advantages)


class MethodLoss(PolicyLoss, Generic[Settings]):
    """Base class of the losses of one method, whose settings have the type `Settings`."""

    settings: Settings


class FixedIntervalLoss(MethodLoss[Interval]):
    """A loss with the same interval of ratios for all tokens, [1 − ε_low, 1 + ε_high]."""

    def __init__(self, settings: Interval, objective: ObjectiveConfig) -> None:
        super().__init__(settings, objective)
        self._lower, self._upper = self.interval = (1.0 - settings.eps_low, 1.0 + settings.eps_high)


class DppoLoss(MethodLoss[methods.DppoSettings]):
    """−sg(mask·min(r, max_weight))·a·log π, mask 0 for moves away from π_old outside the trust region.

    The divergence of a token is the divergence of the two-point distributions (p, 1−p) of π_old and π: |π − π_old| for
    tv, KL(π_old‖π) for kl. The mask is 0 where it exceeds δ and a > 0, r > 1 or a < 0, r < 1.

    Source: arXiv 2602.04879; verl 0.9.1, `compute_policy_loss_dppo_tv` and `..._dppo_kl`, with `clip_ratio` as δ and
    `clip_ratio_c` as max_weight. Two departures: verl computes 1 − p from p with 1e-8 added, here it is computed from
    log p, which is accurate at both ends; and the paper's π_old is the sampler's policy, here it is the trainer's
    unless `objective.old_logprobs` is `sampler`.
    """

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        divergence = binary_tv if self.settings.divergence == "tv" else binary_kl
        outside = divergence(batch.old_logprobs, logprobs.detach()) > self.settings.delta
        return masked_losses(logprobs, batch, outside, self.settings.max_weight)


def binary_tv(old_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """Return the total variation |π − π_old| of the two-point distributions per token, [n]."""
    return (logprobs.exp() - old_logprobs.exp()).abs()


def binary_kl(old_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """Return KL(π_old‖π) of the two-point distributions per token, [n], nats; infinite where π = 1 > π_old."""
    p_old, rest_old = old_logprobs.exp(), -torch.expm1(old_logprobs)
    log_rest_ratio = torch.log(rest_old) - torch.log(-torch.expm1(logprobs))
    rest = torch.where(rest_old > 0, rest_old * log_rest_ratio, 0.0)
    return p_old * (old_logprobs - logprobs) + rest


class CispoLoss(MethodLoss[methods.CispoSettings]):
    """−sg(clamp(r, min_weight, max_weight))·a·log π (arXiv 2506.13585, equation 4): no token loses its gradient.

    The paper has no lower bound in effect and gives no value for the upper one; 5 is that of ScaleRL (arXiv
    2510.13786), which TRL recommends.

    Equal to verl 0.9.1, `compute_policy_loss_cispo`, with 1 − clip_ratio_low and 1 + clip_ratio_high as bounds; and to
    TRL 1.16, `loss_type="cispo"`, with `epsilon_high` as the upper bound and no lower one.
    """

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        weights = batch.ratios(logprobs).detach().clamp(self.settings.min_weight, self.settings.max_weight)
        return -weights * batch.advantages * logprobs


class SapoLoss(MethodLoss[methods.SapoSettings]):
    """−(4/τ)·σ(τ(r − 1))·a, with τ by the sign of a (arXiv 2511.20347, equations 5 and 6).

    The weight of the gradient is r·4σ(1 − σ) with σ at τ(r − 1): 1 at r = 1, at most 1.6 (r = 2.1, for τ = 1), and
    falling to 0 on both sides.

    Equal to verl 0.9.1, `compute_policy_loss_sapo`, and TRL 1.16, `loss_type="sapo"`. Both always use the mean over
    completions of the means over tokens; here `objective.aggregation` is used.
    """

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        taus = by_sign(batch.advantages, self.settings.tau_positive, self.settings.tau_negative)
        return -4.0 / taus * torch.sigmoid(taus * (batch.ratios(logprobs) - 1.0)) * batch.advantages


class CeGppoLoss(FixedIntervalLoss[methods.CeGppoSettings]):
    """The clipped loss, with −sg(β·bound/r)·r·a for clipped tokens (CE-GPPO, arXiv 2509.20712).

    Tokens that PPO's interval clips keep a gradient of weight β·bound: β₁(1 − ε) below, β₂(1 + ε) above.

    Source: Kwai-Klear/CE-GPPO, verl/trainer/ppo/core_algos.py, `compute_gppo_loss_general_beta`. One departure: the
    source adds a dual clip (10 in its scripts), here there is none, so a < 0 with r > 10 keeps the weight r.
    """

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        ratios, advantages = batch.ratios(logprobs), batch.advantages
        scale = torch.ones_like(ratios)
        above = (advantages > 0) & (ratios > self._upper)
        below = (advantages < 0) & (ratios < self._lower)
        scale = torch.where(above, self.settings.beta_high * self._upper / ratios.detach(), scale)
        scale = torch.where(below, self.settings.beta_low * self._lower / ratios.detach(), scale)
        return -scale * ratios * advantages


class AspoLoss(FixedIntervalLoss[methods.AspoSettings]):
    """−sg(mask·w)·a·log π with w = min(1/r, c) for a > 0 and min(r, c) for a < 0 (ASPO, arXiv 2510.06062).

    The mask is PPO's: 0 for a > 0, r > 1 + ε and a < 0, r < 1 − ε. Tokens with a positive advantage that have become
    less probable (r < 1) are raised faster than those that have become more probable.

    Source: section 6 of the paper, equation 3 for 1/r; wizard-III/Archer2.0, verl/trainer/ppo/core_algos.py,
    `compute_policy_loss_archer`, with c = 3 for both signs and a gradient beyond it. Two departures: the source's
    interval is ε = 0.2 for the 80% of tokens of lowest entropy in a completion and 0.4 for the others, here it is the
    same for all; and the value of its loss is −a·w except beyond c, here it is −w·a·log π everywhere (equal gradients).
    """

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        ratios, advantages = batch.ratios(logprobs).detach(), batch.advantages
        positive = advantages > 0
        clipped = torch.where(positive, ratios > self._upper, ratios < self._lower)
        weights = torch.where(positive, 1.0 / ratios, ratios).clamp(max=self.settings.max_weight)
        return -torch.where(clipped, 0.0, weights) * advantages * logprobs


class DrpoLoss(MethodLoss[methods.DrpoSettings]):
    """−r·a + |a|·π_old·(r − 1)²/2ε (DRPO, arXiv 2606.09821, equation 8).

    The weight of the gradient is r·(1 − sign(a)·(π − π_old)/ε) (equation 9): it falls linearly in the change of
    probability, and for ε < 1 it crosses 0 at a change of ε·sign(a) and pulls back beyond. With the paper's ε = 12.5
    it does not, as no probability changes by more than 1: the factor stays between 0.92 and 1.08.

    Source: Tencent-Hunyuan/UniRL, unirl/algorithms/drpo.py, `_drpo_loss`. One departure: its π_old is the sampler's
    policy, here it is the trainer's unless `objective.old_logprobs` is `sampler`.
    """

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        ratios, advantages = batch.ratios(logprobs), batch.advantages
        penalty = batch.old_logprobs.exp() * (ratios - 1.0).square() / (2.0 * self.settings.eps)
        return -ratios * advantages + advantages.abs() * penalty


def token_covariance(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return (log π − mean)·(a − mean) of each token, [N]; its mean is the covariance over the tokens."""
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


class ClipCovLoss(FixedIntervalLoss[methods.ClipCovSettings]):
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
        kept = torch.ones_like(covariance)
        in_range = (covariance > self.settings.cov_low) & (covariance < self.settings.cov_high)
        candidates = in_range.nonzero().squeeze(1)
        number = max(int(self.settings.share * len(covariance)), 1)
        generator = torch.Generator().manual_seed(len(covariance))
        order = torch.randperm(len(candidates), generator=generator)[:number]
        kept[candidates[order.to(candidates.device)]] = 0.0
        return kept

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        losses = clipped_losses(batch.ratios(logprobs), batch.advantages, self._lower, self._upper)
        return losses * batch.columns["kept"]


class KlCovLoss(MethodLoss[methods.KlCovSettings]):
    """−r·a, plus kl_coef·|log r| for the share of tokens with the highest covariance."""

    needs_all_tokens = True

    def prepare(self, old_logprobs: Tensor, advantages: Tensor) -> Columns:
        """Return `penalized`, 1 for the tokens with the penalty and 0 for the others: share·N of them, at least one."""
        return {"penalized": self.choose(token_covariance(old_logprobs, advantages))}

    def choose(self, covariance: Tensor) -> Tensor:
        """Return 1 for the share·N tokens, at least one, with the highest covariance, and 0 for the others, [N]."""
        number = max(int(self.settings.share * len(covariance)), 1)
        penalized = torch.zeros_like(covariance)
        penalized[torch.topk(covariance, number).indices] = 1.0
        return penalized

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        penalty = self.settings.kl_coef * log_ratio(logprobs, batch.old_logprobs).abs()
        return -batch.ratios(logprobs) * batch.advantages + batch.columns["penalized"] * penalty
