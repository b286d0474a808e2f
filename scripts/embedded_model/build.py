"""The embedded model before it has learned anything: its tokenizer and its Qwen2 network."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

PAD, EOS = "<pad>", "<eos>"
ALPHABET = "0123456789+-*()=: "
MAX_POSITIONS = 512


def build_tokenizer() -> Any:
    """A token for each character of `ALPHABET`, so numbers go digit by digit; other characters are dropped.

    AutoTokenizer makes a Qwen2Tokenizer for every Qwen2 model, whatever class and rules the folder names
    (transformers 5.19). So this is one, byte-level BPE without merges, where a space is written "\u0120".
    """
    symbols = [PAD, EOS, *ALPHABET.replace(" ", "\u0120")]
    return Qwen2Tokenizer(
        vocab={symbol: index for index, symbol in enumerate(symbols)},
        merges=[],
        pad_token=PAD,
        eos_token=EOS,
        unk_token=None,  # the default would be added to the vocabulary
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def build_model(tokenizer: Any) -> Any:
    """A random Qwen2 network of about a million parameters, from torch's current seed.

    Width before depth within that budget: sampling is bound by the number of layers, not by their size.
    """
    special = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
            dtype="float32",
            **special,
        )
    )
    # Sampling from the model as it is: training measures π itself, so nothing may truncate it.
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **special)
    return model
