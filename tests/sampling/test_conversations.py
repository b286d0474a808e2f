"""Conversations with tools and environments: tokens in and out, limits, errors, seeds, and the order of requests."""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from bandpo_cli.config.batch_and_sampling import GradingConfig
from bandpo_cli.errors import ConfigError
from bandpo_cli.grading import tools
from bandpo_cli.grading.tools import EnvironmentPool, ToolPool, as_problem, first_messages, tool_schemas
from bandpo_cli.sampling.conversations import Conversations
from bandpo_cli.sampling.prompt_encoding import PromptEncoder
from bandpo_cli.sampling.rollouts import decode_completions, stream_completions, with_turns
from bandpo_cli.sampling.sampler import SampleRequest, SamplingParams, TransformersSampler
from bandpo_cli.sampling.tool_calls import parse_calls
from bandpo_cli.types import Completion, Message, Problem
from tests.text_model import END, TEMPLATE, save_text_model

TOOLS_TEMPLATE = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + TEMPLATE
CODE = '''
import random, time

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    print("adding")
    if a == 13:
        raise RuntimeError("no 13")
    if a == 99:
        time.sleep(60)
    return "x" * b if a == 0 else a + b

def untyped(a):
    """Return it.

    Args:
        a: anything.
    """
    return a

class Guess:
    """Guess a number; the answer is how far away it is."""
    def reset(self, problem):
        self.number, self.reward = random.Random(problem["seed"]).randrange(100), 0.0
        return [f"Guess a number from 0 to 99. {problem['question']}"]
    def step(self, message):
        if message["content"] == "crash":
            raise KeyError("no such word")
        distance = abs(int(message["content"]) - self.number)
        self.reward = 1.0 if not distance else 1 / (1 + distance)
        return None if not distance else [f"{distance} away"]

class Endless:
    reward, steps = 0.25, 0
    def reset(self, problem): return "say something"
    def step(self, message):
        Endless.steps += 1
        return "go on"

class NoStep:
    reward = 1
    def reset(self, problem): return "?"

class Counter:
    """An environment of TRL: its public methods are tools."""
    def reset(self, **columns):
        self.total = 0
        return f" The sum is {self.total}."
    def increase(self, by: int) -> str:
        """Increase the sum.

        Args:
            by: the difference.
        """
        if by > 5:
            raise ValueError("too much")
        self.total += by
        return str(self.total)
    async def get(self) -> int:
        """Return the sum."""
        return self.total
    async def get_reward(self):
        return self.total / 10

class Odd:
    """Answers with a character that has no encoding, then with a role that the template refuses."""
    reward = 1
    def reset(self, problem): return "?"
    def step(self, message):
        self.turns = getattr(self, "turns", 0) + 1
        return ["\\ud800"] if self.turns == 1 else [{"role": "judge", "content": "no"}]
'''
MALFORMED = "Error: a call is an object with name, a text, and arguments, an object"
PARAMS = SamplingParams(samples=2, temperature=1.0, max_tokens=400, stop_ids=())


