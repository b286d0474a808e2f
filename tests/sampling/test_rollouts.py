"""Rollouts: encoded prompts, versions of the sampled completions, texts for graders, rewards."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import RewardConfig
from bandpo_cli.errors import ConfigError
from bandpo_cli.sampling.rollouts import (
    EncodedPrompt,
    PromptEncoder,
    check_some_prompt_fits,
    decode_completions,
    drop_long_prompts,
    graded_groups,
    problem_per_completion,
    sample_completions,
)
from bandpo_cli.sampling.sampler import SamplingParams, StaleEngineError
from bandpo_cli.tasks.prompts import build_prompt
from bandpo_cli.types import Completion, Grade, Group, Message, Problem, Prompt

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' and strict %}{{ raise_exception('no system') }}{% endif %}"
    "<s> {{ m['role'] }} {{ m['content'] }} </s>{% endfor %}{% if add_generation_prompt %}<s> assistant{% endif %}"
)
CHAT = (Message("system", "be brief"), Message("user", "2 plus 2"))
END, TWO, PLUS = 2, 8, 9
PROBLEMS = [Problem(name, name, "", "test", "math") for name in ("first", "second")]
PROMPTS = [EncodedPrompt("be", (6,)), EncodedPrompt("brief", (7, 7))]
PARAMS = SamplingParams(samples=2, temperature=1.0, max_tokens=6, stop_ids=(END,))


def tokenizer_of(template: str | None) -> PreTrainedTokenizerFast:
    """Return a word tokenizer that puts <s> before a text, as Llama's does."""
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


def test_chat_template_applies_to_messages_without_duplicate_special_tokens() -> None:
    (encoded,) = PromptEncoder(tokenizer_of(TEMPLATE)).encode([problem(CHAT)])
    assert encoded.text == "<s> system be brief </s><s> user 2 plus 2 </s><s> assistant"
    assert encoded.token_ids == (1, 3, 6, 7, 2, 1, 4, 8, 9, 8, 2, 1, 5)


@pytest.mark.parametrize(("template", "prompts"), [(TEMPLATE, "raw"), (None, "auto"), (None, "raw")])
def test_raw_messages_are_joined_after_the_start_token(template: str | None, prompts: str) -> None:
    (encoded,) = PromptEncoder(tokenizer_of(template), prompts).encode([problem(CHAT)])
    assert encoded.text == "be brief\n\n2 plus 2"
    assert encoded.token_ids == (1, 6, 7, 8, 9, 8)


def test_plain_text_gets_no_special_tokens_in_a_batch_with_messages() -> None:
    encoder = PromptEncoder(tokenizer_of(TEMPLATE), "raw")
    plain, joined = encoder.encode([problem("2 plus"), problem((Message("user", "2 plus"),))])
    assert plain.token_ids == (8, 9)
    assert joined.token_ids == (1, 8, 9)


def test_chat_setting_without_a_template_names_the_alternative() -> None:
    with pytest.raises(ConfigError, match=r"model\.prompts=raw"):
        PromptEncoder(tokenizer_of(None), "chat")


def test_error_of_a_template_names_the_problem() -> None:
    refusing = tokenizer_of(TEMPLATE.replace("and strict", "and true"))
    with pytest.raises(ConfigError, match=r"problem p: .*no system"):
        PromptEncoder(refusing).encode([problem(CHAT)])


def test_filter_by_length_removes_long_and_empty_prompts_in_order() -> None:
    encoder = PromptEncoder(tokenizer_of(None), "raw")
    short, long, empty = problem("2 plus 2"), problem("2 plus 2 plus 2"), problem("")
    assert encoder.filter_by_length([long, short, empty, short], 3) == [short, short]
    assert encoder.filter_by_length([long, short], 5) == [long, short]


def completion(*ids: int, version: int = 0) -> Completion:
    return Completion(ids, (-0.5,) * len(ids), "stop" if ids[-1] == END else "length", version)


COMPLETIONS = [
    [completion(TWO, END), completion(TWO, PLUS, TWO, PLUS, END)],
    [completion(PLUS, END), completion(PLUS, TWO, TWO, TWO, TWO, TWO)],
]


