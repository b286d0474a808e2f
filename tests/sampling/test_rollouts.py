"""Rollouts: prompts, versions of completions, texts for graders, rewards, end-of-turn tokens; checks of the setup."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from bandpo_cli.config.batch_and_sampling import RewardConfig
from bandpo_cli.config.layers import resolve
from bandpo_cli.errors import ConfigError
from bandpo_cli.sampling.prompt_encoding import (
    EncodedPrompt,
    PromptEncoder,
    drop_long_prompts,
    end_of_turn_id,
)
from bandpo_cli.sampling.rollouts import (
    decode_completions,
    graded_groups,
    problem_per_completion,
    stream_completions,
)
from bandpo_cli.sampling.sampler import SampleRequest, SamplingParams, StaleEngineError
from bandpo_cli.tasks.task import build_prompt, build_task
from bandpo_cli.training.build import Components, build_components
from bandpo_cli.types import Completion, Grade, Message, Problem, Prompt
from tests.text_model import TEMPLATE as CHATML
from tests.text_model import THINKING, save_text_model, word_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' and strict %}{{ raise_exception('no system') }}{% endif %}"
    "<s> {{ m['role'] }} {{ m['content'] }} </s>{% endfor %}{% if add_generation_prompt %}<s> assistant{% endif %}"
)
CHAT = (Message("system", "be brief"), Message("user", "2 plus 2"))
END, TWO, PLUS = 2, 8, 9
PARAMS = SamplingParams(samples=2, temperature=1.0, max_tokens=6, stop_ids=(END,))


def tokenizer_of(template: str | None) -> PreTrainedTokenizerFast:
    """Return a word tokenizer that puts <s> before a text, as Llama's does."""
    tokenizer = word_tokenizer(template, ["system", "user", "assistant", "be", "brief", "2", "plus"])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def problem(prompt: Prompt) -> Problem:
    return Problem("p", prompt, "4", "test", "math")


@pytest.mark.parametrize(
    ("template", "setting", "prompt", "text", "token_ids"),
    [
        (TEMPLATE, "auto", CHAT, "<s> system be brief </s><s> user 2 plus 2 </s><s> assistant",
         (1, 3, 6, 7, 2, 1, 4, 8, 9, 8, 2, 1, 5)),  # without duplicate special tokens
        (TEMPLATE, "raw", CHAT, "be brief\n\n2 plus 2", (1, 6, 7, 8, 9, 8)),
        (None, "auto", CHAT, "be brief\n\n2 plus 2", (1, 6, 7, 8, 9, 8)),
        (TEMPLATE, "raw", "2 plus", "2 plus", (8, 9)),  # plain text has no special tokens
    ],
)  # fmt: skip
def test_prompts_as_text_and_tokens(template, setting, prompt, text, token_ids):
    """Alone, and in a batch with other kinds of prompts."""
    encoder = PromptEncoder(tokenizer_of(template), setting)
    _, encoded, _ = encoder.encode([problem("be"), problem(prompt), problem(CHAT)])
    assert (encoded.text, encoded.token_ids) == (text, token_ids)
    assert encoder.encode([problem(prompt)]) == [encoded]


def test_a_template_that_is_missing_or_refuses_is_an_error():
    with pytest.raises(ConfigError, match=r"model\.prompts=raw"):
        PromptEncoder(tokenizer_of(None), "chat")
    refusing = tokenizer_of(TEMPLATE.replace("and strict", "and true"))
    with pytest.raises(ConfigError, match=r"problem p: .*no system"):
        PromptEncoder(refusing).encode([problem(CHAT)])


