"""End-of-turn tokens and arguments of the chat templates of published models, as TRL ships them."""

from pathlib import Path

import pytest

from bandpo_cli.errors import ConfigError
from bandpo_cli.sampling.prompt_encoding import PromptEncoder, end_of_turn_id
from bandpo_cli.types import Message, Problem
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
OTHERS = ["<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|user|>", "<|assistant|>"]
OTHERS += ["<|START_OF_TURN_TOKEN|>"]


def template_of(name: str) -> str:
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "token"), [(name, token) for token, names in END_OF_TURN.items() for name in names.split()]
)
def test_end_of_turn_token_of_a_published_template(name, token):
    tokenizer = word_tokenizer(template_of(name), special=[*filter(None, END_OF_TURN), *OTHERS])
    if name.startswith("deepseek"):
        tokenizer.eos_token = DEEPSEEK_END
    assert end_of_turn_id(tokenizer) == (None if token is None else tokenizer.convert_tokens_to_ids(token))


@pytest.mark.parametrize(
    ("name", "argument", "value", "end"),
    [
        ("qwen3", "enable_thinking", False, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("qwen3", "enable_thinking", True, "<|im_start|>assistant\n"),  # the default
        ("gptoss", "reasoning_effort", "high", "<|start|>assistant"),  # it is in the system message
        ("gptoss", "reasoning_effort", "medium", "<|start|>assistant"),  # the default
        ("qwen2_5", "enable_thinking", False, None),
        ("gptoss", "enable_thinking", False, None),
    ],
)
def test_arguments_of_a_published_template(name, argument, value, end):
    """The template of Qwen2.5 has no thinking, and gpt-oss chooses an effort instead."""
    question = Problem("q", (Message("user", "What is 1+1?"),), "2", "set", "math")
    encoder = PromptEncoder(word_tokenizer(template_of(name)), "auto", {argument: value})
    if end is None:
        with pytest.raises(ConfigError, match=rf"kwargs\.{argument} = False: .* ignores this argument"):
            encoder.encode([question])
    else:
        (prompt,) = encoder.encode([question])
        assert prompt.text.endswith(end)
