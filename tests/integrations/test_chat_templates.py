"""End-of-turn tokens of the chat templates of published models, as TRL ships them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from bandpo_cli.sampling.rollouts import end_of_turn_id

trl = pytest.importorskip("trl")

END_OF_TURN = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llama3_1": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "phi3": "<|end|>",
    "phi3_5": "<|end|>",
    "deepseekv3": "<｜end▁of▁sentence｜>",
    "deepseek_r1_distill": "<｜end▁of▁sentence｜>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "gptoss": "<|return|>",
    "glm4moe": None,
    "lfm2": "<|im_end|>",
}
"""The token after an assistant's message, as the models' cards describe the format."""
OTHERS = [
    "<|im_start|>",
    "<|start_header_id|>",
    "<start_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|START_OF_TURN_TOKEN|>",
]


@pytest.mark.parametrize("name", END_OF_TURN)
def test_end_of_turn_token_of_a_published_template(name: str) -> None:
    path = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    words = [*dict.fromkeys(filter(None, END_OF_TURN.values())), *OTHERS]
    backend = Tokenizer(WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": words})
    if name.startswith("deepseek"):
        tokenizer.eos_token = "<｜end▁of▁sentence｜>"
    tokenizer.chat_template = path.read_text(encoding="utf-8")
    token = END_OF_TURN[name]
    assert end_of_turn_id(tokenizer) == (None if token is None else tokenizer.convert_tokens_to_ids(token))
