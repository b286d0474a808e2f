"""Policy losses per token: the clipped loss, DPPO, CISPO, SAPO, CE-GPPO, ASPO and DRPO.

The clipped loss is the loss of the interval methods: the Band, clip, clip-higher, DCPO and none.

Notation as in `objective.loss`; sg(·) is a value without gradient, and all losses are [n], one per token. Each class
names its paper, public code and where it departs from them; docs/methods.md lists all methods. The gradient of a loss
−w·a·log π with a weight w that has no gradient is −w·a·∇log π, as that of −r·a is −r·a·∇log π; such losses differ from
others by a value, and not by a gradient. `objective.dual_clip` applies to the clipped loss alone.
"""

from __future__ import annotations

import math

import torch

from bandpo_cli.bounds.intervals import ClipState, clip_state, ratio_bounds
from bandpo_cli.config.methods import MethodSettings
from bandpo_cli.config.policy_losses import (
    AspoSettings,
    CeGppoSettings,
    CispoSettings,
    DppoSettings,
    DrpoSettings,
    SapoSettings,
)
from bandpo_cli.config.run import ObjectiveConfig
from bandpo_cli.objective.loss import Columns, LossBatch, PolicyLoss


class IntervalLoss(PolicyLoss):
    """−min(r·a, clamp(r, lower, upper)·a), with bounds that are computed from π_old (PPO, arXiv 1707.06347).

    Equation 7 of the paper has one fixed interval; `bounds.methods` has the bounds of each method. For a < 0 the loss
    is at most −dual_clip·a (`objective.dual_clip`; dual-clip PPO, arXiv 1912.09729), so that a single very large ratio
    does not dominate the update.

    Equal to verl 0.9.1, `compute_policy_loss_vanilla` (dual clip `clip_ratio_c`), and to TRL 1.16,
    `loss_type` "grpo", "bnpo" and "dapo" (no dual clip), for the methods clip and clip-higher.
    """

    def __init__(self, settings: MethodSettings, objective: ObjectiveConfig) -> None:
        self._bounds = ratio_bounds(settings)
        self._dual_clip = objective.dual_clip

    def prepare(self, old_logprobs: torch.Tensor, advantages: torch.Tensor) -> Columns:
        """Return the bounds of the ratio, `lower` and `upper`, 0 ≤ lower ≤ 1 ≤ upper; upper may be inf."""
        lower, upper = self._bounds(old_logprobs)
        return {"lower": lower, "upper": upper}

    def token_losses(self, logprobs: torch.Tensor, batch: LossBatch) -> torch.Tensor:
        """Return the clipped loss of each token, [n]."""
        ratios, advantages = batch.ratios(logprobs), batch.advantages
        lower, upper = batch.columns["lower"], batch.columns["upper"]
        # Not torch.clamp: from torch 2.15 on, it passes on half the gradient of a ratio that equals a bound, as the
        # ratio 1 of an on-policy token of probability 1 does.
        clamped = torch.where(ratios > upper, upper, torch.where(ratios < lower, lower, ratios))
        losses = -torch.minimum(ratios * advantages, clamped * advantages)
        if self._dual_clip is not None:
            limit = -self._dual_clip * advantages
            losses = torch.where(advantages < 0, torch.minimum(losses, limit), losses)
        return losses

    def clip_state(
        self,
        columns: Columns,
        ratios: torch.Tensor,
        advantages: torch.Tensor,
        gradient_weights: torch.Tensor,
    ) -> ClipState:
        """Return the tokens that a bound clips, dual clip apart, and those outside the bounds."""
        return clip_state(ratios, columns["lower"], columns["upper"], advantages)


