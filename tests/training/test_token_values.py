"""Values per token and clip metrics, compared with forward passes and formulas by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Metaspace
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from bandpo_cli.bounds import band_bounds
from bandpo_cli.bounds.intervals import clip_state
from bandpo_cli.config.layers import resolve
from bandpo_cli.storage.tables import TokenValues, read_token_values
from bandpo_cli.training.metrics import clip_metrics, is_recorded, token_texts, token_values
from bandpo_cli.training.optimizer import Optimizer
from bandpo_cli.training.update import update_policy
from tests.training.recording import Recording, run, shaped_reward
from tests.training.small_updates import CONFIG, band_loss, experience_of, graded_groups, policy_of


def split(values: TokenValues, name: str) -> list[np.ndarray]:
    """Return the values of each completion."""
    return np.split(getattr(values, name), np.cumsum(values.lengths)[:-1])


@pytest.mark.slow
def test_recorded_values_equal_those_of_plain_forward_passes(tmp_path, small_model):
    """Step 2: two updates of two groups each. Log-probs by the plain model, with the weights of that moment."""
    fast = {"lr": 1e-2, "warmup_steps": 0, "schedule": "constant"}
    recorded = run(
        tmp_path / "a",
        small_model,
        {"steps": 2, "optim": fast, "evaluation": {"every": 0}, "checkpoint": {"every": 0}},
    )
    step, config = recorded.steps[2], recorded.config
    values = read_token_values(recorded.folder.path / "token_values" / "step-000002.parquet")
    model = recorded.components.policy.model
    final = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = {number: text for text, number in recorded.components.policy.tokenizer.get_vocab().items()}
    place, clipped = 0, 0
    columns = {name: split(values, name) for name in TokenValues._fields[3:]}
    try:
        for number, group in enumerate(step.training_groups()):
            rewards = np.array([shaped_reward(item, config) for item in group if item.grade.has_reward])
            for item in group:
                advantage = (shaped_reward(item, config) - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
                assert values.advantage[place] == pytest.approx(advantage, rel=1e-5)
                old, entropy = plain_logprobs(recorded, 0, item.prompt_ids, item.completion.token_ids)
                new, _ = plain_logprobs(recorded, number // 2, item.prompt_ids, item.completion.token_ids)
                ratio = np.exp(new - old)
                lower, upper = band_bounds(old, "kl", 0.05, max_ratio=10.0)
                np.testing.assert_allclose(columns["old_logprob"][place], old, rtol=1e-4, atol=1e-5)
                np.testing.assert_allclose(columns["ratio"][place], ratio, rtol=1e-4)
                np.testing.assert_allclose(columns["entropy"][place], entropy, rtol=2e-3, atol=1e-4)
                np.testing.assert_allclose(columns["lower"][place], lower, rtol=2e-3, atol=1e-3)
                np.testing.assert_allclose(columns["upper"][place], upper, rtol=2e-3)
                side = 1 * ((advantage > 0) & (ratio > upper)) + 2 * ((advantage < 0) & (ratio < lower))
                assert columns["clipped"][place].tolist() == side.tolist()
                assert np.isnan(columns["importance"][place]).all(), "the sampler is the trainer"
                texts = [values.texts[index] for index in columns["text_index"][place]]
                assert texts == [names[token].replace("Ġ", " ") for token in item.completion.token_ids]
                place, clipped = place + 1, clipped + int((side > 0).sum())
    finally:
        model.load_state_dict(final)
    assert place == len(values.advantage) == 16
    assert clipped > 3, "no token is clipped, so nothing is tested"


def plain_logprobs(
    recorded: Recording, update: int, prompt: tuple[int, ...], tokens: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probs at the run's temperature and entropies at T=1 with the weights before an update of step 2."""
    model = recorded.components.policy.model
    model.load_state_dict(recorded.weights_before(2, update))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].double()
    chosen = (logits / recorded.config.sampling.temperature).log_softmax(-1)[range(len(tokens)), list(tokens)]
    return chosen.numpy(), torch.distributions.Categorical(logits=logits).entropy().numpy()


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
    conversations = [
        replace(rollout, completion=replace(rollout.completion, inserted=((0, (3, 4)), (place, (5,)))))
        for rollout, place in zip(a.rollouts_G, places, strict=True)
    ]
    dropped = replace(a, rollouts_G=tuple(conversations))
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


def test_the_denominator_of_a_bins_share_is_its_tokens():
    """Four rare tokens, one of them clipped above; two likely ones, one of them clipped below."""
    metrics = metrics_of(
        (0.005, 2.0, 1.0), (0.005, 2.0, -1.0), (0.005, 1.0, 1.0), (0.005, 0.5, 1.0),
        (0.95, 0.5, -1.0), (0.95, 1.0, -1.0),
    )  # fmt: skip
    assert metrics["clip/active_fraction/p_0.001_0.01"] == 1 / 4
    assert metrics["clip/active_fraction/p_0.9_1"] == 1 / 2
    assert metrics["clip/token_share/p_0.001_0.01"] == pytest.approx(4 / 6)
    assert metrics["clip/token_share/p_0.5_0.9"] == 0
    assert "clip/active_fraction/p_0.5_0.9" not in metrics
    assert metrics["clip/active_fraction"] == pytest.approx(2 / 6)
    assert metrics["clip/upper_fraction"] == metrics["clip/lower_fraction"] == pytest.approx(1 / 6)
    assert metrics["clip/outside_fraction"] == pytest.approx(4 / 6)


def test_a_ratio_on_a_bound_is_inside():
    metrics = metrics_of((0.3, 0.75, -1.0), (0.3, 1.25, 1.0))
    assert {metrics[f"clip/{name}_fraction"] for name in ("active", "upper", "lower", "outside")} == {0.0}


def test_a_bin_holds_its_upper_edge():
    """exp(log 0.5) is 0.5 exactly, the upper edge of the bin from 0.1."""
    metrics = metrics_of((0.5, 1.0, 1.0), (0.5 + 1e-9, 1.0, 1.0))
    assert (metrics["clip/token_share/p_0.1_0.5"], metrics["clip/token_share/p_0.5_0.9"]) == (0.5, 0.5)