class Script(TransformersSampler):
    """Samples what `reply` makes of the text of the prompt, also in tokens of one character, and the end token."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        reply: Callable[[str], str],
        streams: bool = False,
        by_character: bool = False,
    ) -> None:
        self.streams, self._tokenizer, self._reply = streams, tokenizer, reply
        self._split: Callable[[str], list[str]] = list if by_character else lambda text: [text]
        self.requests: list[SampleRequest] = []

    def sample_stream(self, requests: Any, params: SamplingParams, in_order: bool = True) -> Any:
        for number, request in enumerate(filter(None, requests)):
            yield number, self.sample_request(request, params)

    def sample_request(self, request: SampleRequest, params: SamplingParams) -> list[list[Completion]]:
        self.requests.append(request)
        groups = []
        for prompt, turn in zip(request.prompts_P, request.turns_P, strict=True):
            texts = [*self._split(self._reply(self._tokenizer.decode(list(prompt)))), END]
            ids = [*chain(*self._tokenizer(texts, add_special_tokens=False)["input_ids"])]
            reason = "length" if len(ids) > turn.max_tokens else "stop"
            ids = ids[: turn.max_tokens]
            groups.append([Completion(ids, [-0.5] * len(ids), reason, 3, [0.1] * len(ids))])
        return groups

    def sync(self, model: Any, version: int) -> None: ...


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = save_text_model(tmp_path_factory.mktemp("text"), [CODE, TOOLS_TEMPLATE], vocabulary=500)
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    loaded.chat_template = TOOLS_TEMPLATE
    return loaded


POOLS: dict[tuple[str | None, float], ToolPool] = {}
"""The workers of an environment, or of the tools, by name and deadline, which the tests share."""


@pytest.fixture(scope="module", autouse=True)
def code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("code"))
        Path("turns_code.py").write_text(CODE)
        yield
    while POOLS:
        POOLS.popitem()[1].close()


def call(**arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': arguments})}\n</tool_call>"


def problems(count: int = 1) -> list[Problem]:
    asked = [Message("user", f"What is {place} + 1?") for place in range(count)]
    plain = [Problem(f"p{place}", (turn,), "1", "data", "number") for place, turn in enumerate(asked)]
    return [replace(problem, extra=as_problem(problem)) for problem in plain]


class Talk:
    """Runs conversations of scripted replies."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, environment: str | None = None, **options: Any
    ) -> None:
        key = environment, options.pop("deadline", 60.0)
        if key not in POOLS:
            pool, name = (ToolPool, "add") if environment is None else (EnvironmentPool, environment)
            POOLS[key] = pool((f"turns_code:{name}",), GradingConfig(deadline=key[1], workers=2))
        self.pool = POOLS[key]
        self.tokenizer, self.encoder = tokenizer, PromptEncoder(tokenizer)
        self._options = {"max_turns": 4, "max_chars": 100} | options

    def run(
        self,
        reply: Callable[[str], str],
        batches: Sequence[Sequence[Problem]] = (problems(),),
        params: SamplingParams = PARAMS,
        **options: bool,
    ) -> list[list[list[Completion]]]:
        self.sampler = Script(self.tokenizer, reply, **options)

        def requests() -> Iterator[tuple[Sequence[Problem], SampleRequest]]:
            start = 0
            for batch in batches:
                prompts = [prompt.token_ids for prompt in self.encoder.encode(batch)]
                yield batch, SampleRequest(prompts, 50 + start)
                start += len(batch)

        talk = Conversations(self.encoder, self.pool, **self._options)
        return [*stream_completions(self.sampler, requests(), params, 3, talk)]

    def one(self, reply: Callable[[str], str], **options: Any) -> Completion:
        (((first, *others),),) = self.run(reply, **options)
        assert all(other == first for other in others)
        return first


def once(*texts: str) -> Callable[[str], str]:
    """Return a reply by the number of the assistant's earlier turns."""
    return lambda prompt: texts[min(prompt.count("<|im_start|>assistant") - 1, len(texts) - 1)]


def contents(completion: Completion) -> list[Any]:
    return [message["content"] for message in completion.conversation.messages]


@pytest.mark.slow
def test_the_next_turn_continues_from_the_tokens_and_not_from_the_text(tokenizer):
    """Of a text in single characters, as a model may sample it: tokenized again it has fewer tokens."""
    talk, words = Talk(tokenizer), f"I add.{call(a=40, b=2)}"
    completion = talk.one(once(words, "42"), by_character=True)
    first, second = talk.sampler.requests
    assert contents(completion) == ["I add.", "42", "42"]
    about = completion.conversation
    assert (about.turns, about.calls, about.failed_calls, about.reward) == (2, 1, 0, None)
    assert about.messages[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 40, "b": 2}}
    assert [message["role"] for message in about.messages] == ["assistant", "tool", "assistant"]
    ((place, inserted),) = completion.inserted
    assert tokenizer.decode(inserted) == "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    first_turn, second_turn = completion.token_ids[:place], completion.token_ids[place:]
    assert len(first_turn) > len(tokenizer(words + END)["input_ids"])
    assert tokenizer.decode(list(second_turn)) == f"42{END}"
    assert decode_completions(tokenizer, [[completion]]) == ["42"], "the last turn is graded"
    assert second.prompts_P[0] == [*first.prompts_P[0], *first_turn, *inserted]
    assert [*completion.marked_ids] == [*first_turn, *(~token for token in inserted), *second_turn]
    assert completion.finish_reason == "stop"
    assert len(completion.logprobs) == len(completion.entropies) == len(completion.token_ids)
    graded = with_turns(problems()[0], completion)
    assert graded.extra == {**problems()[0].extra, "messages": about.messages}


