"""The methods that weight the gradient of each token.

CISPO, SAPO, CE-GPPO, DGPO, BAPO, ASPO, DRPO and WAPO do so by a function of its ratio, Clip-Cov and KL-Cov by its
covariance of log-prob and advantage, M2PO by its share in the second moment of the log ratio to the sampler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from bandpo_cli.bounds.arrays import namespace
from bandpo_cli.methods.loss import by_sign, clipped_losses, log_ratio, without_masked
from bandpo_cli.methods.settings import IntervalSettings, MethodSettings, Share
from bandpo_cli.settings_validation import NotNegative, Positive, require

if TYPE_CHECKING:
    from torch import Tensor

    from bandpo_cli.methods.loss import Columns, LossBatch


class CispoSettings(MethodSettings):
    """Truncated importance weights, with a gradient for every token (CISPO, MiniMax-M1, arXiv 2506.13585)."""

    text = "CISPO: ratio truncated to [{s.min_weight:g}, {s.max_weight:g}] as a weight"
    method: Literal["cispo"] = "cispo"
    min_weight: NotNegative = 0.0
    max_weight: Positive = 5.0
    """The range that the ratio, as the weight of the gradient, is truncated to."""

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return −sg(clamp(r, min_weight, max_weight))·a·log π (arXiv 2506.13585, equation 4).

        No token loses its gradient. The paper has no lower bound in effect and gives no value for the upper one; 5 is
        that of ScaleRL (arXiv 2510.13786), which TRL recommends.

        Equal to verl 0.9.1, `compute_policy_loss_cispo`, with 1 − clip_ratio_low and 1 + clip_ratio_high as bounds; and
        to TRL 1.16, `loss_type="cispo"`, with `epsilon_high` as the upper bound and no lower one.
        """
        weights = batch.ratios(logprobs).detach().clamp(self.min_weight, self.max_weight)
        return -weights * batch.advantages * logprobs


class SapoSettings(MethodSettings):
    """A sigmoid of the ratio in place of a clip (SAPO, arXiv 2511.20347)."""

    text = "SAPO: soft gate, τ = {s.tau_positive:g} for positive, {s.tau_negative:g} for negative advantages"
    method: Literal["sapo"] = "sapo"
    tau_positive: Positive = 1.0
    tau_negative: Positive = 1.05
    """Temperature of the gate for positive and for negative advantages."""

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return −(4/τ)·σ(τ(r − 1))·a, with τ by the sign of a (arXiv 2511.20347, equations 5 and 6).

        The weight of the gradient is r·4σ(1 − σ) with σ at τ(r − 1): 1 at r = 1, at most 1.6 (r = 2.1, for τ = 1), and
        falling to 0 on both sides.

        Equal to verl 0.9.1, `compute_policy_loss_sapo`, and TRL 1.16, `loss_type="sapo"`. Both always use the mean over
        completions of the means over tokens; here `objective.aggregation` is used.
        """
        taus = by_sign(batch.advantages, self.tau_positive, self.tau_negative)
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

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return the clipped loss, with −sg(β·bound/r)·r·a for clipped tokens (CE-GPPO, arXiv 2509.20712).

        Tokens that PPO's interval clips keep a gradient of weight β·bound: β₁(1 − ε) below, β₂(1 + ε) above.

        Source: Kwai-Klear/CE-GPPO, verl/trainer/ppo/core_algos.py, `compute_gppo_loss_general_beta`. One departure: the
        source adds a dual clip (10 in its scripts), here there is none, so a < 0 with r > 10 keeps the weight r.
        """
        ratios, advantages = batch.ratios(logprobs), batch.advantages
        (lower, upper), taken = self.ends, ratios.detach()
        scale = (self.beta_high * upper / taken).where((advantages > 0) & (ratios > upper), 1.0)
        scale = (self.beta_low * lower / taken).where((advantages < 0) & (ratios < lower), scale)
        return -scale * ratios * advantages


