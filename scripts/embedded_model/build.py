"""Architecture of the bundled models: their tokenizers and their Qwen2 networks with random weights."""

from typing import Any

from transformers import AddedToken, GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

PAD, EOS = "<pad>", "<eos>"
ALPHABET = "0123456789+-*()=: "
MAX_POSITIONS = 512
HEAD_SIZE = 32
"""The smallest one that vLLM's attention on CPUs takes."""

CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>'
"""The text before and after the expression of a call."""

CALCULATOR_TEMPLATE = """\
{%- if tools %}{{ '<tools>' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<assistant>' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<eos>' }}
{%- else %}
{{- ('<tool>' if message.role == 'tool' else '<user>') + message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""


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


def build_calculator_tokenizer() -> Any:
    """Return `build_tokenizer` with a chat template for tools, and with a token for each constant part of a call."""
    tokenizer = build_tokenizer()
    roles = [AddedToken(text, special=True) for text in ("<tools>", "<user>", "<assistant>", "<tool>")]
    tokenizer.add_tokens([*roles, *(AddedToken(text, special=False) for text in CALL)])
    tokenizer.chat_template = CALCULATOR_TEMPLATE
    return tokenizer


def build_model(tokenizer: Any, hidden_size: int = 128, layers: int = 5) -> Any:
    """Return a Qwen2 network with random weights from torch's current random state; about a million by default.

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
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=hidden_size // HEAD_SIZE,
            num_key_value_heads=hidden_size // HEAD_SIZE,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
            dtype="float32",
            **special,
        )
    )
    # Sampling without truncation: training measures π itself.
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **special)
    return model