@pytest.mark.parametrize(
    ("words", "content", "deadline"),
    [
        (call(a=13, b=1), "Error: RuntimeError: no 13", 60.0),
        (call(a=99, b=1), "Error: no result within 0.3 s", 0.3),
        (call(a=1), "Error: TypeError: add() missing 1 required positional argument: 'b'", 60.0),
        (call(a=0, b=200), f"{'x' * 100} ... (100 more characters)", 60.0),
        (call(a=1, b=1).replace("add", "sub"), "Error: no tool 'sub'; there are add", 60.0),
        ('<tool_call>{"name": "add", ', "Error: the call is not JSON: Expecting prop", 60.0),
        ('<tool_call>{"arguments": {}}</tool_call>', MALFORMED, 60.0),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', MALFORMED, 60.0),
    ],
)  # fmt: skip
def test_what_goes_wrong_in_a_call_is_a_result_that_the_model_reads(tokenizer, words, content, deadline):
    talk = Talk(tokenizer, deadline=deadline)
    completion = talk.one(once(words, "done"))
    assert contents(completion)[1].startswith(content)
    about, is_long = completion.conversation, "more characters" in contents(completion)[1]
    assert about.failed_calls == ("more characters" not in content)
    assert about.malformed_calls == ("call" in content)
    assert (about.timed_out_calls, about.truncated_results) == (deadline < 1, is_long)
    assert contents(completion)[-1] == "done"


def nested(levels: int) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {{"a": {"[" * levels}{"]" * levels}, "b": 1}}}}</tool_call>'


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (nested(700), "Error: the lists and objects of a call have at most 64 levels"),
        (call(a="x" * (1 << 16), b=1), "Error: a call has at most 65,536 characters"),
    ],
)
def test_calls_beyond_the_limits_are_malformed(tokenizer, words, error):
    talk = Talk(tokenizer)
    long = SamplingParams(1, 1.0, 1 << 18, ())
    about = talk.one(once(words, "done"), params=long).conversation
    assert about.messages[1]["content"] == error
    assert (about.calls, about.failed_calls, about.malformed_calls) == (1, 1, 1)
    (*made, last) = parse_calls(call(a=1, b=1) * 40)["tool_calls"]
    assert [item["function"]["name"] for item in made] == ["add"] * 32
    assert last["function"]["arguments"] == "a message has at most 32 calls; the other 8 were not made"


def test_characters_without_an_encoding_in_the_name_of_a_tool_end_no_run(tokenizer, monkeypatch):
    template = TOOLS_TEMPLATE.replace("{{ m['content'] }}", "{{ m['name'] }}{{ m['content'] }}")
    monkeypatch.setattr(tokenizer, "chat_template", template)
    talk = Talk(tokenizer)
    completion = talk.one(once(call(a=1, b=1).replace("add", "\\ud800"), "done"))
    assert contents(completion)[1] == "Error: no tool '?'; there are add"


def test_calls_are_read_as_the_response_template_of_the_tokenizer_says(tokenizer, monkeypatch):
    """Calls in another form, one of them with arguments that are no object, and a message that it cannot read."""
    call_field = {
        "open": "[call]",
        "close": "[/call]",
        "content": "json",
        "repeats": True,
        "transform": "{content}",
    }
    template = {
        "version": 1,
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {"content": {"close": END}, "tool_calls": call_field},
    }
    monkeypatch.setattr(tokenizer, "response_template", template, raising=False)
    words = (
        '[call]{"name": "add", "arguments": {"a": 1, "b": 2}}[/call]',
        '[call]{"name": "add", "arguments": 3}[/call]',
    )
    talk = Talk(tokenizer)
    completion = talk.one(once(f"I add.{words[0]}", words[1], "[call]{[/call]", "5"))
    assert contents(completion)[:2] == ["I add.", "3"]
    assert contents(completion)[3] == MALFORMED
    assert contents(completion)[5].startswith("Error: the message is not readable")
    assert (completion.conversation.calls, completion.conversation.failed_calls) == (3, 2)
    monkeypatch.setitem(call_field, "content", "text")  # calls that are texts
    talk = Talk(tokenizer)
    completion = talk.one(once(words[0], "5"))
    assert contents(completion)[1].startswith("Error: the message is not readable")
    assert (completion.conversation.calls, completion.conversation.failed_calls) == (1, 1)


