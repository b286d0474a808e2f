"""A model's folder, which may come from anyone: looked at before it is loaded, and what loading it raises as one line.

Weights are read from safetensors alone: a pickle (`pytorch_model.bin`) can run code when it is read. A config that
asks for more than its weights hold is refused before anything of that size is made.
"""

# MERGED: Whether a model's log-probs can be computed the way `token_logprobs` does.
from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from bandpo_cli.config.run import ModelConfig
from bandpo_cli.errors import RunError, UserError
from bandpo_cli.models.logprobs import token_logprobs
from bandpo_cli.models.packing import Row, collate
from bandpo_cli.paths import check_regular_file, path_exists, read_text

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    INDEX,
)
_OTHER_FILES = ("tokenizer.json", WEIGHTS)
_MAX_JSON_BYTES = 2**26
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_COUNT_WORDS = ("layer", "expert", "block")
"""Parts of the names of settings that say how often something is made."""
_MAX_COUNT, _MAX_LAYERS = 10_000, 1000


@contextmanager
def loading_errors(path: str, what: str = "cannot be loaded") -> Iterator[None]:
    """Tell whatever loading a model raises as a line about the folder that the user named.

    The readers of configs, tokenizers and weights raise many kinds of errors for damaged files, Rust's panics, which
    are no Exceptions, among them.

    Raises:
        UserError: in place of all of them. Memory that runs out is another matter and stays as it is.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, UserError, RunError, MemoryError):
        raise
    except BaseException as error:
        text = str(error).strip()
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text:
            raise
        if "trust_remote_code" in text:
            raise UserError(
                f"model.path = {path!r}: brings Python code of its own, which is not run unasked; if you trust it: "
                "--set model.trust_remote_code=true"
            ) from None
        line = next((line for line in map(str.strip, text.splitlines()) if line), "")
        raise UserError(f"model.path = {path!r}: {what}: {type(error).__name__}: {line[:300]}") from None


def check_model_files(location: str, path: str) -> None:
    """Refuse a folder whose files cannot be a model's; what is no folder (a hub id) is left to the loader.

    Raises:
        UserError: a file is a pipe or the like, is no JSON object, or names weights elsewhere or in another format.
    """
    folder = Path(location)
    if not path_exists(folder):
        return
    where = f"model.path = {path!r}"
    names: list[Any] = []
    for name in (*_JSON_FILES, *_OTHER_FILES):
        if not path_exists(folder / name):
            continue
        check_regular_file(folder / name, f"{where}: {name}")
        content = _read_json_object(folder / name, f"{where}: {name}") if name in _JSON_FILES else {}
        if name == "config.json":
            _check_counts(content, f"{where}: {name}")
        if "transformers_weights" in content:
            names.append(content["transformers_weights"])
        if name == INDEX:
            shards = content.get("weight_map")
            names += shards.values() if isinstance(shards, dict) else [shards]
    for name in dict.fromkeys(map(str, names)):
        if not name.endswith(".safetensors") or Path(name).name != name:
            raise UserError(
                f"{where}: names {name!r} for its weights; a safetensors file beside it is expected"
            )


def _check_counts(config: Mapping[str, Any], where: str) -> None:
    """Refuse a million layers before transformers writes a list of them."""
    for name, value in config.items():
        if isinstance(value, dict):
            _check_counts(value, where)
        elif isinstance(value, int) and value > _MAX_COUNT and any(part in name for part in _COUNT_WORDS):
            raise UserError(f"{where}: {name} = {value!s:.20}: more than {_MAX_COUNT:,}")


def check_weight_format(location: str, path: str) -> None:
    """Refuse a folder without weights in safetensors. Raises UserError, with the way out where they are pickles."""
    folder = Path(location)
    if not path_exists(folder) or path_exists(folder / WEIGHTS) or path_exists(folder / INDEX):
        return
    pickles = sorted(each.name for each in folder.iterdir() if each.suffix in _PICKLES)
    why = (
        f"its weights are in {pickles[0]}, a pickle, which can run code when it is read; convert them to safetensors "
        "first: load them where you trust them, and save_pretrained"
        if pickles
        else f"no {WEIGHTS} there"
    )
    raise UserError(f"model.path = {path!r}: {why}")


def _read_json_object(path: Path, where: str) -> dict[str, Any]:
    try:
        content = json.loads(read_text(path, where, _MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not readable as JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{where}: expected a JSON object")
    return content


def check_declared_size(location: str, described: PreTrainedConfig, config: ModelConfig) -> None:
    """Refuse a config that asks for far more than the folder's weights hold, before any of it is made.

    Raises:
        UserError: with both sizes.
    """
    folder = Path(location)
    own_code = config.trust_remote_code and getattr(described, "auto_map", None)
    if not folder.is_dir() or own_code:  # code of its own need not run without data
        return
    files = sorted(folder.glob("*.safetensors"))
    shapes = [shape for file in files for shape in _shapes(file)]
    where = f"model.path = {config.path!r}: config.json"
    layers = getattr(described.get_text_config(), "num_hidden_layers", 0)
    if layers > (len(shapes) if files else _MAX_LAYERS):
        raise UserError(f"{where}: num_hidden_layers = {layers}, but the weights are {len(shapes):,} tensors")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described, trust_remote_code=config.trust_remote_code)
    asked, held = sum(each.numel() for each in model.parameters()), sum(map(math.prod, shapes))
    if files and asked > 2 * held:  # an output embedding that is the input's is stored once
        raise UserError(f"{where}: describes {asked:,} parameters, but the weights hold {held:,}")


def _shapes(file: Path) -> list[list[int]]:
    with safe_open(file, "pt") as weights:
        return [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118 - no mapping


def check_loaded_weights(model: PreTrainedModel, info: Mapping[str, Any], path: str) -> None:
    """Refuse a model that is not what its folder holds: the loader fills what is missing with random numbers.

    Args:
        info: what `from_pretrained(..., output_loading_info=True)` says.

    Raises:
        UserError: weights are missing, of other shapes, of layers that the model has not, or not finite.
    """
    own = f"{model.base_model_prefix}."
    for kind, names in (
        ("missing", info["missing_keys"]),
        ("of another shape than config.json says", [each[0] for each in info["mismatched_keys"]]),
        ("no part of the model in config.json", [n for n in info["unexpected_keys"] if n.startswith(own)]),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(f"model.path = {path!r}: weights that are {kind}: {sorted(names)[0]}{more}")
    for name, parameter in model.named_parameters():
        if parameter.numel() and not all(bound.isfinite() for bound in parameter.detach().aminmax()):
            raise UserError(f"model.path = {path!r}: NaN or infinity in its weights: {name}")


TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Nats. Rounding stays well below; attention across rows or a factor at the logits does not."""
PACKED_LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers that keep packed rows apart; others pass a state on or cut rows into chunks of their own."""


def check_output_layer(model: PreTrainedModel) -> None:
    """Refuse a model whose logits are more than its output embedding times its hidden state.

    Raises:
        UserError: the architecture scales or caps its logits, which `token_logprobs` would miss.
    """
    config = model.config.get_text_config()
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1.0):
            raise UserError(
                f"model.path: {config.model_type} models change their logits by '{name}', not supported"
            )


@torch.no_grad()
def check_packed_forward(model: PreTrainedModel) -> None:
    """Compare `token_logprobs` on packed rows with the model's own forward pass on each sequence alone.

    Layers that carry a state from token to token would carry it from one packed row into the next, and architectures
    differ in what they do to their logits. A few tokens tell, whatever the architecture.

    Raises:
        UserError: they differ, or the model cannot be called this way.
    """
    kind, text = model.config.model_type, model.config.get_text_config()
    if others := set(getattr(text, "layer_types", None) or ()) - PACKED_LAYERS:
        raise UserError(
            f"model.path: {kind} models have {sorted(others)[0]} layers, which do not run on packed rows"
        )
    known = min(text.vocab_size, 1000)
    ids = [(7 * i + 3) % known for i in range(12)]
    rows = [Row(ids[:3], [ids[3:6], ids[6:8]]), Row(ids[8:10], [ids[10:]])]
    try:
        packed = token_logprobs(model, collate(rows, model.device)).logprobs
    except torch.OutOfMemoryError:
        raise  # says nothing about the architecture
    except (TypeError, AttributeError, KeyError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"model.path: {kind} models do not run on packed rows: {reason}") from None
    alone = torch.cat(
        [
            _unpacked_logprobs(model, row.prompt_ids, completion)
            for row in rows
            for completion in row.completions
        ]
    )
    gap = (packed - alone).abs().max().item()
    if not gap <= TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16]):
        raise UserError(
            f"model.path: {kind} models are not supported: in rows without padding their log-probs are off by {gap:.3g}"
        )


def _unpacked_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int]
) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *completion]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, dim=-1).gather(1, ids[0, len(prompt) :, None]).squeeze(1)
