"""Training with LoRA: the base stays as it is, and checkpoints hold the adapters."""

import peft
import pytest
import torch

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import LoraSettings, ModelConfig
from bandpo_cli.models.load import load_policy
from bandpo_cli.models.logprobs import token_logprobs
from bandpo_cli.models.lora import adapter_parameters, add_adapters
from bandpo_cli.models.packing import Row, collate
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tasks.task import build_task
from bandpo_cli.training.build import build_components
from bandpo_cli.training.loop import train
from bandpo_cli.training.performance import PackedWork
from tests.conftest import random_model
from tests.training.recording import SETTINGS


@pytest.mark.slow
def test_a_run_trains_the_adapters_alone(tmp_path, small_model):
    layer = {
        "steps": 2,
        "model": {"path": str(small_model), "lora": {"rank": 4}},
        "objective": {"reference_kl": 0.01},
        "optim": {"lr": 1e-2, "warmup_steps": 0, "schedule": "constant"},
    }
    config = resolve([SETTINGS, layer])
    base = load_policy(ModelConfig(path=str(small_model), device="cpu")).model
    components = build_components(config, build_task(config.task))
    try:
        policy = components.policy.model
        start = {name: value.detach().clone() for name, value in policy.named_parameters()}
        lines = [report.record for report in train(config, components, RunFolder.create(tmp_path, "run"))]
    finally:
        components.close()
    moved = {name for name, value in policy.named_parameters() if not torch.equal(value, start[name])}
    assert moved == {name for name, _ in policy.named_parameters() if "lora_" in name}
    assert components.reference.model is policy
    # In the first step the policy is its reference up to the second update; later it moves away.
    assert lines[2]["kl/ref"] > lines[1]["kl/ref"] >= 0.0
    assert all(line["sampler/logprob_gap_max"] < 1e-5 for line in lines[1:])

    checkpoint = tmp_path / "run" / "checkpoints" / "step-000002"
    files = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    assert files >= {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "trainer/state.json",
    }
    assert not any(name in files for name in ("config.json", "model.safetensors"))
    loaded = peft.PeftModel.from_pretrained(base, checkpoint)
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, policy(input_ids=ids).logits)
        with loaded.disable_adapter():
            assert not torch.equal(loaded(input_ids=ids).logits, policy(input_ids=ids).logits)


def test_the_flops_of_frozen_weights_have_no_gradient():
    """Forward: 2 per weight and token. Backward: 4 of those that are trained, 2 of the others, and attention twice."""
    model = (
        random_model()
    )  # 2 layers, 32 wide, 4 heads of 8 and 2 of keys and values, tied output layer of 23 words
    plain = sum(
        value.numel() for name, value in model.named_parameters() if "layers" in name and value.ndim == 2
    )
    add_adapters(model, LoraSettings(rank=3), seed=0, base="")
    adapters = sum(adapter_parameter.numel() for _, adapter_parameter in adapter_parameters(model))
    with PackedWork(model).counted() as work:
        token_logprobs(model, collate([Row([1, 2, 3], [[4, 5]])], torch.device("cpu")))
        with_gradient = work.flops
        work.flops = 0.0
        with torch.no_grad():
            token_logprobs(model, collate([Row([1, 2, 3], [[4, 5]])], torch.device("cpu")))
    tokens, predicted, pairs = 5, 2, 15  # pairs of a token with itself and those before it
    attention = 4 * 2 * 32 * pairs
    assert work.flops == 2 * (plain + adapters) * tokens + 2 * 23 * 32 * predicted + attention
    backward = (2 * plain + 4 * adapters) * tokens + 2 * 23 * 32 * predicted + 2 * attention
    assert with_gradient == work.flops + backward