def test_the_calls_of_a_turn_are_answered_in_their_order(tokenizer):
    talk = Talk(tokenizer)
    completion = talk.one(once(call(a=1, b=1) + call(a=13, b=1) + call(a=2, b=2), "done"))
    assert contents(completion) == ["", "2", "Error: RuntimeError: no 13", "4", "done"]


def test_conversations_end_at_the_limits_of_turns_and_tokens(tokenizer):
    again = once(call(a=1, b=1))
    talk = Talk(tokenizer)
    completion = talk.one(again)
    assert (completion.conversation.turns, completion.conversation.calls) == (4, 3)
    assert completion.finish_reason == "length"
    for max_tokens in range(3, 200, 7):
        params = SamplingParams(1, 1.0, max_tokens, ())
        ((group,),) = talk.run(again, params=params)
        (cut,) = group
        assert len(cut.marked_ids) <= max_tokens
        assert cut.marked_ids[-1] >= 0, "the last token is a sampled one"
        assert cut.finish_reason == "length"
    assert talk.one(once("no call")).finish_reason == "stop"


@pytest.mark.parametrize("streams", [False, True])
def test_requests_come_back_in_order_and_do_not_depend_on_the_others(tokenizer, streams):
    """Conversations of one and two turns; seeds depend on problem, sample and turn alone."""

    def reply(prompt: str) -> str:
        return "done" if "tool\n" in prompt or "2 +" in prompt else call(a=1, b=1)

    every = problems(5)
    talk = Talk(tokenizer)
    together = talk.run(reply, [every], streams=streams)
    seeds = {turn.seed for request in talk.sampler.requests for turn in request.turns_P or ()}
    divided = talk.run(reply, [every[:2], every[2:4], every[4:]], streams=streams)
    assert {turn.seed for request in talk.sampler.requests for turn in request.turns_P or ()} == seeds
    most = max(len(request.prompts_P) for request in talk.sampler.requests)
    assert most == (1 if streams else 4)
    assert len(seeds) == 2 * (5 + 4)
    assert [len(batch) for batch in divided] == [2, 2, 1]
    assert [group for batch in divided for group in batch] == together[0]
    assert [len(group) for group in together[0]] == [2] * 5


def test_an_environment_gives_messages_and_the_reward(tokenizer):
    """The guesses converge by the answers; some of the steps are repeated by another worker."""

    def reply(prompt: str) -> str:
        turns = prompt.split("<|im_start|>")
        guess = 0
        for before, after in pairwise(turns):
            if before.startswith("assistant") and after.startswith("user"):
                guess = int(before.split()[1].removesuffix(END)) + int(after.split()[1])
        return str(guess)

    prompted = first_messages("turns_code:Guess", GradingConfig(), problems(6), "environment")
    assert prompted[2].prompt == (Message("user", "Guess a number from 0 to 99. What is 2 + 1?"),)
    assert {problem.grader for problem in prompted} == {"environment"}
    talk = Talk(tokenizer, "Guess")
    (groups,) = talk.run(reply, [prompted])
    for group in groups:
        for completion in group:
            about = completion.conversation
            assert (about.turns, about.reward, completion.finish_reason) == (2, 1.0, "stop")
            assert about.messages[1]["content"] == f"{about.messages[2]['content']} away"
    assert len({str(contents(group[0])) for group in groups}) > 3


