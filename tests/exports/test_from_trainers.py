"""Configurations of TRL and verl as settings of a run: batches, losses, defaults, and what has no place."""

import json
import subprocess
from typing import Any

import pytest

from bandpo_cli.config.layers import flatten, parse_yaml, resolve, setting_changes
from bandpo_cli.errors import ConfigError
from bandpo_cli.exports.from_trainers import Translation, read_trainer_file
from bandpo_cli.exports.verl_settings import LOSSES, overrides_of
from tests.cli.eval_command import succeed, usage_error
from tests.exports.folders import small

BASE = {"model_name_or_path": "m", "dataset_name": "d/d", "reward_funcs": ["accuracy_reward"]}


def translation(**given: Any) -> Translation:
    return Translation("trl", BASE | {"num_processes": 1} | given)


def trl(**given: Any) -> dict[str, Any]:
    """Return the settings of TRL's arguments, by dotted name."""
    return {key: value for key, (value, _) in translation(**given).settings.items()}


BATCHES = [
    # The arguments, and by hand from GRPOConfig.__post_init__: prompts per batch, updates per batch.
    ({"gradient_accumulation_steps": 4}, 4, 1),
    ({"gradient_accumulation_steps": 4, "num_processes": 2}, 8, 1),
    ({"gradient_accumulation_steps": 2, "steps_per_generation": 8}, 8, 4),
    ({"generation_batch_size": 64}, 8, 8),
    ({"gradient_accumulation_steps": 4, "num_iterations": 2}, 4, 2),
    ({"gradient_accumulation_steps": 8, "steps_per_generation": 4}, 8, 1),
]


@pytest.mark.parametrize(("given", "prompts", "updates"), BATCHES)
def test_batches_of_trl_are_prompts_and_updates(given, prompts, updates):
    found = trl(max_steps=40, **given)
    expected = (prompts, updates, 40 // updates)
    assert (found["sampling.prompts"], found["optim.updates"], found["steps"]) == expected


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"num_generations": 3}, "no multiple of num_generations = 3"),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 3}, "a part of a batch"),
        ({"generation_batch_size": 64, "steps_per_generation": 2}, "TRL takes one of them"),
        ({"loss_type": "grpoo"}, "loss_type = 'grpoo': no such loss here"),
        ({"num_generations": "x"}, "num_generations = 'x': expected a number, such as 8"),
    ],
)
def test_a_run_without_an_equivalent_is_refused(given, problem):
    with pytest.raises(ConfigError, match=problem):
        trl(**given)


@pytest.mark.parametrize(
    ("trainer", "given", "problem"),
    [
        (
            "trl",
            {"data.train_batch_size": 8, "num_processes": 1},
            "no key of TRL, but of verl: --from verl; it",
        ),
        ("verl", BASE, "no key of verl, but of trl: --from trl; it has model_name_or_path, dataset_name"),
        ("verl", {"frobnicate": 1}, "no key of verl; it has frobnicate"),
    ],
)
def test_a_file_of_another_trainer_is_refused(trainer, given, problem):
    with pytest.raises(ConfigError, match=problem):
        Translation(trainer, given)


def test_defaults_of_trl_that_differ_are_stated():
    found = trl()
    expected = {
        "seed": 42, "sampling.prompts": 1, "sampling.samples": 8, "sampling.max_tokens": 512, "bounds.method": "clip",
        "objective.aggregation": "token-mean", "objective.dual_clip": None, "objective.importance_cap": None,
        "optim.schedule": "linear", "optim.warmup_steps": 0, "evaluation.every": 0, "task.template": "plain",
    }  # fmt: skip
    assert expected.items() <= found.items()
    assert "optim.lr" not in found  # 1e-6 is the default of language models here, too
    assert resolve([translation().layer()]).optim.lr == 1e-6


