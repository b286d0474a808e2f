"""Values of verl's settings that follow from several settings here, and what verl 0.9.1 computes differently.

The functions are named after the settings that they read; `verl_settings.RULES` has the complete list. `VERL_LOSSES`
has the policy losses of verl that methods of this package are equal to; tests/integrations compares each pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

from bandpo_cli.config.hardware import dtype_on
from bandpo_cli.config.methods import BandSettings, IntervalSettings
from bandpo_cli.config.policy_losses import (
    ClipCovSettings,
    DppoSettings,
    GmpoSettings,
    KlCovSettings,
    SapoSettings,
)
from bandpo_cli.config.run import EMBEDDED_MODEL, RunConfig
from bandpo_cli.paths import path_exists, user_path

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


def aggregation(config: RunConfig) -> Overrides:
    """Return the mean over tokens and completions; a sum is divided by the longest completion."""
    if config.objective.aggregation != "seq-sum-norm":
        return {f"{ACTOR}.loss_agg_mode": config.objective.aggregation}
    factor = {f"{ACTOR}.loss_scale_factor": config.sampling.max_tokens}
    return {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", **factor}


def _loss(name: str, low: float, high: float, **others: float) -> Overrides:
    clip = {"clip_ratio_low": low, "clip_ratio_high": high, **others}
    return {f"{LOSS}.loss_mode": name, **{f"{ACTOR}.{key}": value for key, value in clip.items()}}


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
    return _loss("vanilla", bounds.eps_low, bounds.eps_high, clip_ratio_c=dual_clip)


def _dppo(bounds: DppoSettings, dual_clip: float) -> Overrides:
    cap = NEVER if bounds.max_weight is None else bounds.max_weight
    delta = bounds.delta
    return _loss(f"dppo_{bounds.divergence}", delta, delta, clip_ratio_c=cap, clip_ratio=delta)


LOSSES: dict[str, Callable[[Any, float], Overrides]] = {
    "band": _band,
    "clip": _clip,
    "clip-higher": _clip,
    "none": lambda bounds, dual_clip: _loss("vanilla", 1.0, NEVER, clip_ratio_c=dual_clip),
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


MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"


class InFolder(str):
    """A path relative to the exported folder, whose place is known when run.sh runs."""


def model_path(config: RunConfig) -> Overrides:
    """Return the model: a hub id, an absolute folder, or the copy in the exported folder."""
    path = config.model.path
    if is_copied(config):
        path = InFolder("model")
    elif path_exists(local := user_path(path)):
        path = str(local.absolute())
    return {f"{MODEL}.path": path}


def is_copied(config: RunConfig) -> bool:
    """Return whether the model's files are copied: those of the bundled model, whose path depends on the machine."""
    return config.model.path == EMBEDDED_MODEL


def attention(config: RunConfig) -> Overrides:
    """Return verl's kernels. Packed rows (`use_remove_padding`) need FlashAttention, which has no float32."""
    kernel = config.model.attention
    if kernel == "auto":
        kernel = "flash_attention_2" if _dtype(config) == "bfloat16" else "sdpa"
    if kernel in ("flash_attention_2", "varlen"):  # torch's varlen attention has the same kernels
        return {}
    overrides: Overrides = {f"+{MODEL}.override_config.attn_implementation": kernel}
    if kernel != "flash_attention_3":
        overrides[f"{MODEL}.use_remove_padding"] = False
    return overrides


def _dtype(config: RunConfig) -> str:
    """Return what `model.dtype` is in the exported job, which runs on GPUs."""
    return dtype_on(config.model.dtype, on_gpu=True)


def passes_dtype(config: RunConfig) -> Overrides:
    """Return the dtype of the engine and of forward and backward passes, which are bfloat16 where nothing is set."""
    overrides: Overrides = {f"{ROLLOUT}.dtype": _dtype(config)}
    if _dtype(config) != "bfloat16":
        for role, part in product(("actor", "ref"), ("param_dtype", "reduce_dtype", "buffer_dtype")):
            overrides[f"+actor_rollout_ref.{role}.fsdp_config.mixed_precision.{part}"] = "fp32"
    return overrides


def lora(config: RunConfig) -> Overrides:
    """Return the adapters, whose product verl merges into the weights that it sends to vLLM, as it is done here.

    Where no layers are named, verl has them on all linear layers but the output layer, too.
    """
    settings = config.model.lora
    if settings is None:
        return {}
    overrides: Overrides = {
        f"{MODEL}.lora_rank": settings.rank,
        f"{MODEL}.lora_alpha": int(settings.scaling * settings.rank),
        f"{MODEL}.lora.merge": True,
    }
    if settings.target_modules is not None:
        overrides[f"{MODEL}.target_modules"] = list(settings.target_modules)
    return overrides


