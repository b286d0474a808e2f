"""Checks of a model: its folder before loading, its weights after loading, and its log-probs on packed rows.

A model folder may come from an untrusted source. Weights are read only from safetensors, since a pickle
(`pytorch_model.bin`) can run code when it is read. A config that declares more parameters than its weights hold is
refused before anything of that size is allocated. Errors of the loaders become one-line `UserError`s. Before training,
`check_packed_forward` verifies that `token_logprobs` gives the model's own log-probs.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, PreTrainedModel

from bandpo_cli.errors import RunError, UserError, find_out_of_memory, first_line
from bandpo_cli.models.logprobs import token_logprobs
from bandpo_cli.models.packing import Row, collate
from bandpo_cli.models.sharding import forward_dtype
from bandpo_cli.paths import GGUF_ADVICE, check_regular_file, gguf_file, path_exists
from bandpo_cli.storage.files import read_json_object

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Maximum difference in nats between packed and unpacked log-probs. Rounding stays well below it; attention across rows
or a scale factor on the logits does not."""
PACKED_LAYERS = {"full_attention", "sliding_attention"}
"""Layer types that keep packed rows separate; others carry a state across tokens or split rows into chunks."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_CONFIG = "config.json"
_JSON_FILES = (_CONFIG, "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", INDEX)
_MAX_JSON_BYTES = 2**26
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_COUNT_WORDS = ("layer", "expert", "block")  # Parts of the names of settings that give a number of modules
_MAX_COUNT = 10_000  # Maximum value of such a setting


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
        line = first_line(text, max_chars=300)
        raise model_error(path, f"{what}: {type(error).__name__}: {line}") from None


def model_error(path: str, text: str) -> UserError:
    """Return the error for a user's `model.path`."""
    return UserError(f"model.path = {path!r}: {text}")


def check_model_files(location: str, path: str) -> None:
    """Raise if the files of a model folder are not valid; a hub id instead of a folder is left to the loader.

    Raises:
        UserError: a file is not a regular file or not a JSON object, a setting declares a huge number of layers, or a
            file names weights outside of the folder or in another format than safetensors.
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


def check_not_quantized(config: PreTrainedConfig, path: str) -> None:
    """Raise UserError for quantized weights; the loader would ask for the package that unpacks them."""
    stated = getattr(config, "quantization_config", None)
    if stated:
        method = stated.get("quant_method") if isinstance(stated, dict) else None
        problem = f"its weights are quantized ({method!r:.40}), which cannot be trained"
        raise model_error(path, f"{problem}; name the model with weights of 16 or 32 bits")


def check_declared_size(model: PreTrainedModel, location: str, path: str) -> None:
    """Raise UserError if config.json declares far more parameters than the folder's weights hold, or they are damaged.

    Args:
        model: the model of config.json on the meta device, so that nothing of its size is allocated.
        location: folder or hub id of the model; only a folder is checked.
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


def check_loaded_weights(model: PreTrainedModel, info: Mapping[str, Any], path: str) -> None:
    """Raise UserError if weights are missing (the loader fills in random numbers), unknown, misshapen or not finite.

    Args:
        info: loading info of `from_pretrained(..., output_loading_info=True)`.
    """
    prefix = f"{model.base_model_prefix}."
    for kind, names in (
        ("missing", info["missing_keys"]),
        ("of another shape than in config.json", [item[0] for item in info["mismatched_keys"]]),
        ("not in the model of config.json", [n for n in info["unexpected_keys"] if n.startswith(prefix)]),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise model_error(path, f"weights that are {kind}: {min(names)}{more}")
    for name, parameter in model.named_parameters():
        if parameter.numel() and not all(bound.isfinite() for bound in parameter.detach().aminmax()):
            raise model_error(path, f"NaN or infinity in its weights: {name}")


@torch.no_grad()
def check_packed_forward(model: PreTrainedModel) -> None:
    """Compare `token_logprobs` on packed rows with the model's own forward pass on each sequence separately.

    Layers that carry a state from token to token would carry it from one packed row into the next, and architectures
    differ in how they compute logits. A few tokens detect both for any architecture.

    Raises:
        UserError: the log-probs differ, the model does not accept packed rows, or it scales or caps its logits.
    """
    kind, text = f"model.path: {model.config.model_type}", model.config.get_text_config()
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(text, name, None) not in (None, 1.0):
            raise UserError(f"{kind} models change their logits by '{name}', which is not supported")
    if others := set(getattr(text, "layer_types", None) or ()) - PACKED_LAYERS:
        raise UserError(f"{kind} models have {min(others)} layers, which do not run on packed rows")
    vocabulary = min(text.vocab_size, 1000)
    ids = [(7 * i + 3) % vocabulary for i in range(12)]
    rows = [Row(ids[:3], [ids[3:6], ids[6:8]]), Row(ids[8:10], [ids[10:]])]
    try:
        packed = token_logprobs(model, collate(rows, model.device)).logprobs
    except (TypeError, AttributeError, KeyError, ValueError, RuntimeError) as error:
        if find_out_of_memory(error):  # independent of the architecture
            raise
        raise UserError(f"{kind} models do not run on packed rows: {first_line(error)}") from None
    unpacked = []
    for prompt_ids, completion in ((row.prompt_ids, item) for row in rows for item in row.completions):
        ids_1T, first = torch.tensor([[*prompt_ids, *completion]], device=model.device), len(prompt_ids)
        logits = model(input_ids=ids_1T, use_cache=False).logits[0, first - 1 : -1].float()
        unpacked.append(torch.log_softmax(logits, dim=-1).gather(1, ids_1T[0, first:, None]).squeeze(1))
    gap = (packed - torch.cat(unpacked)).abs().max().item()
    if not gap <= TOLERANCE.get(forward_dtype(model), TOLERANCE[torch.bfloat16]):
        differ = f"log-probs in rows without padding differ by {gap:.3g} nats"
        raise UserError(f"{kind} models are not supported: {differ}")