class DgpoSettings(IntervalSettings):
    """The fixed interval, with a decaying weight of the gradient beyond it (DGPO, arXiv 2603.14389)."""

    text = "DGPO: {s.interval}, weight ∝ r^(1 + {s.decay_low:g}) below and r^(1 − 1/{s.decay_high:g}) above"
    method: Literal["dgpo"] = "dgpo"
    decay_low: Positive = 1.0
    """n: below the interval, for negative advantages, the weight is r^(n+1)/l^n. The authors also take 2 at 1.5B."""
    decay_high: float = Field(2.0, ge=1)
    """m: above the interval, for positive advantages, the weight is r^(1−1/m)·u^(1/m)."""

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return −r·a, times sg((r/l)^n) for a < 0, r < l and sg((u/r)^(1/m)) for a > 0, r > u.

        The weight is continuous at both ends of [l, u], and falls to 0 with the probability for a < 0.

        Source: VenomRose-Juri/DGPO-RL, verl/trainer/ppo/core_algos.py, `ratio_mode` dgpo, without a dual clip too.
        """
        ratios, advantages = batch.ratios(logprobs), batch.advantages
        (lower, upper), taken = self.ends, ratios.detach()
        scale = (upper / taken).pow(1.0 / self.decay_high).where((advantages > 0) & (ratios > upper), 1.0)
        scale = (taken / lower).pow(self.decay_low).where((advantages < 0) & (ratios < lower), scale)
        return -scale * ratios * advantages


class WapoSettings(MethodSettings):
    """Only completions with a positive advantage, with an upper bound of the ratio (WAPO, arXiv 2606.16154)."""

    text = "WAPO: positive advantages only, ratio ≤ 1 + {s.eps_high:g}"
    method: Literal["wapo"] = "wapo"
    has_negative = False
    eps_high: Positive = 9.0
    """The upper bound of the ratio is 1 + eps_high."""

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return −a·min(r, 1 + ε) for a > 0, and 0 for the other tokens.

        The authors' advantage is the reward minus the mean of the group (`objective.advantage_std: false`), and the
        divisor of a group its completions times the most tokens of a sequence, here of a completion (`seq-sum-norm`).

        Source: layer6ai-labs/wapo, verifiers/rl/trainer/trainer.py, `loss_type` wapo. One departure: its r is relative
        to the sampler, here to the trainer's π_old unless `objective.old_logprobs` is `sampler`.
        """
        positive = batch.advantages.clamp(min=0.0)
        return clipped_losses(batch.ratios(logprobs), positive, 0.0, 1.0 + self.eps_high)


class BapoSettings(MethodSettings):
    """An interval whose bounds rise in each update until positive tokens have their share (BAPO, arXiv 2510.18927)."""

    text = (
        "BAPO: ratio in [{s.low_start:g} to {s.low_end:g}, {s.high_start:g} to {s.high_end:g}], "
        "positive share {s.share:g}"
    )
    method: Literal["bapo"] = "bapo"
    adapts = True
    share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """The share of the positive tokens in the sum of |clipped ratio·a| that is aimed at."""
    low_start: float = Field(0.6, gt=0, le=1)
    low_end: float = Field(0.8, gt=0, le=1)
    high_start: float = Field(1.2, ge=1)
    high_end: float = Field(2.0, ge=1)
    step: Positive = 0.05
    """The interval is [low_start, high_start]; first the lower bound rises in steps to at most low_end, then the upper
    bound to at most high_end, until the share is reached."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        ordered = self.low_start <= self.low_end and self.high_start <= self.high_end
        order = "take low_start ≤ low_end and high_start ≤ high_end"
        require(ordered, f"a bound rises from its start to its end: {order}")
        return self

    def prepare(self, old_logprobs: Tensor, advantages: Tensor, *_: Tensor) -> Columns:
        """Return the interval at the start, that of an update whose ratios are 1."""
        return {
            "lower": old_logprobs.new_full(old_logprobs.shape, self.low_start),
            "upper": old_logprobs.new_full(old_logprobs.shape, self.high_start),
        }

    def adapt(self, batch: LossBatch, logprobs: Tensor) -> Columns:
        """Return the interval of the update, `lower` and `upper`, for log π of all of its tokens, [N]."""
        ratios, advantages = batch.ratios(logprobs), without_masked(batch.advantages, batch)
        low, high = self.low_start, self.high_start

        def is_short() -> bool:
            gains = advantages.clamp(min=0) * ratios.clamp(max=high)
            losses = -advantages.clamp(max=0) * ratios.clamp(min=low)
            return bool(gains.sum() < self.share * (gains.sum() + losses.sum()))

        while low < self.low_end and is_short():
            low = min(low + self.step, self.low_end)
        while high < self.high_end and is_short():
            high = min(high + self.step, self.high_end)
        return {"lower": ratios.new_full(ratios.shape, low), "upper": ratios.new_full(ratios.shape, high)}

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return the clipped loss with the interval of the update; the first one, where every r is 1, has the start.

        Source: WooooDyy/BAPO, recipe/bapo/policy_loss.py, with `adv_ratio_target` share/(1 − share). Two departures: it
        chooses the interval per micro-batch, here per update, which takes a further forward pass; and it has a dual
        clip of 3, here there is none.
        """
        columns = batch.columns
        return clipped_losses(batch.ratios(logprobs), batch.advantages, columns["lower"], columns["upper"])


