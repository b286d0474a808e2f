"""Questions as chat messages: what reaches the chat template, and which lists are refused."""

import json
import re
from pathlib import Path
from typing import Any

import pandas
import pytest

from bandpo_cli.config.task import DataTask
from bandpo_cli.errors import ConfigError
from bandpo_cli.sampling.prompt_encoding import PromptEncoder
from bandpo_cli.tasks.completions import read_completions
from bandpo_cli.tasks.task import build_task
from bandpo_cli.types import Message, Problem
from tests.tasks.stored_completions import jsonl
from tests.text_model import TEMPLATE as CHATML
from tests.text_model import word_tokenizer

STRICT = (  # as Gemma's: no system message, and turns alternate
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": " What is 3*4?\n"}
SOLUTION = {"role": "assistant", "content": "3*4 is 12.\n#### 12"}
EXAMPLE = [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": "Answer: 2"}]
FEW_SHOT = [SYSTEM, *EXAMPLE, QUESTION]


def read(path: Path, **settings: Any) -> tuple[dict[str, Problem], list[str]]:
    """Return the problems of a file by answer, those held out included, and the notes."""
    task = build_task(DataTask.model_validate({"name": "data", "train": str(path), **settings}))
    problems = [*task.train_problems(), *(item for part in task.heldout_sets().values() for item in part)]
    return {problem.answer: problem for problem in problems}, task.notes


def other(answer: str) -> dict[str, Any]:
    """Return another row, so that one can be held out."""
    return {"messages": [{"role": "user", "content": f"Say {answer}."}], "answer": answer}


def test_all_turns_reach_the_chat_template_unchanged(tmp_path):
    """System message, few-shot turns and blanks included; the text is the one that samples store."""
    rows = [{"messages": FEW_SHOT, "answer": "12"}, {"messages": [QUESTION], "answer": "13"}]
    problems, notes = read(jsonl(tmp_path / "chat.jsonl", *rows), system="unused")
    (encoded,) = PromptEncoder(word_tokenizer(CHATML)).encode([problems["12"]])
    assert encoded.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is 1+1?<|im_end|>\n"
        "<|im_start|>assistant\nAnswer: 2<|im_end|>\n"
        "<|im_start|>user\n What is 3*4?\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    note = "chat: has chat messages; task.template does not apply, task.system where they have no system"
    assert f"{note} message" in notes


def test_models_without_a_template_or_with_one_that_refuses_the_turns(tmp_path):
    path = jsonl(tmp_path / "chat.jsonl", {"messages": FEW_SHOT, "answer": "12", "id": "first"}, other("13"))
    problems, _ = read(path, train={"path": str(path), "fields": {"id": "id"}})
    (encoded,) = PromptEncoder(word_tokenizer(None)).encode([problems["12"]])
    assert encoded.text == "Be brief.\n\nWhat is 1+1?\n\nAnswer: 2\n\n What is 3*4?\n"
    with pytest.raises(ConfigError, match=r"problem chat/first: .*refuses its messages.*must alternate"):
        PromptEncoder(word_tokenizer(STRICT)).encode([problems["12"]])


def test_an_assistant_message_at_the_end_is_the_answer_or_left_out(tmp_path):
    """As in data for supervised fine-tuning: it is left out where a field has the answer, unless it is that field."""
    last = Message("user", QUESTION["content"])
    turns = ([SYSTEM, QUESTION, SOLUTION], [*FEW_SHOT[1:], SOLUTION], [QUESTION])
    problems, notes = read(jsonl(tmp_path / "sft.jsonl", *({"messages": messages} for messages in turns)))
    assert set(problems) == {"12"}
    assert "sft: 2 problems; dropped: 1 without an answer" in notes
    assert "sft: the assistant message at the end of 2 prompts is the reference answer" in notes
    assert problems["12"].prompt[-1] == last
    rows = [{"messages": [*messages, SOLUTION], "answer": "13"} for messages in ([QUESTION], FEW_SHOT)]
    path = jsonl(tmp_path / "chat.jsonl", *rows, {"messages": [QUESTION], "answer": "13"})
    problems, notes = read(path)
    assert set(problems) == {"13"}
    assert problems["13"].prompt[-1] == last
    assert "chat: the assistant message at the end of 2 prompts is left out" in notes
    fields = {"question": "messages", "answer": "messages"}
    configured, _ = read(path, train={"path": str(path), "fields": fields})
    assert set(configured) == {"12"}


def test_completions_of_chat_messages_can_be_scored(tmp_path):
    row = {"messages": [QUESTION, SOLUTION], "completions": ["#### 12", "#### 13"]}
    (stored,) = read_completions(jsonl(tmp_path / "done.jsonl", row))["done"]
    assert (stored.problem.prompt, stored.problem.answer) == (QUESTION["content"], "12")
    assert len(stored.completions_G) == 2
    path = jsonl(tmp_path / "short.jsonl", {"prompt": [QUESTION], "completion": "12", "style": "terse"})
    (stored,) = read_completions(path, "mine:reward")["short"]
    assert (stored.problem.answer, stored.problem.extra["style"]) == ("", "terse")
    with pytest.raises(ConfigError, match="no field found for the answer"):
        read_completions(path)


def test_messages_in_a_csv_file_are_json_text(tmp_path):
    """pandas writes a list as Python would, which is refused: no text of a list is ever a prompt."""
    path = tmp_path / "chat.csv"
    frame = pandas.DataFrame({"messages": [json.dumps(FEW_SHOT), json.dumps([QUESTION])], "answer": [12, 13]})
    frame.to_csv(path)
    problems, _ = read(path)
    assert [turn.content for turn in problems["12"].prompt] == [turn["content"] for turn in FEW_SHOT]
    frame["messages"] = [json.dumps([*FEW_SHOT, SOLUTION]), json.dumps([QUESTION, SOLUTION])]
    frame.drop(columns="answer").to_csv(path)
    assert set(read(path)[0]) == {"12"}
    for broken in (str([QUESTION]), json.dumps([QUESTION])[:-1]):
        pandas.DataFrame({"prompt": ["1+1?", broken], "answer": [2, 12]}).to_csv(path)
        expected = f"{path}, row 2: the chat messages of 'prompt': no JSON text; write them with json.dumps"
        with pytest.raises(ConfigError, match=re.escape(expected)):
            read(path)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
NO_TEXT = "has content that is no text in UTF-8; only a text, or a list of parts of the type 'text', is supp"
MALFORMED = [
    *((value, f"message 1 {NO_TEXT}") for value in (
        [{"role": "user"}], user("a\udc00"), user([IMAGE]), user(["text"]), user([{"type": "text"}]),
    )),
    ([QUESTION, "and?"], "message 2 has the role None; expected {role: user, content: ...}"),
    ([{"role": "usr", "content": "1+1?"}], "message 1 has the role 'usr'; expected"),
    ([{"role": 3, "content": "1+1?"}], "message 1 has the role 3; expected"),
    ([{"from": "human", "value": "1+1?"}], "message 1 has the role None"),
    ([QUESTION, SYSTEM, QUESTION], "message 2 has the role 'system'; expected"),
    *((value, "no question, which is a message with the role user and a text, at the end or before") for value in (
        [], user(" "), [SYSTEM], [SOLUTION], [QUESTION, SOLUTION, SOLUTION],
    )),
]  # fmt: skip


def test_a_malformed_list_is_one_line_with_file_row_and_field(tmp_path):
    for messages, message in MALFORMED:
        path = jsonl(tmp_path / "bad.jsonl", other("1"), {"messages": messages, "answer": "2"})
        expected = f"{path}, row 2: the chat messages of 'messages': {message}"
        with pytest.raises(ConfigError, match=re.escape(expected)):
            read(path)
