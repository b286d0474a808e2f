"""Settings of verl 0.9.1 for the settings of a run: one rule per setting, with its reason.

`RULES` is complete: a test fails for a setting without a rule. A rule states which overrides a setting becomes, and
what verl computes differently, which `bandpo export verl` refuses unless the user allows it. The interfaces are those
of verl's default trainer (`trainer/ppo/v1`, `trainer.use_v1=true`) with the FSDP engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

from bandpo_cli.config.run import RunConfig
from bandpo_cli.exports import verl_rules as rules
from bandpo_cli.exports.verl_rules import (
    ACTOR,
    CORRECTION,
    LOSSES,
    MODEL,
    ROLLOUT,
    Overrides,
    is_corrected,
    loss_differences,
    loss_overrides,
)


@dataclass(frozen=True)
class Rule:
    """How verl gets one setting, or a complete section.

    Attributes:
        reason: where the value goes, or why verl needs none, for the README of an exported folder.
        to: the setting of verl that gets the value; None where there is none.
        value: a function from the value here to the value of `to`.
        overrides: further settings of verl for a configuration.
        difference: what verl computes differently with the setting's value in a configuration; false for nothing.
        differences: the same as complete lines, for differences that other settings have a part in.
    """

    reason: str = ""
    to: str | None = None
    value: Callable[[Any], Any] = lambda value: value
    overrides: Callable[[RunConfig], Overrides] = lambda config: {}
    difference: Callable[[RunConfig], Any] = lambda config: None
    differences: Callable[[RunConfig], list[str]] = lambda config: []

    def describe(self) -> str:
        """Return verl's key and the reason."""
        return "; ".join(filter(None, (self.to and f"`{self.to}`", self.reason)))


def overrides_of(config: RunConfig) -> Overrides:
    """Return verl's settings for a configuration, apart from what depends on the machines and on the data."""
    overrides = dict(FIXED)
    for key, rule in RULES.items():
        if rule.to is not None:
            overrides[rule.to] = rule.value(_value(config, key))
        overrides |= rule.overrides(config)
    return overrides


def differences_of(config: RunConfig) -> list[str]:
    """Return what verl would compute differently, one line each, beginning with the setting."""
    lines = []
    for key, rule in RULES.items():
        if text := rule.difference(config):
            lines.append(f"{key} = {_value(config, key)}: {text}")
        lines += rule.differences(config)
    return lines


