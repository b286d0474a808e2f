"""The policy losses of verl 0.9.1 that the methods of this package are equal to, with the values of their settings.

tests/integrations compares each pair: `test_policy_losses.py` verl's own losses, `test_verl_loss.py` the Band.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from bandpo_cli.config.methods import BandSettings, ClipHigherSettings, ClipSettings, MethodSettings
from bandpo_cli.config.policy_losses import (
    CispoSettings,
    ClipCovSettings,
    DppoSettings,
    GmpoSettings,
    GspoSettings,
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
    build = LOSSES.get(config.bounds.method)
    return None if build is None else build(config)


def loss_differences(config: RunConfig) -> list[str]:
    """Return what verl computes differently with the overrides of `loss_overrides`, or why there are none."""
    bounds = config.bounds
    if bounds.method not in LOSSES:
        return [f"bounds.method = {bounds.method}: verl has no such policy loss (it has {', '.join(LOSSES)})"]
    found = []
    if bounds.scheduled(1, config.steps):
        found.append(
            "bounds.delta_schedule: the radius is constant in verl, whose losses do not know the step"
        )
    if isinstance(bounds, ClipCovSettings | KlCovSettings):
        found.append(
            f"bounds.method = {bounds.method}: verl chooses the tokens by their covariance under π, not under π_old"
        )
    if isinstance(bounds, SapoSettings | GmpoSettings) and config.objective.aggregation != PER_COMPLETION:
        found.append(
            f"objective.aggregation = {config.objective.aggregation}: verl's {bounds.method} has {PER_COMPLETION} only"
        )
    corrected = config.objective.importance_cap is not None and config.objective.old_logprobs == "trainer"
    if isinstance(bounds, GmpoSettings) and corrected:
        found.append(
            "objective.importance_cap: verl's gmpo takes the geometric mean of the importance weights over a completion"
        )
    return found


def _band(config: RunConfig) -> Overrides:
    bounds = _settings(config, BandSettings)
    relax = bounds.relax
    return {
        f"{LOSS}._target_": "bandpo_cli.integrations.verl.BandPolicyLossConfig",
        f"{LOSS}.loss_mode": "band",
        f"+{LOSS}.divergence": bounds.divergence,
        f"+{LOSS}.delta": bounds.delta,
        f"+{LOSS}.max_ratio": bounds.max_ratio,
        f"+{LOSS}.relax_eps_low": None if relax is None else relax.eps_low,
        f"+{LOSS}.relax_eps_high": None if relax is None else relax.eps_high,
        f"{ACTOR}.clip_ratio_c": _dual_clip(config),
    }


def _clip(config: RunConfig) -> Overrides:
    bounds = config.bounds
    assert isinstance(bounds, ClipSettings | ClipHigherSettings)
    return _loss("vanilla", bounds.eps_low, bounds.eps_high, _dual_clip(config))


def _none(config: RunConfig) -> Overrides:
    return _loss("vanilla", 1.0, NEVER, _dual_clip(config))


def _dppo(config: RunConfig) -> Overrides:
    bounds = _settings(config, DppoSettings)
    radius = bounds.delta
    cap = NEVER if bounds.max_weight is None else bounds.max_weight
    return {
        **_loss(f"dppo_{bounds.divergence}", radius, radius, cap),
        f"{ACTOR}.clip_ratio": radius,
    }


def _cispo(config: RunConfig) -> Overrides:
    bounds = _settings(config, CispoSettings)
    return _loss("cispo", 1.0 - bounds.min_weight, bounds.max_weight - 1.0)


def _sapo(config: RunConfig) -> Overrides:
    bounds = _settings(config, SapoSettings)
    return {
        f"{LOSS}.loss_mode": "sapo",
        f"{ACTOR}.tau_pos": bounds.tau_positive,
        f"{ACTOR}.tau_neg": bounds.tau_negative,
    }


def _gspo(config: RunConfig) -> Overrides:
    bounds = _settings(config, GspoSettings)
    return _loss("gspo", bounds.eps_low, bounds.eps_high)


def _gmpo(config: RunConfig) -> Overrides:
    bounds = _settings(config, GmpoSettings)
    return _loss("geo_mean", bounds.log_eps_low, bounds.log_eps_high)


def _clip_cov(config: RunConfig) -> Overrides:
    bounds = _settings(config, ClipCovSettings)
    return {
        **_loss("clip_cov", bounds.eps_low, bounds.eps_high),
        f"{LOSS}.clip_cov_ratio": bounds.share,
        f"{LOSS}.clip_cov_lb": bounds.cov_low,
        f"{LOSS}.clip_cov_ub": bounds.cov_high,
    }


def _kl_cov(config: RunConfig) -> Overrides:
    bounds = _settings(config, KlCovSettings)
    return {
        f"{LOSS}.loss_mode": "kl_cov",
        f"{LOSS}.kl_cov_ratio": bounds.share,
        f"{LOSS}.ppo_kl_coef": bounds.kl_coef,
    }


LOSSES: dict[str, Callable[[RunConfig], Overrides]] = {
    "band": _band,
    "clip": _clip,
    "clip-higher": _clip,
    "none": _none,
    "dppo": _dppo,
    "cispo": _cispo,
    "sapo": _sapo,
    "gspo": _gspo,
    "gmpo": _gmpo,
    "clip-cov": _clip_cov,
    "kl-cov": _kl_cov,
}
"""The overrides of each method for which verl has a policy loss, or this package registers one."""


def _loss(name: str, low: float, high: float, clip_ratio_c: float | None = None) -> Overrides:
    overrides = {
        f"{LOSS}.loss_mode": name,
        f"{ACTOR}.clip_ratio_low": low,
        f"{ACTOR}.clip_ratio_high": high,
    }
    return overrides if clip_ratio_c is None else {**overrides, f"{ACTOR}.clip_ratio_c": clip_ratio_c}


def _dual_clip(config: RunConfig) -> float:
    cap = config.objective.dual_clip
    return NEVER if cap is None else cap


S = TypeVar("S", bound=MethodSettings)


def _settings(config: RunConfig, cls: type[S]) -> S:
    """Return the settings of the method, which are of the class that `LOSSES` implies."""
    bounds = config.bounds
    assert isinstance(bounds, cls)
    return bounds