class DppoLoss(PolicyLoss):
    """−sg(mask·min(r, max_weight))·a·log π, mask 0 for moves away from π_old outside the trust region.

    The divergence of a token is the divergence of the two-point distributions (p, 1−p) of π_old and π: |π − π_old| for
    tv, KL(π_old‖π) for kl. The mask is 0 where it exceeds δ and a > 0, r > 1 or a < 0, r < 1.

    Source: arXiv 2602.04879; verl 0.9.1, `compute_policy_loss_dppo_tv` and `..._dppo_kl`, with `clip_ratio` as δ and
    `clip_ratio_c` as max_weight. Two departures: verl computes 1 − p from p with 1e-8 added, here it is computed from
    log p, which is accurate at both ends; and the paper's π_old is the sampler's policy, here it is the trainer's
    unless `objective.old_logprobs` is `sampler`.
    """

    def __init__(self, settings: DppoSettings, objective: ObjectiveConfig) -> None:
        self._divergence, self._delta = settings.divergence, settings.delta
        self._max_weight = math.inf if settings.max_weight is None else settings.max_weight

    def token_losses(self, logprobs: torch.Tensor, batch: LossBatch) -> torch.Tensor:
        """Return the masked loss of each token, [n]."""
        ratios = batch.ratios(logprobs).detach()
        outside = self._outside(logprobs.detach(), batch.old_logprobs)
        away = torch.where(batch.advantages > 0, ratios > 1, ratios < 1)
        weights = torch.where(outside & away, 0.0, ratios.clamp(max=self._max_weight))
        return -weights * batch.advantages * logprobs

    def _outside(self, logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
        divergence = binary_tv if self._divergence == "tv" else binary_kl
        return divergence(old_logprobs, logprobs) > self._delta


def binary_tv(old_logprobs: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Return the total variation |π − π_old| of the two-point distributions per token, [n]."""
    return (logprobs.exp() - old_logprobs.exp()).abs()


def binary_kl(old_logprobs: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Return KL(π_old‖π) of the two-point distributions per token, [n], nats; infinite where π = 1 > π_old."""
    p_old, rest_old = old_logprobs.exp(), -torch.expm1(old_logprobs)
    log_rest_ratio = torch.log(rest_old) - torch.log(-torch.expm1(logprobs))
    rest = torch.where(rest_old > 0, rest_old * log_rest_ratio, 0.0)
    return p_old * (old_logprobs - logprobs) + rest


class CispoLoss(PolicyLoss):
    """−sg(clamp(r, min_weight, max_weight))·a·log π (arXiv 2506.13585, equation 4): no token loses its gradient.

    The paper has no lower bound in effect and gives no value for the upper one; 5 is that of ScaleRL (arXiv
    2510.13786), which TRL recommends.

    Equal to verl 0.9.1, `compute_policy_loss_cispo`, with 1 − clip_ratio_low and 1 + clip_ratio_high as bounds; and to
    TRL 1.16, `loss_type="cispo"`, with `epsilon_high` as the upper bound and no lower one.
    """

    def __init__(self, settings: CispoSettings, objective: ObjectiveConfig) -> None:
        self._low, self._high = settings.min_weight, settings.max_weight

    def token_losses(self, logprobs: torch.Tensor, batch: LossBatch) -> torch.Tensor:
        """Return the loss of each token, [n]."""
        weights = batch.ratios(logprobs).detach().clamp(self._low, self._high)
        return -weights * batch.advantages * logprobs


class SapoLoss(PolicyLoss):
    """−(4/τ)·σ(τ(r − 1))·a, with τ by the sign of a (arXiv 2511.20347, equations 5 and 6).

    The weight of the gradient is r·4σ(1 − σ) with σ at τ(r − 1): 1 at r = 1, at most 1.6 (r = 2.1, for τ = 1), and
    falling to 0 on both sides.

    Equal to verl 0.9.1, `compute_policy_loss_sapo`, and TRL 1.16, `loss_type="sapo"`. Both always use the mean over
    completions of the means over tokens; here `objective.aggregation` is used.
    """

    def __init__(self, settings: SapoSettings, objective: ObjectiveConfig) -> None:
        self._tau_positive, self._tau_negative = settings.tau_positive, settings.tau_negative

    def token_losses(self, logprobs: torch.Tensor, batch: LossBatch) -> torch.Tensor:
        """Return the loss of each token, [n]."""
        taus = torch.full_like(batch.advantages, self._tau_negative)
        taus = taus.masked_fill(batch.advantages > 0, self._tau_positive)
        return -4.0 / taus * torch.sigmoid(taus * (batch.ratios(logprobs) - 1.0)) * batch.advantages


class CeGppoLoss(PolicyLoss):
    """The clipped loss, with −sg(β·bound/r)·r·a for clipped tokens (CE-GPPO, arXiv 2509.20712).

    Tokens that PPO's interval clips keep a gradient of weight β·bound: β₁(1 − ε) below, β₂(1 + ε) above.

    Source: Kwai-Klear/CE-GPPO, verl/trainer/ppo/core_algos.py, `compute_gppo_loss_general_beta`. One departure: the
    source adds a dual clip (10 in its scripts), here there is none, so a < 0 with r > 10 keeps the weight r.
    """

    def __init__(self, settings: CeGppoSettings, objective: ObjectiveConfig) -> None:
        self._lower, self._upper = self.interval = (1.0 - settings.eps_low, 1.0 + settings.eps_high)
        self._beta_low, self._beta_high = settings.beta_low, settings.beta_high

    def token_losses(self, logprobs: torch.Tensor, batch: LossBatch) -> torch.Tensor:
        """Return the loss of each token, [n]."""
        ratios, advantages = batch.ratios(logprobs), batch.advantages
        scale = torch.ones_like(ratios)
        above = (advantages > 0) & (ratios > self._upper)
        below = (advantages < 0) & (ratios < self._lower)
        scale = torch.where(above, self._beta_high * self._upper / ratios.detach(), scale)
        scale = torch.where(below, self._beta_low * self._lower / ratios.detach(), scale)
        return -scale * ratios * advantages


class AspoLoss(PolicyLoss):
    """−sg(mask·w)·a·log π with w = min(1/r, c) for a > 0 and min(r, c) for a < 0 (ASPO, arXiv 2510.06062).

    The mask is PPO's: 0 for a > 0, r > 1 + ε and a < 0, r < 1 − ε. Tokens with a positive advantage that have become
    less probable (r < 1) are raised faster than those that have become more probable.

    Source: section 6 of the paper, equation 3 for 1/r; wizard-III/Archer2.0, verl/trainer/ppo/core_algos.py,
    `compute_policy_loss_archer`, with c = 3 for both signs and a gradient beyond it. Two departures: the source's
    interval is ε = 0.2 for the 80% of tokens of lowest entropy in a completion and 0.4 for the others, here it is the
    same for all; and the value of its loss is −a·w except beyond c, here it is −w·a·log π everywhere (equal gradients).
    """

    def __init__(self, settings: AspoSettings, objective: ObjectiveConfig) -> None:
        self._lower, self._upper = self.interval = (1.0 - settings.eps_low, 1.0 + settings.eps_high)
        self._max_weight = settings.max_weight

    def token_losses(self, logprobs: torch.Tensor, batch: LossBatch) -> torch.Tensor:
        """Return the loss of each token, [n]."""
        ratios, advantages = batch.ratios(logprobs).detach(), batch.advantages
        positive = advantages > 0
        clipped = torch.where(positive, ratios > self._upper, ratios < self._lower)
        weights = torch.where(positive, 1.0 / ratios, ratios).clamp(max=self._max_weight)
        return -torch.where(clipped, 0.0, weights) * advantages * logprobs


class DrpoLoss(PolicyLoss):
    """−r·a + |a|·π_old·(r − 1)²/2ε (DRPO, arXiv 2606.09821, equation 8).

    The weight of the gradient is r·(1 − sign(a)·(π − π_old)/ε) (equation 9): it falls linearly in the change of
    probability, and for ε < 1 it crosses 0 at a change of ε·sign(a) and pulls back beyond. With the paper's ε = 12.5
    it does not, as no probability changes by more than 1: the factor stays between 0.92 and 1.08.

    Source: Tencent-Hunyuan/UniRL, unirl/algorithms/drpo.py, `_drpo_loss`. One departure: its π_old is the sampler's
    policy, here it is the trainer's unless `objective.old_logprobs` is `sampler`.
    """

    def __init__(self, settings: DrpoSettings, objective: ObjectiveConfig) -> None:
        self._eps = settings.eps

    def token_losses(self, logprobs: torch.Tensor, batch: LossBatch) -> torch.Tensor:
        """Return the loss of each token, [n]."""
        ratios, advantages = batch.ratios(logprobs), batch.advantages
        penalty = batch.old_logprobs.exp() * (ratios - 1.0).square() / (2.0 * self._eps)
        return -ratios * advantages + advantages.abs() * penalty