def test_replies_to_a_call_of_the_stream_that_ended_early_are_dropped(tokenizer, monkeypatch):
    """They arrive together with the others."""
    talk = Talk(tokenizer)
    poll = talk.pool.poll
    monkeypatch.setattr(talk.pool, "poll", lambda seconds: {-1: {"content": "old"}} | poll(seconds))
    completion = talk.one(once(call(a=40, b=2), "42"))
    assert contents(completion)[1:] == ["42", "42"]


@pytest.mark.parametrize(
    "message", [5, {"content": "no role"}, {"role": "user"}, {"role": "user", "content": 5}]
)
def test_an_environment_returns_texts_or_messages(message):
    with pytest.raises(ValueError, match="texts or messages with role and content, not"):
        tools.as_messages([message])


def test_the_environments_used_last_are_kept_and_the_others_repeat_their_steps(monkeypatch):
    monkeypatch.setattr(tools, "KEPT_ENVIRONMENTS", 1)
    environments = tools.load_environment(["turns_code:Endless"])
    steps = []
    for name, turns in (("a", 1), ("a", 2), ("b", 1), ("a", 3)):
        asyncio.run(environments.call([(name, {}, [{"content": "well"}] * turns, False)]))
        steps.append(sys.modules["turns_code"].Endless.steps)
    assert steps == [1, 2, 3, 3 + 3]


@pytest.mark.parametrize("exit", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_an_exit_in_a_tool_or_an_environment_is_its_error(exit, monkeypatch):
    def leave() -> None:
        raise exit("no")

    result = asyncio.run(tools.call_tool({"leave": leave}, "leave", {}))
    assert result == {"content": f"Error: {exit.__name__}: no", "failed": True}
    monkeypatch.setattr(tools, "load_function", lambda path: leave)
    with pytest.raises(ValueError, match=f"'mine:Env' cannot be created: {exit.__name__}: no"):
        tools.load_environment(["mine:Env"])


def test_an_environment_that_never_ends_or_fails(tokenizer):
    talk = Talk(tokenizer, "Endless", max_turns=3)
    completion = talk.one(once("well"))
    assert (completion.conversation.turns, completion.conversation.reward) == (3, 0.25)
    assert completion.finish_reason == "length"
    params = SamplingParams(1, 1.0, 20, ())
    cut = talk.one(once("well " * 30), params=params)
    assert (len(cut.token_ids), cut.conversation.reward) == (20, 0.25)
    too_long = talk.one(once("well"), params=SamplingParams(1, 1.0, 10, ()))
    assert (too_long.conversation.turns, too_long.conversation.reward) == (1, 0.25)
    talk = Talk(tokenizer, "Guess")
    completion = talk.one(once("crash"))
    about = completion.conversation
    assert about.reward == "KeyError: 'no such word' (turns_code.py:33, in step)"
    assert about.failed_calls == 1


@pytest.mark.slow
def test_a_message_that_is_cut_is_ended_and_the_conversation_continues(tokenizer):
    """The model then reads what the template makes of the conversation, as after a message that it has ended."""
    long = "well " * 30
    talk = Talk(tokenizer, "Endless", max_turns=3, max_tokens=6)
    completion = talk.one(once(long, "well", long))
    read = tokenizer.decode([*talk.sampler.requests[-1].prompts_P[0]])
    first, second = completion.inserted
    lengths = [first.position, second.position - first.position, len(completion.token_ids) - second.position]
    assert lengths[0] == lengths[2] == 6 > lengths[1]
    assert first.token_ids == (tokenizer.convert_tokens_to_ids(END), *second.token_ids)
    asked = [{"role": "user", "content": "What is 0 + 1?"}]
    messages = [*asked, *completion.conversation.messages[:4]]
    assert read == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    most = len(tokenizer(call(a=1) + END)["input_ids"])
    talk = Talk(tokenizer, max_tokens=most)  # of tools, the last message is the answer
    answered, answer = (talk.one(once(call(a=1), text)) for text in ("2", long * 2))
    unread = talk.one(once(call(a=1) + long, "2"))
    assert [item.finish_reason for item in (answered, answer, unread)] == ["stop", "length", "stop"]
    assert [item.conversation.turns for item in (answered, answer, unread)] == [2, 2, 2]


@pytest.mark.slow
def test_an_environment_of_trl_has_tools(tokenizer):
    def use(name: str, **arguments: int) -> str:
        return call(**arguments).replace("add", name)

    prompted = first_messages("turns_code:Counter", GradingConfig(), problems(), "environment")
    assert prompted[0].prompt == (Message("user", "What is 0 + 1? The sum is 0."),)
    names = [schema["function"]["name"] for schema in tool_schemas(("turns_code:Counter",), True)]
    assert names == ["get", "increase"]
    words = use("increase", by=3) + use("increase", by=9), use("increase", by=4) + use("get"), "done"
    talk = Talk(tokenizer, "Counter")
    completion = talk.one(once(*words), batches=[prompted])
    about = completion.conversation
    assert contents(completion)[1:3] == ["3", "Error: ValueError: too much"]
    assert contents(completion)[4:] == ["7", "7", "done"]
    assert (about.turns, about.calls, about.failed_calls, about.reward) == (3, 4, 1, 0.7)
    assert completion.finish_reason == "stop"


def test_messages_that_cannot_be_rendered_end_their_conversation_alone(tokenizer, monkeypatch):
    refusing = "{% for m in messages if m['role'] == 'judge' %}{{ raise_exception('no judge') }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", refusing + TOOLS_TEMPLATE)
    talk = Talk(tokenizer, "Odd")
    about = talk.one(once("well")).conversation
    assert (about.messages[1]["content"], about.turns, about.failed_calls) == ("?", 2, 1)
    assert str(about.reward).startswith(
        "the model's chat template refuses a conversation with messages of judge"
    )


