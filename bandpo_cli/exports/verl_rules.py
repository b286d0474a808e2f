"""Values of verl's settings that follow from several settings here, and what verl 0.9.1 computes differently.

The functions are named after the settings that they read; `verl_settings.RULES` has the complete list.
"""

from __future__ import annotations

import math

from bandpo_cli.config.hardware import dtype_on
from bandpo_cli.config.run import EMBEDDED_MODEL, RunConfig
from bandpo_cli.exports.verl_losses import ACTOR, Overrides, is_corrected
from bandpo_cli.paths import path_exists, user_path

MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
OVERLONG = "+reward.reward_kwargs.overlong_buffer_cfg"


class InFolder(str):
    """A path relative to the exported folder, whose place is known when run.sh runs."""


def model_path(config: RunConfig) -> Overrides:
    """Return the model: a hub id, an absolute folder, or the copy in the exported folder."""
    path = config.model.path
    if is_copied(config):
        return {f"{MODEL}.path": InFolder("model")}
    local = user_path(path)
    return {f"{MODEL}.path": str(local.absolute()) if path_exists(local) else path}


def is_copied(config: RunConfig) -> bool:
    """Return whether the model's files are copied: those of the bundled model, whose path depends on the machine."""
    return config.model.path == EMBEDDED_MODEL


def attention(config: RunConfig) -> Overrides:
    """Return verl's kernels. Packed rows (`use_remove_padding`) need FlashAttention, which has no float32."""
    chosen = config.model.attention
    # torch's varlen attention has the kernels of FlashAttention 2.
    if chosen in ("flash_attention_2", "varlen") or (chosen == "auto" and _dtype(config) == "bfloat16"):
        return {}
    kernel = "sdpa" if chosen == "auto" else chosen
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
    if _dtype(config) == "bfloat16":
        return overrides
    return overrides | {
        f"+actor_rollout_ref.{role}.fsdp_config.mixed_precision.{part}": "fp32"
        for role in ("actor", "ref")
        for part in ("param_dtype", "reduce_dtype", "buffer_dtype")
    }


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
    if settings is None or (settings.scaling * settings.rank).is_integer():
        return []
    return [f"model.lora.alpha = {settings.scaling * settings.rank:g}: verl has whole numbers only"]


def overlong(config: RunConfig) -> Overrides:
    """Return the soft over-long penalty of verl's reward manager `dapo`."""
    reward = config.reward
    if not reward.overlong_buffer:
        return {}
    return {
        "reward.reward_manager.name": "dapo",
        "+reward.reward_kwargs.max_resp_len": config.sampling.max_tokens,
        f"{OVERLONG}.enable": True,
        f"{OVERLONG}.len": reward.overlong_buffer,
        f"{OVERLONG}.penalty_factor": reward.overlong_penalty,
        f"{OVERLONG}.log": False,
    }


def reference_kl(config: RunConfig) -> Overrides:
    """Return the penalty to the reference model in the loss."""
    coefficient = config.objective.reference_kl
    if coefficient == 0:
        return {f"{ACTOR}.use_kl_loss": False}
    return {
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.kl_loss_coef": coefficient,
        f"{ACTOR}.kl_loss_type": "low_var_kl",
    }


def reference_kl_differences(config: RunConfig) -> list[str]:
    """Return a line if tokens have an importance weight: here it weights the penalty, too."""
    if config.objective.reference_kl == 0 or not is_corrected(config):
        return []
    return ["objective.reference_kl: verl does not weight the penalty by the importance correction"]


def importance(config: RunConfig) -> Overrides:
    """Return the correction for the gap between the sampler's and the trainer's log-probs."""
    objective = config.objective
    cap = objective.importance_cap
    if cap is None or not is_corrected(config):
        return {}
    floor = 1.0 / cap if objective.importance_floor is None else objective.importance_floor
    if objective.importance == "sequence-mask":  # verl's statistic is the inverse ratio
        return {
            f"{CORRECTION}.rollout_rs": "seq_mean_k1",
            f"{CORRECTION}.rollout_rs_threshold": f"{1 / cap}_{1 / floor}",
        }
    if objective.importance == "sequence-mask-any":
        return {
            f"{CORRECTION}.rollout_is": "token",
            f"{CORRECTION}.rollout_is_threshold": cap,
            f"{CORRECTION}.rollout_rs": "seq_max_k2",
            f"{CORRECTION}.rollout_rs_threshold": math.log(cap) ** 2 / 2,
        }
    return {
        f"{CORRECTION}.rollout_is": objective.importance.partition("-")[0],
        f"{CORRECTION}.rollout_is_threshold": f"{floor}_{cap}"
        if objective.importance == "token-mask"
        else cap,
    }


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
