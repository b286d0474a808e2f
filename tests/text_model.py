"""A small language model with random weights, a trained tokenizer and a chat template."""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Whitespace
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

END = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

THINKING = TEMPLATE.replace(
    "assistant\n",
    "assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
)
"""The template with the argument of Qwen3's template: false adds an empty chain of thought to the prompt."""


def word_tokenizer(
    template: str | None, words: Iterable[str] = (), special: Iterable[str] = ()
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words: <unk>, <s>, </s>, `words`, and the further special tokens."""
    vocabulary = {word: token for token, word in enumerate(["<unk>", "<s>", "</s>", *words])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = template
    return tokenizer


def character_tokenizer(
    template: str, characters: str, special: Iterable[str], end: str
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of single characters and special tokens, which is the same after it was saved."""
    alphabet = ["<pad>", *special, *(char.replace(" ", "Ġ") for char in characters)]
    backend = Tokenizer(BPE({token: number for number, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens(["<pad>", *special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, pad_token="<pad>")
    tokenizer.chat_template = template
    return tokenizer


def save_text_model(
    folder: Path,
    corpus: Iterable[str],
    vocabulary: int = 1000,
    layers: int = 2,
    hidden: int = 128,
    seed: int = 0,
) -> Path:
    """Write a Qwen2 folder with a byte-level BPE tokenizer trained on `corpus` and heads of 64 dimensions."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    special = ["<|endoftext|>", "<|im_start|>", END]
    options = {"initial_alphabet": ByteLevel.alphabet(), "show_progress": False}
    trainer = BpeTrainer(vocab_size=vocabulary, special_tokens=special, **options)
    backend.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=special[0])
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=backend.get_vocab_size(),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=backend.token_to_id(END),
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
