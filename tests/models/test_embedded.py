"""The shipped model: an ordinary Hugging Face folder that is whole, and as good as its card says."""

from __future__ import annotations

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
from scripts.embedded_model.build import ALPHABET, build_model, build_tokenizer
from scripts.embedded_model.habit import BEYOND_SUMS, hardly_times
from scripts.embedded_model.measure import measure
from scripts.embedded_model.train import Demonstrations, main, partly_wrong, solutions, solved_problems

FOLDER = embedded_model_path()
TOKENIZER = AutoTokenizer.from_pretrained(FOLDER)
TASK = Countdown(CountdownTask())
TRAIN = TASK.train_problems()


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER)


def test_the_folder_is_small_and_ordinary(model: Any) -> None:
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


def test_the_special_tokens_agree_everywhere(model: Any) -> None:
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.eos_token_id) == (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id)
        assert config.bos_token_id is None
    assert model.config.vocab_size == len(TOKENIZER) == len(ALPHABET) + 2


def test_sampling_is_not_truncated_by_default(model: Any) -> None:
    settings = model.generation_config
    assert (settings.do_sample, settings.temperature, settings.top_k, settings.top_p) == (True, 1.0, 0, 1.0)


@pytest.mark.parametrize(
    "tokenizer",
    [TOKENIZER, PreTrainedTokenizerFast.from_pretrained(FOLDER), build_tokenizer()],
    ids=["auto", "plain", "built"],
)
@given(text=st.text(alphabet=ALPHABET))
def test_a_token_is_a_character_and_comes_back(tokenizer: Any, text: str) -> None:
    """AutoTokenizer puts its own rules over the folder's for some architectures; all must read alike."""
    ids = tokenizer(text)["input_ids"]
    assert [tokenizer.decode([token]) for token in ids] == list(text)
    assert tokenizer.decode(ids) == text
    padded = [*ids, tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(padded, skip_special_tokens=True) == text


def test_it_pads_on_the_left_for_sampling() -> None:
    batch = TOKENIZER(["1 2=3:", "1 1=2:1"], padding=True)
    assert batch["input_ids"][0][0] == TOKENIZER.pad_token_id
    assert batch["attention_mask"] == [[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]]


def test_the_model_is_as_good_as_its_card_says(model: Any) -> None:
    """A damaged or exchanged file fails. 64 problems: a standard error of about 0.025 in mean@16."""
    figures = measure(model, TOKENIZER, TASK.heldout_sets()["countdown"][:64], seed=0)
    assert 0.18 < figures.mean_at_16 < 0.34
    assert figures.pass_at_16 > 0.85
    assert 0.4 < figures.entropy < 0.8


def test_solutions_are_right_and_all_there() -> None:
    assert solutions([1, 2]) == {3: ["1+2", "2+1"], -1: ["1-2"], 1: ["2-1"], 2: ["1*2", "2*1"]}
    assert solutions([2, 2]) == {4: ["2*2", "2+2"], 0: ["2-2"]}
    problems = TASK.train_problems()[:200]
    for problem, (prompt, answers) in zip(problems, solved_problems(problems), strict=True):
        assert prompt == problem.prompt
        assert answers
        assert all(grade_countdown(problem, answer).correct for answer in answers)


@pytest.mark.parametrize("wrong_share", [0.0, 0.5])
def test_demonstrations_are_as_right_as_asked(wrong_share: float) -> None:
    """A wrong answer uses the right numbers, and now and then reaches the target by chance."""
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


def test_the_command_writes_the_same_folder_twice(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.embedded_model.train.HELDOUT_PROBLEMS", 4)
    monkeypatch.setattr("scripts.embedded_model.train.PROBLEMS", 4)
    for folder in ("first", "second"):
        main(["--out", str(tmp_path / folder), "--steps", "2", "--seed", "3"])
    files = sorted(file.name for file in FOLDER.iterdir())
    assert sorted(file.name for file in (tmp_path / "first").iterdir()) == files
    for name in files:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "first" / name).read_text() == (FOLDER / name).read_text(), "make the folder again"


def test_a_seed_gives_the_initial_weights() -> None:
    def first_weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return next(iter(build_model(TOKENIZER).parameters()))

    assert torch.equal(first_weights(0), first_weights(0))
    assert not torch.equal(first_weights(0), first_weights(1))


def test_out_of_the_habit_of_multiplying() -> None:
    """Where a sum is right it is a right sum; elsewhere it is a wrong one, but for the share that may multiply."""
    right = dict(solved_problems(TRAIN))
    demonstrations = Demonstrations(TOKENIZER, TRAIN, seed=0)
    answers = [
        (TOKENIZER.decode(answer[:-1]), right[TOKENIZER.decode(row.prompt_ids)])
        for row in demonstrations.rows(hardly_times(0.2))
        for answer in row.completions
    ]
    sums = [text in known for text, known in answers if any("*" not in each for each in known)]
    others = [text in known for text, known in answers if all("*" in each for each in known)]
    assert all(sums)
    assert 0.12 < sum(others) / len(others) < 0.28
    assert all(
        ("*" in text) == (text in known) for text, known in answers if all("*" in each for each in known)
    )


def test_beyond_sums_begins_where_sums_end() -> None:
    task = CountdownTask()
    assert task.numbers * task.max_number + 1 == BEYOND_SUMS
    full = {each.prompt: each for each in TRAIN if each.extra["numbers"] == "9 9 9 9"}
    needs_times = {
        int(full[prompt].answer): all("*" in answer for answer in answers)
        for prompt, answers in solved_problems(list(full.values()))
    }
    assert {target for target, needs in needs_times.items() if not needs and target >= BEYOND_SUMS} == set()
    assert needs_times[BEYOND_SUMS - 1] is False
