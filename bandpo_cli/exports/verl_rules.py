"""Values of verl's settings that are not copies of a setting here.

`LOSSES` has the policy losses of verl that methods of this package are equal to; tests/integrations compares each pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

from bandpo_cli.config.hardware import dtype_on
from bandpo_cli.config.methods import BandSettings, DppoSettings, IntervalSettings
from bandpo_cli.config.run import EMBEDDED_MODEL, RunConfig
from bandpo_cli.paths import path_exists, user_path

Overrides = dict[str, Any]
"""Values of verl's settings by key; a key that verl's configuration does not have begins with +."""

ACTOR = "actor_rollout_ref.actor"
LOSS = f"{ACTOR}.policy_loss"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"

NEVER = 1e9
"""A bound on ratios that is never reached: both engines limit the log ratio to 20, and e^20 is 4.9e8."""


def derived_overrides(config: RunConfig) -> dict[str, Overrides]:
    """Return the settings of verl whose values are not copied, by the setting here that they belong to."""
    model, sampling, objective, optim = config.model, config.sampling, config.objective, config.optim
    evaluation, norm = config.evaluation, optim.max_grad_norm
    cap = NEVER if objective.dual_clip is None else objective.dual_clip
    checkpointing, warmup = bool(model.gradient_checkpointing), math.ceil(optim.warmup_steps / optim.updates)
    loggers = ["console", "mlflow"] if config.tracking.mlflow else ["console"]
    evaluations = {
        "trainer.test_freq": evaluation.every or -1,
        "trainer.val_before_train": evaluation.every > 0,
    }
    return {
        "seed": {f"{ROLLOUT}.seed": config.seed, f"{ACTOR}.data_loader_seed": config.seed},
        "steps": {"trainer.total_epochs": config.steps},
        "model.path": {f"{MODEL}.path": _model_path(config)},
        "model.dtype": _dtype(config),
        "model.attention": _attention(config),
        "model.gradient_checkpointing": {f"{MODEL}.enable_gradient_checkpointing": checkpointing},
        "model.trust_remote_code": {"data.trust_remote_code": model.trust_remote_code},
        "model.lora": _lora(config),
        "sampling.vllm.memory_fraction": {
            f"{ROLLOUT}.gpu_memory_utilization": sampling.vllm.memory_fraction or 0.5
        },
        "reward.overlong_buffer": _overlong(config),
        "bounds": LOSSES[config.bounds.method](config.bounds, cap) if config.bounds.method in LOSSES else {},
        "objective.aggregation": _aggregation(config),
        "objective.reference_kl": _reference_kl(config),
        "objective.old_logprobs": {f"{CORRECTION}.bypass_mode": objective.old_logprobs == "sampler"},
        "objective.importance": _importance(config),
        "optim.eps": {f"{ACTOR}.optim.override_optimizer_config": {"eps": optim.eps}},
        "optim.max_grad_norm": {f"{ACTOR}.optim.clip_grad": math.inf if norm is None else norm},
        "optim.warmup_steps": {f"{ACTOR}.optim.lr_warmup_steps": warmup or -1},
        "optim.updates": {f"{ACTOR}.ppo_mini_batch_size": sampling.prompts // optim.updates},
        "optim.micro_batch_tokens": {f"{ACTOR}.ppo_max_token_len_per_gpu": tokens_per_micro_batch(config)},
        "evaluation.every": evaluations,
        "evaluation.temperature": {f"{ROLLOUT}.val_kwargs.do_sample": evaluation.temperature > 0},
        "checkpoint.every": {"trainer.save_freq": config.checkpoint.every or config.steps},
        "tracking.mlflow": {"trainer.logger": loggers},
    }


def is_corrected(config: RunConfig) -> bool:
    """Return whether the loss has importance weights; with the sampler's log-probs as π_old there is nothing to do."""
    return config.objective.importance_cap is not None and config.objective.old_logprobs == "trainer"


def longest_row(config: RunConfig) -> int:
    """Return the most tokens of a prompt and its completion."""
    return config.sampling.max_prompt_tokens + config.sampling.max_tokens


def tokens_per_micro_batch(config: RunConfig) -> int:
    """Return the most tokens of a micro-batch, at least a complete row."""
    return max(config.optim.micro_batch_tokens, longest_row(config))


class InFolder(str):
    """A path relative to the exported folder, whose place is known when run.sh runs."""


