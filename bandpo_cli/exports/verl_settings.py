"""Settings of verl 0.9.1 for the settings of a run, and what verl computes differently.

The rules (verl_settings.yaml) are complete: a test fails for a setting without a rule. `bandpo export verl` refuses
settings that verl computes differently unless the user allows them. `LOSSES` has the policy losses of verl that methods
of this package are equal to; tests/integrations compares each pair. The interfaces are those of verl's default trainer
(`trainer/ppo/v1`, `trainer.use_v1=true`) with the FSDP engine.
"""

import math
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import yaml

from bandpo_cli.config.run import RunConfig, dtype_on
from bandpo_cli.methods.importance_correction import ImportanceRules
from bandpo_cli.paths import path_exists, user_path
from bandpo_cli.registries import BUNDLED_MODELS, TRACKERS
from bandpo_cli.settings_validation import trainer_keys

Overrides = dict[str, Any]
"""Values of verl's settings by key; a key that verl's configuration does not have begins with +."""

ACTOR = "actor_rollout_ref.actor"
LOSS = f"{ACTOR}.policy_loss"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"

NEVER = 1e9
"""A bound on ratios that is never reached: both engines limit the log ratio to 20, and e^20 is 4.9e8."""


def tokens_per_micro_batch(config: RunConfig) -> int:
    """Return the most tokens of a micro-batch, at least a prompt and its completion."""
    sampling = config.sampling
    return max(config.optim.pass_tokens, sampling.max_prompt_tokens + sampling.max_tokens)


class InFolder(str):
    """A path relative to the exported folder, whose place is known when run.sh runs."""


def _dtype(config: RunConfig) -> Overrides:
    """Return the dtype of the engine and of forward and backward passes, which are bfloat16 where nothing is set."""
    dtype = dtype_on(config.model.dtype, on_gpu=True)
    overrides: Overrides = {f"{ROLLOUT}.dtype": dtype}
    for role, part in product(("actor", "ref"), ("param", "reduce", "buffer")) if dtype != "bfloat16" else ():
        key = f"+actor_rollout_ref.{role}.fsdp_config.mixed_precision.{part}_dtype"
        overrides[key] = "fp16" if (dtype, part) == ("float16", "param") else "fp32"
    return overrides


def _attention(config: RunConfig) -> Overrides:
    """Return verl's kernels. Packed rows (`use_remove_padding`) need FlashAttention, which has no float32."""
    kernel = config.model.attention
    if kernel == "auto":
        is_narrow = dtype_on(config.model.dtype, on_gpu=True) != "float32"
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


def _importance(config: RunConfig) -> Overrides:
    """Return the correction for the gap between the sampler's and the trainer's log-probs."""
    objective, cap = config.objective, config.objective.importance_cap
    if cap is None or objective.old_logprobs == "sampler":
        return {}
    floor = 1.0 / cap if objective.importance_floor is None else objective.importance_floor
    weights, rejection = f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_rs"
    if not isinstance(objective.importance, str):
        overrides: Overrides = {}
        for rule in objective.importance:
            if rule.rule in VERL_WEIGHTS:
                overrides |= {weights: VERL_WEIGHTS[rule.rule], f"{weights}_threshold": rule.high or NEVER}
        rejects = [rule for rule in objective.importance if rule.rule in VERL_REJECTIONS]
        if rejects:  # verl's statistic is the inverse ratio
            limits = [
                f"{1 / item.high!r}_{1 / item.low!r}" if item.low else str(item.high)
                for item in rejects
                if item.high
            ]
            overrides[rejection] = ",".join(VERL_REJECTIONS[item.rule] for item in rejects)
            overrides[f"{rejection}_threshold"] = ",".join(limits)
        return overrides
    if objective.importance == "sequence-mask":  # verl's statistic is the inverse ratio
        return {rejection: "seq_mean_k1", f"{rejection}_threshold": f"{1 / cap}_{1 / floor}"}
    if objective.importance == "sequence-mask-any":
        overrides = {weights: "token", f"{weights}_threshold": cap}
        return {**overrides, rejection: "seq_max_k2", f"{rejection}_threshold": math.log(cap) ** 2 / 2}
    threshold = f"{floor}_{cap}" if objective.importance == "token-mask" else cap
    return {weights: objective.importance.partition("-")[0], f"{weights}_threshold": threshold}


