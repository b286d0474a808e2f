"""Policy losses: the interface that every method implements, and the arithmetic that methods share.

A method's loss is a function from the tokens of a micro-batch to one loss per token (`PolicyLoss.token_losses`). What
depends on π_old alone, such as ratio bounds, is computed once per batch (`PolicyLoss.prepare`).

Notation: r = π/π_old, a the advantage of a completion; sg(·) is a value without gradient. Dimensions: N tokens and S
completions of an update, n tokens and s completions of a micro-batch. Per-token tensors are flat, without padding, in
the order of the completions; a micro-batch holds complete completions, so its size changes no loss.

Each loss names its paper, public code and where it departs from them; docs/methods.md lists all methods. The gradient
of a loss −w·a·log π with a weight w that has no gradient is −w·a·∇log π, just as the gradient of −r·a is −r·a·∇log π;
such losses differ from others by a value, and not by a gradient.

A method is a class with its settings and its loss, and commands that only read settings start without torch. Therefore
losses are written with methods of tensors, and torch is imported for type checkers only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

from pydantic import BaseModel

from bandpo_cli.bounds.arrays import namespace
from bandpo_cli.bounds.intervals import ClipState, clip_state
from bandpo_cli.methods import METHODS
from bandpo_cli.methods.settings import IntervalSettings, MethodSettings
from bandpo_cli.registries import load_attribute
from bandpo_cli.settings_validation import Section

if TYPE_CHECKING:
    from torch import Tensor

    from bandpo_cli.config.run import ObjectiveConfig

Columns: TypeAlias = "Mapping[str, Tensor]"
"""Named values per token, [N] or [n] each: what a method computed from π_old."""
Bound: TypeAlias = "Tensor | float"
MAX_LOG_RATIO = 20.0  # Limit of |log ratio|: exp(20) = 5e8 is far beyond any bound and far below overflow


@dataclass(frozen=True)
class LossBatch:
    """The tokens of an update, or of one of its micro-batches, with all values that a loss needs beside log π.

    Attributes:
        lengths: [S] int64, tokens per completion.
        advantages: [N] float32, the advantage of the token's completion.
        old_logprobs: [N] float32, log π_old(token), nats: the denominator of the ratio.
        columns: what `PolicyLoss.prepare` returned, [N] each; for interval methods `lower` and `upper`.
        importance_weights: [N] float32, the weight of `objective.importance`, an estimate of π_old/π_sampler; None
            where the ratio is taken to the sampler's log-probs, or where no correction is configured. Masked tokens
            have the weight 0; a loss with a value of the completion leaves them out of this value.
        ref_logprobs: [N] float32, log π_reference(token), nats; None without a reference model.
        wrong_peers: [S] float32, for a correct completion the share of the other completions of its group that are not
            correct, 0 for the others; None where the completions come in no groups.
        sampler_logprobs: [N] float32, log μ(token) as the sampler reported it, nats; None for `old_logprobs`.
        chosen: [N] bool, False for a token without policy loss and entropy bonus (`objective.top_entropy`); None if all
            tokens have them.
    """

    lengths: Tensor
    advantages: Tensor
    old_logprobs: Tensor
    columns: Columns = field(default_factory=dict)
    importance_weights: Tensor | None = None
    ref_logprobs: Tensor | None = None
    wrong_peers: Tensor | None = None
    sampler_logprobs: Tensor | None = None
    chosen: Tensor | None = None

    @property
    def sampled_logprobs(self) -> Tensor:
        """Log-probs under the policy that sampled the tokens, [N]."""
        return self.old_logprobs if self.sampler_logprobs is None else self.sampler_logprobs

    def ratios(self, logprobs: Tensor) -> Tensor:
        """Return π/π_old for the log-probs of π, [N], with their gradient."""
        return log_ratio(logprobs, self.old_logprobs).exp()


class PolicyLoss:
    """The policy loss that the settings of a method define, with `objective`; see `policy_loss`.

    A subclass that a user names as `bounds.method: module:Class` defines it itself; see CONTRIBUTING.md.

    Attributes:
        settings: the settings of the method; a subclass names their class.
        Options: the pydantic class of `bounds.options`, for a user's subclass.
        options: an object of this class; None for other losses.
        interval: the interval of ratios outside which a token counts as outside, for a method that has one for all
            tokens; None for others.
        needs_all_tokens: False where `prepare` treats each completion separately and tokens with an advantage of 0
            have a loss and a gradient of 0. Then the update leaves out groups without an advantage, and the first
            update of a step takes π_old from its own forward pass, micro-batch by micro-batch.
        needs_sampler: `prepare` has the sampler's log-probs, [N], as a third argument.
        adapts: before each update but those whose own pass gives π_old, `adapt` chooses columns from the ratios.
    """

    settings: MethodSettings
    Options: ClassVar[type[BaseModel]] = Section
    options: Any
    interval: tuple[float, float] | None = None
    needs_all_tokens: bool = False
    needs_sampler: bool = False
    adapts: bool = False

    def __init__(self, settings: MethodSettings, objective: ObjectiveConfig) -> None:
        self.settings, self.objective = settings, objective
        self.options = getattr(settings, "options", None)
        self.needs_all_tokens |= settings.needs_all_tokens
        self.needs_sampler |= settings.needs_sampler
        self.adapts |= settings.adapts
        if isinstance(settings, IntervalSettings):
            self.interval = settings.ends

    def prepare(self, old_logprobs: Tensor, advantages: Tensor, *sampler_logprobs: Tensor) -> Columns:
        """Return the values per token that depend on π_old alone, [N] each, without gradient.

        Called with all tokens of an update, and also with those of a micro-batch unless `needs_all_tokens` is set.
        """
        return self.settings.prepare(old_logprobs, advantages, *sampler_logprobs)

    def adapt(self, batch: LossBatch, logprobs: Tensor) -> Columns:
        """Return columns, [N] each, from all tokens of the update and log π before it; called if `adapts` is set."""
        return self.settings.adapt(batch, logprobs)

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return the loss of each token, [n], before it is weighted.

        Args:
            logprobs: [n] float32, log π(token) under the policy being updated, nats, with gradient.
            batch: the n tokens of a micro-batch.
        """
        return self.settings.token_losses(logprobs, batch)

    def clip_state(
        self, columns: Columns, ratios: Tensor, advantages: Tensor, gradient_weights: Tensor
    ) -> ClipState:
        """Return which tokens the method clips; here those with an advantage and no gradient.

        Args:
            columns: what `prepare` returned, [N] each.
            ratios, advantages, gradient_weights: [N], as in `LossBatch` and `LossOutputs`.
        """
        zero, outside = gradient_weights == 0, None
        if self.interval is not None:
            outside = (ratios < self.interval[0]) | (ratios > self.interval[1])
        return ClipState(zero & (advantages > 0), zero & (advantages < 0), outside)


