"""The bundled model: a complete Hugging Face folder, as accurate as its card states, and the scripts that train it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2ForCausalLM

from bandpo_cli.config.task import CountdownTask
from bandpo_cli.grading.countdown import grade_countdown
from bandpo_cli.models.load import embedded_model_path
from bandpo_cli.tasks.countdown import Countdown
from scripts.embedded_model.build import ALPHABET, build_tokenizer
from scripts.embedded_model.measure import measure
from scripts.embedded_model.rare_multiplication import FIRST_PRODUCT_TARGET, rarely_multiplying
from scripts.embedded_model.train import Demonstrations, main, partly_wrong, solutions, solved_problems

FOLDER = embedded_model_path()
TOKENIZER = AutoTokenizer.from_pretrained(FOLDER)
TASK = Countdown(CountdownTask())
TRAIN = TASK.train_problems()


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER)


def test_folder_has_the_usual_files_and_is_small(model: Any) -> None:
    assert {file.name for file in FOLDER.iterdir()} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
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
@given(text=st.text(alphabet=ALPHABET))
def test_each_character_is_one_token_and_decodes_to_itself(tokenizer: Any, text: str) -> None:
    """AutoTokenizer replaces the folder's rules for some architectures; all ways of loading must agree."""
    ids = tokenizer(text)["input_ids"]
    assert [tokenizer.decode([token]) for token in ids] == list(text)
    assert tokenizer.decode(ids) == text
    padded = [*ids, tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(padded, skip_special_tokens=True) == text


def test_tokenizer_pads_on_the_left() -> None:
    batch = TOKENIZER(["1 2=3:", "1 1=2:1"], padding=True)
    assert batch["input_ids"][0][0] == TOKENIZER.pad_token_id
    assert batch["attention_mask"] == [[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]]


@pytest.mark.slow
def test_model_is_as_accurate_as_its_card_states(model: Any) -> None:
    """Fails for a damaged or replaced file. With 64 problems the standard error of mean@16 is about 0.025."""
    metrics = measure(model, TOKENIZER, TASK.heldout_sets()["countdown"][:64], seed=0)
    assert 0.18 < metrics.mean_at_16 < 0.34
    assert metrics.pass_at_16 > 0.85
    assert 0.4 < metrics.entropy < 0.8


@pytest.mark.slow
def test_solutions_are_correct_and_complete() -> None:
    assert solutions([1, 2]) == {3: ["1+2", "2+1"], -1: ["1-2"], 1: ["2-1"], 2: ["1*2", "2*1"]}
    assert solutions([2, 2]) == {4: ["2*2", "2+2"], 0: ["2-2"]}
    problems = TASK.train_problems()[:200]
    for problem, (prompt, answers) in zip(problems, solved_problems(problems), strict=True):
        assert prompt == problem.prompt
        assert answers
        assert all(grade_countdown(problem, answer).correct for answer in answers)


@pytest.mark.slow
@pytest.mark.parametrize("wrong_share", [0.0, 0.5])
def test_demonstrations_have_the_requested_share_of_wrong_answers(wrong_share: float) -> None:
    """A wrong answer uses the right numbers and sometimes reaches the target by chance."""
    problems = {problem.prompt: problem for problem in TASK.train_problems()}
    rows = Demonstrations(TOKENIZER, TASK.train_problems(), seed=0).rows(partly_wrong(wrong_share))
    verdicts = []
    for row in rows:
        problem = problems[TOKENIZER.decode(row.prompt_ids)]
        for answer in row.completions:
            assert answer[-1] == TOKENIZER.eos_token_id
            verdicts.append(grade_countdown(problem, TOKENIZER.decode(answer[:-1])).verdict)
    assert set(verdicts) <= {"correct", "wrong-value"}
    share = verdicts.count("wrong-value") / len(verdicts)
    assert share == 0 if wrong_share == 0 else 0.35 < share < 0.6


@pytest.mark.slow
def test_training_command_is_deterministic(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.embedded_model.train.HELDOUT_PROBLEMS", 4)
    monkeypatch.setattr("scripts.embedded_model.train.PROBLEMS", 4)
    for folder in ("first", "second"):
        main(["--out", str(tmp_path / folder), "--steps", "2", "--seed", "3"])
    files = sorted(file.name for file in FOLDER.iterdir())
    assert sorted(file.name for file in (tmp_path / "first").iterdir()) == files
    for name in files:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        made, shipped = (json.loads((folder / name).read_text()) for folder in (tmp_path / "first", FOLDER))
        for content in (made, shipped):
            content.pop("transformers_version", None)  # of the installation that wrote the file
        assert made == shipped, "train the shipped model again"


@pytest.mark.slow
def test_rarely_multiplying_answers_have_the_requested_share_of_products() -> None:
    """Problems with a correct sum get a correct sum; the others get a wrong sum, except for the requested share."""
    correct_answers = dict(solved_problems(TRAIN))
    demonstrations = Demonstrations(TOKENIZER, TRAIN, seed=0)
    answers = [
        (TOKENIZER.decode(answer[:-1]), correct_answers[TOKENIZER.decode(row.prompt_ids)])
        for row in demonstrations.rows(rarely_multiplying(0.2))
        for answer in row.completions
    ]
    with_sums = [text in correct for text, correct in answers if any("*" not in item for item in correct)]
    only_products = [(text, correct) for text, correct in answers if all("*" in item for item in correct)]
    assert all(with_sums)
    assert 0.12 < sum(text in correct for text, correct in only_products) / len(only_products) < 0.28
    assert all(("*" in text) == (text in correct) for text, correct in only_products)


def test_first_product_target_is_the_first_that_no_sum_reaches() -> None:
    task = CountdownTask()
    assert task.numbers * task.max_number + 1 == FIRST_PRODUCT_TARGET
    problems = {item.prompt: item for item in TRAIN if item.extra["numbers"] == "9 9 9 9"}
    needs_product = {
        int(problems[prompt].answer): all("*" in answer for answer in answers)
        for prompt, answers in solved_problems(list(problems.values()))
    }
    assert all(needed for target, needed in needs_product.items() if target >= FIRST_PRODUCT_TARGET)
    assert needs_product[FIRST_PRODUCT_TARGET - 1] is False
