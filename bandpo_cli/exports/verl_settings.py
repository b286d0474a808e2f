"""Settings of verl 0.9.1 for the settings of a run, and what verl computes differently.

`RULES` is complete: a test fails for a setting without a rule. `bandpo export verl` refuses settings that verl computes
differently unless the user allows them. The interfaces are those of verl's default trainer (`trainer/ppo/v1`,
`trainer.use_v1=true`) with the FSDP engine.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from bandpo_cli.config.run import RunConfig
from bandpo_cli.exports.verl_rules import (
    ACTOR,
    CORRECTION,
    LOSSES,
    MODEL,
    ROLLOUT,
    Overrides,
    derived_overrides,
    is_corrected,
)

PER_COMPLETION = "seq-mean-token-mean"
LR_SCHEDULES = ("constant", "cosine")
"""The values of `optim.schedule` that verl's FSDP engine has."""

FIXED: Overrides = {
    "trainer.use_v1": True,
    "algorithm.adv_estimator": "grpo",
    "algorithm.use_kl_in_reward": False,
    f"{ACTOR}.entropy_coeff": 0,
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

RULES: dict[str, tuple[str, str]] = {
    "seed": ("data.seed", "another order of the problems and other samples than here"),
    "steps": ("trainer.total_training_steps", "the number of passes only has to be large enough"),
    "model.path": ("", "a hub id or folder, unchanged; the bundled model is copied"),
    "model.revision": ("", "the latest"),
    "model.dtype":
        ("", f"`{ROLLOUT}.dtype`, also the dtype of the passes; `auto` is bfloat16; weights and optimizer are float32"),
    "model.attention": ("", "`auto` is FlashAttention 2 with bfloat16, sdpa with float32"),
    "model.gradient_checkpointing": (f"{MODEL}.enable_gradient_checkpointing", "`auto` is true"),
    "model.prompts": ("", "messages in the data files; a template joins them where none of the model is used"),
    "model.trust_remote_code": (f"{MODEL}.trust_remote_code", ""),
    "model.lora": ("", f"`{MODEL}.lora_rank`, `lora_alpha`, `target_modules`; merged into the weights for vLLM"),
    "model.device": ("", "the GPUs of the job"),
    "task": ("", "train.parquet, heldout.parquet; reward.py has the graders and weighted rewards"),
    "sampling.engine": ("", "vLLM"),
    "sampling.prompts": ("data.train_batch_size", ""),
    "sampling.samples": (f"{ROLLOUT}.n", ""),
    "sampling.temperature": (f"{ROLLOUT}.temperature", ""),
    "sampling.max_tokens": ("data.max_response_length", ""),
    "sampling.max_prompt_tokens": ("data.max_prompt_length", "longer prompts are dropped"),
    "sampling.max_sequences": (f"{ROLLOUT}.max_num_seqs", "per vLLM engine"),
    "sampling.dynamic": ("algorithm.filter_groups.enable", "groups with equal rewards are replaced"),
    "sampling.dynamic_batches": ("", "verl has no limit"),
    # The asynchronous modes of the exported trainer (`trainer.v1.trainer_mode`) continue partial completions with newer
    # weights. `verl.experimental.one_step_off_policy` has a lag of one step, with another main program and settings.
    "sampling.max_lag": ("", "0: `trainer.v1.trainer_mode=sync`, verl's default"),
    "sampling.weight_transfer": ("", "no engine process"),
    "sampling.top_p": (f"{ROLLOUT}.top_p", "1 in both"),
    "sampling.top_k": ("", "off in both"),
    "sampling.min_p": ("", "off in both"),
    "sampling.vllm.memory_fraction": (f"{ROLLOUT}.gpu_memory_utilization", "null is 0.5, verl's default"),
    "sampling.vllm.kv_cache_gb": ("", "only for a CPU"),
    "sampling.vllm.tensor_parallel": (f"{ROLLOUT}.tensor_model_parallel_size", ""),
    "sampling.vllm.eager": (f"{ROLLOUT}.enforce_eager", ""),
    "sampling.vllm.sleep": (f"{ROLLOUT}.free_cache_engine", ""),
    "sampling.vllm.prefix_caching": (f"{ROLLOUT}.enable_prefix_caching", ""),
    **dict.fromkeys(("grading.deadline", "grading.memory_gb", "grading.batch", "reward.correct", "reward.wrong"),
                    ("", "config.yaml, which reward.py reads")),
    "grading.workers": ("", "config.yaml, which reward.py reads; per reward worker of verl, of which there are 8"),
    "grading.timeout_reward":
        ("", "verl needs a number for every completion: a timeout and a grader error get the reward of a wrong answer"),
    "grading.while_sampling": ("", "verl grades in its reward workers"),
    "reward.overlong_buffer": ("", "verl's reward manager `dapo`, with the same penalty"),
    "reward.overlong_penalty": ("", "with reward.overlong_buffer"),
    "bounds": ("", "the policy loss and its settings"),
    "objective.advantage_std": ("algorithm.norm_adv_by_std_in_grpo", "1e-6 is added in both"),
    "objective.aggregation": ("", "over all GPUs and micro-batches of an update"),
    "objective.dual_clip": ("", f"`{ACTOR}.clip_ratio_c`; null is 1e9, which no ratio reaches"),
    "objective.reference_kl": ("", "k3, which verl limits to 10 per token"),
    "objective.old_logprobs":
        (f"{CORRECTION}.bypass_mode", "`sampler` is bypass_mode, which in this trainer keeps the policy loss"),
    "objective.importance": ("", f"`{CORRECTION}`"),
    "objective.importance_cap": ("", "with objective.importance"),
    "objective.importance_floor": ("", "with objective.importance"),
    "objective.all_token_metrics": ("", "verl computes its metrics from all tokens"),
    "optim.lr": (f"{ACTOR}.optim.lr", ""),
    "optim.betas": (f"{ACTOR}.optim.betas", ""),
    "optim.eps": (f"{ACTOR}.optim.override_optimizer_config", ""),
    "optim.weight_decay": (f"{ACTOR}.optim.weight_decay", ""),
    "optim.max_grad_norm": (f"{ACTOR}.optim.clip_grad", "null is infinity"),
    "optim.warmup_steps": ("", "steps, not updates"),
    "optim.schedule": (f"{ACTOR}.optim.lr_scheduler_type", ""),
    "optim.updates":
        ("", "verl sorts the completions of a step by length first, so that an update has completions of any prompts"),
    "optim.micro_batch_tokens": ("", "per GPU; at least a prompt and its completion"),
    "optim.max_skips": ("", "verl skips every update whose gradient is not finite, without a limit"),
    "evaluation.every": ("trainer.test_freq", "with the start and the end"),
    "evaluation.problems": ("", "the rows of heldout.parquet"),
    "evaluation.samples": (f"{ROLLOUT}.val_kwargs.n", ""),
    "evaluation.k": ("", "verl reports best@k for powers of 2, by resampling, which is not pass@k"),
    "evaluation.temperature": (f"{ROLLOUT}.val_kwargs.temperature", ""),
    "evaluation.batch": ("", "verl samples an evaluation at once"),
    "checkpoint.every": ("", "0 is the last step"),
    "checkpoint.keep_last": ("trainer.max_actor_ckpt_to_keep", ""),
    "checkpoint.keep_best": ("", "verl keeps no best checkpoint"),
    "checkpoint.best_metric": ("", "with checkpoint.keep_best"),
    "checkpoint.background": ("", "verl's trainer waits for its checkpoints"),
    "tracking.mlflow": ("trainer.logger", ""),
    "tracking.uri": ("", "MLFLOW_TRACKING_URI in run.sh"),
    "tracking.experiment": ("trainer.project_name", ""),
    "tracking.parent": ("", "verl's runs have no parent"),
}  # fmt: skip
"""By the key of a setting or of its section: verl's setting with the same value ("" for none), and the reason."""


def overrides_of(config: RunConfig) -> Overrides:
    """Return verl's settings for a configuration, apart from what depends on the machines and on the data."""
    overrides, derived = dict(FIXED), derived_overrides(config)
    for key, (to, _) in RULES.items():
        if to:
            overrides[to] = _value(config, key)
        overrides |= derived.get(key, {})
    return overrides


def _value(config: RunConfig, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def differences_of(config: RunConfig) -> list[str]:
    """Return what verl would compute differently, one line each, beginning with the setting."""
    model, sampling, objective, optim = config.model, config.sampling, config.objective, config.optim
    method, corrected = config.bounds.method, is_corrected(config)
    alpha = model.lora.scaling * model.lora.rank if model.lora else 0.0
    other_mean = method in ("sapo", "gmpo") and objective.aggregation != PER_COMPLETION
    importance = IMPORTANCE_DIFFERENCES.get(objective.importance, "") if corrected else ""
    no_loss = f"verl has no such policy loss (it has {', '.join(LOSSES)})"
    by_pi = "verl chooses the tokens by their covariance under π, not under π_old"
    scheduled = method in LOSSES and config.bounds.scheduled(1, config.steps)
    constant = "the radius is constant in verl, whose losses do not know the step"
    geometric = "verl's gmpo takes the geometric mean of the importance weights over a completion"
    unweighted = "verl does not weight the penalty by the importance correction"
    warmup = "verl raises the learning rate once per step, from 0 in the first; optim.warmup_steps=0 is equal in both"
    per_step = "verl changes the learning rate once per step, not with every update"
    checks: list[tuple[str, object, str]] = [
        ("model.revision", model.revision, "verl loads the latest revision"),
        ("model.lora.alpha", not alpha.is_integer(), "verl has whole numbers only"),
        ("model.device", not model.device.startswith(("auto", "cuda")), "the exported job runs on GPUs"),
        ("sampling.engine", sampling.engine not in ("auto", "vllm"), "the exported job samples with vLLM"),
        ("sampling.dynamic_batches", sampling.dynamic, "verl samples until it has all groups, without a limit"),
        ("sampling.max_lag", sampling.max_lag, "verl samples each batch with the weights of its step"),
        ("bounds.method", method not in LOSSES, no_loss),
        ("bounds.delta_schedule", scheduled, constant),
        ("bounds.method", method in ("clip-cov", "kl-cov"), by_pi),
        ("objective.aggregation", other_mean, f"verl's {method} has {PER_COMPLETION} only"),
        ("objective.importance_cap", corrected and method == "gmpo", geometric),
        ("objective.reference_kl", corrected and objective.reference_kl, unweighted),
        ("objective.importance", importance, importance),
        ("optim.warmup_steps", optim.warmup_steps, warmup),
        ("optim.schedule", optim.schedule not in LR_SCHEDULES, f"verl has {' and '.join(LR_SCHEDULES)} only"),
        ("optim.schedule", optim.schedule == "cosine" and optim.updates > 1, per_step),
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
    return config.bounds.method in LOSSES and config.optim.schedule in LR_SCHEDULES
