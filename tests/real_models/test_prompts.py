"""Prompts of pretrained models: the tokens of the chat template, and the tokens that end a completion."""

import pytest
from transformers import AutoTokenizer

from bandpo_cli.config.run import ModelConfig
from bandpo_cli.models.load import load_policy, load_tokenizer
from bandpo_cli.sampling.prompt_encoding import PromptEncoder, completion_stop_ids
from tests.real_models.pretrained import QUESTIONS, TEMPLATE, problems

pytestmark = pytest.mark.real_models


@pytest.mark.parametrize("system", [None, "You are careful."])
def test_prompts_have_the_tokens_of_the_chat_template(folder, system):
    """Without a system message, the templates of these models add their own."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = PromptEncoder(load_tokenizer(ModelConfig(path=str(folder)))).encode(problems(system=system))
    for question, prompt in zip(QUESTIONS, found, strict=True):
        messages = [{"role": "user", "content": TEMPLATE.replace("{question}", question)}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert list(prompt.token_ids) == expected
        assert prompt.text == tokenizer.decode(expected)
        assert tokenizer.bos_token_id is None or expected.count(tokenizer.bos_token_id) <= 3
        assert prompt.text.count("system\n") == 1


def test_a_completion_ends_at_the_end_of_the_turn(folder):
    policy = load_policy(ModelConfig(path=str(folder), device="cpu"), for_training=False)
    stop_ids = completion_stop_ids(policy, PromptEncoder(policy.tokenizer), problems())
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    written = policy.tokenizer.apply_chat_template(turns, return_dict=False)
    without = policy.tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False)
    end_of_turn = written[len(without) + 1]  # after the one token of "2"
    assert policy.tokenizer.decode([end_of_turn]) == "<|im_end|>"
    assert end_of_turn in stop_ids
    assert set(stop_ids) >= {policy.tokenizer.eos_token_id, policy.model.generation_config.eos_token_id}
