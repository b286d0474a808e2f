"""Settings of verl 0.9.1 for the settings of a run, and what verl computes differently.

`RULES` is complete: a test fails for a setting without a rule. `bandpo export verl` refuses settings that verl computes
differently unless the user allows them. `LOSSES` has the policy losses of verl that methods of this package are equal
to; tests/integrations compares each pair. The interfaces are those of verl's default trainer (`trainer/ppo/v1`,
`trainer.use_v1=true`) with the FSDP engine.
"""

import math
from collections.abc import Callable
from functools import reduce
from itertools import product
from typing import Any, NamedTuple

from bandpo_cli.config.run import RunConfig, dtype_on
from bandpo_cli.methods.band_and_clip import BandSettings
from bandpo_cli.methods.trust_region_masks import DppoSettings
from bandpo_cli.paths import path_exists, user_path
from bandpo_cli.registries import BUNDLED_MODELS, TRACKERS

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
    return max(config.optim.micro_batch_tokens, sampling.max_prompt_tokens + sampling.max_tokens)


class InFolder(str):
    """A path relative to the exported folder, whose place is known when run.sh runs."""


def _model_path(config: RunConfig) -> str:
    """Return a hub id, an absolute folder, or the copy of the bundled model in the exported folder."""
    if config.model.path in BUNDLED_MODELS:
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
    return {
        "reward.reward_manager.name": "dapo",
        f"{key}.max_resp_len": config.sampling.max_tokens,
        f"{key}.overlong_buffer_cfg.enable": True,
        f"{key}.overlong_buffer_cfg.len": reward.overlong_buffer,
        f"{key}.overlong_buffer_cfg.penalty_factor": reward.overlong_penalty,
        f"{key}.overlong_buffer_cfg.log": False,
    }


def _importance(config: RunConfig) -> Overrides:
    """Return the correction for the gap between the sampler's and the trainer's log-probs."""
    objective, cap = config.objective, config.objective.importance_cap
    if cap is None or objective.old_logprobs == "sampler":
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