class M2poSettings(MethodSettings):
    """No gradient for the tokens with the largest log ratios to the sampler (M2PO, arXiv 2510.01161)."""

    text = "M2PO: the tokens of smallest log²(π_old/π_sampler), with a mean below {s.threshold:g}"
    method: Literal["m2po"] = "m2po"
    needs_all_tokens = True
    needs_sampler = True
    threshold: Positive = 0.04
    """The limit of the mean of log²(π_old/π_sampler) over the tokens of the update that keep their gradient."""

    def prepare(
        self, old_logprobs: Tensor, advantages: Tensor, sampler_logprobs: Tensor | None = None
    ) -> Columns:
        """Return `kept`: 0 for the tokens of largest log²(π_old/π_sampler), until the mean of the others is below."""
        sampled = old_logprobs if sampler_logprobs is None else sampler_logprobs
        moments, order = (old_logprobs - sampled).double().square().sort(descending=True)
        counts = old_logprobs.new_ones(len(moments)).double().flip(0).cumsum(0).flip(0)
        means = moments.flip(0).cumsum(0).flip(0) / counts  # of each token and those with a smaller moment
        dropped = (means >= self.threshold).sum().clamp(max=max(len(moments) - 1, 0))
        kept = old_logprobs.new_ones(len(moments))
        kept[order] = (counts <= len(moments) - dropped).to(kept.dtype)
        return {"kept": kept}

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return −r·a for kept tokens, 0 for the others.

        Source: AReaL, areal/trainer/ppo/actor.py, `_apply_m2po_masking`. One departure: it chooses the tokens of a
        micro-batch, here of the update. The paper has π in place of π_old, and only masks tokens that PPO could clip.
        """
        return -batch.columns["kept"] * batch.ratios(logprobs) * batch.advantages


class AspoSettings(IntervalSettings):
    """The fixed interval, with 1/r as the weight of tokens with a positive advantage (ASPO, arXiv 2510.06062)."""

    text = "ASPO: {s.interval}, weight 1/r for positive advantages, weights ≤ {s.max_weight:g}"
    method: Literal["aspo"] = "aspo"
    max_weight: Positive = 3.0
    """Cap of the weight: of 1/r for positive, of r for negative advantages."""

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return −sg(mask·w)·a·log π with w = min(1/r, c) for a > 0 and min(r, c) for a < 0 (ASPO, arXiv 2510.06062).

        The mask is PPO's: 0 for a > 0, r > 1 + ε and a < 0, r < 1 − ε. Tokens with a positive advantage that have
        become less probable (r < 1) are raised faster than those that have become more probable.

        Source: section 6 of the paper, equation 3 for 1/r; wizard-III/Archer2.0, verl/trainer/ppo/core_algos.py,
        `compute_policy_loss_archer`, with c = 3 for both signs and a gradient beyond it. Two departures: the source's
        interval is ε = 0.2 for the 80% of tokens of lowest entropy in a completion and 0.4 for the others, here it is
        the same for all; and the value of its loss is −a·w except beyond c, here it is −w·a·log π everywhere (equal
        gradients).
        """
        ratios, advantages = batch.ratios(logprobs).detach(), batch.advantages
        (lower, upper), positive = self.ends, advantages > 0
        clipped = (ratios > upper).where(positive, ratios < lower)
        weights = (1.0 / ratios).where(positive, ratios).clamp(max=self.max_weight)
        return -weights.masked_fill(clipped, 0.0) * advantages * logprobs


