"""Settings of verl: every setting has a rule, values are those of the authors' scripts, and departures are named."""

import math
from pathlib import Path
from typing import Any

import pytest

from bandpo_cli.config.layers import flatten, nest, read_layer, resolve
from bandpo_cli.config.run import RunConfig
from bandpo_cli.exports.verl_settings import (
    ACTOR,
    CORRECTION,
    LOSSES,
    MODEL,
    ROLLOUT,
    RULES,
    differences_of,
    is_runnable,
    overrides_of,
)  # fmt: skip
from bandpo_cli.methods import METHODS
from bandpo_cli.registries import TASKS

PAPER = Path(__file__).parents[2] / "configs" / "paper"


def config_of(**settings: Any) -> RunConfig:
    """Return the default configuration without warm-up, with settings by their keys, in which __ stands for a dot."""
    keys = {"optim.warmup_steps": 0} | {key.replace("__", "."): value for key, value in settings.items()}
    return resolve([nest(keys)])


def rules_for(key: str) -> list[str]:
    return [name for name in RULES if key == name or key.startswith(f"{name}.")]


@pytest.mark.parametrize(
    ("method", "task"), [*((method, "countdown") for method in METHODS), *(("band", task) for task in TASKS)]
)
def test_each_setting_has_one_rule_that_says_where_it_goes(method, task):
    """A new setting without a rule would be lost in an export; this names it."""
    train = {"task__train": "x.jsonl"} if task == "data" else {}
    keys = flatten(config_of(bounds__method=method, task__name=task, **train).model_dump(mode="json"))
    rules = {key: rules_for(key) for key in keys}
    assert {key: names for key, names in rules.items() if len(names) != 1} == {}
    assert {name for names in rules.values() for name in names} == set(RULES)
    assert all(rule.to or rule.reason for rule in RULES.values())


def test_the_papers_run_has_the_values_of_the_authors_script():
    """The values are those that docs/paper.md quotes from it; verl 0.9.1 has other names for some keys."""
    files = [PAPER / "base.yaml", PAPER / "models" / "qwen2.5-3b-instruct.yaml"]
    config = resolve(map(read_layer, files))
    assert differences_of(config) == []
    expected = {
        "data.train_batch_size": 256, "data.max_prompt_length": 1024, "data.max_response_length": 4096,
        "data.filter_overlong_prompts": True, f"{MODEL}.path": "Qwen/Qwen2.5-3B-Instruct",
        f"{MODEL}.enable_gradient_checkpointing": True, f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.n": 16,
        f"{ROLLOUT}.temperature": 1.0, f"{ROLLOUT}.top_p": 1.0, f"{ROLLOUT}.top_k": -1,
        f"{ROLLOUT}.max_num_seqs": 1024, f"{ROLLOUT}.tensor_model_parallel_size": 1,
        f"{ROLLOUT}.enforce_eager": False, f"{ROLLOUT}.enable_prefix_caching": True, f"{ROLLOUT}.val_kwargs.n": 32,
        f"{ROLLOUT}.val_kwargs.do_sample": True, f"{ROLLOUT}.val_kwargs.temperature": 1.0,
        "algorithm.filter_groups.enable": False, "algorithm.norm_adv_by_std_in_grpo": True,
        "algorithm.use_kl_in_reward": False, f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
        f"{ACTOR}.clip_ratio_c": 10.0, f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.001,
        f"{ACTOR}.kl_loss_type": "low_var_kl", f"{ACTOR}.entropy_coeff": 0, f"{ACTOR}.ppo_mini_batch_size": 64,
        f"{ACTOR}.ppo_epochs": 1, f"{ACTOR}.optim.lr": 1e-6, f"{ACTOR}.optim.betas": (0.9, 0.999),
        f"{ACTOR}.optim.weight_decay": 0.01, f"{ACTOR}.optim.clip_grad": 1.0, f"{ACTOR}.optim.lr_warmup_steps": -1,
        "trainer.test_freq": 5, "trainer.val_before_train": True, "trainer.save_freq": 10,
    }  # fmt: skip
    found = overrides_of(config)
    assert {key: found[key] for key in expected} == expected
    assert f"{CORRECTION}.rollout_is" not in found


