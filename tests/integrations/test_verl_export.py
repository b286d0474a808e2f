"""Exported folders in verl itself: its configuration and checks, losses, data set, prompts, rewards and schedules."""

import asyncio
import importlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bandpo_cli.config.layers import read_layer, resolve
from bandpo_cli.config.run import RunConfig
from bandpo_cli.experiments import export_verl, import_verl
from bandpo_cli.exports.verl_files import RewardFunction, hydra_value, problem_from_json, problem_to_json
from bandpo_cli.exports.verl_settings import LOSSES, differences_of, is_runnable, overrides_of
from bandpo_cli.grading.pool import GraderPool, training_grader
from bandpo_cli.methods.importance_correction import importance_weights
from bandpo_cli.methods.loss import LossBatch, policy_loss
from bandpo_cli.models.load import load_tokenizer
from bandpo_cli.models.logprobs import linear_logprobs
from bandpo_cli.objective.advantages import group_advantages, rloo_advantages, shaped_rewards
from bandpo_cli.objective.policy_objective import AGGREGATIONS, k3, policy_objective
from bandpo_cli.sampling.prompt_encoding import PromptEncoder
from bandpo_cli.settings_validation import trainer_keys
from bandpo_cli.training.optimizer import lr_factor
from bandpo_cli.types import Message, Problem
from tests.exports.folders import SMALL, run_script, small
from tests.integrations.batches import SPREADS, assert_equal, ours, random_batch
from tests.text_model import THINKING, save_text_model

CONFIGS = Path(__file__).parents[2] / "configs"
Compose = Callable[..., Any]


@pytest.fixture(scope="module")
def compose(verl_package):
    """Return a function to verl's configuration from an exported folder, by its run.sh, or from a configuration."""
    hydra = importlib.import_module("hydra")
    folder = Path(importlib.import_module("verl").__file__).parent / "trainer" / "config"

    def composed(exported: Path | RunConfig) -> Any:
        if isinstance(exported, Path):
            words = run_script(exported)[0][2:]  # without -m verl.trainer.main_ppo
        else:
            words = [f"{key}={hydra_value(value)}" for key, value in overrides_of(exported).items()]
        return hydra.compose("ppo_trainer", overrides=words)

    with hydra.initialize_config_dir(str(folder), version_base=None):
        yield composed


def validate(config: Any) -> None:
    """Run verl's own checks of a configuration, as main_ppo does."""
    utils = importlib.import_module("verl.trainer.ppo.utils")
    policy, critic = utils.need_reference_policy(config), utils.need_critic(config)
    check = importlib.import_module("verl.utils.config").validate_config
    check(config=config, use_reference_policy=policy, use_critic=critic)


def dataclass_of(config: Any) -> Any:
    return importlib.import_module("verl.utils.config").omega_conf_to_dataclass(config)


def test_the_table_of_verls_keys_has_verls_defaults(compose):
    """Keys of the Band's loss are this package's, and some keys are in no file of verl's defaults."""
    assert compose(method_config("band-chi2"))  # Hydra is initialized
    config = importlib.import_module("hydra").compose("ppo_trainer")
    select = importlib.import_module("omegaconf").OmegaConf.select
    added = ("policy_loss.divergence", "policy_loss.delta", "policy_loss.max_ratio", "penalty_factor")
    rows = {key: row["default"] for key, row in trainer_keys("verl").items() if "default" in row}
    rows = {key: value for key, value in rows.items() if not key.endswith(added)}
    assert {key: select(config, key) for key in rows} == rows


METHODS = "atr band-chi2 band-kl-relaxed cispo clip clip-higher dppo-kl dppo-tv gmpo gspo none sapo"
"""Files of the methods that verl computes equally; clip-cov and kl-cov choose other tokens."""


OTHER_SETTINGS = [
    ("dppo-tv", {"max_weight": 2.0}),
    ("gspo", {"eps_low": 0.1, "eps_high": 0.2}),
    ("sapo", {"tau_positive": 3.0, "tau_negative": 5.0}),
    ("gmpo", {"log_eps_low": 0.1, "log_eps_high": 0.2}),
    ("cispo", {"min_weight": 0.8, "max_weight": 1.28}),
]


def method_config(name: str, **bounds: float) -> RunConfig:
    layer = {"objective": {"importance_cap": None}, "bounds": bounds}
    return small(read_layer(CONFIGS / "methods" / f"{name}.yaml"), layer)


