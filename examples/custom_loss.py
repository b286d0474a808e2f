"""A policy loss of your own: a smooth gate on the ratio, with an option.

bandpo train --method examples.custom_loss:SmoothGate --set bounds.options.width=0.2
bandpo sweep --method examples.custom_loss:SmoothGate --axis bounds.options.width=0.1,0.2,0.4 --seeds 0,1,2
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, PositiveFloat
from torch import Tensor

from bandpo_cli.methods.loss import LossBatch, PolicyLoss, log_ratio


class SmoothGate(PolicyLoss):
    """−sg(w)·a·log π with w = r·exp(−(log r)²/2b²): the weight falls smoothly on both sides of r = 1."""

    class Options(BaseModel):
        """`bounds.options`."""

        width: PositiveFloat = 0.4

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return the loss of each token, [n]."""
        log_r = log_ratio(logprobs, batch.old_logprobs).detach()
        weights = torch.exp(log_r - log_r.square() / (2 * self.options.width**2))
        return -weights * batch.advantages * logprobs