class RecordingGrader:
    """Grades texts that begin with 2 as correct; records its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def __call__(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[Grade]:
        self.calls += zip((problem.id for problem in problems), texts, strict=True)
        return [
            Grade(1.0, True, "correct") if text.startswith("2") else Grade(0.0, False, "wrong")
            for text in texts
        ]


def graded(grader: RecordingGrader, reward: RewardConfig) -> list[Group]:
    texts = decode_completions(tokenizer_of(None), COMPLETIONS)
    grades = grader(problem_per_completion(PROBLEMS, COMPLETIONS), texts)
    return graded_groups(PROBLEMS, PROMPTS, COMPLETIONS, texts, grades, reward, 6)


def test_rewards_have_the_configured_range_and_overlong_penalty() -> None:
    """Computed by hand: −1 to 1, and a penalty that grows by 0.2 per token over the last 4 of 6 tokens."""
    reward = RewardConfig(correct=1.0, wrong=-1.0, overlong_buffer=4, overlong_penalty=0.8)
    groups = graded(RecordingGrader(), reward)
    rewards = [[rollout.grade.reward for rollout in group.rollouts_G] for group in groups]
    assert rewards == [pytest.approx([1.0, 1.0 - 0.6]), pytest.approx([-1.0, -1.0 - 0.8])]
    verdicts = [(rollout.grade.correct, rollout.grade.verdict) for rollout in groups[0].rollouts_G]
    assert verdicts == [(True, "correct")] * 2


def test_graders_get_each_completion_without_special_tokens_and_with_its_problem() -> None:
    grader = RecordingGrader()
    groups = graded(grader, RewardConfig())
    assert grader.calls == [
        ("first", "2"),
        ("first", "2 plus 2 plus"),
        ("second", "plus"),
        ("second", "plus 2 2 2 2 2"),
    ]
    for group, problem, prompt, completions in zip(groups, PROBLEMS, PROMPTS, COMPLETIONS, strict=True):
        assert group.problem is problem
        assert [rollout.completion for rollout in group.rollouts_G] == completions
        assert {(rollout.prompt, rollout.prompt_ids) for rollout in group.rollouts_G} == {
            (prompt.text, prompt.token_ids)
        }


def test_completion_of_an_old_version_raises_stale_engine_error() -> None:
    new, old = completion(TWO, version=4), completion(TWO, version=3)
    sampler: Any = SimpleNamespace(sample=lambda prompts, params, seed: [[new, new], [new, old]])
    with pytest.raises(StaleEngineError, match="weights of update 3, the policy is at 4"):
        sample_completions(sampler, PROMPTS, PARAMS, seed=1, version=4)
    sampler = SimpleNamespace(sample=lambda prompts, params, seed: [[new, new], [new, new]])
    assert sample_completions(sampler, PROMPTS, PARAMS, seed=1, version=4) == [[new, new], [new, new]]


def test_prompts_that_are_all_too_long_are_reported_with_the_share_of_the_template() -> None:
    """Words are tokens here. The template has 6 and the chat template 5: <s> user ... </s> <s> assistant."""
    config = resolve(
        [
            {"sampling": {"max_prompt_tokens": 12}, "model": {"path": "a/b"}},
            {"task": {"name": "gsm8k", "template": "be brief be {question} brief be brief"}},
        ]
    )
    questions = ["2 plus 2", "2 plus 2 plus 2"]
    problems = [
        problem(build_prompt(question, "be brief be {question} brief be brief")) for question in questions
    ]
    encoder = PromptEncoder(tokenizer_of(TEMPLATE))
    message = (
        "sampling.max_prompt_tokens = 12: all 2 prompts of 'training' are longer: 14 to 16 tokens, of which the "
        "template takes 11; --set sampling.max_prompt_tokens=16 keeps all of them"
    )
    for check in (check_some_prompt_fits, partial(drop_long_prompts, notes=[])):
        with pytest.raises(ConfigError) as error:
            check(encoder, "training", problems, config)
        assert str(error.value) == message
    long_chat = problem((Message("user", "2 plus 2 plus 2 plus 2 plus 2 plus 2"),))
    with pytest.raises(ConfigError, match="are longer: 16 to 16 tokens; --set"):
        check_some_prompt_fits(encoder, "training", [long_chat], config)
    check_some_prompt_fits(encoder, "training", [*problems, problem((Message("user", "2"),))], config)


@pytest.mark.parametrize(
    ("template", "prompts", "prompt", "noted"),
    [
        (None, "auto", CHAT, True),
        (None, "raw", CHAT, False),
        (None, "auto", "2 plus 2", False),  # in the task's own format
        (TEMPLATE, "auto", CHAT, False),
    ],
)
def test_a_missing_chat_template_is_noted(
    template: str | None, prompts: str, prompt: Prompt, noted: bool
) -> None:
    notes = PromptEncoder(tokenizer_of(template), prompts).notes([Problem("a", prompt, "", "test", "math")])
    assert len(notes) == noted
    assert all("chat_template.jinja" in note and "model.prompts=raw" in note for note in notes)
