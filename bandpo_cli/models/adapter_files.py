"""Adapter folders in the format of peft: their base model, and its weights with the adapter.

An adapter folder has `adapter_config.json` and `adapter_model.safetensors`. It may come from an untrusted source, so
it is read without peft: as JSON, and as a safetensors file. LoRA on linear layers is supported; other kinds of adapters
and variants of LoRA are refused.
"""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from bandpo_cli.config.run import EMBEDDED_MODEL, ModelConfig
from bandpo_cli.errors import UserError, first_line
from bandpo_cli.models.lora import ADAPTER_PREFIX, ADAPTER_WEIGHTS, merged_weight
from bandpo_cli.paths import ADAPTER_CONFIG, check_regular_file, is_adapter_folder, path_exists, user_path
from bandpo_cli.storage.files import read_json_object

_ENDS = (".lora_A.weight", ".lora_B.weight")
# The end of the path of the shipped model, which another installation has elsewhere.
_EMBEDDED_PARTS = ("bandpo_cli", "models", "embedded")
# Settings with the values that are supported.
_EXPECTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    # With these, training leaves the weights of the base as they are.
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva"),
    "alpha_pattern": (None, {}),
}
# Settings that are used here, that matter to training only, or that the tensors show.
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_config", "megatron_core",
    "parent_library", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config",
    "target_modules", "task_type", "use_rslora",
}  # fmt: skip


def base_config(config: ModelConfig) -> tuple[ModelConfig, Path | None]:
    """Return the settings of the base model if `model.path` is the folder of an adapter, and that folder.

    Other settings are returned unchanged, with None.

    Raises:
        UserError: the adapter cannot be used, or there is no such base model.
    """
    adapter = user_path(config.path)
    if config.path == EMBEDDED_MODEL or not is_adapter_folder(adapter):
        return config, None
    stated = _read_config(adapter)
    path = stated["base_model_name_or_path"]
    folder = user_path(path)
    if not path_exists(folder):
        if folder.parts[-3:] == _EMBEDDED_PARTS:
            path = EMBEDDED_MODEL
        elif folder.is_absolute():
            advice = f"set base_model_name_or_path in {ADAPTER_CONFIG} to its folder or hub id"
            raise UserError(f"{adapter}: its base model {path} does not exist here; {advice}")
    return config.model_copy(update={"path": path, "revision": stated.get("revision")}), adapter


def _read_config(adapter: Path) -> dict[str, Any]:
    """Return adapter_config.json, if the adapter is the product of two matrices on linear layers; else UserError."""
    where = f"{adapter}: {ADAPTER_CONFIG}"
    stated = read_json_object(adapter / ADAPTER_CONFIG, where)
    base, revision, alpha = (stated.get(key) for key in ("base_model_name_or_path", "revision", "lora_alpha"))
    if not isinstance(base, str) or not base or not isinstance(revision, str | None):
        raise UserError(f"{where}: base_model_name_or_path names no model")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise UserError(f"{where}: lora_alpha = {alpha!r}: a number is expected")
    others = [key for key, supported in _EXPECTED.items() if stated.get(key) not in supported]
    known = _EXPECTED.keys() | _WITHOUT_EFFECT
    others += [key for key, value in stated.items() if value and key not in known]
    if others:
        what = f"{where}: {others[0]} = {stated.get(others[0])!s:.50}"
        raise UserError(f"{what}: not supported; merge the adapter with peft (merge_and_unload)")
    return stated


@torch.no_grad()
def merge_adapter(model: PreTrainedModel, adapter: Path) -> None:
    """Add the products of an adapter's matrices to the weights of the model, in place.

    peft would round the sums to the nearest number of 16 bits, which drops small changes. The weights are those that
    the sampler of a run gets (`models.lora.merged_weight`).

    Raises:
        UserError: the file is missing or damaged, a tensor is not finite, or they belong to another model.
    """
    config, file = _read_config(adapter), adapter / ADAPTER_WEIGHTS
    where = f"{adapter}: {ADAPTER_WEIGHTS}"
    if not path_exists(file):
        raise UserError(f"{adapter}: it has no {ADAPTER_WEIGHTS}; only safetensors files are read")
    check_regular_file(file, where)
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{where}: cannot be read: {first_line(error)}") from None
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise UserError(f"{where}: NaN or infinity, or no floating-point numbers, in {name}")
    weights = {name: weight for name, weight in model.named_parameters() if weight.ndim == 2}
    pairs = sorted({name.rpartition(".lora_")[0] for name in tensors if name.endswith(_ENDS)})
    for name in pairs:
        layer = name.removeprefix(ADAPTER_PREFIX)
        a, b = (tensors.pop(f"{name}{end}", torch.empty(0)) for end in _ENDS)
        weight = weights.get(f"{layer}.weight", torch.empty(0))
        rank = len(a)
        if not rank or a.shape[1:] != weight.shape[1:] or b.shape != (len(weight), rank):
            raise UserError(
                f"{where}: {name}: lora_A of shape {[*a.shape]} and lora_B of {[*b.shape]} do not match the weights of "
                f"the base model, {[*weight.shape]} ([0]: there is no such tensor)"
            )
        scaling = float(config["lora_alpha"]) / (math.sqrt(rank) if config.get("use_rslora") else rank)
        weight.copy_(merged_weight(f"{layer}.weight", weight, a, b, scaling))
    if tensors or not pairs:
        other = min(tensors, default="no tensor")
        raise UserError(f"{where}: {other}: only LoRA on linear layers is supported")
