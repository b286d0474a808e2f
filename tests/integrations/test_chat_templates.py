"""End-of-turn tokens of the chat templates of published models, as TRL ships them."""

from pathlib import Path

import pytest

from bandpo_cli.sampling.rollouts import end_of_turn_id
from tests.text_model import word_tokenizer

trl = pytest.importorskip("trl")

DEEPSEEK_END = "<｜end▁of▁sentence｜>"
END_OF_TURN = {
    "<|im_end|>": "qwen2_5 qwen3 lfm2",
    "<|eot_id|>": "llama3 llama3_1 llama3_2",
    "<end_of_turn>": "gemma gemma3",
    "<|end|>": "phi3 phi3_5",
    DEEPSEEK_END: "deepseekv3 deepseek_r1_distill",
    "<|END_OF_TURN_TOKEN|>": "cohere",
    "<|return|>": "gptoss",
    None: "glm4moe",
}
"""The token after an assistant's message, as the models' cards describe the format, and the models."""
OTHERS = [
    *("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|user|>", "<|assistant|>"),
    "<|START_OF_TURN_TOKEN|>",
]


@pytest.mark.parametrize(
    ("name", "token"), [(name, token) for token, names in END_OF_TURN.items() for name in names.split()]
)
def test_end_of_turn_token_of_a_published_template(name: str, token: str | None) -> None:
    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = word_tokenizer(template, special=[*filter(None, END_OF_TURN), *OTHERS])
    if name.startswith("deepseek"):
        tokenizer.eos_token = DEEPSEEK_END
    assert end_of_turn_id(tokenizer) == (None if token is None else tokenizer.convert_tokens_to_ids(token))