REWARD = "+reward.reward_kwargs"
PRECISION = "+actor_rollout_ref.actor.fsdp_config.mixed_precision"
CHANGED = [
    ({"seed": 7}, {"data.seed": 7, f"{ROLLOUT}.seed": 7}),
    ({"model__dtype": "bfloat16"}, {f"{ROLLOUT}.dtype": "bfloat16"}),
    ({"model__dtype": "float16"},
     {f"{ROLLOUT}.dtype": "float16", f"{PRECISION}.param_dtype": "fp16", f"{PRECISION}.reduce_dtype": "fp32"}),
    ({"model__attention": "eager"}, {f"+{MODEL}.override_config.attn_implementation": "eager"}),
    ({"task__name": "gsm8k", "model__path": "m/m", "model__chat_template_kwargs": {"enable_thinking": False, "n": 2}},
     {"+data.apply_chat_template_kwargs.enable_thinking": False, "+data.apply_chat_template_kwargs.n": 2}),
    ({"sampling__dynamic": True}, {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "reward"}),
    ({"objective__dual_clip": 4.0}, {f"{ACTOR}.clip_ratio_c": 4.0}),
    ({"objective__entropy_bonus": 0.01}, {f"{ACTOR}.entropy_coeff": 0.01}),
    ({"objective__aggregation": "seq-sum-norm", "sampling__max_tokens": 30},
     {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor": 30}),
    ({"objective__old_logprobs": "sampler"}, {f"{CORRECTION}.bypass_mode": True}),
    ({"objective__importance": "token-mask", "objective__importance_cap": 5.0, "objective__importance_floor": 0.5},
     {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": "0.5_5.0"}),
    ({"reward__overlong_buffer": 4, "reward__overlong_penalty": 0.5},
     {"reward.reward_manager.name": "dapo", f"{REWARD}.max_resp_len": 8, f"{REWARD}.overlong_buffer_cfg.len": 4,
      f"{REWARD}.overlong_buffer_cfg.penalty_factor": 0.5}),
    ({"optim__max_grad_norm": None}, {f"{ACTOR}.optim.clip_grad": math.inf}),
    ({"optim__warmup_steps": 9}, {f"{ACTOR}.optim.lr_warmup_steps": 3}),
    ({"optim__micro_batch_tokens": 5}, {f"{ACTOR}.ppo_max_token_len_per_gpu": 72}),
    ({"evaluation__every": 0}, {"trainer.test_freq": -1, "trainer.val_before_train": False}),
    ({"evaluation__temperature": 0, "evaluation__samples": 1, "evaluation__k": [1]},
     {f"{ROLLOUT}.val_kwargs.do_sample": False, f"{ROLLOUT}.val_kwargs.temperature": 0}),
    ({"checkpoint__every": 0, "steps": 30}, {"trainer.save_freq": 30}),
    ({"tracking__mlflow": False}, {"trainer.logger": ["console"]}),
]  # fmt: skip
"""Settings, and what becomes of them: those whose value is not copied."""


@pytest.mark.parametrize(("settings", "expected"), CHANGED, ids=lambda value: next(iter(value)))
def test_values_that_are_not_copied(settings, expected):
    found = overrides_of(config_of(**settings))
    assert {key: found.get(key) for key in expected} == expected


DIFFERENT = [
    ({"optim__warmup_steps": 5}, "optim.warmup_steps = 5"),
    ({"optim__schedule": "cosine"}, "optim.schedule = cosine"),
    ({"sampling__dynamic": True}, "sampling.dynamic_batches = 10"),
    ({"sampling__max_lag": 1}, "sampling.max_lag = 1"),
    ({"sampling__engine": "transformers"}, "sampling.engine = transformers"),
    ({"model__device": "cpu"}, "model.device = cpu"),
    ({"objective__reference_kl": 0.001}, "objective.reference_kl"),
    ({"objective__mask_truncated": True}, "objective.mask_truncated = True"),
    ({"objective__importance": "sequence-truncate"}, "objective.importance = sequence-truncate"),
    ({"objective__importance": "sequence-mask"}, "objective.importance = sequence-mask"),
    ({"objective__importance": "sequence-mask-any"}, "objective.importance = sequence-mask-any"),
    ({"bounds__delta_schedule": "linear", "bounds__delta_end": 0.01}, "bounds.delta_schedule"),
    ({"bounds__method": "clip-cov"}, "bounds.method = clip-cov"),
    ({"bounds__method": "kl-cov"}, "bounds.method = kl-cov"),
    ({"bounds__method": "sapo", "objective__aggregation": "token-mean"}, "objective.aggregation = token-mean"),
    ({"bounds__method": "gmpo"}, "objective.importance_cap"),
    ({"stop__entropy_below": 0.1}, "stop.entropy_below = 0.1: verl does not end a run early"),
    ({"stop__truncation_above": 0.0}, "stop.truncation_above = 0.0"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "start"), DIFFERENT, ids=lambda value: str(value)[:40])
def test_what_verl_computes_differently_is_named(settings, start):
    config = config_of(**settings)
    (line,) = differences_of(config)
    assert line.startswith(start)
    assert is_runnable(config)


SAME = [
    {},
    {"optim__schedule": "cosine", "optim__updates": 1},
    {"objective__reference_kl": 0.001, "objective__importance_cap": None},
    {"objective__reference_kl": 0.001, "objective__old_logprobs": "sampler"},
    {"objective__entropy_bonus": 0.01},
    {"bounds__method": "gmpo", "objective__importance_cap": None},
    {"bounds__method": "gmpo", "objective__old_logprobs": "sampler"},
    {"model__device": "cuda:1"},
    {"sampling__engine": "vllm"},
    {"stop__steps": 3},
]


@pytest.mark.parametrize("settings", SAME, ids=str)
def test_what_verl_computes_equally_is_not_refused(settings):
    assert differences_of(config_of(**settings)) == []


def test_methods_and_schedules_that_verl_does_not_have_cannot_be_run():
    for method in sorted(set(METHODS) - set(LOSSES)):
        config = config_of(bounds__method=method)
        assert not is_runnable(config)
        assert differences_of(config)[0].startswith(f"bounds.method = {method}: verl has no such policy loss")
    others = "dcpo ripo cppo luspo gapo ctpo vaco m2po wapo dgpo bapo ce-gppo aspo drpo topr vespo"
    assert set(METHODS) - set(LOSSES) == {*others.split()}
    assert not is_runnable(config_of(optim__schedule="linear"))


def test_a_bound_that_is_null_is_never_reached():
    """Both engines limit the log ratio to 20."""
    unclipped = overrides_of(config_of(bounds__method="none", objective__dual_clip=None))
    uncapped = overrides_of(config_of(bounds__method="dppo", bounds__max_weight=None))
    assert unclipped[f"{ACTOR}.clip_ratio_low"] == 1.0
    assert unclipped[f"{ACTOR}.clip_ratio_high"] > math.exp(20)
    assert min(config[f"{ACTOR}.clip_ratio_c"] for config in (unclipped, uncapped)) > math.exp(20)


OTHER = {"divergence": "tv", "relax": {"eps_low": 0.1, "eps_high": 0.3}}
"""Values that differ from every default, for settings that are not numbers."""


@pytest.mark.parametrize("method", LOSSES)
def test_each_setting_of_a_method_reaches_verl(method):
    """Another value changes an override, or is reported as a difference."""
    default = config_of(bounds__method=method)
    for name, value in default.bounds:
        if name == "method" or name.startswith("delta_"):  # tested above
            continue
        changed = OTHER.get(name) or 0.5 * (value or 1.5) + 0.25
        config = config_of(bounds__method=method, **{f"bounds__{name}": changed})
        assert getattr(config.bounds, name) != value
        assert overrides_of(config) != overrides_of(default), name
        assert differences_of(config) == differences_of(default)


def test_adapters_are_those_of_verls_fsdp_engine():
    """Names of verl 0.9.1 in trainer/config/model/hf_model.yaml; `lora.merge` sends merged weights to vLLM."""
    lora = {"rank": 16, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    found = overrides_of(config_of(model__lora=lora))
    expected = {"lora_rank": 16, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "lora.merge": True}
    assert {key: found[f"{MODEL}.{key}"] for key in expected} == expected
    default = config_of(model__lora={"rank": 16})
    assert overrides_of(default)[f"{MODEL}.lora_alpha"] == 32
    assert f"{MODEL}.target_modules" not in overrides_of(default)
    assert not [key for key in overrides_of(config_of()) if "lora" in key]
    assert differences_of(default) == []
    (line,) = differences_of(config_of(model__lora={"rank": 16, "alpha": 0.5}))
    assert line.startswith("model.lora.alpha = 0.5: ")