@pytest.mark.slow
def test_tools_and_environments_that_cannot_be_used(tokenizer):
    with pytest.raises(ConfigError, match=r"task.tools: 'untyped' needs type hints and a docstring"):
        tool_schemas(("turns_code:untyped",), False)
    with pytest.raises(ConfigError, match=r"task.tools: module 'turns_code' has no function 'sub'"):
        tool_schemas(("turns_code:sub",), False)
    with pytest.raises(ConfigError, match=r"task.environment: 'turns_code:NoStep' has no method step"):
        first_messages("turns_code:NoStep", GradingConfig(), problems(), None)
    with pytest.raises(ConfigError, match=r"task.tools: 'turns_code:Guess' is a class; a tool is a function"):
        tool_schemas(("turns_code:Guess",), False)
    (schema,) = tool_schemas(("turns_code:add",), False)
    plain = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    with pytest.raises(ConfigError, match=r"task.tools: the model's chat template has no place for tools"):
        PromptEncoder(plain, "auto", {"tools": [schema]}).encode(problems())
    prompt = PromptEncoder(tokenizer, "auto", {"tools": [schema]}).encode(problems())[0].text
    assert "Add two numbers." in prompt
    with pytest.raises(ConfigError, match="need a chat template"):
        Conversations(PromptEncoder(tokenizer, "raw"), Talk(tokenizer).pool, 1, 1)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain", "plain", []),
        ('a <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call> b', "a  b", [("f", {"x": 1})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", {"x": 1})]),
        ('<tool_call>{"name": "f"}', "", [("f", {})]),
        # without tags: the object alone, in a block or not
        ('{"name": "f", "arguments": {"x": 1}}\n', "", [("f", {"x": 1})]),
        ('```json\n{"name": "f", "arguments": {"x": 1}}\n```', "", [("f", {"x": 1})]),
        ('So: {"name": "f", "arguments": {}}', 'So: {"name": "f", "arguments": {}}', []),
        ('{"name": "Anna"}', '{"name": "Anna"}', []),
        ('{"arguments": {"x": 1}}', '{"arguments": {"x": 1}}', []),
        ('{"name": "f", "arguments": {}} {', '{"name": "f", "arguments": {}} {', []),
    ],
)
def test_calls_in_the_format_of_hermes(text, content, calls):
    message = parse_calls(text)
    functions = [item["function"] for item in message.get("tool_calls", ())]
    assert message["content"] == content
    assert [(item["name"], item["arguments"]) for item in functions] == calls
