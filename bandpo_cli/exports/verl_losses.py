"""The policy losses of verl 0.9.1 that the methods of this package are equal to, with the values of their settings.

tests/integrations compares each pair: `test_policy_losses.py` verl's own losses, `test_verl_loss.py` the Band.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bandpo_cli.config.methods import BandSettings, IntervalSettings
from bandpo_cli.config.policy_losses import (
    ClipCovSettings,
    DppoSettings,
    GmpoSettings,
    KlCovSettings,
    SapoSettings,
)
from bandpo_cli.config.run import RunConfig

Overrides = dict[str, Any]
"""Values of verl's settings by key; a key that verl's configuration does not have begins with +."""

ACTOR = "actor_rollout_ref.actor"
LOSS = f"{ACTOR}.policy_loss"

NEVER = 1e9
"""A bound on ratios that is never reached: both engines limit the log ratio to 20, and e^20 is 4.9e8."""

PER_COMPLETION = "seq-mean-token-mean"


def loss_overrides(config: RunConfig) -> Overrides | None:
    """Return the overrides for `bounds` and `objective.dual_clip`; None where verl has no such loss."""
    build, cap = LOSSES.get(config.bounds.method), config.objective.dual_clip
    return None if build is None else build(config.bounds, NEVER if cap is None else cap)


def is_corrected(config: RunConfig) -> bool:
    """Return whether the loss has importance weights; with the sampler's log-probs as π_old there is nothing to do."""
    return config.objective.importance_cap is not None and config.objective.old_logprobs == "trainer"


def loss_differences(config: RunConfig) -> list[str]:
    """Return what verl computes differently with the overrides of `loss_overrides`, or why there are none."""
    bounds = config.bounds
    if bounds.method not in LOSSES:
        return [f"bounds.method = {bounds.method}: verl has no such policy loss (it has {', '.join(LOSSES)})"]
    lines = []
    if bounds.scheduled(1, config.steps):
        lines.append(
            "bounds.delta_schedule: the radius is constant in verl, whose losses do not know the step"
        )
    if isinstance(bounds, ClipCovSettings | KlCovSettings):
        lines.append(
            f"bounds.method = {bounds.method}: verl chooses the tokens by their covariance under π, not under π_old"
        )
    if isinstance(bounds, SapoSettings | GmpoSettings) and config.objective.aggregation != PER_COMPLETION:
        lines.append(
            f"objective.aggregation = {config.objective.aggregation}: verl's {bounds.method} has {PER_COMPLETION} only"
        )
    if isinstance(bounds, GmpoSettings) and is_corrected(config):
        lines.append(
            "objective.importance_cap: verl's gmpo takes the geometric mean of the importance weights over a completion"
        )
    return lines


def _loss(name: str, low: float, high: float, clip_ratio_c: float | None = None) -> Overrides:
    overrides = {
        f"{LOSS}.loss_mode": name,
        f"{ACTOR}.clip_ratio_low": low,
        f"{ACTOR}.clip_ratio_high": high,
    }
    return overrides if clip_ratio_c is None else {**overrides, f"{ACTOR}.clip_ratio_c": clip_ratio_c}


def _band(bounds: BandSettings, dual_clip: float) -> Overrides:
    relax = bounds.relax
    return {
        f"{LOSS}._target_": "bandpo_cli.integrations.verl.BandPolicyLossConfig",
        f"{LOSS}.loss_mode": "band",
        f"+{LOSS}.divergence": bounds.divergence,
        f"+{LOSS}.delta": bounds.delta,
        f"+{LOSS}.max_ratio": bounds.max_ratio,
        f"+{LOSS}.relax_eps_low": None if relax is None else relax.eps_low,
        f"+{LOSS}.relax_eps_high": None if relax is None else relax.eps_high,
        f"{ACTOR}.clip_ratio_c": dual_clip,
    }


def _clip(bounds: IntervalSettings, dual_clip: float) -> Overrides:
    return _loss("vanilla", bounds.eps_low, bounds.eps_high, dual_clip)


def _dppo(bounds: DppoSettings, dual_clip: float) -> Overrides:
    cap = NEVER if bounds.max_weight is None else bounds.max_weight
    loss = _loss(f"dppo_{bounds.divergence}", bounds.delta, bounds.delta, cap)
    return {**loss, f"{ACTOR}.clip_ratio": bounds.delta}


LOSSES: dict[str, Callable[[Any, float], Overrides]] = {
    "band": _band,
    "clip": _clip,
    "clip-higher": _clip,
    "none": lambda bounds, dual_clip: _loss("vanilla", 1.0, NEVER, dual_clip),
    "dppo": _dppo,
    "cispo": lambda bounds, _: _loss("cispo", 1.0 - bounds.min_weight, bounds.max_weight - 1.0),
    "sapo": lambda bounds, _: {
        f"{LOSS}.loss_mode": "sapo",
        f"{ACTOR}.tau_pos": bounds.tau_positive,
        f"{ACTOR}.tau_neg": bounds.tau_negative,
    },
    "gspo": lambda bounds, _: _loss("gspo", bounds.eps_low, bounds.eps_high),
    "gmpo": lambda bounds, _: _loss("geo_mean", bounds.log_eps_low, bounds.log_eps_high),
    "clip-cov": lambda bounds, _: {
        **_loss("clip_cov", bounds.eps_low, bounds.eps_high),
        f"{LOSS}.clip_cov_ratio": bounds.share,
        f"{LOSS}.clip_cov_lb": bounds.cov_low,
        f"{LOSS}.clip_cov_ub": bounds.cov_high,
    },
    "kl-cov": lambda bounds, _: {
        f"{LOSS}.loss_mode": "kl_cov",
        f"{LOSS}.kl_cov_ratio": bounds.share,
        f"{LOSS}.ppo_kl_coef": bounds.kl_coef,
    },
}
"""The overrides of each method for which verl has a policy loss, or this package registers one, from the method's
settings and the dual clip."""