def _aggregation(config: RunConfig) -> Overrides:
    if config.objective.aggregation != "seq-sum-norm":
        return {f"{ACTOR}.loss_agg_mode": config.objective.aggregation}
    # A sum is divided by the longest completion.
    norm = {f"{ACTOR}.loss_scale_factor": config.sampling.max_tokens}
    return {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", **norm}


def _reference_kl(config: RunConfig) -> Overrides:
    penalty = config.objective.reference_kl
    kl_loss = {f"{ACTOR}.kl_loss_coef": penalty, f"{ACTOR}.kl_loss_type": "low_var_kl"}
    return {f"{ACTOR}.use_kl_loss": penalty > 0, **(kl_loss if penalty else {})}


def _policy_loss(config: RunConfig) -> Overrides:
    cap = NEVER if config.objective.dual_clip is None else config.objective.dual_clip
    method = config.bounds.method
    return LOSSES[method](config.bounds, cap) if method in LOSSES else {}


def _loss(mode: str, low: float | None = None, high: float | None = None, **others: float) -> Overrides:
    """Return a policy loss of verl. Its settings `clip_ratio_*` and `tau_*` are in the section of the actor."""
    clip = {} if low is None else {"clip_ratio_low": low, "clip_ratio_high": high}
    values = {
        f"{ACTOR if name.startswith(('clip_ratio', 'tau')) else LOSS}.{name}": value
        for name, value in (clip | others).items()
    }
    return {f"{LOSS}.loss_mode": mode, **values}


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


def _dppo(bounds: DppoSettings, dual_clip: float) -> Overrides:
    cap = NEVER if bounds.max_weight is None else bounds.max_weight
    delta = bounds.delta
    return _loss(f"dppo_{bounds.divergence}", delta, delta, clip_ratio_c=cap, clip_ratio=delta)


LOSSES: dict[str, Callable[[Any, float], Overrides]] = {
    "band": _band,
    "clip": lambda bounds, cap: _loss("vanilla", bounds.eps_low, bounds.eps_high, clip_ratio_c=cap),
    "clip-higher": lambda bounds, cap: _loss("vanilla", bounds.eps_low, bounds.eps_high, clip_ratio_c=cap),
    "none": lambda bounds, cap: _loss("vanilla", 1.0, NEVER, clip_ratio_c=cap),
    "dppo": _dppo,
    "cispo": lambda bounds, _: _loss("cispo", 1.0 - bounds.min_weight, bounds.max_weight - 1.0),
    "sapo": lambda bounds, _: _loss("sapo", tau_pos=bounds.tau_positive, tau_neg=bounds.tau_negative),
    "gspo": lambda bounds, _: _loss("gspo", bounds.eps_low, bounds.eps_high),
    "gmpo": lambda bounds, _: _loss("geo_mean", bounds.log_eps_low, bounds.log_eps_high),
    "clip-cov": lambda bounds, _: _loss(
        "clip_cov", bounds.eps_low, bounds.eps_high,
        clip_cov_ratio=bounds.share, clip_cov_lb=bounds.cov_low, clip_cov_ub=bounds.cov_high,
    ),
    "kl-cov": lambda bounds, _: _loss("kl_cov", kl_cov_ratio=bounds.share, ppo_kl_coef=bounds.kl_coef),
}  # fmt: skip
"""The overrides of each method for which verl has a policy loss, or this package registers one, from the method's
settings and the dual clip."""

PER_COMPLETION = "seq-mean-token-mean"
LR_SCHEDULES = ("constant", "cosine")
"""The values of `optim.schedule` that verl's FSDP engine has."""

ESTIMATORS = {"group": "grpo", "rloo": "rloo"}
"""verl's `algorithm.adv_estimator` for the values of `objective.advantages` that verl has."""

FIXED: Overrides = {
    "trainer.use_v1": True,
    "algorithm.use_kl_in_reward": False,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.shuffle": False,
    f"{ACTOR}.use_dynamic_bsz": True,
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.top_k": -1,
    f"{ROLLOUT}.val_kwargs.top_p": 1.0,
    f"{ROLLOUT}.val_kwargs.top_k": -1,
    "algorithm.filter_groups.metric": "reward",
    "data.shuffle": True,
    "data.truncation": "error",
    "data.filter_overlong_prompts": True,
}
"""Values that do not depend on the configuration."""


class Rule(NamedTuple):
    """How verl takes over a setting.

    Attributes:
        to: verl's setting with the same value; "" for none.
        reason: what else there is to know, for README.md.
        derive: returns settings of verl whose values are not copied.
    """

    to: str = ""
    reason: str = ""
    derive: Callable[[RunConfig], Overrides] = lambda config: {}


RULES: dict[str, Rule] = {
    "seed": Rule("data.seed", "another order of the problems and other samples than here",
        lambda c: {f"{ROLLOUT}.seed": c.seed, f"{ACTOR}.data_loader_seed": c.seed}),
    "deterministic": Rule("", "ordinary kernels"),
    "steps": Rule("trainer.total_training_steps", "the number of passes only has to be large enough",
        lambda c: {"trainer.total_epochs": c.steps}),
    "model.path": Rule("", "a hub id or folder, unchanged; the bundled model is copied",
        lambda c: {f"{MODEL}.path": _model_path(c)}),
    "model.revision": Rule("", "the latest"),
    "model.dtype": Rule(
        "", f"`{ROLLOUT}.dtype`, also the dtype of the passes; `auto` is bfloat16; weights and optimizer are float32",
        _dtype),
    "model.attention": Rule("", "`auto` is FlashAttention 2 with bfloat16, sdpa with float32", _attention),
    "model.gradient_checkpointing": Rule(f"{MODEL}.enable_gradient_checkpointing", "`auto` is true",
        lambda c: {f"{MODEL}.enable_gradient_checkpointing": bool(c.model.gradient_checkpointing)}),
    "model.prompts": Rule("", "messages in the data files; a template joins them where none of the model is used"),
    "model.chat_template_kwargs": Rule("", "`data.apply_chat_template_kwargs`",
        lambda c: {f"+data.apply_chat_template_kwargs.{key}": value
            for key, value in (c.model.chat_template_kwargs or {}).items()}),
    "model.trust_remote_code": Rule(f"{MODEL}.trust_remote_code", "",
        lambda c: {"data.trust_remote_code": c.model.trust_remote_code}),
    "model.lora": Rule("", f"`{MODEL}.lora_rank`, `lora_alpha`, `target_modules`; merged into the weights for vLLM",
        _lora),
    "model.device": Rule("", "the GPUs of the job"),
    "task": Rule("", "train.parquet, heldout.parquet; reward.py has the graders and weighted rewards"),
    "sampling.engine": Rule("", "vLLM"),
    "sampling.prompts": Rule("data.train_batch_size"),
    "sampling.samples": Rule(f"{ROLLOUT}.n"),
    "sampling.temperature": Rule(f"{ROLLOUT}.temperature"),
    "sampling.max_tokens": Rule("data.max_response_length"),
    "sampling.max_prompt_tokens": Rule("data.max_prompt_length", "longer prompts are dropped"),
    "sampling.max_sequences": Rule(f"{ROLLOUT}.max_num_seqs", "per vLLM engine"),
    "sampling.dynamic": Rule("algorithm.filter_groups.enable", "groups with equal rewards are replaced"),
    "sampling.dynamic_batches": Rule("", "verl has no limit"),
    # The asynchronous modes of the exported trainer (`trainer.v1.trainer_mode`) continue partial completions with newer
    # weights. `verl.experimental.one_step_off_policy` has a lag of one step, with another main program and settings.
    "sampling.max_lag": Rule("", "0: `trainer.v1.trainer_mode=sync`, verl's default"),
    "sampling.weight_transfer": Rule("", "no engine process"),
    "sampling.top_p": Rule(f"{ROLLOUT}.top_p", "1 in both"),
    "sampling.top_k": Rule("", "off in both"),
    "sampling.min_p": Rule("", "off in both"),
    "sampling.vllm.memory_fraction": Rule(f"{ROLLOUT}.gpu_memory_utilization", "null is 0.5, verl's default",
        lambda c: {f"{ROLLOUT}.gpu_memory_utilization": c.sampling.vllm.memory_fraction or 0.5}),
    "sampling.vllm.kv_cache_gb": Rule("", "only for a CPU"),
    "sampling.vllm.tensor_parallel": Rule(f"{ROLLOUT}.tensor_model_parallel_size"),
    "sampling.vllm.eager": Rule(f"{ROLLOUT}.enforce_eager"),
    "sampling.vllm.sleep": Rule(f"{ROLLOUT}.free_cache_engine"),
    "sampling.vllm.prefix_caching": Rule(f"{ROLLOUT}.enable_prefix_caching"),
    **dict.fromkeys(("grading.deadline", "grading.retries", "grading.memory_gb", "grading.batch", "reward.correct",
                     "reward.wrong"), Rule("", "config.yaml, which reward.py reads")),
    **dict.fromkeys(("grading.workers", "grading.concurrency"),
                    Rule("", "config.yaml, which reward.py reads; per reward worker of verl, of which there are 8")),
    "grading.timeout_reward": Rule(
        "", "verl needs a number for every completion: a timeout and a grader error get the reward of a wrong answer"),
    "grading.while_sampling": Rule("", "verl grades in its reward workers"),
    "reward.overlong_buffer": Rule("", "verl's reward manager `dapo`, with the same penalty", _overlong),
    "reward.overlong_penalty": Rule("", "with reward.overlong_buffer"),
    "bounds": Rule("", "the policy loss and its settings", _policy_loss),
    "objective.advantages": Rule("", "`algorithm.adv_estimator`: grpo for group, rloo for rloo",
        lambda c: {"algorithm.adv_estimator": ESTIMATORS.get(c.objective.advantages, "grpo")}),
    "objective.advantage_std": Rule("algorithm.norm_adv_by_std_in_grpo", "1e-6 is added in both"),
    "objective.aggregation": Rule("", "over all GPUs and micro-batches of an update", _aggregation),
    "objective.dual_clip": Rule("", f"`{ACTOR}.clip_ratio_c`; null is 1e9, which no ratio reaches"),
    "objective.reference_kl": Rule("", "k3, which verl limits to 10 per token", _reference_kl),
    "objective.entropy_bonus": Rule(f"{ACTOR}.entropy_coeff", "at the sampling temperature in both"),
    "objective.mask_truncated": Rule("", "verl has no such mask"),
    "objective.old_logprobs": Rule(
        f"{CORRECTION}.bypass_mode", "`sampler` is bypass_mode, which in this trainer keeps the policy loss",
        lambda c: {f"{CORRECTION}.bypass_mode": c.objective.old_logprobs == "sampler"}),
    "objective.importance": Rule("", f"`{CORRECTION}`", _importance),
    "objective.importance_cap": Rule("", "with objective.importance"),
    "objective.importance_floor": Rule("", "with objective.importance"),
    "objective.all_token_metrics": Rule("", "verl computes its metrics from all tokens"),
    "optim.lr": Rule(f"{ACTOR}.optim.lr"),
    "optim.betas": Rule(f"{ACTOR}.optim.betas"),
    "optim.eps": Rule(f"{ACTOR}.optim.override_optimizer_config", "",
        lambda c: {f"{ACTOR}.optim.override_optimizer_config": {"eps": c.optim.eps}}),
    "optim.weight_decay": Rule(f"{ACTOR}.optim.weight_decay"),
    "optim.max_grad_norm": Rule(f"{ACTOR}.optim.clip_grad", "null is infinity",
        lambda c: {f"{ACTOR}.optim.clip_grad": math.inf if c.optim.max_grad_norm is None else c.optim.max_grad_norm}),
    "optim.warmup_steps": Rule("", "steps, not updates",
        lambda c: {f"{ACTOR}.optim.lr_warmup_steps": math.ceil(c.optim.warmup_steps / c.optim.updates) or -1}),
    "optim.schedule": Rule(f"{ACTOR}.optim.lr_scheduler_type"),
    "optim.updates": Rule(
        "", "verl sorts the completions of a step by length first, so that an update has completions of any prompts",
        lambda c: {f"{ACTOR}.ppo_mini_batch_size": c.sampling.prompts // c.optim.updates}),
    "optim.micro_batch_tokens": Rule("", "per GPU; at least a prompt and its completion",
        lambda c: {f"{ACTOR}.ppo_max_token_len_per_gpu": tokens_per_micro_batch(c)}),
    "optim.max_skips": Rule("", "verl skips every update whose gradient is not finite, without a limit"),
    "evaluation.every": Rule("trainer.test_freq", "with the start and the end",
        lambda c: {"trainer.test_freq": c.evaluation.every or -1, "trainer.val_before_train": c.evaluation.every > 0}),
    "evaluation.problems": Rule("", "the rows of heldout.parquet"),
    "evaluation.samples": Rule(f"{ROLLOUT}.val_kwargs.n"),
    "evaluation.k": Rule("", "verl reports best@k for powers of 2, by resampling, which is not pass@k"),
    "evaluation.temperature": Rule(f"{ROLLOUT}.val_kwargs.temperature", "",
        lambda c: {f"{ROLLOUT}.val_kwargs.do_sample": c.evaluation.temperature > 0}),
    "evaluation.batch": Rule("", "verl samples an evaluation at once"),
    "checkpoint.every": Rule("", "0 is the last step",
        lambda c: {"trainer.save_freq": c.checkpoint.every or c.steps}),
    "checkpoint.keep_last": Rule("trainer.max_actor_ckpt_to_keep"),
    "checkpoint.keep_best": Rule("", "verl keeps no best checkpoint"),
    "checkpoint.best_metric": Rule("", "with checkpoint.keep_best"),
    "checkpoint.background": Rule("", "verl's trainer waits for its checkpoints"),
    "stop": Rule("", "verl does not end a run early"),
    "tracking.trackers": Rule("trainer.logger", "without custom trackers",
        lambda c: {"trainer.logger": ["console", *filter(TRACKERS.__contains__, c.tracking.names)]}),
    "tracking.mlflow": Rule("", "part of tracking.trackers"),
    "tracking.uri": Rule("", "MLFLOW_TRACKING_URI in run.sh"),
    "tracking.experiment": Rule("trainer.project_name"),
    "tracking.parent": Rule("", "verl's runs have no parent"),
    "tracking.callbacks": Rule("", "callbacks of this package's trainer"),
    "tracking.tokens_every": Rule("", "verl records no values per token"),
    "tracking.stall_after": Rule("", "verl reports no waits"),
}  # fmt: skip
"""By the key of a setting or of its section."""


def overrides_of(config: RunConfig) -> Overrides:
    """Return verl's settings for a configuration, apart from what depends on the machines and on the data."""
    overrides = dict(FIXED)
    for key, rule in RULES.items():
        if rule.to:
            overrides[rule.to] = _value(config, key)
        overrides |= rule.derive(config)
    return overrides


def _value(config: RunConfig, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def differences_of(config: RunConfig) -> list[str]:
    """Return what verl would compute differently, one line each, beginning with the setting."""
    model, sampling, objective, optim = config.model, config.sampling, config.objective, config.optim
    # With the sampler's log-probs as π_old there is nothing to correct.
    corrected = objective.importance_cap is not None and objective.old_logprobs == "trainer"
    method = config.bounds.method
    alpha = model.lora.scaling * model.lora.rank if model.lora else 0.0
    other_mean = method in ("sapo", "gmpo") and objective.aggregation != PER_COMPLETION
    importance = IMPORTANCE_DIFFERENCES.get(objective.importance, "") if corrected else ""
    no_loss = f"verl has no such policy loss (it has {', '.join(LOSSES)})"
    scheduled = method in LOSSES and config.bounds.scheduled(1, config.steps)
    warmup = "verl raises the learning rate once per step, from 0 in the first; optim.warmup_steps=0 is equal in both"
    checks: list[tuple[str, object, str]] = [
        ("model.revision", model.revision, "verl loads the latest revision"),
        ("model.lora.alpha", not alpha.is_integer(), "verl has whole numbers only"),
        ("model.device", not model.device.startswith(("auto", "cuda")), "the exported job runs on GPUs"),
        ("sampling.engine", sampling.engine not in ("auto", "vllm"), "the exported job samples with vLLM"),
        ("sampling.dynamic_batches", sampling.dynamic, "verl samples until it has all groups, without a limit"),
        ("sampling.max_lag", sampling.max_lag, "verl samples each batch with the weights of its step"),
        ("task.tools", config.task.tools, "verl runs tools in its agent loops, which have settings of their own"),
        ("task.environment", config.task.environment, "verl has interactions with an interface of its own"),
        ("bounds.method", method not in LOSSES, no_loss),
        ("bounds.delta_schedule", scheduled,
         "the radius is constant in verl, whose losses do not know the step"),
        ("bounds.method", method in ("clip-cov", "kl-cov"),
         "verl chooses the tokens by their covariance under π, not under π_old"),
        ("objective.advantages", objective.advantages not in ESTIMATORS,
         f"verl has no such estimator (it has {' and '.join(ESTIMATORS)})"),
        ("objective.aggregation", other_mean, f"verl's {method} has {PER_COMPLETION} only"),
        ("objective.importance_cap", corrected and method == "gmpo",
         "verl's gmpo takes the geometric mean of the importance weights over a completion"),
        ("objective.reference_kl", corrected and objective.reference_kl,
         "verl does not weight the penalty by the importance correction"),
        ("objective.mask_truncated", objective.mask_truncated, "verl trains on completions without an end token"),
        ("objective.importance", importance, importance),
        ("deterministic", config.deterministic, "the export does not set up deterministic kernels"),
        ("optim.warmup_steps", optim.warmup_steps, warmup),
        ("optim.schedule", optim.schedule not in LR_SCHEDULES, f"verl has {' and '.join(LR_SCHEDULES)} only"),
        ("optim.schedule", optim.schedule == "cosine" and optim.updates > 1,
         "verl changes the learning rate once per step, not with every update"),
        *((f"stop.{name}", limit is not None, "verl does not end a run early")
          for name, limit in config.stop if name != "steps"),
    ]  # fmt: skip
    return [f"{key} = {_value(config, key)}: {text}" for key, differs, text in checks if differs]


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
    return is_known and not config.task.functions