def _derived(config: RunConfig) -> dict[str, Overrides]:
    """Return the settings of verl whose values are not copied, by the setting that they follow from."""
    model, sampling, objective, optim = config.model, config.sampling, config.objective, config.optim
    evaluation, local, kl = config.evaluation, user_path(model.path), objective.reference_kl
    kl_loss = {f"{ACTOR}.kl_loss_coef": kl, f"{ACTOR}.kl_loss_type": "low_var_kl"} if kl else {}
    # A sum is divided by the longest completion.
    norm = {
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
        f"{ACTOR}.loss_scale_factor": sampling.max_tokens,
    }
    path: str = str(local.absolute()) if path_exists(local) else model.path
    return {
        "seed": {f"{ROLLOUT}.seed": config.seed, f"{ACTOR}.data_loader_seed": config.seed},
        "steps": {"trainer.total_epochs": config.steps},
        "model.path": {f"{MODEL}.path": InFolder("model") if model.path in BUNDLED_MODELS else path},
        "model.dtype": _dtype(config),
        "model.attention": _attention(config),
        "model.chat_template_kwargs": {
            f"+data.apply_chat_template_kwargs.{key}": value
            for key, value in (model.chat_template_kwargs or {}).items()
        },
        "model.trust_remote_code": {"data.trust_remote_code": model.trust_remote_code},
        "model.lora": _lora(config),
        "reward.overlong_buffer": _overlong(config),
        "bounds": _policy_loss(config),
        "objective.advantages": {"algorithm.adv_estimator": ESTIMATORS.get(objective.advantages, "grpo")},
        "objective.aggregation": norm
        if objective.aggregation == "seq-sum-norm"
        else {f"{ACTOR}.loss_agg_mode": objective.aggregation},
        "objective.reference_kl": {f"{ACTOR}.use_kl_loss": kl > 0, **kl_loss},
        "objective.old_logprobs": {f"{CORRECTION}.bypass_mode": objective.old_logprobs == "sampler"},
        "objective.importance": _importance(config),
        "optim.eps": {f"{ACTOR}.optim.override_optimizer_config": {"eps": optim.eps}},
        "optim.warmup_steps": {
            f"{ACTOR}.optim.lr_warmup_steps": math.ceil(optim.warmup_steps / optim.updates) or -1
        },
        "optim.updates": {f"{ACTOR}.ppo_mini_batch_size": sampling.prompts // optim.updates},
        "optim.micro_batch_tokens": {f"{ACTOR}.ppo_max_token_len_per_gpu": tokens_per_micro_batch(config)},
        "evaluation.every": {"trainer.val_before_train": evaluation.every > 0},
        "evaluation.temperature": {f"{ROLLOUT}.val_kwargs.do_sample": evaluation.temperature > 0},
        "checkpoint.every": {"trainer.save_freq": config.checkpoint.every or config.steps},
        "tracking.trackers": {
            "trainer.logger": ["console", *filter(TRACKERS.__contains__, config.tracking.names)]
        },
    }


LOSSES = {
    "band": "band", "clip": "vanilla", "clip-higher": "vanilla", "atr": "vanilla", "none": "vanilla", "dppo": "dppo_tv",
    "cispo": "cispo", "sapo": "sapo", "gspo": "gspo", "gmpo": "geo_mean", "clip-cov": "clip_cov", "kl-cov": "kl_cov",
}  # fmt: skip
"""The policy loss of verl, or of this package in verl, that a method is equal to. Its settings are in `verl_losses` of
from_trainers.yaml, which `configs --from verl` reads in the other direction."""


def _policy_loss(config: RunConfig) -> Overrides:
    """Return the policy loss with its settings; an interval is `vanilla` with its two ends."""
    bounds: Any = config.bounds
    if bounds.method not in LOSSES:
        return {}
    mode = f"dppo_{bounds.divergence}" if bounds.method == "dppo" else LOSSES[bounds.method]
    derived = {}
    if bounds.method in ("none", "atr"):
        low, high = bounds.ends if bounds.method == "atr" else (0.0, 1.0 + NEVER)
        derived = {"bounds.eps_low": 1.0 - low, "bounds.eps_high": high - 1.0}
    overrides: Overrides = {f"{LOSS}.loss_mode": mode}
    if mode == "band":
        overrides = {f"{LOSS}._target_": "bandpo_cli.integrations.verl.BandPolicyLossConfig", **overrides}
    for setting, text in trainer_keys("verl_losses")[mode]["settings"].items():
        sign, _, key = text.removesuffix("|").rpartition(" ")
        value = derived[setting] if setting in derived else _value(config, setting)
        if value is None and setting in ("objective.dual_clip", "bounds.max_weight"):
            value = NEVER
        value = {"": lambda x: x, "1-": lambda x: 1.0 - x, "1+": lambda x: x - 1.0}[sign](value)
        is_ours = mode == "band" and key.startswith("policy_loss.")
        overrides[f"{'+' if is_ours else ''}{ACTOR}.{key}"] = value
    if bounds.method == "dppo":  # verl reads one of these three by the kind of the loss
        overrides |= dict.fromkeys((f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio"), bounds.delta)
    return overrides


PER_COMPLETION = "seq-mean-token-mean"
LR_SCHEDULES = ("constant", "cosine")
"""The values of `optim.schedule` that verl's FSDP engine has."""

ESTIMATORS = {"group": "grpo", "rloo": "rloo"}
"""verl's `algorithm.adv_estimator` for the values of `objective.advantages` that verl has."""


class Rule(NamedTuple):
    """How verl takes over a setting, as the head of verl_settings.yaml says."""

    to: str = ""
    reason: str = ""
    values: Mapping[Any, Any] = MappingProxyType({})
    differs: str | Literal[True] = ""


FIXED, _rules = yaml.safe_load_all(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
RULES = {key: Rule(**rule) for key, rule in _rules.items()}
"""By the key of a setting or of its section. `FIXED` has values that do not depend on the configuration."""


def overrides_of(config: RunConfig) -> Overrides:
    """Return verl's settings for a configuration, apart from what depends on the machines and on the data."""
    overrides, derived = dict(FIXED), _derived(config)
    for key, rule in RULES.items():
        if rule.to:
            overrides[rule.to] = rule.values.get(value := _value(config, key), value)
        overrides |= derived.get(key, {})
    return overrides


def _value(config: RunConfig, key: str) -> Any:
    """Return a setting; None for one of a section that is null."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def differences_of(config: RunConfig) -> list[str]:
    """Return what verl would compute differently, one line each, beginning with the setting."""
    model, sampling, objective, optim = config.model, config.sampling, config.objective, config.optim
    # With the sampler's log-probs as π_old there is nothing to correct.
    corrected = objective.importance_cap is not None and objective.old_logprobs == "trainer"
    method = config.bounds.method
    alpha = model.lora.scaling * model.lora.rank if model.lora else 0.0
    other_mean = method in ("sapo", "gmpo") and objective.aggregation != PER_COMPLETION
    importance = _importance_difference(objective.importance) if corrected else ""
    no_loss = f"verl has no such policy loss (it has {', '.join(LOSSES)})"
    controls = any(reward.is_control for reward in config.task.rewards or ())
    scheduled = method in LOSSES and config.bounds.scheduled(1, config.steps)
    checks: list[tuple[str, object, str]] = [
        *((key, _value(config, key), rule.reason if rule.differs is True else rule.differs)
          for key, rule in RULES.items() if rule.differs),
        ("model.lora.alpha", not alpha.is_integer(), "verl has whole numbers only"),
        ("model.device", not model.device.startswith(("auto", "cuda")), "the exported job runs on GPUs"),
        ("sampling.engine", sampling.engine not in ("auto", "vllm"), "the exported job samples with vLLM"),
        ("sampling.dynamic_batches", sampling.dynamic, "verl samples until it has all groups, without a limit"),
        ("task.tools", config.task.tools, "verl runs tools in its agent loops, which have settings of their own"),
        ("task.rewards", controls, "the graders random and format are controls of bandpo train"),
        ("task.environment", config.task.environment, "verl has interactions with an interface of its own"),
        ("bounds.method", method not in LOSSES, no_loss),
        ("bounds.delta_schedule", scheduled,
         "the radius is constant in verl, whose losses do not know the step"),
        ("bounds.method", method in ("clip-cov", "kl-cov"),
         "verl chooses the tokens by their covariance under π, not under π_old"),
        ("objective.advantages", objective.advantages not in ESTIMATORS,
         f"verl has no equal estimator (equal are {' and '.join(ESTIMATORS)})"),
        ("objective.aggregation", other_mean, f"verl's {method} has {PER_COMPLETION} only"),
        ("objective.importance_cap", corrected and method == "gmpo",
         "verl's gmpo takes the geometric mean of the importance weights over a completion"),
        ("objective.reference_kl", corrected and objective.reference_kl,
         "verl does not weight the penalty by the importance correction"),
        ("objective.reference_kl_estimator", objective.reference_kl_estimator == "unbiased",
         "verl's penalty is k3 alone"),
        ("objective.importance", importance, importance),
        ("optim.schedule", optim.schedule not in LR_SCHEDULES, f"verl has {' and '.join(LR_SCHEDULES)} only"),
        ("optim.schedule", optim.schedule == "cosine" and optim.updates > 1,
         "verl changes the learning rate once per step, not with every update"),
        *((f"stop.{name}", limit is not None, "verl does not end a run early")
          for name, limit in config.stop if name != "steps"),
    ]  # fmt: skip
    return [f"{key} = {_value(config, key)}: {text}" for key, differs, text in checks if differs]


VERL_WEIGHTS = {"token-truncate": "token", "product-truncate": "sequence"}
VERL_REJECTIONS = {
    "token-reject": "token_k1",
    "sequence-reject": "seq_mean_k1",
    "product-reject": "seq_sum_k1",
    "token-k3-reject": "token_k3",
    "sequence-k3-reject": "seq_mean_k3",
}
"""verl's `rollout_is` and `rollout_rs` for the rules of a list `objective.importance`."""


def _importance_difference(importance: ImportanceRules) -> str:
    """Return what verl computes differently with this correction; "" for nothing."""
    if isinstance(importance, str):
        return IMPORTANCE_DIFFERENCES.get(importance, "")
    names = [rule.rule for rule in importance]
    if others := [name for name in names if name not in (*VERL_WEIGHTS, *VERL_REJECTIONS)]:
        return f"verl has no rule {others[0]}"
    if any(name.startswith("token") and name.endswith("reject") for name in names):
        return "verl has no loss and no mean over tokens for the tokens that a rule rejects"
    return ""


IMPORTANCE_DIFFERENCES = {
    "sequence-truncate": "verl's weight of a completion is the product of its ratios, not their geometric mean",
    "sequence-mask": "verl masks the same completions, but gives all other completions the weight 1 instead of their "
    "mean ratio",
    "sequence-mask-any": "verl's limits are 1/importance_cap and importance_cap, whatever importance_floor is, and its "
    "mean over tokens covers only the tokens that are not masked",
}
"""What verl computes differently, by the values of `objective.importance` for which it does."""


def is_runnable(config: RunConfig) -> bool:
    """Return whether verl can run the configuration at all, with whatever differences."""
    is_known = config.bounds.method in LOSSES and config.optim.schedule in LR_SCHEDULES
    has_control = any(reward.is_control for reward in config.task.rewards or ())
    return is_known and not config.task.functions and not has_control