class DrpoSettings(MethodSettings):
    """A quadratic penalty on the change of probability in place of a mask (DRPO, arXiv 2606.09821)."""

    text = "DRPO: penalty |a|·π_old·(r − 1)²/2ε, ε = {s.eps:g}"
    method: Literal["drpo"] = "drpo"
    eps: Positive = 12.5
    """Change of probability at which the gradient is 0; above 1 it never is, and the penalty only scales it."""

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return −r·a + |a|·π_old·(r − 1)²/2ε (DRPO, arXiv 2606.09821, equation 8).

        The weight of the gradient is r·(1 − sign(a)·(π − π_old)/ε) (equation 9): it falls linearly in the change of
        probability, and for ε < 1 it crosses 0 at a change of ε·sign(a) and pulls back beyond. With the paper's ε =
        12.5 it does not, as no probability changes by more than 1: the factor stays between 0.92 and 1.08.

        Source: Tencent-Hunyuan/UniRL, unirl/algorithms/drpo.py, `_drpo_loss`. One departure: its π_old is the sampler's
        policy, here it is the trainer's unless `objective.old_logprobs` is `sampler`.
        """
        ratios, advantages = batch.ratios(logprobs), batch.advantages
        penalty = batch.old_logprobs.exp() * (ratios - 1.0).square() / (2.0 * self.eps)
        return -ratios * advantages + advantages.abs() * penalty


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
    needs_all_tokens = True

    def prepare(self, old_logprobs: Tensor, advantages: Tensor) -> Columns:
        """Return `kept`: 0 for up to share·N tokens (at least one) with a covariance in the range, 1 for the others."""
        return {"kept": self.choose(token_covariance(old_logprobs, advantages))}

    def choose(self, covariance: Tensor) -> Tensor:
        """Return the column `kept` for the covariance of each token of the update, [N]."""
        xp, kept = namespace(covariance), covariance.new_ones(len(covariance))
        in_range = (covariance > self.cov_low) & (covariance < self.cov_high)
        candidates = in_range.nonzero().squeeze(1)
        number = max(int(self.share * len(covariance)), 1)
        generator = xp.Generator().manual_seed(len(covariance))
        order = xp.randperm(len(candidates), generator=generator)[:number]
        kept[candidates[order.to(candidates.device)]] = 0.0
        return kept

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return PPO's clipped loss, without gradient for some tokens whose covariance is in (cov_low, cov_high).

        Source of Clip-Cov and KL-Cov: arXiv 2505.22617; PRIME-RL/Entropy-Mechanism-of-RL and verl 0.9.1,
        verl/trainer/ppo/core_algos.py, `compute_policy_loss_clip_cov` and `..._kl_cov`. Two departures: the covariance
        is computed with π_old over the update, and not with π over a micro-batch, so that the choice of tokens does not
        depend on the size of micro-batches (the source leaves out tokens that the interval clips, which is not known
        then); and the random choice of Clip-Cov is a function of the number of tokens, so that a resumed run repeats
        it. For the same tokens, losses and gradients equal verl's.
        """
        return clipped_losses(batch.ratios(logprobs), batch.advantages, *self.ends) * batch.columns["kept"]


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
    needs_all_tokens = True

    def prepare(self, old_logprobs: Tensor, advantages: Tensor) -> Columns:
        """Return `penalized`: 1 for the share·N tokens, at least one, with the highest covariance, 0 for the others."""
        return {"penalized": self.choose(token_covariance(old_logprobs, advantages))}

    def choose(self, covariance: Tensor) -> Tensor:
        """Return the column `penalized` for the covariance of each token of the update, [N]."""
        penalized = covariance.new_zeros(len(covariance))
        penalized[covariance.topk(max(int(self.share * len(covariance)), 1)).indices] = 1.0
        return penalized

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return −r·a, plus kl_coef·|log r| for the share of tokens with the highest covariance."""
        penalty = self.kl_coef * log_ratio(logprobs, batch.old_logprobs).abs()
        return -batch.ratios(logprobs) * batch.advantages + batch.columns["penalized"] * penalty