@pytest.mark.parametrize(("name", "bounds"), [*((name, {}) for name in METHODS.split()), *OTHER_SETTINGS])
def test_the_loss_of_an_exported_method_is_that_of_a_run(name, bounds, compose, verl_package):
    """From the settings by overrides, Hydra, verl's checks and classes to the function in its registry."""
    config = method_config(name, **bounds)
    assert is_runnable(config)
    assert differences_of(config) == []
    actor = dataclass_of(compose(config).actor_rollout_ref.actor)
    loss = verl_package.algos.get_policy_loss_fn(actor.policy_loss.loss_mode)
    for spread in SPREADS:
        batch = random_batch(0, SPREADS[spread])
        logprobs = batch.new.clone().requires_grad_()
        mode = actor.loss_agg_mode
        value, _ = loss(batch.old, logprobs, batch.advantages, batch.mask, loss_agg_mode=mode, config=actor)
        (gradient,) = torch.autograd.grad(value, logprobs)
        found = ours(batch, config.bounds.model_dump(), "seq-mean-token-mean", 10.0).outputs
        assert_equal(f"{name}, {spread}", found, value, gradient, batch.mask)


def test_all_methods_that_verl_has_are_compared():
    compared = {method_config(name).bounds.method for name in METHODS.split()}
    assert compared == set(LOSSES) - {"clip-cov", "kl-cov"}


def with_model(config: RunConfig, **settings: Any) -> RunConfig:
    """Return the configuration with other settings of the model."""
    return config.model_copy(update={"model": config.model.model_copy(update=settings)})


STUB = [
    Problem(f"q{index}", (Message("user", f"What is {index}+1?"),), str(index + 1), "stub", "number")
    for index in range(512)
]
COMPLETE = [("countdown",), ("paper/base", "paper/models/qwen2.5-3b-instruct", "paper/dynamic-sampling")]
"""Shipped configurations that are complete: files that go together."""


@pytest.mark.parametrize("names", COMPLETE, ids=lambda names: names[-1])
def test_shipped_configurations_pass_verls_checks(names, tmp_path, compose, monkeypatch):
    """Problems of the hub are replaced: data sets cannot be downloaded here. Their prompts have a chat template."""
    task = SimpleNamespace(train_problems=lambda: STUB, heldout_sets=lambda: {"stub": STUB[:8]}, notes=list)
    config = resolve([read_layer(CONFIGS / f"{name}.yaml") for name in names])
    if config.task.name != "countdown":
        module = importlib.import_module("bandpo_cli.experiments.plan")
        monkeypatch.setattr(module, "build_task", lambda settings: task)
        config = with_model(config, prompts="chat")
    export_verl(config, tmp_path / "job", nodes=2, gpus_per_node=8, allow_differences=True)
    composed = compose(tmp_path / "job")
    validate(composed)
    assert composed.trainer.nnodes == 2
    assert composed.data.train_batch_size == config.sampling.prompts
    assert composed.ray_kwargs.ray_init.runtime_env.env_vars.MLFLOW_TRACKING_URI.startswith("sqlite:///")
    actor = dataclass_of(composed.actor_rollout_ref.actor)
    assert actor.optim.override_optimizer_config == {"eps": config.optim.eps}
    assert tuple(actor.optim.betas) == config.optim.betas
    assert dataclass_of(composed.actor_rollout_ref.rollout).n == config.sampling.samples


def test_a_restricted_penalty_and_an_unlimited_gradient_norm_pass_verls_checks(tmp_path, compose):
    """Values that Hydra could read as another type: infinity, an interval of importance weights, nested new keys."""
    settings = {
        "optim": {"max_grad_norm": None},
        "objective": {"importance": "token-mask", "importance_cap": 2.0, "reference_kl": 0.0},
        "reward": {"overlong_buffer": 4},
        "bounds": {"relax": {"eps_low": 0.2, "eps_high": 0.28}, "max_ratio": None},
    }
    export_verl(small(settings), tmp_path / "it's a job", gpus_per_node=2)
    composed = compose(tmp_path / "it's a job")
    validate(composed)
    actor = dataclass_of(composed.actor_rollout_ref.actor)
    assert math.isinf(actor.optim.clip_grad)
    assert (actor.policy_loss.relax_eps_high, actor.policy_loss.max_ratio) == (0.28, None)
    assert composed.algorithm.rollout_correction.rollout_is_threshold == "0.5_2.0"
    assert composed.reward.reward_kwargs.overlong_buffer_cfg.len == 4
    # run.sh passes variables to Ray, as main_ppo merges them: workers elsewhere do not inherit its environment.
    omegaconf = importlib.import_module("omegaconf").OmegaConf
    default = importlib.import_module("verl.trainer.constants_ppo").get_ppo_ray_runtime_env(composed)
    variables = omegaconf.merge(default, composed.ray_kwargs.ray_init.runtime_env).env_vars
    assert variables.VERL_USE_EXTERNAL_MODULES == "bandpo_cli.integrations.verl"
    assert f"sqlite:///{tmp_path}/it's a job/mlflow.db" == variables.MLFLOW_TRACKING_URI


