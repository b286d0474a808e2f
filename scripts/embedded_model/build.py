"""Architecture of the bundled model: its tokenizer and its Qwen2 network with random weights."""

from typing import Any

from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

PAD, EOS = "<pad>", "<eos>"
ALPHABET = "0123456789+-*()=: "
MAX_POSITIONS = 512


def build_tokenizer() -> Any:
    """Return a tokenizer with one token per character of `ALPHABET`; it drops all other characters.

    AutoTokenizer creates a Qwen2Tokenizer for every Qwen2 model, regardless of the class and rules in the folder
    (transformers 5.19). This is therefore a Qwen2Tokenizer: byte-level BPE without merges, which writes a space as
    "\u0120".
    """
    symbols = [PAD, EOS, *ALPHABET.replace(" ", "\u0120")]
    return Qwen2Tokenizer(
        vocab={symbol: index for index, symbol in enumerate(symbols)},
        merges=[],
        pad_token=PAD,
        eos_token=EOS,
        unk_token=None,  # the default value would be added to the vocabulary
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def build_model(tokenizer: Any) -> Any:
    """Return a Qwen2 network of about a million parameters with random weights from torch's current random state.

    It is wide rather than deep, since the number of layers limits the speed of sampling more than their size.
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
    # Sampling without truncation: training measures π itself.
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **special)
    return model
