"""Where the shipped model lies. No torch here: a command line may ask before anything heavy is imported."""

# MERGED: Loading a policy and its tokenizer.
from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import is_flash_attn_2_available
from transformers.utils.logging import disable_progress_bar

from bandpo_cli.config.run import EMBEDDED_MODEL, ModelConfig
from bandpo_cli.errors import UserError
from bandpo_cli.models.checks import (
    check_declared_size,
    check_loaded_weights,
    check_model_files,
    check_output_layer,
    check_packed_forward,
    check_weight_format,
    loading_errors,
)
from bandpo_cli.paths import path_exists, user_path


def embedded_model_path() -> Path:
    """The Hugging Face folder of the model that is used when none is named (docs/embedded_model.md)."""
    return Path(__file__).parent / "embedded"


@dataclass(frozen=True)
class Policy:
    """The model that is trained, with its tokenizer.

    Attributes:
        stop_ids: the tokens that end a completion.
        pad_id: fills rows; never attended to.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    pad_id: int

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.model.device
        return device

    @property
    def parameter_count(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def model_location(config: ModelConfig) -> str:
    """Return what the loader is given: the shipped folder for `embedded`, else the user's folder or the hub id."""
    if config.path == EMBEDDED_MODEL:
        return str(embedded_model_path())
    folder = user_path(config.path)
    return str(folder) if path_exists(folder) else config.path


def load_policy(config: ModelConfig, for_training: bool = True) -> Policy:
    """Load model and tokenizer.

    The model stays in evaluation mode throughout: dropout would make π and π_old differ on the same weights.

    Args:
        for_training: also make sure that the packed forward pass computes what the plain one does.

    Raises:
        UserError: nothing loadable is there, the tokenizer names no end-of-sequence token, or the model cannot be
            trained with these settings.
    """
    attention, device = _attention(config), _device(config.device)
    described = read_config(config)
    model, tokenizer = _load(config, described, attention)
    if for_training:
        check_output_layer(model)
    stop_ids, pad_id = _special_ids(model, tokenizer, config.path)
    model.to(device).eval()
    if for_training and config.gradient_checkpointing:
        _enable_gradient_checkpointing(model)
    if for_training:
        check_packed_forward(model)
    return Policy(model=model, tokenizer=tokenizer, stop_ids=stop_ids, pad_id=pad_id)


def read_config(config: ModelConfig) -> PreTrainedConfig:
    """Read the model's config.json, having looked at what lies beside it.

    Raises:
        UserError: the folder is none of a model, or transformers knows no such architecture.
    """
    location = model_location(config)
    check_model_files(location, config.path)
    with loading_errors(config.path, "its config cannot be read"):
        return AutoConfig.from_pretrained(location, trust_remote_code=config.trust_remote_code)


def _load(
    config: ModelConfig, described: PreTrainedConfig, attention: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    location = model_location(config)
    check_weight_format(location, config.path)
    disable_progress_bar()  # its bars would break into the run's own view
    with loading_errors(config.path), _silenced_logger("transformers.modeling_utils"):
        check_declared_size(location, described, config)
        tokenizer = AutoTokenizer.from_pretrained(location, trust_remote_code=config.trust_remote_code)
        model, info = AutoModelForCausalLM.from_pretrained(
            location,
            dtype=getattr(torch, config.dtype),
            attn_implementation=attention,
            trust_remote_code=config.trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # so that they are listed, and refused, with the others
            output_loading_info=True,
        )
        check_loaded_weights(model, info, config.path)
        ids = tokenizer("1+1=2")["input_ids"]
        if not ids or not isinstance(tokenizer.decode(ids), str):
            raise UserError(
                f"model.path = {config.path!r}: its tokenizer reads nothing; is tokenizer.json there?"
            )
    return model, tokenizer


@contextmanager
def _silenced_logger(name: str) -> Iterator[None]:
    """Keep the loader's table of weights that do not fit off the screen: the error names one of them."""
    logger = logging.getLogger(name)
    logger.disabled = True  # by its level the loader chooses what else to check, and to say elsewhere
    try:
        yield
    finally:
        logger.disabled = False


def frozen_copy(policy: Policy) -> PreTrainedModel:
    """Return the policy's model as it is now, without gradients: the reference of the KL penalty."""
    return copy.deepcopy(policy.model).requires_grad_(False)


def save_policy(policy: Policy, folder: Path) -> None:
    """Write a folder that transformers and vLLM load: safetensors weights, config, tokenizer."""
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"model.device = {name!r}: not usable here: {str(error).splitlines()[0]}") from None
    return device


def _attention(config: ModelConfig) -> str | None:
    """Return the attention to ask transformers for; None leaves it the choice, which is sdpa where a model has it."""
    if config.attention == "flash_attention_2":
        if not is_flash_attn_2_available():
            raise UserError(
                "model.attention = 'flash_attention_2' needs the package flash-attn and a GPU that it runs on, and "
                "one of them is missing here: set model.attention=sdpa"
            )
        if config.dtype == "float32":
            raise UserError(
                "model.attention = 'flash_attention_2' has no float32: set model.dtype=bfloat16 or model.attention=sdpa"
            )
    return None if config.attention == "auto" else config.attention


def _enable_gradient_checkpointing(model: PreTrainedModel) -> None:
    """Make the model's layers forget their activations until the backward pass, which computes them again.

    Raises:
        UserError: the architecture offers no way that works outside of training mode.
    """
    if not any(isinstance(module, GradientCheckpointingLayer) for module in model.modules()):
        raise UserError(
            f"model.gradient_checkpointing: {model.config.model_type} models have no layers for it; set it to false"
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.disable_input_require_grads()  # only the reentrant kind needs its inputs to require gradients


def _special_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str
) -> tuple[tuple[int, ...], int]:
    """Return every end-of-sequence id that the model's generation config and its tokenizer name, and the padding's.

    Raises:
        UserError: there is none, or one is no token of the model's; or the tokenizer is of a larger model.
    """
    named = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = list(named) if isinstance(named, (list, tuple)) else [named]
    stop_ids = [i for i in [*ids, tokenizer.eos_token_id] if i is not None]
    if not stop_ids:
        raise UserError(f"model.path = {path!r}: its tokenizer names no end-of-sequence token")
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stop_ids[0]
    rows = model.get_input_embeddings().weight.shape[0]
    for i in (*stop_ids, pad_id):
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < rows:
            raise UserError(
                f"model.path = {path!r}: its end-of-sequence or padding token {i!r} is none of its {rows:,} tokens"
            )
    if tokenizer.vocab_size > rows:
        raise UserError(
            f"model.path = {path!r}: its tokenizer has {tokenizer.vocab_size:,} tokens and the model {rows:,}"
        )
    return tuple(dict.fromkeys(stop_ids)), pad_id
