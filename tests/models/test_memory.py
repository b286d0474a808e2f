"""The memory estimate from shapes equals what a real model of that shape has and saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import LoraSettings, ModelConfig
from bandpo_cli.errors import UserError
from bandpo_cli.models.lora import add_adapters, save_adapter
from bandpo_cli.models.memory import (
    Device,
    NoEstimateError,
    activation_bytes,
    attention_elements,
    build_on_meta_device,
    estimate_memory,
)
from bandpo_cli.models.packing import Row, batch_rows, collate
from tests.conftest import random_model

TOKENS = 96
MACHINE = Device("this machine", 2**50, 2**50, on_gpu=False)
GPU = Device("a GPU", 2**50, 2**50)
HEADS, KEY_VALUE_HEADS, WIDTH = 4, 2, 8
"""Of `random_model`."""


@pytest.fixture(autouse=True)
def numel(tmp_path: Path) -> int:
    """Save a random model in `tmp_path` and return its number of parameters."""
    model = random_model()
    model.save_pretrained(tmp_path)
    return model.num_parameters()


def test_components_of_the_estimate_computed_by_hand(tmp_path: Path, numel: int) -> None:
    layer = {
        "model": {"path": str(tmp_path), "dtype": "bfloat16", "gradient_checkpointing": True},
        "sampling": {"prompts": 8, "samples": 4, "max_prompt_tokens": 30, "max_tokens": 20},
        "objective": {"reference_kl": 0.1},
    }
    estimate = estimate_memory(resolve([layer]), MACHINE)
    assert estimate.always == {
        "weights": 2 * numel,
        "AdamW": 8 * numel,
        "master weights": 4 * numel,
        "reference model": 2 * numel,
        "copy for a checkpoint": 14 * numel,
    }
    assert estimate.update["gradients"] == 4 * numel
    assert estimate.update["gradient of the output layer"] == 23 * 32 * 2
    # 4 updates of 8 completions. 2 tiles of 400 tokens and 23 words, smaller than the maximum of a tile; 3 times the
    # hidden states of width 32
    assert estimate.update["log-probs and their gradient"] == 8 * 50 * 4 * (2 * 23 + 3 * 32)
    cache = next(size for name, size in estimate.sampling.items() if "cache" in name)
    # sequences × tokens × (keys and values) × layers × key-value heads × head size × bytes
    assert cache == 32 * 50 * 2 * 2 * 2 * 8 * 2
    assert estimate.peak == sum(estimate.always.values()) + max(
        sum(estimate.update.values()), sum(estimate.sampling.values())
    )


def test_with_lora_only_the_adapters_have_gradients_and_optimizer_state(tmp_path: Path, numel: int) -> None:
    linear = [value for name, value in random_model().named_parameters() if "proj.weight" in name]
    adapters = sum(4 * sum(item.shape) for item in linear)
    assert len(linear) == 14
    layer = {
        "model": {"path": str(tmp_path), "dtype": "bfloat16", "lora": {"rank": 4}},
        "objective": {"reference_kl": 0.1},
    }
    estimate = estimate_memory(resolve([layer]), MACHINE)
    assert (estimate.parameters, estimate.trained) == (numel + adapters, adapters)
    assert estimate.always == {
        "weights": 2 * (numel + adapters),
        "AdamW": 8 * adapters,
        "master weights": 4 * adapters,
        "copy for a checkpoint": 14 * adapters,
    }
    assert estimate.update["gradients"] == 4 * adapters
    assert "gradient of the output layer" not in estimate.update
    full = estimate_memory(resolve([layer, {"model": {"lora": None}}]), MACHINE)
    assert full.trained == full.parameters == numel


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
    tmp_path: Path, numel: int, checkpoint: dict[str, Any], device: str, copied: bool
) -> None:
    """On a CPU, before the last of 100 steps: weights and two moments, 12 bytes per parameter of a float32 model."""
    config = resolve([{"model": {"path": str(tmp_path), "dtype": "float32"}, "checkpoint": checkpoint}])
    always = estimate_memory(config, MACHINE if device == "cpu" else GPU).always
    assert always.get("copy for a checkpoint") == (12 * numel if copied else None)


@pytest.mark.parametrize(
    ("prompts", "micro_batch_tokens", "ranks", "tokens"),
    [
        (8, 8, 1, 50),  # a row with one completion is never split, so a row of 30 + 20 tokens is one pass
        (8, 100, 1, 100),
        (2, 16384, 1, 200),  # all tokens of an update: 4 of 8 rows
        (2, 16384, 2, 100),  # shared by the ranks
    ],
)
def test_tokens_of_a_micro_batch(
    tmp_path: Path, prompts: int, micro_batch_tokens: int, ranks: int, tokens: int
) -> None:
    layer = {
        "model": {"path": str(tmp_path)},
        "sampling": {"prompts": prompts, "samples": 4, "max_prompt_tokens": 30, "max_tokens": 20},
        "optim": {"updates": 2, "micro_batch_tokens": micro_batch_tokens},
    }
    assert f"activations of {tokens} tokens" in estimate_memory(resolve([layer]), MACHINE, ranks=ranks).update


def saved_by_packed_rows(model: torch.nn.Module, rows: list[Row]) -> int:
    """Return the bytes of all distinct tensors that the layers save for packed rows, without the parameters."""
    saved: dict[int, torch.Tensor] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    batch = collate(rows, torch.device("cpu"))
    indices = {block.gather_index.data_ptr() for block in batch.packing.blocks}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model(  # type: ignore[operator]
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.input_ids.new_ones((1, 1, 1, 1), dtype=torch.bool),
            packing=batch.packing,
            use_cache=False,
        )
    return sum(
        tensor.untyped_storage().nbytes()
        for address, tensor in saved.items()
        if address not in parameters and address not in indices and tensor.is_floating_point()
    )


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("prompt", "completion", "samples"),
    [(300, 80, 4), (60, 16, 4), (60, 80, 1)],  # copies of the prompt, a mask, one sequence
    ids=["copies of the prompt", "mask", "one completion"],
)
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_estimated_activations_equal_those_of_packed_rows(
    tmp_path: Path, kind: str, lora: LoraSettings | None, prompt: int, completion: int, samples: int
) -> None:
    real = random_model(kind)
    real.save_pretrained(tmp_path)
    settings = ModelConfig(path=str(tmp_path), lora=lora)
    if lora is not None:
        add_adapters(real, lora, seed=0, base="")
    meta = build_on_meta_device(settings)
    assert all(parameter.is_meta for parameter in meta.parameters())
    assert meta.num_parameters() == real.num_parameters()
    tokens = prompt + samples * completion
    ids = [index % 20 for index in range(tokens)]
    row = Row(ids[:prompt], [ids[:completion]] * samples)
    if samples > 1 and tokens <= 512:
        attention = 4 * HEADS * tokens * WIDTH + tokens**2
    else:
        attention = 2 * (HEADS + KEY_VALUE_HEADS) * WIDTH * samples * (prompt + completion)
    estimated = activation_bytes(meta, tokens, settings, attention, on_gpu=True)
    assert estimated == pytest.approx(saved_by_packed_rows(real, [row]), rel=0.05)


@pytest.mark.parametrize("prompt", [64, 700, 3000])
@pytest.mark.parametrize("samples", [2, 16])
def test_attention_never_holds_more_than_the_estimate(tmp_path: Path, prompt: int, samples: int) -> None:
    """Groups whose completions all have one length, packed as for training, up to the longest of 600 tokens."""
    text = build_on_meta_device(ModelConfig(path=str(tmp_path))).config
    config = resolve([{"sampling": {"max_prompt_tokens": prompt, "max_tokens": 600, "samples": samples}}])
    estimate = attention_elements(config, text, 16384) / 16384
    measured = []
    for length in (*(2**i for i in range(10)), 600):
        (rows,) = batch_rows([Row(range(prompt), [range(length)] * samples)], 2**20)
        parts = [part for row in rows for part in batch_rows([row], 4096)]
        packings = [collate(part, torch.device("cpu")).packing for part in parts]
        tokens = sum(sum(map(sum, packing.rows)) for packing in packings)
        masked = [
            block.shape for packing in packings for block in packing.blocks if block.segments is not None
        ]
        plain = [block.shape for packing in packings for block in packing.blocks if block.segments is None]
        held = 4 * HEADS * WIDTH * sum(size * width for size, width in masked)
        held += sum(size * width**2 for size, width in masked)
        held += 2 * (HEADS + KEY_VALUE_HEADS) * WIDTH * sum(size * width for size, width in plain)
        measured.append(held / tokens)
    assert max(measured) <= 1.02 * estimate
    assert max(measured) >= 0.8 * estimate


def test_auto_is_gradient_checkpointing_where_the_model_supports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def activations(value: bool | str) -> int:
        settings = ModelConfig(path=str(tmp_path), gradient_checkpointing=value)  # type: ignore[arg-type]
        return activation_bytes(build_on_meta_device(settings), TOKENS, settings, 1000, on_gpu=True)

    monkeypatch.setattr("bandpo_cli.models.sharding.GradientCheckpointingLayer", ())  # no layer supports it
    assert activations("auto") == activations(False)
    with pytest.raises(UserError, match="do not support it; set it to false"):
        activations(True)
    monkeypatch.undo()
    assert activations("auto") == activations(True) < activations(False)


def test_a_model_whose_memory_does_not_follow_from_shapes_has_no_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ModelConfig(path=str(tmp_path))
    model = build_on_meta_device(settings)

    def look_at_values(*_: object, **__: object) -> None:
        torch.ones(2, device="meta").tolist()

    monkeypatch.setattr(model.base_model, "forward", look_at_values)
    with pytest.raises(NoEstimateError, match="the memory of qwen2 models does not follow from their shapes"):
        activation_bytes(model, TOKENS, settings, 1000, on_gpu=True)


def test_a_folder_with_an_adapter_has_the_memory_of_its_base(tmp_path: Path) -> None:
    """`bandpo eval` loads the checkpoints of a run with LoRA, and merges the adapters into the weights."""
    base, adapters = tmp_path / "base", tmp_path / "adapter"
    real = random_model()
    real.save_pretrained(base)
    numel = real.num_parameters()
    add_adapters(real, LoraSettings(rank=4), seed=0, base=str(base))
    adapters.mkdir()
    save_adapter(real, adapters)
    estimate = estimate_memory(resolve([{"model": {"path": str(adapters)}}]), MACHINE, training=False)
    assert estimate.always == {"weights": 4 * numel}
