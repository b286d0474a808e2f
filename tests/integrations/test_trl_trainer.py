"""The Band in TRL's GRPOTrainer, with the installed TRL: training steps of the bundled model on countdown."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bandpo_cli.bounds import RatioBounds
from bandpo_cli.config.run import RunConfig
from bandpo_cli.grading.countdown import grade_countdown
from bandpo_cli.models.load import embedded_model_path
from bandpo_cli.objective import advantages as estimators
from bandpo_cli.objective.advantages import STD_EPS, batch_advantages, rloo_advantages
from bandpo_cli.tasks.task import build_task
from tests.integrations import batches
from tests.integrations.batches import SPREADS, Batch, assert_equal, ours, random_batch, trl_config

pytestmark = pytest.mark.usefixtures("one_thread")

UPDATES_PER_BATCH = {"steps_per_generation": 2, "num_iterations": 2}
"""A batch of completions is used for 4 optimizer steps, of half of its completions each."""


@dataclass
class Run:
    """A finished run: its trainer, and all weights in one tensor."""

    trainer: Any
    weights: torch.Tensor

    def logged(self, name: str) -> list[float]:
        """Return a metric per optimizer step."""
        return [record[name] for record in self.trainer.state.log_history if name in record]


def train(trainer: type, config: type, folder: Path, steps: int, **settings: Any) -> Run:
    """Train the bundled model on countdown from one seed; `settings` may have `peft_config` and `more_rewards`."""
    from datasets import Dataset

    problems = {problem.prompt: problem for problem in build_task(RunConfig().task).train_problems()[:32]}

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [grade_countdown(problems[p], c).reward for p, c in zip(prompts, completions, strict=True)]

    common = {
        "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False, "gradient_checkpointing": False,
        "seed": 3, "max_steps": steps, "logging_steps": 1, "per_device_train_batch_size": 32, "num_generations": 8,
        "gradient_accumulation_steps": 1, "max_completion_length": 8, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
        "learning_rate": 1e-3, "lr_scheduler_type": "constant",
    }  # fmt: skip
    run = trainer(
        model=str(embedded_model_path()),
        peft_config=settings.pop("peft_config", None),
        reward_funcs=[reward, *settings.pop("more_rewards", [])],
        args=trl_config(config, folder, **common | UPDATES_PER_BATCH | settings),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in problems]),
    )
    run.train()
    return Run(run, torch.cat([weight.detach().reshape(-1) for weight in run.model.parameters()]))


def test_constant_bounds_repeat_a_run_of_trl_bit_for_bit(band, tmp_path, monkeypatch):
    from trl import GRPOConfig, GRPOTrainer

    theirs = train(GRPOTrainer, GRPOConfig, tmp_path, steps=4, epsilon=0.2)

    def constant(old_logprobs: torch.Tensor, *_: object) -> RatioBounds:
        return RatioBounds(torch.full_like(old_logprobs, 0.8), torch.full_like(old_logprobs, 1.2))

    monkeypatch.setattr(band, "logprob_bounds", constant)
    ours = train(band.BandGRPOTrainer, band.BandGRPOConfig, tmp_path, steps=4)
    assert torch.equal(ours.weights, theirs.weights)
    for name in ("loss", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "reward"):
        assert ours.logged(name) == theirs.logged(name)
    assert max(theirs.logged("clip_ratio/region_mean")) > 0


def test_clip_metrics_are_those_of_a_count_by_hand(band, tmp_path):
    seen = []

    class Recorder(band.BandGRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args: Any, **named: Any) -> Any:
            found = super()._get_per_token_logps_and_entropies(*args, **named)
            self.logprobs = found[0].detach()
            return found

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
            loss = super()._compute_loss(model, inputs)
            tensors = (inputs["old_per_token_logps"], self.logprobs, inputs["completion_mask"])
            advantages = inputs["advantages"][:, None].expand_as(self.logprobs)
            seen.append(tuple(tensor.double().numpy() for tensor in (*tensors, advantages)))
            return loss

    settings = {"band_divergence": "kl", "band_delta": 0.02, "band_max_ratio": 3.0}
    run = train(Recorder, band.BandGRPOConfig, tmp_path, steps=4, **settings)
    assert len(seen) == 4
    for step, (old, new, mask, advantages) in enumerate(seen):
        p, ratio = np.exp(old), np.exp(new - old)
        above = (ratio > 1) & ((ratio >= 3.0) | (kl_of_token(p, ratio) > 0.02))
        below = (ratio < 1) & (kl_of_token(p, ratio) > 0.02)
        high, low = above & (advantages > 0) & (mask == 1), below & (advantages < 0) & (mask == 1)
        shares = {"high": high, "low": low, "region": high | low}
        expected = {f"{name}_mean": share.sum() / mask.sum() for name, share in shares.items()}
        expected["low_min"] = (low.sum(1) / mask.sum(1)).min()
        expected["high_max"] = (high.sum(1) / mask.sum(1)).max()
        logged = {name: run.logged(f"clip_ratio/{name}")[step] for name in expected}
        assert logged == pytest.approx(expected, rel=1e-6)
    assert run.logged("clip_ratio/region_mean")[0] == 0.0  # the first update: π = π_old
    assert max(run.logged("clip_ratio/high_mean")) > 0
    assert max(run.logged("clip_ratio/low_mean")) > 0


def kl_of_token(p: np.ndarray, ratio: np.ndarray) -> np.ndarray:
    """Return KL of the two-point distributions (p, 1−p) and (r·p, 1−r·p), from its definition."""
    q = ratio * p
    with np.errstate(divide="ignore", invalid="ignore"):
        return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


def test_a_lora_adapter_is_trained(band, tmp_path):
    """Three optimizer steps change the adapter and leave the model's own weights as they are."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    settings = {"peft_config": lora, "learning_rate": 5e-2}
    run = train(band.BandGRPOTrainer, band.BandGRPOConfig, tmp_path, steps=3, **settings)
    from transformers import AutoModelForCausalLM

    named = dict(run.trainer.model.named_parameters())
    assert any("lora_B" in name and weight.abs().max() > 0 for name, weight in named.items())
    shipped = dict(AutoModelForCausalLM.from_pretrained(embedded_model_path()).named_parameters())
    base = {name.replace(".base_layer", ""): weight for name, weight in named.items()}
    assert all(torch.equal(base[f"base_model.model.{name}"], weight) for name, weight in shipped.items())
    assert max(run.logged("clip_ratio/region_mean")) > 0


