"""Adapter folders in the format of peft: their base model, and its weights with the adapter.

An adapter folder has `adapter_config.json` and `adapter_model.safetensors`. It may come from an untrusted source, so
it is read without peft: as JSON, and as a safetensors file. LoRA on linear layers is supported; other kinds of adapters
and variants of LoRA are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from bandpo_cli.config.run import EMBEDDED_MODEL, ModelConfig
from bandpo_cli.errors import UserError, first_line
from bandpo_cli.models.lora import ADAPTER_PREFIX, ADAPTER_WEIGHTS, merged_weight
from bandpo_cli.paths import (
    ADAPTER_CONFIG,
    check_regular_file,
    is_adapter_folder,
    path_exists,
    read_text,
    user_path,
)

_EMBEDDED_PARTS = ("bandpo_cli", "models", "embedded")
"""The end of the path of the shipped model, which another installation has elsewhere."""
_USED = {"peft_type", "r", "lora_alpha", "use_rslora", "base_model_name_or_path", "revision"}
_WITHOUT_EFFECT = {
    "alpha_pattern", "auto_mapping", "bias", "ensure_weight_tying", "exclude_modules", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_config", "megatron_core",
    "parent_library", "peft_version", "qalora_group_size", "rank_pattern", "runtime_config", "target_modules",
    "task_type",
}  # fmt: skip
"""Settings that matter to training only, that the tensors show, or that `_check_plain` looks at."""
_PLAIN_INITIALISATIONS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` with which training leaves the weights of the base as they are."""


@dataclass(frozen=True)
class AdapterConfig:
    """The settings of adapter_config.json that are read.

    Attributes:
        base: folder or hub id of the base model.
        revision: its commit on the hub.
        alpha: numerator of the factor of B·A.
        by_root: the denominator of the factor is the square root of the rank, not the rank.
    """

    base: str
    revision: str | None
    alpha: float
    by_root: bool

    def scaling(self, rank: int) -> float:
        """Return the factor of B·A."""
        return self.alpha / (math.sqrt(rank) if self.by_root else rank)


def adapter_folder(config: ModelConfig) -> Path | None:
    """Return the folder of `model.path` if it holds an adapter for a model in place of a model, else None."""
    folder = user_path(config.path)
    return folder if config.path != EMBEDDED_MODEL and is_adapter_folder(folder) else None


def base_config(config: ModelConfig, adapter: Path) -> ModelConfig:
    """Return the settings of the base model of an adapter.

    Args:
        config: the settings, whose path is the adapter.
        adapter: the adapter's folder.

    Raises:
        UserError: the adapter cannot be used, or there is no such base model.
    """
    stated = read_adapter_config(adapter)
    path = stated.base
    folder = user_path(path)
    if not path_exists(folder):
        if folder.parts[-3:] == _EMBEDDED_PARTS:
            path = EMBEDDED_MODEL
        elif folder.is_absolute():
            raise UserError(
                f"{adapter}: its base model {path} does not exist here; set base_model_name_or_path in "
                f"{ADAPTER_CONFIG} to the folder or hub id of that model"
            )
    return config.model_copy(update={"path": path, "revision": stated.revision})


def read_adapter_config(adapter: Path) -> AdapterConfig:
    """Return the contents of adapter_config.json.

    Raises:
        UserError: it cannot be read, or the adapter is not LoRA on linear layers.
    """
    where = f"{adapter}: {ADAPTER_CONFIG}"
    try:
        stated = json.loads(read_text(adapter / ADAPTER_CONFIG, where))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not readable as JSON: {error}") from None
    if not isinstance(stated, dict):
        raise UserError(f"{where}: expected a JSON object")
    base, revision, alpha = (stated.get(key) for key in ("base_model_name_or_path", "revision", "lora_alpha"))
    if not isinstance(base, str) or not base or not isinstance(revision, str | None):
        raise UserError(f"{where}: base_model_name_or_path names no model")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise UserError(f"{where}: lora_alpha = {alpha!r}: a number is expected")
    _check_plain(stated, where)
    return AdapterConfig(base, revision, float(alpha), bool(stated.get("use_rslora")))


def _check_plain(stated: Mapping[str, Any], where: str) -> None:
    """Raise UserError for an adapter that is not the product of two matrices on linear layers."""
    differs = {
        "peft_type": stated.get("peft_type") != "LORA",
        "bias": stated.get("bias", "none") != "none",
        "init_lora_weights": stated.get("init_lora_weights") not in _PLAIN_INITIALISATIONS,
        "alpha_pattern": bool(stated.get("alpha_pattern")),
    }
    differs |= {key: bool(value) for key, value in stated.items() if key not in _USED | _WITHOUT_EFFECT}
    key = next((key for key, is_other in differs.items() if is_other), None)
    if key is not None:
        raise UserError(
            f"{where}: {key} = {stated.get(key)!s:.50}: not supported; merge the adapter with peft (merge_and_unload), "
            "and name the folder of the merged model"
        )


@torch.no_grad()
def merge_adapter(model: PreTrainedModel, adapter: Path) -> None:
    """Add the products of an adapter's matrices to the weights of the model, in place.

    Raises:
        UserError: the file is damaged or belongs to another model.
    """
    config = read_adapter_config(adapter)
    where = f"{adapter}: {ADAPTER_WEIGHTS}"
    tensors = read_adapter_weights(adapter)
    weights = {
        name.removesuffix(".weight"): parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2
    }
    pairs = {
        name.removesuffix(end)
        for name in tensors
        for end in (".lora_A.weight", ".lora_B.weight")
        if name.endswith(end)
    }
    for name in sorted(pairs):
        try:
            a, b = tensors.pop(f"{name}.lora_A.weight"), tensors.pop(f"{name}.lora_B.weight")
        except KeyError:
            raise UserError(f"{where}: {name} has no pair of lora_A.weight and lora_B.weight") from None
        layer = name.removeprefix(ADAPTER_PREFIX)
        weight = weights.get(layer)
        if weight is None:
            raise UserError(f"{where}: its base model has no layer {layer}")
        if (
            (b.shape[0], a.shape[-1]) != weight.shape
            or a.shape[0] != b.shape[-1]
            or a.ndim != 2
            or b.ndim != 2
        ):
            raise UserError(
                f"{where}: {name}: matrices of {[*b.shape]} and {[*a.shape]} for weights of {[*weight.shape]}"
            )
        weight.copy_(merged_weight(f"{layer}.weight", weight, a, b, config.scaling(len(a))))
    if tensors or not pairs:
        raise UserError(
            f"{where}: {min(tensors, default='no tensor')}: only LoRA on linear layers is supported"
        )


def read_adapter_weights(adapter: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter by name.

    Raises:
        UserError: the file is missing or damaged, or a tensor is not finite.
    """
    where = f"{adapter}: {ADAPTER_WEIGHTS}"
    if not path_exists(adapter / ADAPTER_WEIGHTS):
        raise UserError(
            f"{adapter}: it has no {ADAPTER_WEIGHTS}; weights are read from safetensors files only"
        )
    check_regular_file(adapter / ADAPTER_WEIGHTS, where)
    try:
        tensors = load_file(adapter / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{where}: cannot be read: {first_line(error)}") from None
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise UserError(f"{where}: NaN or infinity, or no floating-point numbers, in {name}")
    return tensors
