"""Regimes of `against_trl.py`: the settings of each, which bandpo and TRL both run, and what the second one needs.

- `toy`: the bundled model on countdown, 64 prompts × 16 completions of at most 8 tokens, 4 updates.
- `gsm8k`: a Qwen2 of 27M parameters with random weights (8 layers, width 512, vocabulary 8,192) on questions of GSM8K,
  4 prompts × 8 completions of at most 128 tokens, 2 updates. Random answers are never right, so the reward is a
  property of the text that differs within every group: without spread, bandpo would leave the groups out.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SHAPE = VOCABULARY, *_ = (8192, 512, 1344, 8, 8, 4)
END = "<|im_end|>"


def even_length(text: str, answer: str, extra: Mapping[str, Any]) -> float:
    """Return 1 for a text with an even number of characters, else 0: about half of all random texts."""
    return float(len(text) % 2 == 0)


def toy(folder: Path, data: Path | None) -> dict[str, Any]:
    """Return no settings: the defaults are this regime."""
    return {}


def gsm8k(folder: Path, data: Path | None) -> dict[str, Any]:
    """Write the model below `folder` and return the settings.

    Args:
        data: folder of gsm8k_train.jsonl and gsm8k_test.jsonl.
    """
    assert data is not None
    model = folder / "model"
    save_model(model, data / "gsm8k_train.jsonl")
    return {
        "model": {"path": str(model)},
        "task": {
            "name": "gsm8k",
            "train": {"name": "gsm8k", "path": str(data / "gsm8k_train.jsonl")},
            "heldout": {"name": "gsm8k", "path": str(data / "gsm8k_test.jsonl")},
            "template": "plain",
            "grader": "trl_regimes:even_length",
        },
        "sampling": {"prompts": 4, "samples": 8, "max_tokens": 128, "max_prompt_tokens": 256},
        "optim": {"updates": 2, "lr": 1e-5},
    }


REGIMES: dict[str, Callable[[Path, Path | None], dict[str, Any]]] = {"toy": toy, "gsm8k": gsm8k}
NEEDS_DATA = {"gsm8k"}


def save_model(folder: Path, questions: Path) -> None:
    """Write a random Qwen2 with a byte-level BPE tokenizer that is trained on the questions and answers."""
    from shared import random_qwen2
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    rows = [json.loads(line) for line in questions.read_text(encoding="utf-8").splitlines()]
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    special = ["<|endoftext|>", END]
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((row[key] for row in rows for key in ("question", "answer")), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=special[0]).save_pretrained(
        folder
    )
    model = random_qwen2(
        *SHAPE, max_position_embeddings=1024, bos_token_id=None, eos_token_id=1, pad_token_id=0
    )
    model.save_pretrained(folder)