def _model_path(config: RunConfig) -> str:
    """Return a hub id, an absolute folder, or the copy of the bundled model in the exported folder."""
    if config.model.path == EMBEDDED_MODEL:
        return InFolder("model")
    local = user_path(config.model.path)
    return str(local.absolute()) if path_exists(local) else config.model.path


def _dtype(config: RunConfig) -> Overrides:
    """Return the dtype of the engine and of forward and backward passes, which are bfloat16 where nothing is set."""
    dtype = dtype_on(config.model.dtype, on_gpu=True)
    parts = product(("actor", "ref"), ("param_dtype", "reduce_dtype", "buffer_dtype"))
    keys = (f"+actor_rollout_ref.{role}.fsdp_config.mixed_precision.{part}" for role, part in parts)
    return {f"{ROLLOUT}.dtype": dtype} | ({} if dtype == "bfloat16" else dict.fromkeys(keys, "fp32"))


def _attention(config: RunConfig) -> Overrides:
    """Return verl's kernels. Packed rows (`use_remove_padding`) need FlashAttention, which has no float32."""
    kernel = config.model.attention
    if kernel == "auto":
        is_narrow = dtype_on(config.model.dtype, on_gpu=True) == "bfloat16"
        kernel = "flash_attention_2" if is_narrow else "sdpa"
    if kernel in ("flash_attention_2", "varlen"):  # torch's varlen attention has the same kernels
        return {}
    overrides: Overrides = {f"+{MODEL}.override_config.attn_implementation": kernel}
    return overrides if kernel == "flash_attention_3" else overrides | {f"{MODEL}.use_remove_padding": False}


def _lora(config: RunConfig) -> Overrides:
    """Return the adapters, whose product verl merges into the weights that it sends to vLLM, as it is done here.

    Where no layers are named, verl has them on all linear layers but the output layer, too.
    """
    if (lora := config.model.lora) is None:
        return {}
    numbers = {f"{MODEL}.lora_rank": lora.rank, f"{MODEL}.lora_alpha": int(lora.scaling * lora.rank)}
    modules = {} if lora.target_modules is None else {f"{MODEL}.target_modules": [*lora.target_modules]}
    return {**numbers, f"{MODEL}.lora.merge": True, **modules}


def _overlong(config: RunConfig) -> Overrides:
    """Return the soft over-long penalty of verl's reward manager `dapo`."""
    reward, key = config.reward, "+reward.reward_kwargs"
    if not reward.overlong_buffer:
        return {}
    buffer = {
        "enable": True,
        "len": reward.overlong_buffer,
        "penalty_factor": reward.overlong_penalty,
        "log": False,
    }
    return {
        "reward.reward_manager.name": "dapo",
        f"{key}.max_resp_len": config.sampling.max_tokens,
        **{f"{key}.overlong_buffer_cfg.{name}": value for name, value in buffer.items()},
    }


def _aggregation(config: RunConfig) -> Overrides:
    """Return the mean over tokens and completions; a sum is divided by the longest completion."""
    mode, factor = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor"
    if config.objective.aggregation != "seq-sum-norm":
        return {mode: config.objective.aggregation}
    return {mode: "seq-mean-token-sum-norm", factor: config.sampling.max_tokens}


def _reference_kl(config: RunConfig) -> Overrides:
    """Return the penalty to the reference model in the loss."""
    if (coefficient := config.objective.reference_kl) == 0:
        return {f"{ACTOR}.use_kl_loss": False}
    loss = {f"{ACTOR}.kl_loss_coef": coefficient, f"{ACTOR}.kl_loss_type": "low_var_kl"}
    return {f"{ACTOR}.use_kl_loss": True, **loss}


def _importance(config: RunConfig) -> Overrides:
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


def _loss(name: str, low: float, high: float, **others: float) -> Overrides:
    clip = {"clip_ratio_low": low, "clip_ratio_high": high, **others}
    return {f"{LOSS}.loss_mode": name, **{f"{ACTOR}.{key}": value for key, value in clip.items()}}


def _band(bounds: BandSettings, dual_clip: float) -> Overrides:
    low, high = (None, None) if bounds.relax is None else (bounds.relax.eps_low, bounds.relax.eps_high)
    return {
        f"{LOSS}._target_": "bandpo_cli.integrations.verl.BandPolicyLossConfig",
        f"{LOSS}.loss_mode": "band",
        **{f"+{LOSS}.{name}": getattr(bounds, name) for name in ("divergence", "delta", "max_ratio")},
        f"+{LOSS}.relax_eps_low": low,
        f"+{LOSS}.relax_eps_high": high,
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
