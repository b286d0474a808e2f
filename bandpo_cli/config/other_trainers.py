"""Names of settings in other trainers, for suggestions in errors about unknown settings."""

from __future__ import annotations

from collections.abc import Mapping

SETTINGS_ELSEWHERE: Mapping[str, str] = {
    "batch_size": "sampling.prompts",
    "train_batch_size": "sampling.prompts",
    "per_device_train_batch_size": "optim.micro_batch_tokens",
    "gradient_accumulation_steps": "optim.micro_batch_tokens",
    "beta": "objective.reference_kl",
    "kl_coef": "objective.reference_kl",
    "kl_loss_coef": "objective.reference_kl",
    "clip_ratio": "bounds.eps_high",
    "clip_ratio_c": "objective.dual_clip",
    "clip_ratio_high": "bounds.eps_high",
    "clip_ratio_low": "bounds.eps_low",
    "epsilon": "bounds.eps_low",
    "epsilon_high": "bounds.eps_high",
    "epochs": "steps",
    "eval_steps": "evaluation.every",
    "grad_clip": "optim.max_grad_norm",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "group_size": "sampling.samples",
    "k": "evaluation.k",
    "learning_rate": "optim.lr",
    "lora_alpha": "model.lora.alpha",
    "lora_r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "lora_target_modules": "model.lora.target_modules",
    "loss_agg_mode": "objective.aggregation",
    "loss_type": "objective.aggregation",
    "lr": "optim.lr",
    "lr_scheduler_type": "optim.schedule",
    "max_completion_length": "sampling.max_tokens",
    "max_grad_norm": "optim.max_grad_norm",
    "max_new_tokens": "sampling.max_tokens",
    "max_prompt_length": "sampling.max_prompt_tokens",
    "max_response_length": "sampling.max_tokens",
    "max_steps": "steps",
    "max_tokens": "sampling.max_tokens",
    "model_name_or_path": "model.path",
    "n": "sampling.samples",
    "num_generations": "sampling.samples",
    "num_iterations": "optim.updates",
    "num_train_epochs": "steps",
    "ppo_epochs": "optim.updates",
    "ppo_mini_batch_size": "optim.updates",
    "report_to": "tracking.mlflow",
    "rollout_n": "sampling.samples",
    "save_freq": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "scale_rewards": "objective.advantage_std",
    "temperature": "sampling.temperature",
    "test_freq": "evaluation.every",
    "top_p": "sampling.top_p",
    "total_epochs": "steps",
    "total_training_steps": "steps",
    "warmup_steps": "optim.warmup_steps",
    "weight_decay": "optim.weight_decay",
}
"""Keys by the names of TRL's GRPOConfig, verl's trainer settings, and flags that people try."""


def setting_for(name: str) -> str | None:
    """Return the setting that a flag or key of another trainer stands for; None where there is none.

    `--learning-rate`, `learning_rate` and `actor.learning_rate` are the same name.
    """
    return SETTINGS_ELSEWHERE.get(name.lstrip("-").replace("-", "_").rpartition(".")[2].lower())
