"""The Band as the custom loss of prime-rl: `import_path = "bandpo_cli.integrations.prime_rl.band_loss"`."""

import torch
from prime_rl.trainer.rl.loss import LossInputs, LossOutputs

from bandpo_cli.integrations import band_losses


def band_loss(
    inputs: LossInputs, *, divergence: str = "kl", delta: float = 0.05, max_ratio: float | None = 10.0
) -> LossOutputs:
    """Return the sum of the clipped losses of one sequence, which prime-rl divides by the tokens of the batch.

    π_old is the policy that sampled the sequence (`inference_logprobs`).

    Args:
        inputs: one sequence, [seq] each: `trainer_logprobs` with gradient, `inference_logprobs`, `advantages`,
            `loss_mask` (bool), and `loss_weights` or None. Positions outside the mask may have any values.
        divergence, delta, max_ratio: the settings of the Band, as in `bandpo_cli.bounds.band_bounds`.

    Returns:
        The scalar loss, and the shares `band/upper_fraction` and `band/lower_fraction` of the tokens of the mask whose
        gradient is zero: above the upper bound at a positive, or below the lower bound at a negative advantage.

    Raises:
        ConfigError: a setting is invalid.
    """
    mask = inputs.loss_mask
    logprobs, old_logprobs, advantages = (
        torch.where(mask, values, 0.0)
        for values in (inputs.trainer_logprobs, inputs.inference_logprobs, inputs.advantages)
    )
    losses, clipped = band_losses(logprobs, old_logprobs, advantages, divergence, delta, max_ratio)
    if inputs.loss_weights is not None:
        losses = losses * torch.where(mask, inputs.loss_weights, 0.0)
    counts = {"upper": clipped.at_upper.sum(), "lower": clipped.at_lower.sum()}
    tokens = mask.sum().clamp(min=1)
    metrics = {f"band/{end}_fraction": count / tokens for end, count in counts.items()}
    return LossOutputs(loss=losses.sum(), metrics=metrics)