PLACES = [
    ({"loss_type": "grpo", "epsilon": 0.1}, {"bounds.eps_low": 0.1, "bounds.eps_high": 0.1}),
    ({"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
     {"bounds.method": "gspo", "bounds.eps_high": 4e-4, "objective.aggregation": "token-mean"}),
    ({"loss_type": "cispo", "epsilon_high": 5.0}, {"bounds.method": "cispo", "bounds.max_weight": 5.0}),
    ({"band_delta": 0.1}, {"bounds.method": "band", "bounds.delta": 0.1, "objective.aggregation": "token-mean"}),
    ({"delta": 4.0, "max_grad_norm": 0}, {"objective.dual_clip": 4.0, "optim.max_grad_norm": None}),
    ({"scale_rewards": "batch"}, {"objective.advantages": "batch"}),
    ({"scale_rewards": False}, {"objective.advantage_std": False}),
    ({"fp16": True, "bf16": False}, {"model.dtype": "float16"}),
    ({"top_entropy_quantile": 0.2}, {"objective.top_entropy": 0.2}),
    ({"use_adaptive_entropy": True, "entropy_coef_delta": 0.01},
     {"objective.entropy_target": 0.2, "objective.entropy_bonus_step": 0.01, "objective.entropy_bonus_max": 1.0}),
    ({"reward_funcs": ["my.brief", "my.right"], "multi_objective_aggregation": "normalize_then_sum"},
     {"objective.advantages": "gdpo"}),
    ({"use_peft": True, "use_rslora": True, "lora_target_modules": "all-linear"},
     {"model.lora.rank": 16, "model.lora.alpha": 128.0, "model.lora.target_modules": None}),
    ({"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
     {"sampling.engine": "vllm", "objective.importance": [{"rule": "token-truncate", "high": 3.0}]}),
    ({"eval_strategy": "steps", "eval_steps": 4, "temperature": 0.7},
     {"evaluation.every": 4, "evaluation.samples": 8, "evaluation.temperature": 0.7}),
    ({"lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "max_steps": 50}, {"optim.warmup_steps": 5}),
    ({"lr_scheduler_type": "constant", "warmup_steps": 9}, {"optim.warmup_steps": 0}),
    ({"reward_funcs": ["my.rewards.brief"]}, {"task.grader": "trl:my.rewards:brief"}),
    ({"dataset_name": "openai/gsm8k"}, {"task.name": "gsm8k"}),
]  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), PLACES, ids=lambda value: next(iter(value)))
def test_arguments_of_trl_have_the_settings_of_their_meaning(given, expected):
    found = trl(**given)
    assert {key: found.get(key) for key in expected} == expected
    resolve([translation(**given).layer()])


def test_values_without_a_place_and_settings_that_a_run_would_refuse_are_reported():
    found = translation(use_adaptive_entropy=True, entropy_coef=0.01, top_entropy_quantile=0.0)
    assert "objective.entropy_bonus" not in found.settings
    assert "entropy_coef = 0.01: the coefficient starts at 0" in found.missing
    assert "bandpo train refuses these settings together: objective.top_entropy = 0.0: " in found.missing[-1]


@pytest.mark.parametrize("method", LOSSES)
def test_the_overrides_of_an_export_become_the_same_run(method, tmp_path):
    """`export verl` and `configs --from verl` are inverse: an interval is `clip` whatever its name was."""
    rules = [{"rule": "sequence-reject", "low": 0.5, "high": 2.0}, {"rule": "product-truncate", "high": 5.0}]
    objective = {"importance": rules, "reference_kl": 0.1}
    config = small({"bounds": {"method": method}, "objective": objective | {"aggregation": "seq-sum-norm"}})
    overrides = flatten(overrides_of(config)).items()
    given = {key.lstrip("+"): value for key, value in overrides if value is not None}
    translated = Translation("verl", given)
    layer = {**translated.layer(), "task": config.task.model_dump()}
    changes = setting_changes(config, resolve([layer]))
    resolved = {"model.path", "model.dtype", "sampling.engine"}
    resolved |= {"sampling.vllm.memory_fraction", "evaluation.problems"}
    renamed = {"bounds.method"} if method in ("atr", "clip-higher", "none") else set()
    assert changes.keys() == resolved | renamed
    assert not [line for line in translated.missing if "the table of verl" in line]


def test_files_of_both_trainers_are_read(tmp_path):
    script = "python3 -m main_ppo \\\n  data.train_batch_size=8 +a.b=1e-3 'trainer.logger=[\"x\"]' \\\n $@"
    (tmp_path / "run.sh").write_text(script)
    keys = {"data.train_batch_size": 8, "a.b": 1e-3, "trainer.logger": ["x"]}
    assert read_trainer_file(tmp_path / "run.sh") == keys
    (tmp_path / "c.yaml").write_text("data: {seed: '${x.y}', shuffle: '${oc.env:X}'}\nx: {y: 3}\n")
    assert read_trainer_file(tmp_path / "c.yaml") == {"data.seed": 3, "x.y": 3}
    (tmp_path / "args.json").write_text('{"learning_rate": 1e-05, "optim_args": null}')
    assert read_trainer_file(tmp_path / "args.json") == {"learning_rate": 1e-5}


def test_the_variables_of_a_script_have_the_values_that_bash_gives_them(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("RATE", "2e-06")
    script = (
        "n=4\nexport batch=$((n * (2 + 6)))  # prompts\nloss='token-mean'; seed=1\nprintf '%s\\n' \\\n"
        'd.batch=${batch} d.n=$n "a.mode=${loss}" +a.k=${K:-3} a.lr=$RATE a.most=$((1024*20)) d.files=$NO_FILES'
    )
    (tmp_path / "run.sh").write_text(script)
    words = subprocess.run(["bash", tmp_path / "run.sh"], capture_output=True, text=True, check=True).stdout
    expected = dict(word.lstrip("+").split("=") for word in words.split())
    found = read_trainer_file(tmp_path / "run.sh")
    assert {key: str(value) for key, value in found.items()} | {"a.lr": "2e-06", "d.files": ""} == expected
    assert "d.files = $NO_FILES is not known here and is left out" in caplog.text
    assert found["a.lr"] == 2e-6


def test_a_zero_and_the_word_none_in_a_file_are_values_and_no_missing_keys(tmp_path):
    """Expected: GRPOConfig (no deviation, no clipping) and verl 0.9.1, whose FSDP engine takes the ratio for 0 steps
    and whose agent loop evaluates at val_kwargs.temperature whatever do_sample is."""
    (tmp_path / "trl.yaml").write_text("scale_rewards: none\nmax_grad_norm: 0.0\nlora_r: null\n")
    given = read_trainer_file(tmp_path / "trl.yaml")
    assert trl(**given).items() >= {"objective.advantage_std": False, "optim.max_grad_norm": None}.items()
    (tmp_path / "verl.sh").write_text(
        "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0 "
        "actor_rollout_ref.actor.optim.weight_decay=0 actor_rollout_ref.actor.optim.lr_warmup_steps=0 "
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 trainer.total_training_steps=50 "
        "actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.val_kwargs.temperature=0.6"
    )
    found = Translation("verl", read_trainer_file(tmp_path / "verl.sh")).settings
    expected = {
        "objective.reference_kl": 0, "optim.weight_decay": 0, "evaluation.temperature": 0.6,
        "optim.warmup_steps": 20,  # 5 steps of 4 updates
    }  # fmt: skip
    assert {key: found[key][0] for key in expected} == expected


def test_the_command_prints_a_config_file_and_what_has_no_place(tmp_path):
    given = {"model_name_or_path": "m", "per_device_train_batch_size": 4, "num_generations": 4, "top_p": 0.9}
    given |= {"frobnicate": 1, "num_train_epochs": 2, "logging_steps": 5}
    (tmp_path / "args.yaml").write_text(json.dumps(given))
    done = succeed("configs", "--from", "TRL", "args.yaml", "--processes", "8", cwd=tmp_path)
    layer = parse_yaml(done.out, "stdout")
    assert layer["sampling"]["prompts"] == 8
    assert "  prompts: 8  # per_device_train_batch_size, num_processes" in done.out
    for text in ("top_p = 0.9", "frobnicate", "(training problems) × 2 / 8", "--task FILE|NAME"):
        assert text in done.err
    assert "logging_steps" not in done.err
    resolve([layer])
    assert "allowed: trl, verl" in usage_error("configs", "--from", "trll", "args.yaml", cwd=tmp_path)
