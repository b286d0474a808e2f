"""The memory estimate from shapes equals what a real model of that shape has and saves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import LoraSettings, ModelConfig
from bandpo_cli.errors import UserError
from bandpo_cli.models.logprobs import TILE_BYTES
from bandpo_cli.models.lora import add_adapters
from bandpo_cli.models.memory import (
    AttendedTokens,
    activation_bytes,
    attended_tokens,
    build_on_meta_device,
    estimate_memory,
)
from bandpo_cli.models.packing import Row, collate
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
        "AdamW": 8 * numel,
        "master weights": 4 * numel,
        "reference model": 2 * numel,
        "copy for a checkpoint": 14 * numel,
    }
    assert estimate.update["gradients"] == 4 * numel
    assert estimate.update["gradient of the output layer"] == 23 * 32 * 2
    # 2 tiles of 16,384 tokens and 23 words, smaller than the maximum of a tile; 3 times the hidden states of width 32
    assert estimate.update["log-probs and their gradient"] == 16384 * 4 * (2 * 23 + 3 * 32)
    cache = next(size for name, size in estimate.sampling.items() if "cache" in name)
    # sequences × tokens × (keys and values) × layers × key-value heads × head size × bytes
    assert cache == 32 * 50 * 2 * 2 * 2 * 8 * 2
    without = estimate_memory(config, trainer_samples=False)
    assert without.sampling == {}
    assert without.peak == sum(without.always.values()) + sum(without.update.values())


def test_with_lora_only_the_adapters_have_gradients_and_optimizer_state(tmp_path: Path) -> None:
    real = random_model()  # 2 layers, 32 wide, 2 heads of 8 for keys and values
    real.save_pretrained(tmp_path)
    numel = sum(parameter.numel() for parameter in real.parameters())
    linear = [each for name, each in real.named_parameters() if "proj.weight" in name]
    adapters = sum(4 * sum(each.shape) for each in linear)
    assert len(linear) == 14
    layer = {
        "model": {"path": str(tmp_path), "dtype": "bfloat16", "lora": {"rank": 4}},
        "objective": {"reference_kl": 0.1},
    }
    config = resolve([layer])
    estimate = estimate_memory(config, trainer_samples=True)
    assert (estimate.parameters, estimate.trained) == (numel + adapters, adapters)
    assert estimate.always == {
        "weights": 2 * (numel + adapters),
        "AdamW": 8 * adapters,
        "master weights": 4 * adapters,
        "copy for a checkpoint": 14 * adapters,
    }
    assert estimate.update["gradients"] == 4 * adapters
    assert "gradient of the output layer" not in estimate.update
    full = estimate_memory(resolve([layer, {"model": {"lora": None}}]), trainer_samples=True)
    assert full.trained == full.parameters == numel


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_estimated_activations_with_lora_equal_those_of_a_real_model(tmp_path: Path, kind: str) -> None:
    real, lora = random_model(kind), LoraSettings(rank=4)
    real.save_pretrained(tmp_path)
    settings = ModelConfig(path=str(tmp_path), lora=lora)
    add_adapters(real, lora, seed=0, base="")
    meta = build_on_meta_device(settings)
    assert all(parameter.is_meta for parameter in meta.parameters())
    assert activation_bytes(meta, TOKENS, settings) == pytest.approx(saved_for_backward(real), rel=0.05)


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


def saved_by_packed_rows(model: torch.nn.Module, rows: list[Row]) -> int:
    """Return the bytes of all distinct tensors that the layers save for packed rows, without the parameters."""
    saved: dict[int, torch.Tensor] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    batch = collate(rows, torch.device("cpu"))
    indices = {each.gather_index.data_ptr() for each in batch.packing.blocks}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    def stop(*_: object) -> None:
        raise StopIteration

    handle = model.lm_head.register_forward_pre_hook(stop)  # type: ignore[operator, union-attr]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(  # type: ignore[operator]
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.input_ids.new_ones((1, 1, 1, 1), dtype=torch.bool),
            packing=batch.packing,
            use_cache=False,
        )
    handle.remove()
    return sum(
        tensor.untyped_storage().nbytes()
        for address, tensor in saved.items()
        if address not in parameters and address not in indices and tensor.is_floating_point()
    )


@pytest.mark.parametrize(
    ("prompt", "completion", "attended"),
    [
        # 620 tokens are too many for a mask: four sequences of 300 + 80
        (300, 80, AttendedTokens(masked=0, plain=1520, mask=0)),
        # 124 tokens have a mask
        (60, 16, AttendedTokens(masked=124, plain=0, mask=124**2)),
    ],
    ids=["copies of the prompt", "mask"],
)
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_estimated_activations_equal_those_of_packed_rows(
    tmp_path: Path, kind: str, prompt: int, completion: int, attended: AttendedTokens
) -> None:
    real = random_model(kind)
    real.save_pretrained(tmp_path)
    settings = ModelConfig(path=str(tmp_path))
    tokens = prompt + 4 * completion
    ids = [index % 20 for index in range(tokens)]
    row = Row(ids[:prompt], [ids[:completion]] * 4)
    estimated = activation_bytes(build_on_meta_device(settings), tokens, settings, attended)
    assert estimated == pytest.approx(saved_by_packed_rows(real, [row]), rel=0.05)


def text_config(tmp_path: Path) -> Any:
    random_model().save_pretrained(tmp_path)
    return build_on_meta_device(ModelConfig(path=str(tmp_path))).config


@pytest.mark.parametrize(
    ("prompt", "longest", "samples", "expected"),
    [
        # A row of 1,028 tokens becomes four sequences of 1,025.
        (1024, 1, 4, (0, 1025 * 4 / 1028, 0)),
        # A row of 64 + 16 × 8 tokens has a mask.
        (64, 8, 16, (1, 0, 192)),
        # Only completions of up to 48 tokens share a row of at most 4,096, the most copies per token with 1 token each.
        (4000, 4000, 2, (0, 4001 * 2 / 4002, 0)),
    ],
)
def test_prompts_are_copied_as_packing_copies_them(
    tmp_path: Path, prompt: int, longest: int, samples: int, expected: tuple[float, float, float]
) -> None:
    config = resolve([{"sampling": {"max_prompt_tokens": prompt, "max_tokens": longest, "samples": samples}}])
    found = attended_tokens(config, text_config(tmp_path), 16384)
    assert found == tuple(math.ceil(16384 * share) for share in expected)


def test_a_large_vocabulary_takes_complete_tiles(tmp_path: Path) -> None:
    random_model().save_pretrained(tmp_path)
    config = resolve([{"model": {"path": str(tmp_path)}, "optim": {"micro_batch_tokens": 2**20}}])
    update = estimate_memory(config, trainer_samples=True).update
    assert update["log-probs and their gradient"] == 2 * TILE_BYTES["cpu"] + 3 * 2**20 * 32 * 4