def test_arguments_of_the_chat_template():
    """The value of an argument may be the template's default; an argument that the template ignores is an error."""
    (plain,) = PromptEncoder(tokenizer_of(THINKING)).encode([problem(CHAT)])
    for value, added, effect in (
        (False, "<think>\n\n</think>\n\n", ["+ <think>", "+ ", "+ </think>", "+ "]),
        (True, "", []),
    ):
        encoder = PromptEncoder(tokenizer_of(THINKING), "auto", {"enable_thinking": value})
        (prompt,) = encoder.encode([problem(CHAT)])
        assert prompt.text == plain.text + added
        assert encoder.effect_of_arguments(problem(CHAT)) == effect
    other = tokenizer_of(THINKING.replace("not enable_thinking", "raise_exception('no')"))
    for tokenizer, arguments, message in (
        (tokenizer_of(THINKING), {"enable_thinking": False, "enable_thinkin": 1},
         r"kwargs\.enable_thinkin = 1: .* ignores this argument \(did you mean 'enable_thinking'\?\); leave it out"),
        (tokenizer_of(TEMPLATE), {"tokenize": True}, r"kwargs\.tokenize = True: .* ignores this argument"),
        (tokenizer_of(TEMPLATE), {"strict": True}, "problem p: .*no system"),
        (other, {"enable_thinking": 2}, "problem p: .*no"),
        (tokenizer_of(None), {"a": 1}, r"kwargs = \{'a': 1\}: .* no chat template; .* or leave it out"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            PromptEncoder(tokenizer, "auto", arguments).encode([problem(CHAT)])


def test_long_and_empty_prompts_are_left_out_in_order():
    encoder = PromptEncoder(tokenizer_of(None), "raw")
    short, long, empty = problem("2 plus 2"), problem("2 plus 2 plus 2"), problem("")
    for limit, problems, expected in (
        (3, [long, short, empty, short], [short, short]),
        (5, [long, short], [long, short]),
    ):
        config = resolve([{"sampling": {"max_prompt_tokens": limit}}])
        assert drop_long_prompts(encoder, "training", problems, config, []) == expected


def completion(*ids: int, version: int = 0) -> Completion:
    return Completion(ids, (-0.5,) * len(ids), "stop" if ids[-1] == END else "length", version)


def test_rewards_have_the_configured_range_and_overlong_penalty():
    """Computed by hand: −1 to 1, and a penalty that grows by 0.2 per token over the last 4 of 6 tokens.

    Graders get each completion without special tokens, and with its problem.
    """
    problems = [Problem(name, name, "", "test", "math") for name in ("first", "second")]
    prompts = [EncodedPrompt("be", (6,)), EncodedPrompt("brief", (7, 7))]
    completions = [
        [completion(TWO, END), completion(TWO, PLUS, TWO, PLUS, END)],
        [completion(PLUS, END), completion(PLUS, TWO, TWO, TWO, TWO, TWO)],
    ]
    texts = decode_completions(tokenizer_of(None), completions)
    assert texts == ["2", "2 plus 2 plus", "plus", "plus 2 2 2 2 2"]
    owners = problem_per_completion(problems, completions)
    assert [owner.id for owner in owners] == ["first", "first", "second", "second"]
    grades = [Grade(float(correct), correct, str(correct)) for correct in (True, True, False, False)]
    reward = RewardConfig(correct=1.0, wrong=-1.0, overlong_buffer=4, overlong_penalty=0.8)
    groups = graded_groups(problems, prompts, completions, texts, grades, reward, 6)
    rollouts = [rollout for group in groups for rollout in group.rollouts_G]
    assert [rollout.grade.reward for rollout in rollouts] == pytest.approx([1.0, 1.0 - 0.6, -1.0, -1.0 - 0.8])
    assert [rollout.grade.verdict for rollout in rollouts] == ["True", "True", "False", "False"]
    assert [rollout.text for rollout in rollouts] == texts
    assert [rollout.completion for rollout in rollouts] == [*completions[0], *completions[1]]
    assert [rollout.problem for rollout in rollouts] == owners
    for group, owner, prompt in zip(groups, problems, prompts, strict=True):
        assert group.problem is owner
        assert {(item.prompt, item.prompt_ids) for item in group.rollouts_G} == {
            (prompt.text, prompt.token_ids)
        }


def test_completion_of_an_old_version_raises_stale_engine_error():
    new, old = completion(TWO, version=4), completion(TWO, version=3)
    sampler: Any = SimpleNamespace(
        sample_stream=lambda *_, **__: (item for item in [(0, [[new, new], [new, old]])])
    )
    requests = [([], SampleRequest([(6,)], 1))]
    with pytest.raises(StaleEngineError, match="weights of update 3, the policy is at 4"):
        list(stream_completions(sampler, requests, PARAMS, version=4))


def test_prompts_that_are_all_too_long_are_reported_with_the_share_of_the_template():
    """Words are tokens here. The template has 6 and the chat template 5: <s> user ... </s> <s> assistant."""
    template = "be brief be {question} brief be brief"
    config = resolve([
        {"sampling": {"max_prompt_tokens": 12}, "model": {"path": "a/b"}},
        {"task": {"name": "gsm8k", "template": template}},
    ])  # fmt: skip
    problems = [problem(build_prompt(question, template)) for question in ("2 plus 2", "2 plus 2 plus 2")]
    encoder = PromptEncoder(tokenizer_of(TEMPLATE))
    message = (
        "sampling.max_prompt_tokens = 12: all 2 prompts of 'training' are longer: 14 to 16 tokens, of which the "
        "template takes 11; --set sampling.max_prompt_tokens=16 keeps all of them"
    )
    notes: list[str] = []
    with pytest.raises(ConfigError) as error:
        drop_long_prompts(encoder, "training", problems, config, notes)
    assert str(error.value) == message
    long_chat = problem((Message("user", "2 plus 2 plus 2 plus 2 plus 2 plus 2"),))
    with pytest.raises(ConfigError, match="are longer: 16 to 16 tokens; --set"):
        drop_long_prompts(encoder, "training", [long_chat], config, notes)
    short = problem((Message("user", "2"),))
    assert drop_long_prompts(encoder, "training", [*problems, short], config, notes) == [short]
    assert notes[-1].startswith("training: 2 of 3 problems left out")


@pytest.mark.parametrize(
    ("template", "prompts", "prompt", "noted"),
    [
        (None, "auto", CHAT, True),
        (None, "raw", CHAT, False),
        (None, "auto", "2 plus 2", False),  # in the task's own format
        (TEMPLATE, "auto", CHAT, False),
    ],
)
def test_a_missing_chat_template_is_noted(template, prompts, prompt, noted):
    notes = PromptEncoder(tokenizer_of(template), prompts).notes([problem(prompt)])
    assert len(notes) == noted
    assert all("chat_template.jinja" in note and "model.prompts=raw" in note for note in notes)


def turns(end: str) -> str:
    """Return a template whose messages end with `end`."""
    return f"{{% for m in messages %}}{{{{ m.role }}}}: {{{{ m.content }}}}{end}{{% endfor %}}"


@pytest.mark.parametrize(
    ("template", "token"),
    [
        (CHATML, "<|im_end|>"),
        (turns(end=" <|im_end|>\n"), "<|im_end|>"),
        (turns(end="{{ eos_token }}"), "</s>"),
        (turns(end="<|end|>s"), "<|end|>"),
        (turns(end="<|end|><|im_end|>"), "<|end|>"),
        (turns(end="<|end|>>"), "<|end|>>"),  # the longest token that the text begins with
        (turns(end=""), None),
        (turns(end="\n\n"), None),
        (turns(end="<|finished|>"), None),  # a text of several tokens
        ("{{ raise_exception('no assistant') }}", None),
        ("{{ messages[0].content }}<|im_end|>", None),  # without the assistant's message
        (None, None),
    ],
)  # fmt: skip
def test_the_token_after_an_assistants_message(template, token):
    tokenizer = word_tokenizer(template, special=["<|im_start|>", "<|im_end|>", "<|end|>", "<|end|>>"])
    expected = None if token is None else tokenizer.convert_tokens_to_ids(token)
    assert end_of_turn_id(tokenizer) == expected


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


def test_completions_of_chat_prompts_end_at_the_end_of_a_turn(base_model, tmp_path):
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
def test_prompts_without_the_template_end_at_the_end_of_the_sequence_only(base_model, tmp_path, layer):
    components = components_of(base_model, tmp_path, layer)
    assert components.params.stop_ids == (0,)
    components.close()


def test_completions_longer_than_the_context_are_refused():
    config = resolve([{"sampling": {"max_tokens": 500}}])  # the context length of the bundled model is 512
    with pytest.raises(ConfigError, match=r"at most 512; .* such as --set sampling\.max_tokens=448"):
        build_components(config, build_task(config.task))


def test_problems_with_long_prompts_are_dropped_and_counted():
    config = resolve([{"task": {"max_number": 10, "numbers": 3}, "sampling": {"max_prompt_tokens": 10}}])
    task = build_task(config.task)
    components = build_components(config, task)
    try:
        kept = [problem for problem in task.train_problems() if len(str(problem.prompt)) <= 10]
        seen = {problem.id for problem in components.stream.next(len(kept))}
    finally:
        components.close()
    dropped = len(task.train_problems()) - len(kept)
    assert seen == {problem.id for problem in kept}
    assert dropped > 0
    assert any(f"training: {dropped:,} of" in note for note in components.notes)
