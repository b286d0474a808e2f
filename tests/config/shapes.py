"""Shapes of models on the hub, from which memory is estimated without their weights, and GPUs that are not there."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bandpo_cli.config.layers import Layer, resolve
from bandpo_cli.config.run import RunConfig

_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "vocab_size", "tie_word_embeddings")  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    model: {
        "model_type": "llama" if "Llama" in model else "qwen3" if "Qwen3" in model else "qwen2",
        **dict(zip(_KEYS, shape, strict=True)),
    }
    for model, shape in {
        "Qwen/Qwen2.5-0.5B-Instruct": (896, 4864, 24, 14, 2, 151936, True),
        "Qwen/Qwen2.5-1.5B-Instruct": (1536, 8960, 28, 12, 2, 151936, True),
        "Qwen/Qwen2.5-3B-Instruct": (2048, 11008, 36, 16, 2, 151936, True),
        "Qwen/Qwen2.5-7B-Instruct": (3584, 18944, 28, 28, 4, 152064, False),
        # Its heads have 128 dimensions, the default of transformers.
        "Qwen/Qwen3-1.7B-Base": (2048, 6144, 28, 16, 8, 151936, True),
        "Qwen/Qwen3-4B-Base": (2560, 9728, 36, 32, 8, 151936, True),
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (1536, 8960, 28, 12, 2, 151936, False),
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": (3584, 18944, 28, 28, 4, 152064, False),
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": (4096, 14336, 32, 32, 8, 128256, False),
    }.items()
}
"""The shapes in the config.json of each model on the hub."""


def config_on_disk(tmp_path: Path, model: str, *layers: Layer) -> RunConfig:
    """Return the settings with a folder that has the model's config.json in place of its hub id."""
    (tmp_path / "config.json").write_text(json.dumps({**SHAPES[model], "max_position_embeddings": 32768}))
    return resolve([*layers, {"model": {"path": str(tmp_path)}}])


def use_gpus(monkeypatch: pytest.MonkeyPatch, gpus: Sequence[tuple[int, int]]) -> None:
    """Give this machine GPUs with these total and free bytes; the code on them computes on the CPU."""
    import torch

    def free_and_total(card: int) -> tuple[int, int]:
        if card >= len(gpus):
            raise AssertionError("Invalid device id")
        return gpus[card][::-1]

    def properties(card: int) -> SimpleNamespace:
        return SimpleNamespace(name=f"GPU {card}", total_memory=gpus[card][0])

    for module in ("experiments.memory_check", "experiments.run", "models.load", "sampling.rollouts"):
        monkeypatch.setattr(f"bandpo_cli.{module}.is_gpu", lambda device: device != "cpu")
    monkeypatch.setattr(torch.cuda, "mem_get_info", free_and_total)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