ACCUMULATION, MAX_TOKENS = 2, 64
"""`gradient_accumulation_steps` and `max_completion_length`."""


def token_weights(loss_type: str, batch: Batch) -> torch.Tensor:
    """Return the weight of each token in the loss, [B, T]: TRL's documentation of `loss_type`, accumulated twice.

    dapo divides by the tokens of the generation batch, which is one accumulation window here.
    """
    lengths, completions = batch.lengths[:, None], len(batch.mask)
    weights = {
        "grpo": 1.0 / (lengths * completions * ACCUMULATION),
        "bnpo": 1.0 / (batch.mask.sum() * ACCUMULATION),
        "dr_grpo": torch.tensor(1.0 / (completions * MAX_TOKENS * ACCUMULATION)),
        "dapo": 1.0 / batch.mask.sum(),
        "luspo": torch.tensor(1.0 / (completions * ACCUMULATION)),
    }[loss_type]
    return weights.double().expand(batch.mask.shape)


@pytest.mark.parametrize(
    ("case", "loss_type"),
    [
        *(("kl", loss_type) for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")),
        *((case, "dapo") for case in ("tv without a cap", "delta of TRL", "importance ratios of vLLM")),
    ],
)
def test_loss_and_gradient_are_those_of_the_runner(band, tmp_path, case, loss_type):
    bounds = {"divergence": "kl", "delta": 0.05, "max_ratio": 10.0}
    if case == "tv without a cap":
        bounds = {"divergence": "tv", "delta": 0.1, "max_ratio": None}
    theirs = {f"band_{name}": value for name, value in bounds.items()} | {"loss_type": loss_type}
    dual_clip = 12.0 if case == "delta of TRL" else None
    batch = random_batch(1, SPREADS["far"])
    generator = torch.Generator().manual_seed(0)
    sampler = torch.rand(batch.mask.shape, generator=generator, dtype=torch.float64) + 0.5
    weights = sampler if case == "importance ratios of vLLM" else None
    logprobs = batch.new.clone().requires_grad_()
    theirs |= {"max_completion_length": MAX_TOKENS, "gradient_accumulation_steps": ACCUMULATION}
    args = trl_config(band.BandGRPOConfig, tmp_path, num_iterations=2, delta=dual_clip, **theirs)
    trainer = batches.trl_trainer(band.BandGRPOTrainer, args, logprobs, weights is not None)
    loss = trainer._compute_loss(None, batches.trl_inputs(batch) | {"importance_sampling_ratio": weights})
    assert (trainer.epsilon_low, trainer.epsilon_high) == (0.2, 0.2)
    (gradient,) = torch.autograd.grad(loss, logprobs)

    bounds["method"] = "band"
    expected = ours(batch, bounds, token_weights(loss_type, batch), dual_clip, correction=weights).outputs
    assert_equal(f"TRL {case}, {loss_type}", expected, loss, gradient, batch.mask)
    assert (expected.gradient_weights[batch.advantages[batch.mask] != 0] == 0).any()


def test_the_example_differs_in_the_bounds_alone(band, capsys):
    """Both runs sample the same first batch; a narrow Band then clips more of its tokens than TRL's interval."""
    from examples import trl_band

    (with_band,) = trl_band.train(1, {"band_divergence": "kl", "band_delta": 0.001})
    (without,) = trl_band.train(1, None)
    assert with_band["reward"] == without["reward"] > 0
    assert with_band["clip_ratio/low_mean"] > without["clip_ratio/low_mean"] > 0
    assert capsys.readouterr().out.count("batch 1  reward") == 2


def test_estimators_equal_those_of_trl(tmp_path):
    """`batch` is GRPOTrainer's `scale_rewards="batch"`, which adds 1e-4 to the deviation; `rloo` is RLOOTrainer's."""
    trl = pytest.importorskip("trl")
    for estimator, trainer, config, settings in (
        (batch_advantages, trl.GRPOTrainer, trl.GRPOConfig, {"scale_rewards": "batch"}),
        (rloo_advantages, trl.RLOOTrainer, trl.RLOOConfig, {"beta": 0.0}),
    ):
        logs = train(trainer, config, tmp_path, steps=1, **settings).trainer._logs
        columns = (*logs["rewards"].values(), logs["advantages"])
        rewards, theirs = (torch.tensor(column).double().reshape(-1, 8) for column in columns)
        assert 0 < rewards.mean() < 1
        found = estimator(rewards, torch.ones_like(rewards, dtype=torch.bool))
        if estimator is batch_advantages:
            found *= (rewards.std() + STD_EPS) / (rewards.std() + 1e-4)
        torch.testing.assert_close(found, theirs, rtol=0, atol=1e-6)


def test_gdpo_equals_that_of_trl(tmp_path, monkeypatch):
    """With a weight, a constant reward, and one that does not apply to some completions; TRL adds 1e-4."""
    trl = pytest.importorskip("trl")
    monkeypatch.setattr(estimators, "STD_EPS", 1e-4)

    def brief(completions: list[str], **_: Any) -> list[float | None]:
        return [None if "+" in text else -1.0 * len(text) for text in completions]

    def constant(completions: list[str], **_: Any) -> list[float]:
        return [0.1] * len(completions)

    weights = [1.0, 0.3, 2.0]
    settings = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": weights}
    run = train(trl.GRPOTrainer, trl.GRPOConfig, tmp_path, 1, more_rewards=[brief, constant], **settings)
    columns = (*run.trainer._logs["rewards"].values(), run.trainer._logs["advantages"])
    *values, theirs = (torch.tensor([*column], dtype=torch.float64).reshape(-1, 8) for column in columns)
    assert values[1].isnan().any()
    rewards = values[0]
    found = estimators.gdpo_advantages(rewards, ~rewards.isnan(), [*zip(weights, values, strict=True)])
    assert theirs.std() > 0.9
    torch.testing.assert_close(found, theirs, rtol=0, atol=1e-5)
