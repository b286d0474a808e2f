"""The memory estimate from shapes equals what a real model of that shape has and saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import ModelConfig
from bandpo_cli.errors import UserError
from bandpo_cli.models.memory import activation_bytes, build_on_meta_device, estimate_memory
from tests.conftest import random_model

TOKENS = 96


def saved_for_backward(model: torch.nn.Module) -> int:
    """Return the bytes of all distinct tensors that a real forward pass saves, without the parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(input_ids=torch.zeros(1, TOKENS, dtype=torch.int64), use_cache=False)  # type: ignore[operator]
    return sum(
        tensor.untyped_storage().nbytes() for address, tensor in saved.items() if address not in parameters
    )


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_estimated_activations_equal_those_of_a_real_model(tmp_path: Path, kind: str) -> None:
    real = random_model(kind)
    real.save_pretrained(tmp_path)
    settings = ModelConfig(path=str(tmp_path))
    meta = build_on_meta_device(settings)
    assert sum(p.numel() for p in meta.parameters()) == sum(p.numel() for p in real.parameters())
    assert all(parameter.is_meta for parameter in meta.parameters())
    assert activation_bytes(meta, TOKENS, settings) == pytest.approx(saved_for_backward(real), rel=0.05)


def test_components_of_the_estimate_computed_by_hand(tmp_path: Path) -> None:
    real = random_model()
    real.save_pretrained(tmp_path)
    numel = sum(parameter.numel() for parameter in real.parameters())
    config = resolve(
        [
            {
                "model": {"path": str(tmp_path), "dtype": "bfloat16", "gradient_checkpointing": True},
                "sampling": {"prompts": 8, "samples": 4, "max_prompt_tokens": 30, "max_tokens": 20},
                "objective": {"reference_kl": 0.1},
            }
        ]
    )
    estimate = estimate_memory(config, trainer_samples=True)
    assert estimate.always == {
        "weights": 2 * numel,
        "gradients": 4 * numel,
        "AdamW": 8 * numel,
        "master weights": 4 * numel,
        "reference model": 2 * numel,
        "copy for a checkpoint": 14 * numel,
    }
    cache = next(size for name, size in estimate.sampling.items() if "cache" in name)
    # sequences × tokens × (keys and values) × layers × key-value heads × head size × bytes
    assert cache == 32 * 50 * 2 * 2 * 2 * 8 * 2
    without = estimate_memory(config, trainer_samples=False)
    assert without.sampling == {}
    assert without.peak == sum(without.always.values()) + sum(without.update.values())


@pytest.mark.parametrize(
    ("checkpoint", "device", "copied"),
    [
        ({}, "cpu", True),
        ({"background": False}, "cpu", False),
        ({"every": 0}, "cpu", False),
        ({"every": 100}, "cpu", False),
        ({}, "cuda", False),
    ],
)
def test_the_copy_for_a_checkpoint_is_estimated_where_one_is_taken(
    tmp_path: Path, checkpoint: dict[str, Any], device: str, copied: bool
) -> None:
    """On a CPU, before the last of 100 steps: weights and two moments, 12 bytes per parameter of a float32 model."""
    real = random_model()
    real.save_pretrained(tmp_path)
    config = resolve([{"model": {"path": str(tmp_path), "dtype": "float32"}, "checkpoint": checkpoint}])
    always = estimate_memory(config, trainer_samples=True, device=device).always
    numel = sum(parameter.numel() for parameter in real.parameters())
    assert always.get("copy for a checkpoint") == (12 * numel if copied else None)


def test_gradient_checkpointing_saves_fewer_activations(tmp_path: Path) -> None:
    random_model().save_pretrained(tmp_path)
    meta = build_on_meta_device(ModelConfig(path=str(tmp_path)))
    plain, checkpointed = (
        activation_bytes(meta, TOKENS, ModelConfig(path=str(tmp_path), gradient_checkpointing=on))
        for on in (False, True)
    )
    assert checkpointed < 0.7 * plain  # 2 layers: all activations of one, and the inputs of both


def test_model_without_a_valid_config_raises_user_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="its config cannot be read"):
        build_on_meta_device(ModelConfig(path=str(tmp_path)))


def test_completion_longer_than_a_micro_batch_counts_in_full(tmp_path: Path) -> None:
    """A row with one completion is never split, so a row of 30 + 20 tokens is a forward pass of 50."""
    random_model().save_pretrained(tmp_path)

    def update_bytes(micro_batch_tokens: int) -> int:
        layer = {
            "model": {"path": str(tmp_path)},
            "sampling": {"max_prompt_tokens": 30, "max_tokens": 20},
            "optim": {"micro_batch_tokens": micro_batch_tokens},
        }
        return sum(estimate_memory(resolve([layer]), trainer_samples=True).update.values())

    assert update_bytes(8) == update_bytes(50) < update_bytes(100)