def lora_differences(config: RunConfig) -> list[str]:
    """Return a line for an alpha that verl cannot have."""
    settings = config.model.lora
    alpha = 0.0 if settings is None else settings.scaling * settings.rank
    return [] if alpha.is_integer() else [f"model.lora.alpha = {alpha:g}: verl has whole numbers only"]


def overlong(config: RunConfig) -> Overrides:
    """Return the soft over-long penalty of verl's reward manager `dapo`."""
    reward, key = config.reward, "+reward.reward_kwargs"
    if not reward.overlong_buffer:
        return {}
    return {
        "reward.reward_manager.name": "dapo",
        f"{key}.max_resp_len": config.sampling.max_tokens,
        f"{key}.overlong_buffer_cfg.enable": True,
        f"{key}.overlong_buffer_cfg.len": reward.overlong_buffer,
        f"{key}.overlong_buffer_cfg.penalty_factor": reward.overlong_penalty,
        f"{key}.overlong_buffer_cfg.log": False,
    }


def reference_kl(config: RunConfig) -> Overrides:
    """Return the penalty to the reference model in the loss."""
    if (coefficient := config.objective.reference_kl) == 0:
        return {f"{ACTOR}.use_kl_loss": False}
    loss = {f"{ACTOR}.kl_loss_coef": coefficient, f"{ACTOR}.kl_loss_type": "low_var_kl"}
    return {f"{ACTOR}.use_kl_loss": True, **loss}


def reference_kl_differences(config: RunConfig) -> list[str]:
    """Return a line if tokens have an importance weight: here it weights the penalty, too."""
    line = "objective.reference_kl: verl does not weight the penalty by the importance correction"
    return [line] if config.objective.reference_kl and is_corrected(config) else []


def importance(config: RunConfig) -> Overrides:
    """Return the correction for the gap between the sampler's and the trainer's log-probs."""
    objective = config.objective
    cap = objective.importance_cap
    if cap is None or not is_corrected(config):
        return {}
    floor = 1.0 / cap if objective.importance_floor is None else objective.importance_floor
    weights, rejection = f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_rs"
    if objective.importance == "sequence-mask":  # verl's statistic is the inverse ratio
        return {rejection: "seq_mean_k1", f"{rejection}_threshold": f"{1 / cap}_{1 / floor}"}
    if objective.importance == "sequence-mask-any":
        overrides: Overrides = {weights: "token", f"{weights}_threshold": cap}
        return {**overrides, rejection: "seq_max_k2", f"{rejection}_threshold": math.log(cap) ** 2 / 2}
    threshold = f"{floor}_{cap}" if objective.importance == "token-mask" else cap
    return {weights: objective.importance.partition("-")[0], f"{weights}_threshold": threshold}


IMPORTANCE_DIFFERENCES = {
    "sequence-truncate": "verl's weight of a completion is the product of its ratios, not their geometric mean",
    "sequence-mask": "verl masks the same completions, but gives all other completions the weight 1 instead of their "
    "mean ratio",
    "sequence-mask-any": "verl's limits are 1/importance_cap and importance_cap, whatever importance_floor is, and its "
    "mean over tokens covers only the tokens that are not masked",
}
"""What verl computes differently, by the values of `objective.importance` for which it does."""


LR_SCHEDULES = ("constant", "cosine")
"""The values of `optim.schedule` that verl's FSDP engine has."""


def schedule_difference(config: RunConfig) -> str | None:
    """Return the difference of a schedule that verl does not have, or that changes with every update here."""
    if config.optim.schedule not in LR_SCHEDULES:
        return f"verl has {' and '.join(LR_SCHEDULES)} only"
    if config.optim.schedule != "constant" and config.optim.updates > 1:
        return "verl changes the learning rate once per step, not with every update"
    return None


def longest_row(config: RunConfig) -> int:
    """Return the most tokens of a prompt and its completion."""
    return config.sampling.max_prompt_tokens + config.sampling.max_tokens


def tokens_per_micro_batch(config: RunConfig) -> int:
    """Return the most tokens of a micro-batch, at least a complete row."""
    return max(config.optim.micro_batch_tokens, longest_row(config))
