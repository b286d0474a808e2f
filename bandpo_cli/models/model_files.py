"""Files of a model folder or an adapter folder, which may come from an untrusted source: checks, and merged adapters.

Weights are read only from safetensors, since a pickle (`pytorch_model.bin`) can run code when it is read. A config that
declares more parameters than its weights hold is refused before anything of that size is allocated. Errors of the
loaders become one-line `UserError`s.

An adapter folder in the format of peft has `adapter_config.json` and `adapter_model.safetensors`, and is read without
peft. LoRA on linear layers is supported; other kinds of adapters and variants of LoRA are refused.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import PreTrainedModel

from bandpo_cli.config.run import ModelConfig
from bandpo_cli.errors import RunError, UserError, find_out_of_memory, first_line
from bandpo_cli.models.lora import ADAPTER_WEIGHTS, END_A, END_B, PREFIX, merged_weight
from bandpo_cli.paths import (
    ADAPTER_CONFIG,
    GGUF_ADVICE,
    check_regular_file,
    gguf_file,
    is_adapter_folder,
    path_exists,
    read_json_object,
    user_path,
)
from bandpo_cli.registries import BUNDLED_MODELS

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_CONFIG = "config.json"
_JSON_FILES = (_CONFIG, "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", INDEX)
_MAX_JSON_BYTES = 2**26
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_COUNT_WORDS = ("layer", "expert", "block")  # Parts of the names of settings that give a number of modules
_MAX_COUNT = 10_000  # Maximum value of such a setting
# The end of the path of the shipped model, which another installation has elsewhere.
_BUNDLED_PARTS = ("bandpo_cli", "models")
# Settings of adapter_config.json with the values that are supported.
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


@contextmanager
def loading_errors(path: str, what: str = "cannot be loaded") -> Iterator[None]:
    """Raise a UserError that names the user's `model.path` in place of all errors of loading but out of memory.

    The readers of configs, tokenizers and weights raise many types of errors for damaged files, including Rust panics,
    which are not subclasses of Exception.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, UserError, RunError):
        raise
    except BaseException as error:
        if find_out_of_memory(error):
            raise
        text = str(error).strip()
        if "trust_remote_code" in text:
            text = "contains custom Python code, which does not run unless you allow it; if you trust it: "
            raise model_error(path, f"{text}--set model.trust_remote_code=true") from None
        line = first_line(text, max_chars=300).rstrip(".")
        if not (path in BUNDLED_MODELS or path_exists(user_path(path))):
            line += "; check the id, or give a local copy: --model FOLDER"
        raise model_error(path, f"{what}: {type(error).__name__}: {line}") from None


def model_error(path: str, text: str) -> UserError:
    """Return the error for a user's `model.path`."""
    return UserError(f"model.path = {path!r}: {text}")


def check_model_files(location: str, path: str) -> None:
    """Raise UserError if the files of a model folder are not valid; a hub id instead of a folder is left to the loader.

    A file may be no regular file or no JSON object, a setting may declare a huge number of layers, or a file may name
    weights outside of the folder or in another format than safetensors.
    """
    folder, where = Path(location), f"model.path = {path!r}"
    weights = sorted(file.name for file in folder.glob("*.safetensors")) if path_exists(folder) else ()
    for name in ("tokenizer.json", *weights):
        if path_exists(folder / name):
            check_regular_file(folder / name, f"{where}: {name}")
    files = {name: folder / name for name in _JSON_FILES if path_exists(folder / name)}
    contents = {n: read_json_object(file, f"{where}: {n}", _MAX_JSON_BYTES) for n, file in files.items()}
    _check_counts(contents.get(_CONFIG, {}), f"{where}: {_CONFIG}")
    key = "transformers_weights"
    names = [content[key] for content in contents.values() if key in content]
    if INDEX in contents:
        shards = contents[INDEX].get("weight_map")
        names += shards.values() if isinstance(shards, dict) else [shards]
    for name in map(str, names):
        if not name.endswith(".safetensors") or Path(name).name != name:
            raise model_error(path, f"names {name!r} for its weights, not a safetensors file in its folder")


def _check_counts(config: Mapping[str, Any], where: str) -> None:
    """Raise UserError for a huge number of layers, before transformers builds a list of them."""
    for name, value in config.items():
        if isinstance(value, dict):
            _check_counts(value, where)
        elif isinstance(value, int) and value > _MAX_COUNT and any(part in name for part in _COUNT_WORDS):
            raise UserError(f"{where}: {name} = {value!s:.20}: more than {_MAX_COUNT:,}")


