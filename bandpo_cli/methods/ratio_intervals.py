"""The methods that limit the ratio of each token: by an interval, or by a mask outside a trust region.

clip, clip-higher, DCPO, RIPO and ATR are intervals of ratios. Their loss, as that of the Band and of no clipping, is
`methods.loss.IntervalLoss`: a ratio outside its interval loses its gradient there. DPPO and CPPO mask tokens, CPPO with
a budget for the tokens before.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from bandpo_cli.bounds.arrays import Array, namespace
from bandpo_cli.bounds.band import logprob_bounds
from bandpo_cli.bounds.intervals import BoundsFunction, bounds_of_probability, fixed_bounds
from bandpo_cli.methods.loss import masked_losses, sequence_cumsum, sequence_index
from bandpo_cli.methods.settings import IntervalSettings, MaxRatio, MethodSettings, TrustRegionSettings
from bandpo_cli.settings_validation import Positive

if TYPE_CHECKING:
    from torch import Tensor

    from bandpo_cli.methods.loss import LossBatch


class ClipSettings(IntervalSettings):
    """One fixed interval for every token (PPO, GRPO)."""

    text = "clip (GRPO, PPO): {s.interval}"
    method: Literal["clip"] = "clip"


class ClipHigherSettings(IntervalSettings):
    """The fixed interval with a higher upper end (DAPO)."""

    text = "clip-higher: {s.interval}"
    method: Literal["clip-higher"] = "clip-higher"
    eps_high: float = Field(0.28, gt=0)


class DcpoSettings(MethodSettings):
    """Bounds that widen as the token gets rarer (DCPO, arXiv 2509.02333)."""

    text = "dcpo: dynamic bounds, ε = {s.eps_low:g}/{s.eps_high:g}"
    method: Literal["dcpo"] = "dcpo"
    eps_low: float = Field(0.16, gt=0)
    eps_high: float = Field(0.2, gt=0)
    """The ε of the lower and of the upper bound, in the formula of the paper."""
    max_ratio: MaxRatio | None = 10.0
    """Cap on the upper bound; null for none."""

    def ratio_bounds(self) -> BoundsFunction:
        """Return ½ + ½√max(1−4ε₋/p, 0) and min(½ + ½√(1+4ε₊/p), max_ratio); [1, 1] for NaN."""

        def ends(inverse_p: Array) -> tuple[Array, Array]:
            xp = namespace(inverse_p)
            lower = 0.5 + 0.5 * xp.sqrt(xp.clip(1.0 - 4.0 * self.eps_low * inverse_p, 0.0, None))
            upper = 0.5 + 0.5 * xp.sqrt(1.0 + 4.0 * self.eps_high * inverse_p)
            return lower, upper if self.max_ratio is None else xp.clip(upper, None, self.max_ratio)

        return bounds_of_probability(ends)


class RipoSettings(MethodSettings):
    """Bounds 1 ± √(δ/π_old), which keep π_old·(r − 1)² at most δ (RIPO, arXiv 2607.10169)."""

    text = "RIPO: ratio in 1 ± √(δ/π_old), δ = {s.delta:g}, within [{s.min_ratio:g}, {s.max_ratio:g}]"
    method: Literal["ripo"] = "ripo"
    delta: Positive = 0.05
    min_ratio: float = Field(0.5, ge=0, lt=1)
    max_ratio: MaxRatio = 10.0
    """The lower bound is at least min_ratio, the upper bound at most max_ratio."""

    def ratio_bounds(self) -> BoundsFunction:
        """Return max(1 − √(δ/p), min_ratio) and min(1 + √(δ/p), max_ratio) (equation 11); [1, 1] for NaN.

        The upper bound may exceed 1/p.
        """

        def ends(inverse_p: Array) -> tuple[Array, Array]:
            xp = namespace(inverse_p)
            width = xp.sqrt(self.delta * inverse_p)
            return xp.clip(1.0 - width, self.min_ratio, None), xp.clip(1.0 + width, None, self.max_ratio)

        return bounds_of_probability(ends)


class AtrSettings(MethodSettings):
    """The ratios whose k3 estimate r − 1 − log r is at most δ, the same for every probability (arXiv 2602.05494)."""

    text = "ATR: ratio with r − 1 − log r ≤ {s.delta:g}, for tokens of any probability"
    method: Literal["atr"] = "atr"
    delta: Positive = 0.05
    """The largest k3 estimate, in nats. The default is the radius of the Band, and not a value of the paper."""

    @property
    def ends(self) -> tuple[float, float]:
        """Both ends of the interval, −W₀ and −W₋₁ of −e^(−1−δ), by Newton's method in t = log r.

        h(t) = e^t − 1 − t is convex and exceeds δ at both starts, so the steps converge from one side.
        """
        roots = []
        for t in (-1.0 - self.delta, math.log1p(self.delta + math.sqrt(2.0 * self.delta))):
            for _ in range(50):
                t -= (math.expm1(t) - t - self.delta) / math.expm1(t)
            roots.append(math.exp(t))
        return roots[0], roots[1]

    def ratio_bounds(self) -> BoundsFunction:
        return fixed_bounds(*self.ends)


class NoClipSettings(MethodSettings):
    """No clipping: the control that every comparison needs."""

    text = "none: no bound on the ratio"
    method: Literal["none"] = "none"

    def ratio_bounds(self) -> BoundsFunction:
        """Return [0, ∞] for every token."""
        return fixed_bounds(0.0, math.inf)


class DppoSettings(TrustRegionSettings):
    """Zero gradient for tokens that move away from π_old and are outside the trust region (DPPO, arXiv 2602.04879)."""

    text = "DPPO: mask outside the binary {s.divergence} trust region, {s.radius}"
    method: Literal["dppo"] = "dppo"
    divergence: Literal["kl", "tv"] = "kl"
    max_weight: Positive | None = 20.0
    """Truncation of the ratio in the gradient; null for none."""

    @model_validator(mode="before")
    @classmethod
    def _default_delta(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("delta") is None:
            return {**values, "delta": 0.15 if values.get("divergence") == "tv" else 0.05}  # verl's examples
        return values

    def published(self) -> Self:
        """Return the defaults with this divergence, which determines the radius."""
        return type(self)(divergence=self.divergence)

    def ratio_bounds(self) -> BoundsFunction:
        """Return the Band without a cap: the ratios at which the divergence of (p, 1−p) is at most δ."""
        return lambda old_logprobs: logprob_bounds(old_logprobs, self.divergence, self.delta, None)

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return −sg(mask·min(r, max_weight))·a·log π, mask 0 for moves away from π_old outside the trust region.

        The divergence of a token is the divergence of the two-point distributions (p, 1−p) of π_old and π: |π − π_old|
        for tv, KL(π_old‖π) for kl. The mask is 0 where it exceeds δ and a > 0, r > 1 or a < 0, r < 1.

        Source: arXiv 2602.04879; verl 0.9.1, `compute_policy_loss_dppo_tv` and `..._dppo_kl`, with `clip_ratio` as δ
        and `clip_ratio_c` as max_weight. Two departures: verl computes 1 − p from p with 1e-8 added, here it is
        computed from log p, which is accurate at both ends; and the paper's π_old is the sampler's policy, here it is
        the trainer's unless `objective.old_logprobs` is `sampler`.
        """
        divergence = binary_tv if self.divergence == "tv" else binary_kl
        outside = divergence(batch.old_logprobs, logprobs.detach()) > self.delta
        return masked_losses(logprobs, batch, outside, self.max_weight)


