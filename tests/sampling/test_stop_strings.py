"""Stop strings: the token that ends a completion, by decoding it from its start, and completions that end there."""

import random
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bandpo_cli.config.layers import resolve
from bandpo_cli.errors import ConfigError
from bandpo_cli.sampling.sampler import SamplingParams, TransformersSampler
from bandpo_cli.sampling.tool_calls import StopStrings
from bandpo_cli.types import Completion
from tests.conftest import random_model
from tests.text_model import character_tokenizer

STOPS = ("ab", " b", "</a>", "é", "b\n", "…", "a<end>")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and of some longer tokens, as most models have: é is two tokens, … is three."""
    return character_tokenizer("", [*bytes_of("éa b</>\n…cdefgh"), "ab", "Ġb", "</"], ["<end>"], "<end>")


def bytes_of(text: str) -> list[str]:
    names = chain.from_iterable(piece for piece, _ in pre_tokenizers.ByteLevel(False).pre_tokenize_str(text))
    return [*dict.fromkeys(names)]


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that writes the space before a word only within a text, and bytes as tokens."""
    pieces = ["<unk>", "<end>", *"ab</>é", "▁b", "▁", "▁a", "ab", "<0x0A>", "<0xE2>", "<0x80>", "<0xA6>"]
    backend = Tokenizer(
        models.BPE({piece: place for place, piece in enumerate(pieces)}, [], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ])  # fmt: skip
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("^$"), "isolated")
    backend.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<end>")


def first_end(tokenizer: Any, ids: list[int], stops: Any) -> int | None:
    """Return the first number of tokens whose text has a stop string."""
    texts = (tokenizer.decode(ids[: count + 1]) for count in range(len(ids)))
    ends = (count for count, text in enumerate(texts, start=1) if any(stop in text for stop in stops))
    return next(ends, None)


@pytest.mark.parametrize("make", [byte_tokenizer, sentencepiece_tokenizer])
def test_the_end_is_the_first_token_whose_text_from_the_start_has_a_string(make):
    tokenizer, rng, ends = make(), random.Random(0), set()
    for number in range(600):
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 30))]
        stops = rng.sample(STOPS, 2)
        expected = first_end(tokenizer, ids, stops)
        strings = StopStrings(tokenizer, stops)
        assert strings.end(ids) == expected, (ids, stops)
        steps = (count for count in range(len(ids)) if strings.end(ids[: count + 1], count) is not None)
        assert next((count + 1 for count in steps), None) == expected, number
        ends.add(expected)
    assert {None, 1, 2, 5} <= ends


def check_ends(found: list[Completion], plain: list[Completion], tokenizer: Any, stops: Any) -> None:
    """Check that completions are those without stop strings, up to the first string, which none follows."""
    ends = [first_end(tokenizer, [*item.token_ids], stops) for item in plain]
    for completion, whole, end in zip(found, plain, ends, strict=True):
        assert completion.token_ids == whole.token_ids[:end]
        assert completion.logprobs == pytest.approx(whole.logprobs[:end], abs=1e-4)
        assert completion.finish_reason == (whole.finish_reason if end is None else "stop")
    assert None in ends and len({*ends}) > 4  # noqa: PT018
    assert any(end == 12 and item.finish_reason == "length" for end, item in zip(ends, plain, strict=True))


def test_completions_end_with_the_token_that_completes_a_string():
    """Up to there they are the completions without stop strings; one that ends at the limit has not been truncated."""
    tokenizer = byte_tokenizer()
    model = random_model()
    assert len(tokenizer) == model.config.vocab_size
    prompts, params = [(1, 2, 3), (4,), (5, 6, 7, 8)], SamplingParams(20, 1.0, 12, stop_ids=(9,))
    sampler = TransformersSampler(model, 0, 30, StopStrings(tokenizer, STOPS[:3]))
    plain = [*chain(*sampler.sample(prompts, replace(params, stops=False), 2))]
    found = [*chain(*sampler.sample(prompts, params, 2))]
    check_ends(found, plain, tokenizer, STOPS[:3])


def test_settings_without_a_meaning_are_refused_and_one_text_is_a_list():
    with pytest.raises(ConfigError, match=r"task\.max_turn_tokens = 5: without tools or an environment"):
        resolve({"task": {"max_turn_tokens": 5}})
    with pytest.raises(ConfigError, match=r"task\.max_turns = 3: without tools or an environment"):
        resolve({"task": {"name": "gsm8k", "max_turns": 3}})
    assert resolve(resolve({}).model_dump()) == resolve({})
    assert resolve({"task": {"name": "calculator", "max_turn_tokens": 5}}).task.max_turn_tokens == 5
    assert resolve({"sampling": {"stop": "</answer>"}}).sampling.stop == ("</answer>",)
    with pytest.raises(
        ConfigError, match=r"sampling\.stop\[1\] = '': string should have at least 1 character"
    ):
        resolve({"sampling": {"stop": ["a", ""]}})