def _value(config: RunConfig, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def is_runnable(config: RunConfig) -> bool:
    """Return whether verl can run the configuration at all, with whatever differences."""
    return config.bounds.method in LOSSES and config.optim.schedule in rules.LR_SCHEDULES


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

RULES: dict[str, Rule] = {
    "seed": Rule(
        "another order of the problems and other samples than here",
        to="data.seed",
        overrides=lambda config: {f"{ROLLOUT}.seed": config.seed, f"{ACTOR}.data_loader_seed": config.seed},
    ),
    "steps": Rule(
        "the number of passes only has to be large enough",
        to="trainer.total_training_steps",
        overrides=lambda config: {"trainer.total_epochs": config.steps},
    ),
    "model.path": Rule(
        "a hub id or folder, unchanged; the bundled model is copied", overrides=rules.model_path
    ),
    "model.revision": Rule(
        "the latest", difference=lambda config: config.model.revision and "verl loads the latest revision"
    ),
    "model.dtype": Rule(
        f"`{ROLLOUT}.dtype`, also the dtype of the passes; `auto` is bfloat16; weights and optimizer are float32",
        overrides=rules.passes_dtype,
    ),
    "model.attention": Rule(
        "`auto` is FlashAttention 2 with bfloat16, sdpa with float32", overrides=rules.attention
    ),
    "model.gradient_checkpointing": Rule(
        "`auto` is true", to=f"{MODEL}.enable_gradient_checkpointing", value=bool
    ),
    "model.prompts": Rule(
        "messages in the data files; a template joins them where none of the model is used"
    ),
    "model.trust_remote_code": Rule(
        to=f"{MODEL}.trust_remote_code",
        overrides=lambda config: {"data.trust_remote_code": config.model.trust_remote_code},
    ),
    "model.lora": Rule(
        f"`{MODEL}.lora_rank`, `lora_alpha`, `target_modules`; merged into the weights for vLLM",
        overrides=rules.lora,
        differences=rules.lora_differences,
    ),
    "model.device": Rule(
        "the GPUs of the job",
        difference=lambda config: (
            None if config.model.device.startswith(("auto", "cuda")) else "the exported job runs on GPUs"
        ),
    ),
    "task": Rule("train.parquet, heldout.parquet; reward.py has the graders and weighted rewards"),
    "sampling.engine": Rule(
        "vLLM",
        difference=lambda config: (
            None if config.sampling.engine in ("auto", "vllm") else "the exported job samples with vLLM"
        ),
    ),
    "sampling.prompts": Rule(to="data.train_batch_size"),
    "sampling.samples": Rule(to=f"{ROLLOUT}.n"),
    "sampling.temperature": Rule(to=f"{ROLLOUT}.temperature"),
    "sampling.max_tokens": Rule(to="data.max_response_length"),
    "sampling.max_prompt_tokens": Rule("longer prompts are dropped", to="data.max_prompt_length"),
    "sampling.max_sequences": Rule("per vLLM engine", to=f"{ROLLOUT}.max_num_seqs"),
    "sampling.dynamic": Rule(
        "groups with equal rewards are replaced",
        to="algorithm.filter_groups.enable",
    ),
    "sampling.dynamic_batches": Rule(
        "verl has no limit",
        difference=lambda config: (
            config.sampling.dynamic and "verl samples until it has all groups, without a limit"
        ),
    ),
    # The asynchronous modes of the exported trainer (`trainer.v1.trainer_mode`) continue partial completions with newer
    # weights. `verl.experimental.one_step_off_policy` has a lag of one step, with another main program and settings.
    "sampling.max_lag": Rule(
        "0: `trainer.v1.trainer_mode=sync`, verl's default",
        difference=lambda config: (
            config.sampling.max_lag and "verl samples each batch with the weights of its step"
        ),
    ),
    "sampling.weight_transfer": Rule("no engine process"),
    "sampling.top_p": Rule("1 in both", to=f"{ROLLOUT}.top_p"),
    "sampling.top_k": Rule("off in both"),
    "sampling.min_p": Rule("off in both"),
    "sampling.vllm.memory_fraction": Rule(
        "null is 0.5, verl's default",
        to=f"{ROLLOUT}.gpu_memory_utilization",
        value=lambda fraction: fraction or 0.5,
    ),
    "sampling.vllm.kv_cache_gb": Rule("only for a CPU"),
    "sampling.vllm.tensor_parallel": Rule(to=f"{ROLLOUT}.tensor_model_parallel_size"),
    "sampling.vllm.eager": Rule(to=f"{ROLLOUT}.enforce_eager"),
    "sampling.vllm.sleep": Rule(to=f"{ROLLOUT}.free_cache_engine"),
    "sampling.vllm.prefix_caching": Rule(to=f"{ROLLOUT}.enable_prefix_caching"),
    **dict.fromkeys(
        ("grading.deadline", "grading.memory_gb", "grading.batch", "reward.correct", "reward.wrong"),
        Rule("config.yaml, which reward.py reads"),
    ),
    "grading.workers": Rule(
        "config.yaml, which reward.py reads; per reward worker of verl, of which there are 8"
    ),
    "grading.timeout_reward": Rule(
        "verl needs a number for every completion: a timeout and a grader error get the reward of a wrong answer"
    ),
    "grading.while_sampling": Rule("verl grades in its reward workers"),
    "reward.overlong_buffer": Rule(
        "verl's reward manager `dapo`, with the same penalty", overrides=rules.overlong
    ),
    "reward.overlong_penalty": Rule("with reward.overlong_buffer"),
    "bounds": Rule(
        "the policy loss and its settings",
        overrides=lambda config: loss_overrides(config) or {},
        differences=loss_differences,
    ),
    "objective.advantage_std": Rule("1e-6 is added in both", to="algorithm.norm_adv_by_std_in_grpo"),
    "objective.aggregation": Rule(
        "over all GPUs and micro-batches of an update", overrides=rules.aggregation
    ),
    "objective.dual_clip": Rule(f"`{ACTOR}.clip_ratio_c`; null is 1e9, which no ratio reaches"),
    "objective.reference_kl": Rule(
        "k3, which verl limits to 10 per token",
        overrides=rules.reference_kl,
        differences=rules.reference_kl_differences,
    ),
    "objective.old_logprobs": Rule(
        "`sampler` is bypass_mode, which in this trainer keeps the policy loss",
        to=f"{CORRECTION}.bypass_mode",
        value=lambda source: source == "sampler",
    ),
    "objective.importance": Rule(
        f"`{CORRECTION}`",
        overrides=rules.importance,
        difference=lambda config: (
            is_corrected(config) and rules.IMPORTANCE_DIFFERENCES.get(config.objective.importance)
        ),
    ),
    "objective.importance_cap": Rule("with objective.importance"),
    "objective.importance_floor": Rule("with objective.importance"),
    "objective.all_token_metrics": Rule("verl computes its metrics from all tokens"),
    "optim.lr": Rule(to=f"{ACTOR}.optim.lr"),
    "optim.betas": Rule(to=f"{ACTOR}.optim.betas"),
    "optim.eps": Rule(to=f"{ACTOR}.optim.override_optimizer_config", value=lambda eps: {"eps": eps}),
    "optim.weight_decay": Rule(to=f"{ACTOR}.optim.weight_decay"),
    "optim.max_grad_norm": Rule(
        "null is infinity",
        to=f"{ACTOR}.optim.clip_grad",
        value=lambda norm: math.inf if norm is None else norm,
    ),
    "optim.warmup_steps": Rule(
        "steps, not updates",
        overrides=lambda config: {
            f"{ACTOR}.optim.lr_warmup_steps": math.ceil(config.optim.warmup_steps / config.optim.updates)
            or -1
        },
        difference=lambda config: (
            config.optim.warmup_steps
            and "verl raises the learning rate once per step, from 0 in the first; optim.warmup_steps=0 is the same in "
            "both"
        ),
    ),
    "optim.schedule": Rule(to=f"{ACTOR}.optim.lr_scheduler_type", difference=rules.schedule_difference),
    "optim.updates": Rule(
        "verl sorts the completions of a step by length first, so that an update has completions of any prompts",
        overrides=lambda config: {
            f"{ACTOR}.ppo_mini_batch_size": config.sampling.prompts // config.optim.updates
        },
    ),
    "optim.micro_batch_tokens": Rule(
        "per GPU; at least a prompt and its completion",
        overrides=lambda config: {f"{ACTOR}.ppo_max_token_len_per_gpu": rules.tokens_per_micro_batch(config)},
    ),
    "optim.max_skips": Rule("verl skips every update whose gradient is not finite, without a limit"),
    "evaluation.every": Rule(
        "with the start and the end",
        to="trainer.test_freq",
        value=lambda every: every or -1,
        overrides=lambda config: {"trainer.val_before_train": config.evaluation.every > 0},
    ),
    "evaluation.problems": Rule("the rows of heldout.parquet"),
    "evaluation.samples": Rule(to=f"{ROLLOUT}.val_kwargs.n"),
    "evaluation.k": Rule("verl reports best@k for powers of 2, by resampling, which is not pass@k"),
    "evaluation.temperature": Rule(
        to=f"{ROLLOUT}.val_kwargs.temperature",
        overrides=lambda config: {f"{ROLLOUT}.val_kwargs.do_sample": config.evaluation.temperature > 0},
    ),
    "evaluation.batch": Rule("verl samples an evaluation at once"),
    "checkpoint.every": Rule(
        "0 is the last step",
        overrides=lambda config: {"trainer.save_freq": config.checkpoint.every or config.steps},
    ),
    "checkpoint.keep_last": Rule(to="trainer.max_actor_ckpt_to_keep"),
    "checkpoint.keep_best": Rule("verl keeps no best checkpoint"),
    "checkpoint.best_metric": Rule("with checkpoint.keep_best"),
    "checkpoint.background": Rule("verl's trainer waits for its checkpoints"),
    "tracking.mlflow": Rule(
        to="trainer.logger", value=lambda mlflow: ["console", "mlflow"] if mlflow else ["console"]
    ),
    "tracking.uri": Rule("MLFLOW_TRACKING_URI in run.sh"),
    "tracking.experiment": Rule(to="trainer.project_name"),
    "tracking.parent": Rule("verl's runs have no parent"),
}
"""The rule of each setting, by its key or by the key of its section."""