def binary_tv(old_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """Return the total variation |π − π_old| of the two-point distributions per token, [n]."""
    return (logprobs.exp() - old_logprobs.exp()).abs()


def binary_kl(old_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """Return KL(π_old‖π) of the two-point distributions per token, [n], nats; infinite where π = 1 > π_old."""
    p_old, rest_old = old_logprobs.exp(), -old_logprobs.expm1()
    log_rest_ratio = rest_old.log() - (-logprobs.expm1()).log()
    rest = (rest_old * log_rest_ratio).where(rest_old > 0, 0.0)
    return p_old * (old_logprobs - logprobs) + rest


class CppoSettings(MethodSettings):
    """DPPO's mask with a threshold by position and a budget for the tokens before (CPPO, arXiv 2606.10968)."""

    text = (
        "CPPO: mask where the weighted change of probability exceeds {s.delta:g}, or the budget of "
        "{s.prefix_delta:g} per token of the prefix"
    )
    method: Literal["cppo"] = "cppo"
    delta: Positive = 0.15
    """The largest change of a token's probability, times the weight of its position; 0.2 for the paper's mixture of
    experts."""
    prefix_delta: Positive = 0.02
    """The mean change of probability that the tokens before may have had; a completion whose 90th percentile is larger
    is allowed that, up to twice this value."""
    last_weight: Annotated[float, Field(gt=0, le=1)] = 0.8
    """The weight of the last position of a completion; it falls linearly from 1 at the first."""
    max_weight: Positive | None = 20.0
    """Truncation of the ratio in the gradient, as in DPPO; null for none, as in the paper."""

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return −sg(mask·min(r, max_weight))·a·log π, mask 0 for moves away from π_old beyond a threshold.

        The divergence of token t of a completion of T tokens is D_t = |π − π_old|, its weight w_t falls linearly from 1
        to `last_weight`. The mask is 0 where w_t·D_t exceeds δ, or where the sum of w_j·D_j for j ≤ t exceeds the
        prefix budget δ + b·Σ_{j<t} w_j (equations 8 to 10). Tokens that the importance correction masks count in both
        sums and in b: their change of probability is part of the prefix that the later tokens follow.

        Source: arXiv 2606.10968; Tencent-Hunyuan/UniRL, unirl/algorithms/cppo.py, `_cppo_loss`. Three departures: the
        cap `max_weight` is the one of the authors' pull request to verl (verl#6731), which clamps b at 5 times its
        floor, not 2 times as in the paper and in UniRL; π_old is the trainer's unless `objective.old_logprobs` is
        `sampler`; and for post-trained models the paper has a fixed b. The paper's experiments have the total variation
        over the 20 most likely tokens in place of D_t.
        """
        outside = self.is_outside(logprobs.detach(), batch)
        return masked_losses(logprobs, batch, outside, self.max_weight)

    def is_outside(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return whether each token exceeds its threshold, bool [n]."""
        lengths, index, delta = batch.lengths, sequence_index(batch.lengths, logprobs), self.delta
        position = sequence_cumsum(index.new_ones(index.shape), lengths) - 1
        slope = (1.0 - self.last_weight) / (lengths - 1).clamp(min=1).double()[index]
        changes = (logprobs.exp() - batch.old_logprobs.exp()).abs().double()
        weighted = (1.0 - slope * position) * changes
        spent = sequence_cumsum(weighted, lengths) - weighted
        weights_before = position - slope * position * (position - 1) / 2
        floor = self.prefix_delta
        budget = sequence_quantile(changes, lengths, BUDGET_QUANTILE).clamp(floor, BUDGET_RANGE * floor)
        return weighted > delta + (budget[index] * weights_before - spent).clamp(max=0.0)


BUDGET_QUANTILE, BUDGET_RANGE = 0.9, 2.0
"""The budget per token is this quantile of the completion's changes of probability, from `prefix_delta` to this many
times it (section 4.1 of the paper, and UniRL)."""


def sequence_quantile(values: Tensor, lengths: Tensor, q: float) -> Tensor:
    """Return the quantile q of `values` [n] over the tokens of each completion, [s], interpolated linearly."""
    index = sequence_index(lengths, values)
    order = values.argsort()
    order = order[index[order].argsort(stable=True)]  # by completion, then by value
    place = q * (lengths - 1).double()
    first, share = lengths.cumsum(0) - lengths, place.frac().to(values.dtype)
    below, above = (values[order[first + end.long()]] for end in (place.floor(), place.ceil()))
    return below.lerp(above, share)
