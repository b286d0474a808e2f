"""The work of the checks: model folders with random weights, a tokenizer, problems and settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bandpo_cli.config.run import RunConfig
from bandpo_cli.types import Problem
from scripts.gpu_check.grader import GRADER

SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {
        "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2,
    },
    "1.5b": {
        "vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
    "qwen3-4b": {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    },
}  # fmt: skip
"""Shapes of Qwen2.5-0.5B and 1.5B, Qwen3-0.6B and 4B, from the config.json of Qwen/Qwen2.5-0.5B, ..., Qwen/Qwen3-4B."""

TINY_SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    },
    "1.5b": {
        "vocab_size": 768, "hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 2,
        "num_attention_heads": 3, "num_key_value_heads": 1,
    },
}  # fmt: skip
for _name in ("qwen3-0.6b", "qwen3-4b"):
    TINY_SHAPES[_name] = TINY_SHAPES["0.5b"] | {"model_type": "qwen3", "head_dim": 32}


@dataclass(frozen=True)
class Size:
    """Amounts of work.

    Attributes:
        operator_tokens: tokens of the check of the operator.
        logprob_tokens: tokens of the check of log-probs.
        prompts, samples: the completions of a step.
        prompt_chars: characters, and so about tokens, of a prompt.
        max_tokens: tokens of a completion.
        short_tokens: tokens of a completion where a check compares runs, and their speed matters less.
        micro_batch_tokens: as in the settings; less than the tokens of an update, so that micro-batches are full.
    """

    operator_tokens: int = 2**24
    logprob_tokens: int = 8192
    prompts: int = 16
    samples: int = 8
    prompt_chars: int = 200
    max_tokens: int = 256
    micro_batch_tokens: int = 8192
    short_tokens: int = 64


TINY_SIZE = Size(20_000, 64, 4, 4, 12, 8, 128, 8)


@dataclass(frozen=True)
class Work:
    """The device, the shapes and the folder of a call of the checks."""

    device: str
    tiny: bool
    folder: Path

    @property
    def size(self) -> Size:
        """Amounts of work."""
        return TINY_SIZE if self.tiny else Size()

    @property
    def shapes(self) -> dict[str, dict[str, Any]]:
        """Shapes of the models by name."""
        return TINY_SHAPES if self.tiny else SHAPES

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a CUDA device."""
        return self.device.startswith("cuda")

    def model(self, shape: str) -> Path:
        """Return the folder of the model with random weights, which is written at the first call."""
        folder = self.folder / f"model-{shape}"
        return folder if folder.exists() else save_random_model(folder, self.shapes[shape], self.device)

    def config(self, shape: str, **sections: dict[str, Any]) -> RunConfig:
        """Return the settings of a run of 4 steps; `sections` has the values that differ, by section."""
        size = self.size
        values: dict[str, dict[str, Any]] = {
            "model": {"path": str(self.model(shape)), "dtype": "bfloat16", "device": self.device},
            "sampling": {
                "engine": "transformers",
                "prompts": size.prompts,
                "samples": size.samples,
                "max_tokens": size.max_tokens,
                "max_prompt_tokens": size.prompt_chars + 24,
            },
            "optim": {"updates": 2, "lr": 1e-6, "micro_batch_tokens": size.micro_batch_tokens},
            "evaluation": {"every": 0},
            "checkpoint": {"every": 0, "keep_best": 0},
            "tracking": {"mlflow": False},
        }
        for name, section in sections.items():
            values[name] = values.get(name, {}) | section
        return RunConfig.model_validate({"steps": 4, **values})


def save_random_model(folder: Path, shape: Mapping[str, Any], device: str) -> Path:
    """Write a Qwen folder in bfloat16 with random weights and a tokenizer of the same vocabulary."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = byte_tokenizer(shape["vocab_size"])
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        **{"model_type": "qwen2", **shape},
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def byte_tokenizer(vocabulary: int) -> Any:
    """Return a tokenizer with a token per byte, an end and a padding token, and fillers up to `vocabulary`."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<end>", *sorted(ByteLevel.alphabet())]
    names += [f"filler{index}" for index in range(vocabulary - len(names))]
    backend = Tokenizer(BPE({name: index for index, name in enumerate(names)}, []))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens(["<pad>", "<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")


class RandomProblems:
    """A task of plain-text prompts of equal length."""

    name = "random"

    def __init__(self, size: Size, grader: str = GRADER) -> None:
        self._size, self._grader = size, grader

    def train_problems(self) -> Sequence[Problem]:
        """Return 256 problems."""
        return [
            Problem(
                f"p{index}",
                f"problem {index:3}: ".ljust(self._size.prompt_chars, "x"),
                "1",
                "random",
                self._grader,
            )
            for index in range(256)
        ]

    def heldout_sets(self) -> Mapping[str, Sequence[Problem]]:
        """Return no sets: nothing is evaluated."""
        return {}

    def notes(self) -> list[str]:
        """Return no lines."""
        return []
