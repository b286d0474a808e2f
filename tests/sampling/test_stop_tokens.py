"""The end-of-turn token of a chat template ends completions of chat-formatted prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from bandpo_cli.config.layers import resolve
from bandpo_cli.sampling.rollouts import end_of_turn_id
from bandpo_cli.tasks.task import build_task
from bandpo_cli.training.components import Components, build_components
from tests.text_model import TEMPLATE, save_text_model

TURNS = "{{% for m in messages %}}{{{{ m.role }}}}: {{{{ m.content }}}}{end}{{% endfor %}}"
"""A template whose messages end with `end`."""


def tokenizer_of(template: str | None, *special: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "token"),
    [
        (TEMPLATE, "<|im_end|>"),
        (TURNS.format(end="<|im_end|>"), "<|im_end|>"),
        (TURNS.format(end=" <|im_end|>\n"), "<|im_end|>"),
        (TURNS.format(end="</s>"), "</s>"),
        (TURNS.format(end="{{ eos_token }}"), "</s>"),
        (TURNS.format(end="<|end|>s"), "<|end|>"),
        (TURNS.format(end="<|end|><|im_end|>"), "<|end|>"),
        (TURNS.format(end="<|end|>>"), "<|end|>>"),  # the longest token that the text begins with
        (TURNS.format(end=""), None),
        (TURNS.format(end="\n\n"), None),
        (TURNS.format(end="<|finished|>"), None),  # a text of several tokens
        ("{{ raise_exception('no assistant') }}", None),
        ("{{ messages[0].content }}<|im_end|>", None),  # without the assistant's message
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}<|end|>{% endfor %}", None),
    ],
)  # fmt: skip
def test_the_token_after_an_assistants_message(template: str, token: str | None) -> None:
    tokenizer = tokenizer_of(template, "<|im_start|>", "<|im_end|>", "<|end|>", "<|end|>>")
    expected = None if token is None else tokenizer.convert_tokens_to_ids(token)
    assert end_of_turn_id(tokenizer) == expected


def test_no_token_without_a_template() -> None:
    assert end_of_turn_id(tokenizer_of(None, "<|im_end|>")) is None


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model like a Qwen2.5 base model: it has a chat template, and its end of sequence is <|endoftext|>."""
    folder = save_text_model(tmp_path_factory.mktemp("model"), ["some text"], vocabulary=262, hidden=64)
    for name, key, value in (
        ("tokenizer_config.json", "eos_token", "<|endoftext|>"),
        ("config.json", "eos_token_id", 0),
        ("generation_config.json", "eos_token_id", 0),
    ):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {key: value}))
    return folder


def components_of(base_model: Path, tmp_path: Path, layer: dict[str, Any] | None = None) -> Components:
    rows = [{"question": f"{n}+{n}?", "answer": str(2 * n)} for n in range(40)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {
        "task": {"name": "data", "train": [{"path": str(tmp_path / "sums.jsonl")}], "template": "plain"},
        "sampling": {"prompts": 4, "max_tokens": 64},
    }
    config = resolve([settings, {"model": {"path": str(base_model)}}, layer or {}])
    return build_components(config, build_task(config.task))


def test_completions_of_chat_prompts_end_at_the_end_of_a_turn(base_model: Path, tmp_path: Path) -> None:
    components = components_of(base_model, tmp_path)
    end_of_sequence, end_of_turn = 0, 2
    assert components.policy.stop_ids == (end_of_sequence,)
    assert components.params.stop_ids == (end_of_sequence, end_of_turn)
    prompts = components.encoder.encode(components.stream.next(8))
    assert prompts[0].text.endswith("<|im_start|>assistant\n")
    groups = components.sampler.sample([prompt.token_ids for prompt in prompts], components.params, seed=0)
    completions = [completion for group in groups for completion in group]
    turns = [completion for completion in completions if end_of_turn in completion.token_ids]
    assert len(turns) > 5, "no completion ends a turn, so nothing is tested"
    for turn in turns:
        assert turn.token_ids.index(end_of_turn) == len(turn.token_ids) - 1
        assert turn.finish_reason == "stop"
    components.close()


@pytest.mark.parametrize(
    "layer", [{"model": {"prompts": "raw"}}, {"task": {"name": "countdown", "numbers": 3, "max_number": 4}}]
)
def test_prompts_without_the_template_end_at_the_end_of_the_sequence_only(
    base_model: Path, tmp_path: Path, layer: dict[str, Any]
) -> None:
    components = components_of(base_model, tmp_path, layer)
    assert components.params.stop_ids == (0,)
    components.close()
