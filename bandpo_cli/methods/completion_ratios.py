"""The methods with a ratio of the completion: GSPO, LUSPO, GAPO, GMPO, CTPO, TOPR, VESPO, and VACO's mask.

A token that the importance correction masks (weight 0) has no part in the means and products of its completion, as in
verl, which removes such tokens from the response mask before the loss is computed. The value of a completion has no
gradient, so that a token gets its gradient from its own loss only, and its importance weight applies to it alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from bandpo_cli.bounds.intervals import BoundsFunction, fixed_bounds
from bandpo_cli.methods.loss import (
    MAX_LOG_RATIO,
    by_sign,
    clipped_losses,
    log_ratio,
    sequence_cumsum,
    sequence_index,
    sequence_sum,
    without_masked,
)
from bandpo_cli.methods.settings import MethodSettings
from bandpo_cli.settings_validation import Positive, require

if TYPE_CHECKING:
    from torch import Tensor

    from bandpo_cli.methods.loss import Bound, LossBatch


def completion_sum(values: Tensor, batch: LossBatch) -> Tensor:
    """Return the sum of `values` [n] over the tokens of each completion that have an importance weight above 0, [s]."""
    return sequence_sum(without_masked(values, batch), batch.lengths)


def completion_mean(values: Tensor, batch: LossBatch) -> Tensor:
    """Return the mean of `values` [n] over these tokens of each token's completion, [n]; 0 where there are none."""
    counts = completion_sum(values.new_ones(values.shape), batch).clamp(min=1.0)
    return (completion_sum(values, batch) / counts)[sequence_index(batch.lengths, values)]


def log_product(logprobs: Tensor, batch: LossBatch) -> Tensor:
    """Return the log of the product of the ratios of each token's completion, [n], without gradient, within ±20."""
    sums = completion_sum(logprobs.detach() - batch.old_logprobs, batch)
    return sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[sequence_index(batch.lengths, logprobs)]


class CompletionIntervalSettings(MethodSettings):
    """Base class of the settings of a method with an interval of the ratio of a completion, its geometric mean."""

    eps_low: Positive = 3e-4
    eps_high: Positive = 4e-4
    """The interval of the ratio of a completion is [1 − eps_low, 1 + eps_high]."""

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return −min(s·a, clamp(s, 1 − ε, 1 + ε)·a), s = exp(mean of log r) (GSPO, arXiv 2507.18071, equation 5).

        The mean is over the completion. Per token it is the GSPO-token form of the paper's section 4.3, s_t =
        sg(s)·π/sg(π): equal in value, and in gradient where the tokens of a completion have equal weights. The
        recommended aggregation is `seq-mean-token-mean`.

        Equal to verl 0.9.1, `compute_policy_loss_gspo` (which limits log s to 10, here ±20), and in the gradient to TRL
        1.16, `importance_sampling_level="sequence"`, which distributes the completion's gradient over its tokens
        evenly.
        """
        means = completion_mean(logprobs.detach() - batch.old_logprobs, batch)
        log_s = means + (logprobs - logprobs.detach())
        ratios = log_s.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        return clipped_losses(ratios, batch.advantages, 1.0 - self.eps_low, self.upper(batch))

    def upper(self, batch: LossBatch) -> Bound:
        """Return the upper bound of the ratio of each token's completion, [n] or one number for all."""
        return 1.0 + self.eps_high


class GspoSettings(CompletionIntervalSettings):
    """The clipped loss on the geometric mean ratio of a completion (GSPO, arXiv 2507.18071)."""

    text = "GSPO: ratio of the completion in [1 − {s.eps_low:g}, 1 + {s.eps_high:g}]"
    method: Literal["gspo"] = "gspo"


class LuspoSettings(CompletionIntervalSettings):
    """GSPO with the loss of a completion multiplied by its length (LUSPO, arXiv 2602.05261)."""

    text = "LUSPO: length × GSPO, ratio of the completion in [1 − {s.eps_low:g}, 1 + {s.eps_high:g}]"
    method: Literal["luspo"] = "luspo"
    eps_low: Positive = 2e-3
    eps_high: Positive = 2.5e-3

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return the loss of GSPO times the length of the completion.

        With `seq-mean-token-mean` a completion then counts by its sum over tokens, not by its mean, so that long ones
        have no smaller gradient per token. That is GSPO with `seq-sum-norm`, times `sampling.max_tokens`. Masked tokens
        count in the length, as in `objective.aggregation`.

        Equal to TRL 1.16, `loss_type="luspo"` with `importance_sampling_level="sequence"`, whose documentation gives
        the paper's ε (section 5.1).
        """
        return batch.lengths[sequence_index(batch.lengths, logprobs)] * super().token_losses(logprobs, batch)


class GapoSettings(CompletionIntervalSettings):
    """GSPO with a lower upper bound for the correct completions of an easier problem (GAPO, arXiv 2609.00444)."""

    text = "GAPO: ratio of the completion in [1 − {s.eps_low:g}, 1 + {s.eps_low:g} to {s.eps_high:g}]"
    method: Literal["gapo"] = "gapo"
    eps_low: Positive = 3e-3
    eps_high: Positive = 5e-3
    """The interval is [1 − eps_low, 1 + eps_high] for the only correct completion of a group; the upper bound falls
    linearly in the number of correct completions, to 1 + eps_low where all are correct."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        low, high = self.eps_low, self.eps_high
        require(high >= low, f"eps_high = {high:g} must be at least eps_low = {low:g}, where the bound ends")
        return self

    def upper(self, batch: LossBatch) -> Bound:
        """Return 1 + ε(c), ε(c) = ε₋ + (ε₊ − ε₋)·(k − c)/(k − 1) (arXiv 2609.00444, equation 11).

        c of the k completions of the group are correct. The only correct completion of a group has the bound 1 + ε₊, a
        completion that is not correct 1 + ε₋. The paper does not divide advantages by the standard deviation
        (`objective.advantage_std: false`). Its variant with the ratio of a token is not here. The authors' repository,
        Sheng-J/GAPO, could not be read for the comparison.
        """
        assert batch.wrong_peers is not None, "the completions come in groups"
        low, high = self.eps_low, self.eps_high
        return 1.0 + low + (high - low) * batch.wrong_peers[sequence_index(batch.lengths, batch.advantages)]


