"""The methods that weight the gradient of each token by a function of its ratio: CISPO, SAPO, CE-GPPO, ASPO, DRPO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from bandpo_cli.bounds.intervals import BoundsFunction
from bandpo_cli.methods.loss import FixedIntervalLoss, LossBatch, MethodLoss, by_sign
from bandpo_cli.methods.settings import IntervalSettings, MethodSettings
from bandpo_cli.settings_validation import NotNegative, Positive

if TYPE_CHECKING:
    from torch import Tensor


class CispoSettings(MethodSettings):
    """Truncated importance weights, with a gradient for every token (CISPO, MiniMax-M1, arXiv 2506.13585)."""

    text = "CISPO: ratio truncated to [{s.min_weight:g}, {s.max_weight:g}] as a weight"
    method: Literal["cispo"] = "cispo"
    min_weight: NotNegative = 0.0
    max_weight: Positive = 5.0
    """The range that the ratio, as the weight of the gradient, is truncated to."""


class CispoLoss(MethodLoss[CispoSettings]):
    """−sg(clamp(r, min_weight, max_weight))·a·log π (arXiv 2506.13585, equation 4): no token loses its gradient.

    The paper has no lower bound in effect and gives no value for the upper one; 5 is that of ScaleRL (arXiv
    2510.13786), which TRL recommends.

    Equal to verl 0.9.1, `compute_policy_loss_cispo`, with 1 − clip_ratio_low and 1 + clip_ratio_high as bounds; and to
    TRL 1.16, `loss_type="cispo"`, with `epsilon_high` as the upper bound and no lower one.
    """

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        weights = batch.ratios(logprobs).detach().clamp(self.settings.min_weight, self.settings.max_weight)
        return -weights * batch.advantages * logprobs


class SapoSettings(MethodSettings):
    """A sigmoid of the ratio in place of a clip (SAPO, arXiv 2511.20347)."""

    text = "SAPO: soft gate, τ = {s.tau_positive:g} for positive, {s.tau_negative:g} for negative advantages"
    method: Literal["sapo"] = "sapo"
    tau_positive: Positive = 1.0
    tau_negative: Positive = 1.05
    """Temperature of the gate for positive and for negative advantages."""


class SapoLoss(MethodLoss[SapoSettings]):
    """−(4/τ)·σ(τ(r − 1))·a, with τ by the sign of a (arXiv 2511.20347, equations 5 and 6).

    The weight of the gradient is r·4σ(1 − σ) with σ at τ(r − 1): 1 at r = 1, at most 1.6 (r = 2.1, for τ = 1), and
    falling to 0 on both sides.

    Equal to verl 0.9.1, `compute_policy_loss_sapo`, and TRL 1.16, `loss_type="sapo"`. Both always use the mean over
    completions of the means over tokens; here `objective.aggregation` is used.
    """

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        taus = by_sign(batch.advantages, self.settings.tau_positive, self.settings.tau_negative)
        return -4.0 / taus * (taus * (batch.ratios(logprobs) - 1.0)).sigmoid() * batch.advantages


class CeGppoSettings(IntervalSettings):
    """The fixed interval, with a scaled gradient for clipped tokens (CE-GPPO, arXiv 2509.20712)."""

    text = (
        "CE-GPPO: {s.interval}, gradient of clipped tokens × {s.beta_low:g} below and × {s.beta_high:g} above"
    )
    method: Literal["ce-gppo"] = "ce-gppo"
    beta_low: NotNegative = 0.5
    """Scale of the gradient below the interval, for negative advantages; β₁ of the paper: 0.5 at 1.5B, 0.75 at 7B."""
    beta_high: NotNegative = 1.0
    """Scale of the gradient above the interval, for positive advantages; β₂ of the paper."""

    def ratio_bounds(self) -> BoundsFunction:
        return MethodSettings.ratio_bounds(self)  # raises: clipped tokens keep a gradient


class CeGppoLoss(FixedIntervalLoss[CeGppoSettings]):
    """The clipped loss, with −sg(β·bound/r)·r·a for clipped tokens (CE-GPPO, arXiv 2509.20712).

    Tokens that PPO's interval clips keep a gradient of weight β·bound: β₁(1 − ε) below, β₂(1 + ε) above.

    Source: Kwai-Klear/CE-GPPO, verl/trainer/ppo/core_algos.py, `compute_gppo_loss_general_beta`. One departure: the
    source adds a dual clip (10 in its scripts), here there is none, so a < 0 with r > 10 keeps the weight r.
    """

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        ratios, advantages = batch.ratios(logprobs), batch.advantages
        above = (advantages > 0) & (ratios > self._upper)
        below = (advantages < 0) & (ratios < self._lower)
        scale = (self.settings.beta_high * self._upper / ratios.detach()).where(above, 1.0)
        scale = (self.settings.beta_low * self._lower / ratios.detach()).where(below, scale)
        return -scale * ratios * advantages


class AspoSettings(IntervalSettings):
    """The fixed interval, with 1/r as the weight of tokens with a positive advantage (ASPO, arXiv 2510.06062)."""

    text = "ASPO: {s.interval}, weight 1/r for positive advantages, weights ≤ {s.max_weight:g}"
    method: Literal["aspo"] = "aspo"
    max_weight: Positive = 3.0
    """Cap of the weight: of 1/r for positive, of r for negative advantages."""


class AspoLoss(FixedIntervalLoss[AspoSettings]):
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
        clipped = (ratios > self._upper).where(positive, ratios < self._lower)
        weights = (1.0 / ratios).where(positive, ratios).clamp(max=self.settings.max_weight)
        return -weights.masked_fill(clipped, 0.0) * advantages * logprobs


class DrpoSettings(MethodSettings):
    """A quadratic penalty on the change of probability in place of a mask (DRPO, arXiv 2606.09821)."""

    text = "DRPO: penalty |a|·π_old·(r − 1)²/2ε, ε = {s.eps:g}"
    method: Literal["drpo"] = "drpo"
    eps: Positive = 12.5
    """Change of probability at which the gradient is 0; above 1 it never is, and the penalty only scales it."""


class DrpoLoss(MethodLoss[DrpoSettings]):
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
