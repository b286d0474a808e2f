"""The Band as a policy loss of SkyRL: `register()`, then `trainer.algorithm.policy_loss_type=band`."""

from functools import partial

import torch
from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import apply_off_policy_correction
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry, reduce_loss
from skyrl.backends.skyrl_train.utils.torch_utils import masked_mean
from skyrl.train.config import AlgorithmConfig

from bandpo_cli.bounds import band_bounds
from bandpo_cli.integrations import band_losses


def register(*, divergence: str = "kl", delta: float = 0.05, max_ratio: float | None = 10.0) -> None:
    """Register the policy loss `band` with these settings of the Band; call it before `validate_cfg`.

    SkyRL sends the registered function to its workers, where bandpo_cli must be installed. Raises ConfigError if a
    setting is invalid, and ValueError if SkyRL has a policy loss `band` already.
    """
    band_bounds([-1.0], divergence, delta, max_ratio)  # reports an invalid setting now, not in a worker
    PolicyLossRegistry.register(
        "band", partial(band_loss, divergence=divergence, delta=delta, max_ratio=max_ratio)
    )


def band_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
    *,
    divergence: str = "kl",
    delta: float = 0.05,
    max_ratio: float | None = 10.0,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the sum of the clipped losses over the mask, and SkyRL's metrics.

    SkyRL scales the advantages by its `loss_reduction` before it calls a policy loss; their sign is what the bounds
    need.

    Args:
        log_probs: [B, T], log π(token), nats, with gradient.
        old_log_probs: [B, T], log π_old(token), nats.
        advantages: [B, T], scaled.
        config: SkyRL's settings, of which `off_policy_correction` applies here.
        loss_mask: [B, T], 1 for sampled tokens; None for all.
        rollout_logprobs: [B, T], log-probs of the sampling engine, for the off-policy correction.
        divergence, delta, max_ratio: the settings of the Band, as in `bandpo_cli.bounds.band_bounds`.

    Returns:
        The scalar loss, and the metrics `clip_ratio` (tokens whose gradient the bounds remove), its two parts
        `clip_ratio_upper` and `clip_ratio_lower`, and those of the off-policy correction.
    """
    losses, clipped = band_losses(log_probs, old_log_probs, advantages, divergence, delta, max_ratio)
    shares = {"": clipped.active, "_upper": clipped.at_upper, "_lower": clipped.at_lower}
    metrics = {
        f"clip_ratio{end}": masked_mean(tokens.float(), loss_mask).item() for end, tokens in shares.items()
    }
    losses, mask, correction = apply_off_policy_correction(
        losses, old_log_probs, rollout_logprobs, loss_mask, config.off_policy_correction
    )
    loss: torch.Tensor = reduce_loss(losses, mask)
    return loss, metrics | correction