class GmpoSettings(MethodSettings):
    """The geometric mean over a completion of ratios clipped in log space (GMPO, arXiv 2507.20673)."""

    text = "GMPO: geometric mean of ratios in [e^−{s.log_eps_low:g}, e^{s.log_eps_high:g}]"
    method: Literal["gmpo"] = "gmpo"
    log_eps_low: Positive = 0.4
    log_eps_high: Positive = 0.4
    """The interval of a token's log ratio is [−log_eps_low, log_eps_high]."""

    def ratio_bounds(self) -> BoundsFunction:
        """Return [e^−log_eps_low, e^log_eps_high] for every token."""
        return fixed_bounds(math.exp(-self.log_eps_low), math.exp(self.log_eps_high))

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return −a·exp(mean over the completion of the clipped log r) (arXiv 2507.20673, equation 4).

        log r is clipped to [−ε_low, ε_high] on the side that the sign of a asks for, as in PPO; clipped tokens have no
        gradient. With `seq-mean-token-mean` the loss is the mean over completions, as in the source.

        As in GSPO, each token has the gradient of its own term, which sums up to the paper's where the tokens of a
        completion have equal weights.

        Equal to verl 0.9.1, `compute_policy_loss_geo_mean`; the authors' code is callsys/GMPO, train_zero_math_gmpo.py.
        Two departures: log r is limited to ±20 on the other side, which no finite ratio of interest reaches; and verl
        weights a completion by the geometric mean of its importance weights.
        """
        low, high = -self.log_eps_low, self.log_eps_high
        log_r = log_ratio(logprobs, batch.old_logprobs)
        clipped = log_r.clamp(max=high).where(batch.advantages > 0, log_r.clamp(min=low))
        means = completion_mean(clipped.detach(), batch)
        return -batch.advantages * (means + (clipped - clipped.detach())).exp()


POSITIONS = (1, 10, 100, 1000)
"""Positions in a completion at which `bandpo bounds --compare ctpo` shows the interval."""


class CtpoSettings(MethodSettings):
    """An interval of the product of the ratios up to each token, wider for later tokens (CTPO, arXiv 2605.07331)."""

    text = (
        "CTPO: product of the ratios up to token t in [e^(−{s.log_eps_low:g}·√t), e^({s.log_eps_high:g}·√t)]"
    )
    method: Literal["ctpo"] = "ctpo"
    log_eps_low: Positive = 0.025
    log_eps_high: Positive = 0.05
    """The interval of the log product up to token t is [−log_eps_low·√t, log_eps_high·√t]."""
    log_dual_clip: Positive = 0.05
    """For a negative advantage a, the loss of token t never exceeds −a·e^(log_dual_clip·√t)."""

    def interval_curves(self) -> dict[str, BoundsFunction]:
        """Return the interval at some positions."""
        ends = {t: (-self.log_eps_low * math.sqrt(t), self.log_eps_high * math.sqrt(t)) for t in POSITIONS}
        return {f"ctpo t={t}": fixed_bounds(math.exp(low), math.exp(high)) for t, (low, high) in ends.items()}

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return −min(ρ·a, clamp(ρ, e^(−ε₋√t), e^(ε₊√t))·a), for a < 0 at most −a·e^(c√t) (CTPO, arXiv 2605.07331).

        ρ_t is the product of the ratios of the tokens 1 to t of the completion, of which the tokens before t have no
        gradient: exp(sg(c_t) + log π − sg(log π)), c_t = Σ_{j≤t} log r_j. The variance of c_t grows in proportion to t.
        Masked tokens are neither in the sums nor counted in t.

        Source: horizon-llm/CTPO, verl/trainer/ppo/core_algos.py, `_compute_policy_loss_cum_token_la_impl` with
        `cumprod` and `la_power` 0.5, its script's setting; log r is limited to ±20 and log ρ to 10, as there.
        """
        log_r = without_masked(log_ratio(logprobs.detach(), batch.old_logprobs), batch)
        counts = sequence_cumsum(without_masked(logprobs.new_ones(logprobs.shape), batch), batch.lengths)
        log_products = sequence_cumsum(log_r, batch.lengths) + (logprobs - logprobs.detach())
        products = log_products.clamp(max=10.0).exp().to(logprobs.dtype)
        low, high, most = (
            (scale * counts.sqrt()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().to(logprobs.dtype)
            for scale in (-self.log_eps_low, self.log_eps_high, self.log_dual_clip)
        )
        losses = clipped_losses(products, batch.advantages, low, high)
        return losses.minimum(-most * batch.advantages).where(batch.advantages < 0, losses)


class ToprSettings(MethodSettings):
    """Weight 1 for positive advantages, a completion's truncated ratio for negative ones (TOPR, arXiv 2503.14286)."""

    text = "TOPR: weight 1, for negative advantages the completion's ratio truncated to [0, {s.max_weight:g}]"
    method: Literal["topr"] = "topr"
    max_weight: Positive = 1.0
    """Upper truncation of the completion's ratio, for negative advantages."""

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return −sg(w)·a·log π, w = 1 for a ≥ 0 and clamp(Π r, 0, max_weight) for a < 0 (TOPR, arXiv 2503.14286).

        Two departures: the sign and the factor are those of the paper's reward, here those of the advantage, which is
        the reward minus a baseline; and π_old takes the place of the policy that sampled the data. The paper's ratio is
        that of the complete completion, as here; public code that multiplies per-token ratios' clamps instead
        (Trinity-RFT, `TOPRPolicyLossFn`) differs.
        """
        products = log_product(logprobs, batch).exp().clamp(max=self.max_weight)
        weights = products.where(batch.advantages < 0, 1.0)
        return -weights * batch.advantages * logprobs


class VespoSettings(MethodSettings):
    """A smooth weight w^k·e^{λ(1−w)} of the completion's ratio w in place of a clip (VESPO, arXiv 2602.10693)."""

    text = (
        "VESPO: weight w^k·e^(λ(1−w)) of the completion's ratio w, k = {s.k_positive:g}/{s.k_negative:g}, "
        "λ = {s.lambda_positive:g}/{s.lambda_negative:g}"
    )
    method: Literal["vespo"] = "vespo"
    k_positive: Positive = 2.0
    k_negative: Positive = 3.0
    """The exponent k for positive and for negative advantages."""
    lambda_positive: Positive = 3.0
    lambda_negative: Positive = 2.0
    """The rate λ for positive and for negative advantages; the weight is largest at w = k/λ."""

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return −sg(φ(w))·a·log π, φ(w) = w^k·e^{λ(1−w)} with w = Π r over the completion (VESPO, arXiv 2602.10693).

        k and λ depend on the sign of a. φ(1) = 1, and φ is largest at w = k/λ and falls to 0 on both sides.

        Equal to TRL 1.16, `loss_type="vespo"`, and to the authors' code, recipe/vespo/code/core_algos.py of
        FloyedShen/VESPO, both with `token-mean`. One departure: they multiply the weights of the importance correction
        into w; here these weight the loss, as with every method.
        """
        settings, log_w = self, log_product(logprobs, batch)
        k = by_sign(batch.advantages, settings.k_positive, settings.k_negative)
        rate = by_sign(batch.advantages, settings.lambda_positive, settings.lambda_negative)
        weights = (k * log_w + rate - rate * log_w.exp()).exp()
        return -weights * batch.advantages * logprobs


class VacoSettings(MethodSettings):
    """No gradient away from the sampler in completions that have left its policy (VACO, arXiv 2603.01365)."""

    text = "VACO: no gradient away from the sampler where the mean of |π/π_sampler − 1| exceeds {s.delta:g}"
    method: Literal["vaco"] = "vaco"
    delta: Positive = 0.05
    """The largest mean over a completion of |ρ − 1|, twice its total variation; the default is not the paper's."""

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return −mask·r·a, mask 0 for a·log ρ > 0 in completions whose mean of |ρ − 1| exceeds delta, ρ = π/π_sampler.

        Such a step would raise the total variation further; a step back to the sampler keeps its gradient.

        Source: allenai/open-instruct, open_instruct/grpo_utils.py, `compute_rho_correction` with
        `rho_mask_tv_divergence` (open-instruct#1681), which limits log ρ to 10, here to 20. One departure: its π in ρ
        is the trainer's policy before the updates of the step, here it is the policy under update, so that the mask
        also sees the lag of the updates.
        """
        log_rho = log_ratio(logprobs.detach(), batch.sampled_logprobs)
        distance = completion_mean(log_rho.expm1().abs(), batch)
        dropped = (distance > self.delta) & (batch.advantages * log_rho > 0)
        return (-batch.ratios(logprobs) * batch.advantages).masked_fill(dropped, 0.0)
