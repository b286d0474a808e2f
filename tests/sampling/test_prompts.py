"""What the model is given, letter by letter: chat templates, plain text, special tokens."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from bandpo_cli.errors import ConfigError
from bandpo_cli.sampling.rollouts import PromptEncoder
from bandpo_cli.types import Message, Problem, Prompt

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' and strict %}{{ raise_exception('no system') }}{% endif %}"
    "<s> {{ m['role'] }} {{ m['content'] }} </s>{% endfor %}{% if add_generation_prompt %}<s> assistant{% endif %}"
)
CHAT = (Message("system", "be brief"), Message("user", "2 plus 2"))


def tokenizer_of(template: str | None) -> PreTrainedTokenizerFast:
    """A word tokenizer that puts <s> before a text, as Llama's does."""
    words = ["<unk>", "<s>", "</s>", "system", "user", "assistant", "be", "brief", "2", "plus"]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = template
    return tokenizer


def problem(prompt: Prompt) -> Problem:
    return Problem("p", prompt, "4", "test", "math")


def test_messages_go_through_the_chat_template_and_get_no_token_twice() -> None:
    (encoded,) = PromptEncoder(tokenizer_of(TEMPLATE)).encode([problem(CHAT)])
    assert encoded.text == "<s> system be brief </s><s> user 2 plus 2 </s><s> assistant"
    assert encoded.token_ids == (1, 3, 6, 7, 2, 1, 4, 8, 9, 8, 2, 1, 5)


@pytest.mark.parametrize(("template", "prompts"), [(TEMPLATE, "raw"), (None, "auto"), (None, "raw")])
def test_raw_messages_are_joined_behind_the_start_token(template: str | None, prompts: str) -> None:
    (encoded,) = PromptEncoder(tokenizer_of(template), prompts).encode([problem(CHAT)])
    assert encoded.text == "be brief\n\n2 plus 2"
    assert encoded.token_ids == (1, 6, 7, 8, 9, 8)


def test_plain_text_is_left_as_it_is_beside_messages() -> None:
    encoder = PromptEncoder(tokenizer_of(TEMPLATE), "raw")
    plain, joined = encoder.encode([problem("2 plus"), problem((Message("user", "2 plus"),))])
    assert plain.token_ids == (8, 9)
    assert joined.token_ids == (1, 8, 9)


def test_asking_for_a_template_that_is_not_there_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"model\.prompts=raw"):
        PromptEncoder(tokenizer_of(None), "chat")


def test_a_template_that_refuses_names_the_problem() -> None:
    refusing = tokenizer_of(TEMPLATE.replace("and strict", "and true"))
    with pytest.raises(ConfigError, match=r"problem p: .*no system"):
        PromptEncoder(refusing).encode([problem(CHAT)])


def test_prompts_over_the_limit_are_left_out_in_order() -> None:
    encoder = PromptEncoder(tokenizer_of(None), "raw")
    short, long, empty = problem("2 plus 2"), problem("2 plus 2 plus 2"), problem("")
    assert encoder.filter_by_length([long, short, empty, short], 3) == [short, short]
    assert encoder.filter_by_length([long, short], 5) == [long, short]
