"""The Band as a policy loss of verl, `band` in its registry, and the settings of it.

verl imports this module in each of its processes: by the entry point `verl.plugins` of the installed package, or by
the environment variable `VERL_USE_EXTERNAL_MODULES=bandpo_cli.integrations.verl`. An error of the import is fatal with
the variable; verl only logs an error of an entry point. The overrides of `python -m verl.trainer.main_ppo` are

    actor_rollout_ref.actor.policy_loss._target_=bandpo_cli.integrations.verl.BandPolicyLossConfig
    actor_rollout_ref.actor.policy_loss.loss_mode=band
    +actor_rollout_ref.actor.policy_loss.divergence=kl
    +actor_rollout_ref.actor.policy_loss.delta=0.05

The interfaces are those of verl 0.9.1: `trainer/ppo/core_algos.py`, `workers/utils/losses.py`. Dimensions: B
completions of up to T tokens, padded.
"""

from dataclasses import dataclass
from typing import Any

import torch
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.utils.torch_functional import masked_mean
from verl.workers.config import PolicyLossConfig

from bandpo_cli.bounds.band import band_bounds
from bandpo_cli.errors import ConfigError
from bandpo_cli.integrations import MAX_LOG_RATIO, band_losses

DEFAULT_DUAL_CLIP = 3.0
"""The value that verl's losses use where the actor's settings have no `clip_ratio_c`."""


@dataclass
class BandPolicyLossConfig(PolicyLossConfig):  # type: ignore[misc]  # verl has no types here
    """Settings of the policy loss `band`, beside those of verl's losses.

    Attributes:
        divergence: a name in `registries.DIVERGENCES`, or `module:function` for a custom f.
        delta: radius of the trust region.
        max_ratio: cap on the upper bound; None for none.
        relax_eps_low, relax_eps_high: the interval is never tighter than [1 − relax_eps_low, 1 + relax_eps_high]; None
            for the Band itself. Both or neither.
    """

    loss_mode: str = "band"
    divergence: str = "kl"
    delta: float = 0.05
    max_ratio: float | None = 10.0
    relax_eps_low: float | None = None
    relax_eps_high: float | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for values that have no Band; verl creates the settings before it starts a worker."""
        band_bounds([-1.0], self.divergence, self.delta, self.max_ratio)
        low, high = self.relax_eps_low, self.relax_eps_high
        if (low, high) != (None, None) and not (0 < (low or 0) < 1 and (high or 0) > 0):
            raise ConfigError(
                f"policy_loss: relax_eps_low = {low} must be between 0 and 1, and relax_eps_high = {high} above 0; "
                "give both, or neither of them"
            )


@register_policy_loss("band")  # type: ignore[untyped-decorator]
def band_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the clipped loss of verl's `vanilla` with the Band in place of the fixed interval, and its metrics.

    Args:
        old_log_prob: [B, T], log π_old(token), nats.
        log_prob: [B, T], log π(token), nats, with gradient.
        advantages: [B, T].
        response_mask: [B, T], bool or 0 and 1; values outside it have no effect, whatever they are.
        loss_agg_mode: a mode of verl's `agg_loss`.
        config: verl's ActorConfig, whose `policy_loss` is a `BandPolicyLossConfig`. Its `clip_ratio_c` is the dual
            clip: for a negative advantage a, a token's loss never exceeds −clip_ratio_c·a.
        rollout_is_weights: [B, T], verl's importance weights; None for none.

    Returns:
        The loss, a scalar, and metrics: those of `vanilla`, and the shares of tokens that the upper and the lower bound
        clip and that are outside the bounds for any sign of the advantage.
    """
    settings, mask = config.policy_loss, response_mask.bool()
    old, new = (torch.where(mask, logprobs, 0.0) for logprobs in (old_log_prob, log_prob))
    relax = None if settings.relax_eps_low is None else (settings.relax_eps_low, settings.relax_eps_high)
    band = settings.divergence, settings.delta, settings.max_ratio, relax
    clipped, state = band_losses(new, old, advantages, *band)
    limit = -advantages * config.get("clip_ratio_c", DEFAULT_DUAL_CLIP)
    losses = torch.where(advantages < 0, torch.minimum(clipped, limit), clipped)
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(
        loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info
    )
    values = {
        "pg_clipfrac": state.active,
        "pg_clipfrac_lower": (clipped > limit) & (advantages < 0),
        "band_upper_fraction": state.at_upper,
        "band_lower_fraction": state.at_lower,
        "band_outside_fraction": state.outside,
        "ppo_kl": (old - new).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
    }
    metrics = {name: masked_mean(value.float(), response_mask) for name, value in values.items()}
    return loss, {f"actor/{name}": float(mean.detach().item()) for name, mean in metrics.items()}