def policy_loss(settings: MethodSettings, objective: ObjectiveConfig) -> PolicyLoss:
    """Return the policy loss of the method that `settings` describes."""
    if loss := METHODS[settings.method].loss:
        return cast(PolicyLoss, load_attribute(loss)(settings, objective))
    is_interval = type(settings).token_losses is MethodSettings.token_losses
    return (IntervalLoss if is_interval else PolicyLoss)(settings, objective)


class IntervalLoss(PolicyLoss):
    """−min(r·a, clamp(r, lower, upper)·a), with bounds that are computed from π_old (PPO, arXiv 1707.06347).

    Equation 7 of the paper has one fixed interval; here the method has the bounds of each token
    (`MethodSettings.ratio_bounds`). For a < 0 the loss is at most −dual_clip·a (`objective.dual_clip`; dual-clip PPO,
    arXiv 1912.09729), so that a single very large ratio does not dominate the update.

    Equal to verl 0.9.1, `compute_policy_loss_vanilla` (dual clip `clip_ratio_c`), and to TRL 1.16,
    `loss_type` "grpo", "bnpo" and "dapo" (no dual clip), for the methods clip and clip-higher.
    """

    def prepare(self, old_logprobs: Tensor, advantages: Tensor, *_: Tensor) -> Columns:
        """Return the bounds of the ratio, `lower` and `upper`, 0 ≤ lower ≤ 1 ≤ upper; upper may be inf."""
        return self.settings.ratio_bounds()(old_logprobs)._asdict()

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        advantages, dual_clip = batch.advantages, self.objective.dual_clip
        lower, upper = batch.columns["lower"], batch.columns["upper"]
        losses = clipped_losses(batch.ratios(logprobs), advantages, lower, upper)
        if dual_clip is not None:
            losses = losses.minimum(-dual_clip * advantages).where(advantages < 0, losses)
        return losses

    def clip_state(
        self, columns: Columns, ratios: Tensor, advantages: Tensor, gradient_weights: Tensor
    ) -> ClipState:
        """Return the tokens that a bound clips, dual clip apart, and those outside the bounds."""
        return clip_state(ratios, columns["lower"], columns["upper"], advantages)


