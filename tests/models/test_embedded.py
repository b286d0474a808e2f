"""The bundled model: a complete Hugging Face folder, as accurate as its card states, and the scripts that train it."""

import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2ForCausalLM

from bandpo_cli.config.task import CountdownTask
from bandpo_cli.grading.countdown import grade_countdown
from bandpo_cli.models.load import embedded_model_path
from bandpo_cli.tasks.task import Task, countdown
from scripts.embedded_model.build import ALPHABET, build_tokenizer
from scripts.embedded_model.measure import measure
from scripts.embedded_model.rare_multiplication import FIRST_PRODUCT_TARGET, rarely_multiplying
from scripts.embedded_model.train import (
    AnswerSampler,
    Demonstrations,
    main,
    partly_wrong,
    solutions,
    solved_problems,
)

FOLDER = embedded_model_path()
TOKENIZER = AutoTokenizer.from_pretrained(FOLDER)
TASK = countdown(CountdownTask())
TRAIN = TASK.train_problems()[:30]


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER)


def test_folder_has_the_usual_files_and_is_small(model):
    assert {file.name for file in FOLDER.iterdir()} == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 6e6
    assert type(model) is Qwen2ForCausalLM
    assert model.dtype == torch.float32
    assert 0.5e6 < model.num_parameters() < 2e6
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.eos_token_id) == (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id)
        assert config.bos_token_id is None
    assert model.config.vocab_size == len(TOKENIZER) == len(ALPHABET) + 2
    settings = model.generation_config
    assert (settings.do_sample, settings.temperature, settings.top_k, settings.top_p) == (True, 1.0, 0, 1.0)


@pytest.mark.parametrize(
    "tokenizer",
    [TOKENIZER, PreTrainedTokenizerFast.from_pretrained(FOLDER), build_tokenizer()],
    ids=["auto", "plain", "built"],
)
def test_each_character_is_one_token_and_decodes_to_itself(tokenizer):
    """AutoTokenizer replaces the folder's rules for some architectures; all ways of loading must agree."""
    text = ALPHABET + ALPHABET[::-1]
    ids = tokenizer(text)["input_ids"]
    assert [tokenizer.decode([token]) for token in ids] == list(text)
    assert tokenizer.decode(ids) == text
    padded = [*ids, tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(padded, skip_special_tokens=True) == text


def test_tokenizer_pads_on_the_left():
    batch = TOKENIZER(["1 2=3:", "1 1=2:1"], padding=True)
    assert batch["input_ids"][0][0] == TOKENIZER.pad_token_id
    assert batch["attention_mask"] == [[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]]


@pytest.mark.slow
def test_model_is_as_accurate_as_its_card_states(model):
    """Fails for a damaged or replaced file. With 32 problems the standard error of mean@16 is about 0.035."""
    metrics = measure(model, TOKENIZER, TASK.heldout_sets()["countdown"][:32], seed=0)
    assert 0.15 < metrics.mean_at_16 < 0.37
    assert metrics.pass_at_16 > 0.8
    assert 0.4 < metrics.entropy < 0.8


def test_solutions_are_complete_and_no_sum_reaches_the_first_product_target():
    assert solutions([1, 2]) == {3: ["1+2", "2+1"], -1: ["1-2"], 1: ["2-1"], 2: ["1*2", "2*1"]}
    assert solutions([2, 2]) == {4: ["2*2", "2+2"], 0: ["2-2"]}
    task = CountdownTask()
    assert task.numbers * task.max_number + 1 == FIRST_PRODUCT_TARGET


@pytest.mark.slow
def test_demonstrations_have_the_requested_shares():
    """Of wrong answers, which use the right numbers and sometimes reach the target by chance; and of products."""
    problems, correct = {problem.prompt: problem for problem in TRAIN}, dict(solved_problems(TRAIN))
    demonstrations = Demonstrations(TOKENIZER, TRAIN, seed=0)

    def answers(sampler: AnswerSampler) -> list[tuple[str, str]]:
        """Return prompts and answers of a batch, whose tokens end with the end of the sequence."""
        pairs = [
            (row.prompt_ids, answer) for row in demonstrations.rows(sampler) for answer in row.completions
        ]
        assert {answer[-1] for _, answer in pairs} == {TOKENIZER.eos_token_id}
        return [(TOKENIZER.decode(prompt), TOKENIZER.decode(answer[:-1])) for prompt, answer in pairs]

    for share, low, high in ((0.0, 0.0, 0.0), (0.5, 0.35, 0.6)):
        verdicts = [
            grade_countdown(problems[prompt], text).verdict for prompt, text in answers(partly_wrong(share))
        ]
        assert set(verdicts) <= {"correct", "wrong-value"}
        assert low <= verdicts.count("wrong-value") / len(verdicts) <= high
    rarely = answers(rarely_multiplying(0.2))
    needs_product = [
        (prompt, text) for prompt, text in rarely if all("*" in answer for answer in correct[prompt])
    ]
    products = [(text in correct[prompt], "*" in text) for prompt, text in needs_product]
    assert all(is_correct == has_product for is_correct, has_product in products)
    assert 0.12 < sum(is_correct for is_correct, _ in products) / len(products) < 0.28


@pytest.mark.slow
def test_training_command_is_deterministic(tmp_path, monkeypatch):
    monkeypatch.setattr("scripts.embedded_model.train.HELDOUT_PROBLEMS", 2)
    monkeypatch.setattr("scripts.embedded_model.train.PROBLEMS", 4)
    small = Task("countdown", lambda: TRAIN[:4], countdown(CountdownTask()).heldout_sets)
    monkeypatch.setattr("scripts.embedded_model.train.countdown", lambda config: small)
    for folder in ("first", "second"):
        main(["--out", str(tmp_path / folder), "--steps", "1", "--seed", "3"])
    files = sorted(file.name for file in FOLDER.iterdir())
    assert sorted(file.name for file in (tmp_path / "first").iterdir()) == files
    for name in files:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        made, shipped = (json.loads((folder / name).read_text()) for folder in (tmp_path / "first", FOLDER))
        for content in (made, shipped):
            content.pop("transformers_version", None)  # of the installation that wrote the file
        assert made == shipped, "train the shipped model again"
