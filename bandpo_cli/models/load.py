"""Loading a policy and its tokenizer."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from bandpo_cli.config.run import EMBEDDED_MODEL, ModelConfig
from bandpo_cli.errors import UserError
from bandpo_cli.models.embedded_default import embedded_model_path
from bandpo_cli.models.logprobs import check_plain_head


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
    def parameters_count(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def model_location(config: ModelConfig) -> str:
    """Return what the loader is given: the shipped folder for `embedded`, else the user's folder or the hub id."""
    if config.path == EMBEDDED_MODEL:
        return str(embedded_model_path())
    folder = Path(config.path).expanduser()
    return str(folder) if folder.exists() else config.path


def load_policy(config: ModelConfig) -> Policy:
    """Load model and tokenizer.

    The model stays in evaluation mode throughout: dropout would make π and π_old differ on the same weights.

    Raises:
        UserError: nothing loadable is there, or the tokenizer names no end-of-sequence token.
    """
    location = model_location(config)
    disable_progress_bar()  # its bars would break into the run's own view
    try:
        tokenizer = AutoTokenizer.from_pretrained(location)
        model = AutoModelForCausalLM.from_pretrained(location, dtype=getattr(torch, config.dtype))
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"model.path = {config.path!r}: cannot be loaded: {first_line}") from None
    check_plain_head(model)
    stop_ids = _stop_ids(model, tokenizer)
    if not stop_ids:
        raise UserError(f"model.path = {config.path!r}: its tokenizer names no end-of-sequence token")
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stop_ids[0]
    model.to(_device(config.device)).eval()
    return Policy(model=model, tokenizer=tokenizer, stop_ids=stop_ids, pad_id=pad_id)


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


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return every end-of-sequence id that the model's generation config and its tokenizer name."""
    named = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = list(named) if isinstance(named, (list, tuple)) else [named]
    return tuple(dict.fromkeys(i for i in [*ids, tokenizer.eos_token_id] if i is not None))
