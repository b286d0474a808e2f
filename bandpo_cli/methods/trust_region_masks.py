"""The methods that mask the gradient of tokens outside a trust region: DPPO, and CPPO with a budget for the prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from bandpo_cli.bounds.band import logprob_bounds
from bandpo_cli.bounds.intervals import BoundsFunction
from bandpo_cli.methods.loss import masked_losses, sequence_cumsum, sequence_index
from bandpo_cli.methods.settings import MethodSettings, TrustRegionSettings
from bandpo_cli.settings_validation import Positive

if TYPE_CHECKING:
    from torch import Tensor

    from bandpo_cli.methods.loss import LossBatch


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
        """Return the Band of the same divergence and radius, without a cap.

        A binary divergence of (p, 1−p) is at most δ exactly where the ratio is in the Band, whose other tokens move in
        proportion.
        """
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
