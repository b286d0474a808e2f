"""Values per token in the order of the samples, their texts, and tokens at the edges of bounds and bins.

tests/oracle compares the values themselves.
"""

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Metaspace
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from bandpo_cli.bounds.intervals import clip_state
from bandpo_cli.config.layers import resolve
from bandpo_cli.storage.tables import TokenValues
from bandpo_cli.training.metrics import clip_metrics, is_recorded, token_texts, token_values
from bandpo_cli.training.optimizer import Optimizer
from bandpo_cli.training.update import update_policy
from tests.training.small_updates import CONFIG, band_loss, changed, experience_of, graded_groups, policy_of


def split(values: TokenValues, name: str) -> list[np.ndarray]:
    """Return the values of each completion."""
    return np.split(getattr(values, name), np.cumsum(values.lengths)[:-1])


def test_values_follow_the_order_of_the_samples_and_dropped_groups_have_none():
    """Update 1 trains on the groups 2 and 0, update 2 on 3 and 1; a fifth group is dropped.

    Tokens that are inserted before the first and the last token of its completions are shown there.
    """
    policy = policy_of()
    tokenizer = word_tokenizer([f"w{number}" for number in range(23)])
    a, b, c, d = graded_groups(policy)
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]]).repeat(2, 1)
    experiences = [experience_of(policy, pair, advantages, band_loss()) for pair in ([c, a], [d, b])]
    places = [len(rollout.completion.token_ids) - 1 for rollout in a.rollouts_G]
    assert min(places) > 0
    inserted = iter([((0, (3, 4)), (place, (5,))) for place in places])
    (dropped,) = changed([a], lambda _: {"inserted": next(inserted)})
    updates = update_policy(policy, Optimizer(policy.model, CONFIG.optim, 2), experiences, CONFIG)
    values = token_values([a, b, dropped, c, d], updates, tokenizer)
    ratios = split(values, "ratio")
    second = torch.split(updates.forwards[1].ratios, experiences[1].lengths.tolist())
    for completion in range(4):
        np.testing.assert_allclose(ratios[completion], 1, rtol=1e-5)
        np.testing.assert_allclose(ratios[12 + completion], 1, rtol=1e-5)
        np.testing.assert_array_equal(ratios[16 + completion], second[completion])
        np.testing.assert_array_equal(ratios[4 + completion], second[4 + completion])
        assert np.isnan(ratios[8 + completion]).all()
        logprobs = dropped.rollouts_G[completion].completion.logprobs
        assert split(values, "old_logprob")[8 + completion].tolist() == list(logprobs)
    assert np.isnan(values.advantage).tolist() == [False] * 8 + [True] * 4 + [False] * 8
    texts = [[values.texts[index] for index in indices] for indices in split(values, "text_index")]
    completions = [rollout.completion for group in (a, b, dropped, c, d) for rollout in group.rollouts_G]
    expected = [[f" w{token}" for token in completion.token_ids] for completion in completions]
    for place, words in zip(places, expected[8:12], strict=True):
        words[0], words[place] = f"⟦w3 w4⟧{words[0]}", f"⟦w5⟧{words[place]}"
    assert texts == expected


def test_the_first_every_nth_and_the_last_step_are_recorded():
    for every, expected in ((3, [1, 3, 6, 8]), (0, []), (1, [*range(1, 9)])):
        config = resolve([{"steps": 8, "tracking": {"tokens_every": every}}])
        assert [step for step in range(1, 9) if is_recorded(config, step, config.steps)] == expected


def word_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words that removes the space before the first word, as those of Llama 2 do."""
    backend = Tokenizer(WordLevel({f"▁{word}": number for number, word in enumerate(words)}))
    backend.pre_tokenizer, backend.decoder = Metaspace(), MetaspaceDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_joined_token_texts_are_the_text_of_the_completion(tmp_path):
    assert token_texts(word_tokenizer(["a", "bc"]), [1, 0]) == [" bc", " a"]
    backend = Tokenizer(BPE())
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    text = "So 3 + 4 = 7 .\n</script> é"
    trainer = BpeTrainer(
        vocab_size=300, initial_alphabet=ByteLevel.alphabet(), special_tokens=["<|end|>"], show_progress=False
    )
    backend.train_from_iterator([text], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    ids = [*tokenizer(text)["input_ids"], 0]
    assert "".join(token_texts(tokenizer, ids)) == f"{text}<|end|>"
    bytes_of_emoji = tokenizer("😀")["input_ids"]
    assert set(token_texts(tokenizer, bytes_of_emoji)) == {"\ufffd"}


def metrics_of(*tokens: tuple[float, float, float]) -> dict[str, float]:
    """Return the metrics of tokens given as (old probability, ratio, advantage) under the bounds 0.75 and 1.25."""
    probabilities, ratios, advantages = torch.tensor(tokens, dtype=torch.float64).unbind(1)
    lower, upper = torch.full_like(ratios, 0.75), torch.full_like(ratios, 1.25)
    return clip_metrics(clip_state(ratios, lower, upper, advantages), probabilities.log())


def test_a_ratio_on_a_bound_is_inside():
    metrics = metrics_of((0.3, 0.75, -1.0), (0.3, 1.25, 1.0))
    assert {metrics[f"clip/{name}_fraction"] for name in ("active", "upper", "lower", "outside")} == {0.0}


def test_a_bin_holds_its_upper_edge():
    """exp(log 0.5) is 0.5 exactly, the upper edge of the bin from 0.1."""
    metrics = metrics_of((0.5, 1.0, 1.0), (0.5 + 1e-9, 1.0, 1.0))
    assert (metrics["clip/token_share/p_0.1_0.5"], metrics["clip/token_share/p_0.5_0.9"]) == (0.5, 0.5)