# ---- data and prompts ------------------------------------------------------------------------------------------------


def chat_data(folder: Path) -> RunConfig:
    """Return a configuration with questions in a file and a model with a chat template."""
    rows = [{"question": f"What is {index}+{index}?", "answer": str(2 * index)} for index in range(64)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    save_text_model(folder / "model", [row["question"] for row in rows], layers=1)
    task = {"name": "data", "train": str(folder / "rows.jsonl"), "system": "Be brief."}
    own = {"task": {**task, "heldout_fraction": 0.2}, "model": {"path": str(folder / "model")}}
    plain = {key: value for key, value in SMALL.items() if key != "task"}
    return resolve([plain, own, {"sampling": {"max_prompt_tokens": 1024}}])


@pytest.mark.parametrize("kind", ["countdown", "chat", "thinking", "raw"])
def test_prompts_have_the_token_ids_of_a_run(kind, tmp_path, compose):
    """verl's data set reads the file, its length filter keeps every prompt, and its agent loop makes the tokens."""
    config = small() if kind == "countdown" else chat_data(tmp_path)
    arguments = {"enable_thinking": False} if kind == "thinking" else None
    if kind == "raw":
        config = with_model(config, prompts="raw")
    if kind == "thinking":
        (tmp_path / "model" / "chat_template.jinja").write_text(THINKING, encoding="utf-8")
        config = with_model(config, chat_template_kwargs=arguments)
    exported = export_verl(config, tmp_path / "job", gpus_per_node=1)
    composed = compose(tmp_path / "job")
    model = dataclass_of(composed.actor_rollout_ref.model)
    dataset = importlib.import_module("verl.trainer.ppo.utils").create_rl_dataset(
        composed.data.train_files, composed.data, model.tokenizer, model.processor
    )
    assert len(dataset) == exported.problems
    wiring = importlib.import_module("verl.utils.tokenizer.continuous_token_wiring")
    builder = wiring.create_continuous_token_builder(
        model.tokenizer,
        hf_model_type=model.hf_config.model_type,
        chat_template_kwargs=composed.data.apply_chat_template_kwargs,
    )
    problems = [problem_from_json(dataset[index]["extra_info"]["problem"]) for index in range(len(dataset))]
    encoder = PromptEncoder(load_tokenizer(config.model), config.model.prompts, arguments)
    expected = encoder.encode(problems)
    assert all(prompt.text.endswith("</think>\n\n") == (kind == "thinking") for prompt in expected)
    for index, prompt in enumerate(expected):
        assert tuple(builder.build_initial_tokens(dataset[index]["raw_prompt"])) == prompt.token_ids


# ---- rewards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", [0, 4], ids=["naive", "dapo"])
def test_rewards_of_verls_manager_are_those_of_a_run(buffer, tmp_path, compose):
    """verl's reward manager decodes tokens, calls reward.py, and subtracts the over-long penalty."""
    protocol = importlib.import_module("verl.protocol")
    rewards = importlib.import_module("verl.trainer.ppo.reward")
    config = small({"reward": {"correct": 1.0, "wrong": -1.0, "overlong_buffer": buffer}})
    export_verl(config, tmp_path / "job", gpus_per_node=1)
    composed = compose(tmp_path / "job")
    tokenizer = load_tokenizer(config.model)
    manager = rewards.load_reward_manager(composed, tokenizer)
    assert type(manager).__name__ == ("DAPORewardManager" if buffer else "NaiveRewardManager")
    dataset = importlib.import_module("pandas").read_parquet(tmp_path / "job" / "train.parquet")
    seen = set()

    async def score(row: Any, text: str) -> tuple[dict[str, Any], int]:
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        padded = torch.tensor([ids + [tokenizer.pad_token_id] * (12 - len(ids))])
        keys = ("data_source", "reward_model", "extra_info")
        data = protocol.DataProto.from_dict(
            tensors={"responses": padded, "attention_mask": (padded != tokenizer.pad_token_id).long()},
            non_tensors={key: np.array([row[key]], dtype=object) for key in keys},
        )
        manager.loop = asyncio.get_running_loop()
        return await manager.run_single(data), len(ids)

    with GraderPool(config.grading) as pool:
        for row in dataset.to_dict("records")[:6]:
            problem = problem_from_json(row["extra_info"]["problem"])
            numbers = str(problem.extra["numbers"]).split()
            for text in ("+".join(numbers), "*".join(numbers), f"({'-'.join(numbers)})", numbers[0], "=="):
                result, length = asyncio.run(score(row, text))
                (grade,) = training_grader(pool, None)([problem], [text])
                (expected,) = shaped_rewards([grade], [length], config.sampling.max_tokens, config.reward)
                assert float(result["reward_score"]) == pytest.approx(expected)
                assert result["reward_extra_info"]["acc"] == float(grade.correct)
                seen.add((grade.correct, expected))
    assert len({reward for _, reward in seen}) >= (3 if buffer else 2)


def test_expressions_are_compared_with_the_antlr_of_hydra(compose):
    """math-verify asks for a later ANTLR by default; Hydra needs 4.9.3, for which it has generated parsers, too."""
    function = RewardFunction(resolve([{"task": {"name": "data", "train": "rows.jsonl"}}]))
    for reference, answer, correct in (
        (r"\frac{1}{2}+x", r"x+\frac{2}{4}", 1.0),
        (r"\sqrt{8}", r"2\sqrt{2}", 1.0),
        (r"\sqrt{8}", r"3\sqrt{2}", 0.0),
    ):
        problem = Problem("q", (Message("user", "?"),), reference, "set", "math")
        info = {"problem": problem_to_json(problem)}
        assert function("set", f"The answer is \\boxed{{{answer}}}", reference, info)["acc"] == correct


# ---- what the settings mean in verl ----------------------------------------------------------------------------------


def test_advantages_are_those_of_a_run(verl_package):
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randint(0, 2, (5, 4), generator=generator).double()
    rewards[0] = 1.0
    inputs = (rewards.reshape(-1, 1), torch.ones(20, 1), np.repeat(np.arange(5), 4))
    for by_std in (True, False):
        grpo = verl_package.algos.compute_grpo_outcome_advantage
        theirs, _ = grpo(*inputs, norm_adv_by_std_in_grpo=by_std)
        torch.testing.assert_close(theirs.reshape(5, 4).double(), group_advantages(rewards, by_std))
    theirs, _ = verl_package.algos.compute_rloo_outcome_advantage(*inputs)
    ours = rloo_advantages(rewards, torch.ones_like(rewards, dtype=torch.bool))
    torch.testing.assert_close(theirs.reshape(5, 4).double(), ours)


def test_the_penalty_to_the_reference_model_is_that_of_a_run(verl_package):
    """Up to verl's limit of 10 per token."""
    new, ref = -torch.rand(2, 100, dtype=torch.float64) * 2
    torch.testing.assert_close(verl_package.algos.kl_penalty_forward(new, ref, "low_var_kl"), k3(new, ref))
    far = verl_package.algos.kl_penalty_forward(torch.tensor([-9.0]), torch.tensor([-1.0]), "low_var_kl")
    assert far.item() == 10.0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_entropy_bonus_is_that_of_a_run(aggregation, compose, verl_package):
    """Of the distribution at the sampling temperature, aggregated as the loss; advantages are 0."""
    objective = {"entropy_bonus": 0.3, "aggregation": aggregation}
    config = small({"objective": objective, "sampling": {"temperature": 0.7}})
    assert differences_of(config) == []
    actor = dataclass_of(compose(config).actor_rollout_ref.actor)
    batch, generator = random_batch(0, SPREADS["near"]), torch.Generator().manual_seed(0)
    hidden = torch.randn(*batch.mask.shape, 6, generator=generator).requires_grad_()
    weight = torch.randn(11, 6, generator=generator)
    functional = importlib.import_module("verl.utils.torch_functional")
    logits = hidden.double() @ weight.double().t() / config.sampling.temperature
    entropy = functional.entropy_from_logits(logits)
    mode, factor = actor.loss_agg_mode, actor.loss_scale_factor
    mean = verl_package.algos.agg_loss(entropy, batch.mask.double(), mode, loss_scale_factor=factor)
    expected = -actor.entropy_coeff * mean
    lengths, targets = batch.lengths, torch.zeros(int(batch.mask.sum()), dtype=torch.int64)
    new = linear_logprobs(hidden[batch.mask], weight, None, targets, config.sampling.temperature, False, True)
    weights = AGGREGATIONS[aggregation](lengths, config.sampling.max_tokens).repeat_interleave(lengths)
    loss, old = policy_loss(config.bounds, config.objective), new.logprobs.detach()
    tokens = LossBatch(lengths, torch.zeros_like(old), old, loss.prepare(old, torch.zeros_like(old)))
    found = policy_objective(loss, new.logprobs, tokens, weights, new.sampling_entropy)
    torch.testing.assert_close(found.loss, expected.detach().float(), rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(new.sampling_entropy, hidden, found.entropy_gradient)
    (other,) = torch.autograd.grad(expected, hidden)
    torch.testing.assert_close(gradient, other, rtol=1e-5, atol=2e-6 * other.abs().max().item())


@pytest.mark.parametrize("rule", ["token-mask", "token-truncate"])
def test_importance_weights_are_those_of_a_run(rule, compose):
    config = small({"objective": {"importance": rule, "importance_cap": 1.5}})
    assert differences_of(config) == []
    correction = compose(config).algorithm.rollout_correction
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    batch = random_batch(0, SPREADS["apart"])
    sampler, trainer = (logprobs.masked_fill(~batch.mask, 0.0) for logprobs in (batch.old, batch.new))
    data, mask, _ = helper.compute_rollout_correction_and_rejection_mask(
        old_log_prob=trainer, rollout_log_prob=sampler, response_mask=batch.mask.double(),
        rollout_is=correction.rollout_is, rollout_is_threshold=correction.rollout_is_threshold,
        rollout_rs=correction.rollout_rs,
    )  # fmt: skip
    expected = importance_weights(trainer[batch.mask], sampler[batch.mask], batch.lengths, config.objective)
    torch.testing.assert_close(data.batch["rollout_is_weights"][batch.mask], expected)
    assert (mask.bool() == batch.mask).all()


@pytest.mark.parametrize(("schedule", "updates"), [("constant", 4), ("cosine", 1)])
def test_learning_rates_are_those_of_a_run(schedule, updates, compose):
    """verl steps its schedule once per training step."""
    functional = importlib.import_module("verl.utils.torch_functional")
    config = small({"optim": {"schedule": schedule, "updates": updates, "lr": 0.5}, "steps": 7})
    optim = dataclass_of(compose(config).actor_rollout_ref.actor).optim
    optimizer = importlib.import_module("verl.workers.config.optimizer").build_optimizer(
        [torch.nn.Parameter(torch.zeros(1))], optim
    )
    assert (optimizer.defaults["eps"], optimizer.defaults["betas"]) == (config.optim.eps, config.optim.betas)
    arguments = {"num_warmup_steps": max(optim.lr_warmup_steps, 0)}
    if schedule == "cosine":
        arguments |= {"min_lr_ratio": optim.min_lr_ratio, "num_cycles": optim.num_cycles}
        arguments["num_training_steps"] = 7
    scheduler = getattr(functional, f"get_{schedule}_schedule_with_warmup")(optimizer, **arguments)
    for step in range(7):
        for update in range(updates):
            expected = 0.5 * lr_factor(step * updates + update, 7 * updates, config.optim)
            assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)
        optimizer.step()
        scheduler.step()


def test_the_run_that_verls_logger_writes_is_imported(verl_package, tmp_path, monkeypatch):
    """verl's own class writes to MLflow: its names of the run, the experiment and the metrics."""
    pytest.importorskip("sqlalchemy")
    tracking = importlib.import_module("verl.utils.tracking")
    config = small({"steps": 2})
    export_verl(config, tmp_path / "job", gpus_per_node=1)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/job/mlflow.db")
    logger = tracking.Tracking(config.tracking.experiment, "job", "mlflow", config={"trainer": {"nnodes": 1}})
    logger.log({"val-core/countdown/acc/mean@16": 0.25, "val-aux/countdown/acc/std@16": 0.1}, step=0)
    for step in (1, 2):
        values = {"critic/score/mean": 0.5, "actor/pg_clipfrac": np.float64(0.125), "actor/lr": 1e-6}
        logger.log(values, step=step)
    logger.finish(exit_code=0)
    imported, _ = import_verl(tmp_path / "job", runs_dir=tmp_path / "runs")
    assert (imported.status, imported.step) == ("FINISHED", 2)
    lines = [json.loads(line) for line in (imported.path / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert lines[0] == {"step": 0, "eval/countdown/mean_at_16": 0.25}
    assert lines[2] == {"step": 2, "train/reward": 0.5, "clip/active_fraction": 0.125, "optim/lr": 1e-6}