def clipped_losses(ratios: Tensor, advantages: Tensor, lower: Bound, upper: Bound) -> Tensor:
    """Return −min(r·a, clamp(r, lower, upper)·a) of each token, [n]."""
    # Not torch.clamp: from torch 2.15 on, it passes on half the gradient of a ratio that equals a bound, as the ratio 1
    # of an on-policy token of probability 1 does.
    clamped = ratios.where(~(ratios < lower), lower).where(~(ratios > upper), upper)
    return -(ratios * advantages).minimum(clamped * advantages)


def masked_losses(logprobs: Tensor, batch: LossBatch, outside: Tensor, max_weight: float | None) -> Tensor:
    """Return −sg(mask·min(r, max_weight))·a·log π of each token, [n]; the mask is 0 for moves away from π_old outside.

    Args:
        outside: [n] bool, whether the token is outside of the trust region.
        max_weight: truncation of the ratio; None for none.
    """
    ratios = batch.ratios(logprobs).detach()
    away = (ratios > 1).where(batch.advantages > 0, ratios < 1)
    capped = ratios.clamp(max=math.inf if max_weight is None else max_weight)
    return -capped.masked_fill(outside & away, 0.0) * batch.advantages * logprobs


def by_sign(advantages: Tensor, positive: float, other: float) -> Tensor:
    """Return `positive` for the tokens with a positive advantage and `other` for the other tokens, [n]."""
    return advantages.new_full(advantages.shape, other).masked_fill(advantages > 0, positive)


def log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return log(π/π_old) per token, [n], clamped to ±20, so that its exponential cannot overflow."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def without_masked(values: Tensor, batch: LossBatch) -> Tensor:
    """Return `values` [n], and 0 for tokens with an importance weight of 0."""
    weights = batch.importance_weights
    return values if weights is None else values.where(weights != 0, 0.0)


def sequence_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum of `values` [n] over the tokens of each completion, [s], with gradient."""
    return values.new_zeros(len(lengths)).index_add(0, sequence_index(lengths, values), values)


def sequence_cumsum(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum of `values` [n] from the first token of the completion up to each token, float64 [n]."""
    values = values.double()  # so that the sums do not depend on the completions before
    sums, starts = values.cumsum(0), lengths.cumsum(0) - lengths
    return sums - (sums - values)[starts][sequence_index(lengths, values)]


def sequence_index(lengths: Tensor, tokens: Tensor) -> Tensor:
    """Return the number of each token's completion, int64 [n]; by values of `tokens` [n], n is known without a GPU."""
    xp = namespace(lengths)
    completions = xp.arange(len(lengths), device=lengths.device)
    return cast("Tensor", xp.repeat_interleave(completions, lengths, output_size=len(tokens)))