def check_weight_format(location: str, path: str) -> None:
    """Raise UserError with instructions if a folder has no weights in safetensors."""
    folder = Path(location)
    if not path_exists(folder) or path_exists(folder / WEIGHTS) or path_exists(folder / INDEX):
        return
    problem = f"it has no weights; copy {WEIGHTS} of the model (or all parts and {INDEX}) there"
    if pickles := sorted(item.name for item in folder.iterdir() if item.suffix in _PICKLES):
        problem = f"its weights are in {pickles[0]}, a pickle, which can run code; convert them to safetensors first"
    elif gguf := gguf_file(folder):
        problem = f"its weights are in {gguf.name}; {GGUF_ADVICE}"
    raise model_error(path, problem)


def check_declared_size(model: PreTrainedModel, location: str, path: str) -> None:
    """Raise UserError if config.json declares far more parameters than a folder's weights hold, or they are damaged.

    The model is on the meta device, so that nothing of its size is allocated. Of a hub id nothing is checked.
    """
    files = sorted(Path(location).glob("*.safetensors"))
    stored = 0
    for file in files:
        try:
            with safe_open(file, "pt") as weights:
                names = weights.keys()
                stored += sum(math.prod(weights.get_slice(name).get_shape()) for name in names)
        except SafetensorError as error:
            problem = f"{file.name} is cut or damaged ({first_line(error)}); copy or download it again"
            raise model_error(path, problem) from None
    declared = sum(parameter.numel() for parameter in model.parameters())
    if files and declared > 2 * stored:  # a tied output embedding is stored once
        raise model_error(path, f"{_CONFIG}: {declared:,} parameters, but the weights hold {stored:,}")


def base_config(config: ModelConfig) -> tuple[ModelConfig, Path | None]:
    """Return the settings of the base model if `model.path` is the folder of an adapter, and that folder.

    Other settings are returned unchanged, with None.

    Raises:
        UserError: the adapter cannot be used, or there is no such base model.
    """
    if config.path in BUNDLED_MODELS or not is_adapter_folder(adapter := user_path(config.path)):
        return config, None
    stated = _read_adapter_config(adapter)
    path = stated["base_model_name_or_path"]
    folder = user_path(path)
    if not path_exists(folder):
        if folder.parts[-3:-1] == _BUNDLED_PARTS and folder.name in BUNDLED_MODELS:
            path = folder.name
        elif folder.is_absolute():
            advice = f"set base_model_name_or_path in {ADAPTER_CONFIG} to its folder or hub id"
            raise UserError(f"{adapter}: its base model {path} does not exist here; {advice}")
    return config.model_copy(update={"path": path, "revision": stated.get("revision")}), adapter


def _read_adapter_config(adapter: Path) -> dict[str, Any]:
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
    the sampler of a run gets (`merged_weight`). Raise UserError if the file is missing or damaged, a tensor is not
    finite, or they belong to another model.
    """
    config, file = _read_adapter_config(adapter), adapter / ADAPTER_WEIGHTS
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
    layers = sorted(name.removesuffix(END_A) for name in tensors if name.endswith(END_A))
    for layer in layers:
        a, b = tensors.pop(f"{layer}{END_A}"), tensors.pop(f"{layer}{END_B}", torch.empty(0))
        name = f"{layer.removeprefix(PREFIX)}.weight"
        weight, rank = weights.get(name, torch.empty(0)), len(a)
        if not rank or a.shape[1:] != weight.shape[1:] or b.shape != (len(weight), rank):
            raise UserError(
                f"{where}: {layer}: lora_A of shape {[*a.shape]} and lora_B of {[*b.shape]} do not match the weights "
                f"of the base model, {[*weight.shape]} ([0]: there is no such tensor)"
            )
        scaling = float(config["lora_alpha"]) / (math.sqrt(rank) if config.get("use_rslora") else rank)
        weight.copy_(merged_weight(name, weight, a, b, scaling))
    if tensors or not layers:
        other = min(tensors, default="no tensor")
        raise UserError(f"{where}: {other}: only LoRA on linear layers is supported")


def check_loaded_weights(model: PreTrainedModel, info: Mapping[str, Any], path: str) -> None:
    """Raise UserError if weights are missing (the loader fills in random numbers), unknown, misshapen or not finite.

    `info` is the loading info of `from_pretrained(..., output_loading_info=True)`.
    """
    prefix = f"{model.base_model_prefix}."
    problems = {
        "missing": info["missing_keys"],
        "of another shape than in config.json": [item[0] for item in info["mismatched_keys"]],
        "not in the model of config.json": [n for n in info["unexpected_keys"] if n.startswith(prefix)],
    }
    for kind, names in problems.items():
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise model_error(path, f"weights that are {kind}: {min(names)}{more}")
    for name, parameter in model.named_parameters():
        if parameter.numel() and not all(bound.isfinite() for bound in parameter.detach().aminmax()):
            raise model_error(path, f"NaN or infinity in its weights: {name}")
