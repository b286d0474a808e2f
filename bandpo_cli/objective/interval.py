"""The clipped loss of the methods that are an interval of ratios: the Band, clip, clip-higher, DCPO, none."""

from __future__ import annotations

import torch

from bandpo_cli.bounds.methods import ClipState, clip_state, ratio_bounds
from bandpo_cli.config.methods import MethodSettings
from bandpo_cli.config.run import ObjectiveConfig
from bandpo_cli.objective.loss import Columns, LossInputs, PolicyLoss, UpdateTokens


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

    def prepare(self, tokens: UpdateTokens) -> Columns:
        """Return the bounds of the ratio, `lower` and `upper`, 0 ≤ lower ≤ 1 ≤ upper; upper may be inf."""
        lower, upper = self._bounds(tokens.old_logprobs)
        return {"lower": lower, "upper": upper}

    def token_losses(self, inputs: LossInputs) -> torch.Tensor:
        """Return the clipped loss of each token, [n]."""
        ratios, advantages = inputs.ratios, inputs.advantages
        lower, upper = inputs.columns["lower"], inputs.columns["upper"]
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
