"""Questions of one source: rows become questions or are counted, and errors are one line."""

from pathlib import Path
from typing import Any

import pytest

from bandpo_cli.config.task import TEMPLATES, Fields, Source
from bandpo_cli.errors import ConfigError
from bandpo_cli.tasks.prompts import build_prompt
from bandpo_cli.tasks.question_answers import load_questions, question_key
from bandpo_cli.tasks.rows import source_label
from bandpo_cli.types import Message
from tests.tasks.stored_completions import jsonl as write_jsonl


def jsonl(path: Path, rows: list[Any]) -> str:
    return str(write_jsonl(path, *rows))


def error_of(source: Source, part: Any = "train") -> str:
    with pytest.raises(ConfigError) as caught:
        load_questions(source, part)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_unusable_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [
        {"question": "good", "answer": 1}, {"question": "good", "answer": 1.0}, {"question": None, "answer": 1},
        {"answer": 1}, {"question": {"no": "text"}, "answer": 1}, {"question": "no answer", "answer": None},
        {"question": "a proof", "answer": "First this.\nThen that."}, {},
    ]  # fmt: skip
    ((question,), notes) = load_questions(Source(path=jsonl(tmp_path / "x.jsonl", rows)), "train")
    assert (question.prompt, question.answer) == ("good", "1")
    dropped = "1 repeated, 4 without a question, 2 without an answer"
    assert notes == [f"x: 1 training problem; dropped: {dropped}"]


def test_custom_grader_may_have_an_answer_of_several_lines(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"question": "q", "answer": "First this.\nThen that."}])
    ((question,), _) = load_questions(Source(path=path, grader="my.module:judge"), "train")
    assert (question.answer, question.grader) == ("First this.\nThen that.", "my.module:judge")


def test_missing_fields_are_named_with_the_mapping(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"text": "q", "answer": "1", "gold": 2}])
    message = error_of(Source(path=path))
    assert "no field found for the question; its fields: text, answer, gold" in message
    assert "fields: {question: ...}" in message
    assert "the question and the answer" in error_of(Source(path=jsonl(tmp_path / "y.jsonl", [{"a": 1}])))
    path = jsonl(tmp_path / "z.jsonl", [{"question": "q", "answer": "1"}])
    read_from = "1 without an answer; the question was read from 'question', the answer from 'gold.value'"
    assert read_from in error_of(Source(path=path, fields=Fields(answer="gold.value")))


def test_empty_missing_and_misplaced_sources(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [])
    assert "holds no rows" in error_of(Source(path=path))
    assert "No such file" in error_of(Source(path=str(tmp_path / "none.csv")))
    assert "did you mean 'gsm8k'" in error_of(Source(path="gsm8"))
    assert "split is for data sets on the hub" in error_of(Source(path=path, split="test"))
    assert "'aime24' has no split for this part" in error_of(Source(name="aime24"))
    assert "'dapo-math-17k' has no split for this part" in error_of(Source(name="dapo-math-17k"), "heldout")


def test_levels(tmp_path: Path) -> None:
    levels = ["Level 1", "Level 3", "Level ?", 3, None, "5"]
    rows = [{"problem": f"q{n}", "solution": "\\boxed{1}", "level": level} for n, level in enumerate(levels)]
    path = jsonl(tmp_path / "x.jsonl", rows)
    questions, notes = load_questions(Source(path=path, levels=(3, 5)), "train")
    assert [(q.prompt, q.extra["level"]) for q in questions] == [("q1", 3), ("q3", 3), ("q5", 5)]
    assert notes == ["x: 3 training problems; dropped: 3 of other levels"]
    assert len(load_questions(Source(path=path), "train")[0]) == 6
    bare = jsonl(tmp_path / "y.jsonl", [{"question": "q", "answer": "1"}])
    assert "fields: {level: ...}" in error_of(Source(path=bare, levels=(3,)))


def test_limit_keeps_rows_evenly_spread(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"question": f"q{n}", "answer": n} for n in range(10)])
    for limit, kept in {1: [0], 3: [0, 3, 6], 10: [*range(10)], 99: [*range(10)]}.items():
        questions, notes = load_questions(Source(path=path, limit=limit), "train")
        assert [int(question.answer) for question in questions] == kept
        assert notes[0].partition("; ")[2] == (f"dropped: {10 - limit} over the limit" if limit < 10 else "")


def test_ids_are_configured_or_a_hash_of_label_question_and_answer(tmp_path: Path) -> None:
    rows = [{"question": "1+1?", "answer": "2", "uid": 7}, {"question": "1+2?", "answer": "3", "uid": 7}]
    path = jsonl(tmp_path / "x.jsonl", rows)
    named, notes = load_questions(Source(path=path, fields=Fields(id="uid")), "train")
    assert [question.id for question in named] == ["x/7"]
    assert notes == ["x: 1 training problem; dropped: 1 repeated"]
    # Literal: the ids are stored in every run, and determine the order and the split of the problems.
    ids = [question.id for question in load_questions(Source(path=path), "train")[0]]
    assert ids == ["x/1f446c5bed8256bd", "x/55f7e9b7445d3d34"]


LABELS = [
    (Source(name="math500"), "math500"), (Source(name="math500", path="a/b.jsonl"), "math500"),
    (Source(path="a/my set (1).jsonl"), "my-set-1"), (Source(path="org/Some.Set-v2"), "Some.Set-v2"),
    (Source(path="a/b.jsonl", label="mine"), "mine"), (Source(path="a/" + "x" * 99 + ".csv"), "x" * 60),
]  # fmt: skip


def test_labels() -> None:
    assert [(source, source_label(source)) for source, _ in LABELS] == LABELS
    with pytest.raises(ConfigError, match="give it a label:"):
        source_label(Source(path="数学.jsonl"))


def test_key_ignores_differences_that_do_not_change_the_question(tmp_path: Path) -> None:
    def key(text: Any) -> str:
        path = jsonl(tmp_path / "k.jsonl", [{"question": text, "answer": "1"}])
        return question_key(load_questions(Source(path=path), "train")[0][0].prompt)

    user = [{"role": "user", "content": "What is x+1?"}]
    same = ["What is $x+1$?", "what is  x + 1 ?\n", "Ｗhat is x+1?", user]
    dapo = TEMPLATES["answer-line"].replace("{question}", "What is $x+1$?")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": dapo}]
    assert len({key(text) for text in (*same, dapo, chat)}) == 1
    assert key("What is x-1?") != key("What is x+1?")
    follow_up = [*chat, {"role": "assistant", "content": "2"}, {"role": "user", "content": "Sure?"}]
    assert key(follow_up) != key(chat)


PAPER = """Solve the following math problem step by step. The last line of your response should be of the form \
Answer: $Answer (without quotes) where $Answer is the answer to the problem.

What is $1+1$?

Remember to put your answer on its own line after "Answer:"."""
HASHES = 'q Let\'s think step by step and output the final answer after "####".'


def test_templates_are_those_of_the_paper_and_of_verl_and_a_custom_one_is_filled_literally() -> None:
    boxed = "q\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    for question, template, text in (
        ("What is $1+1$?", "answer-line", PAPER), ("q", "boxed", boxed), ("q", "plain", "q"), ("q", "hashes", HASHES),
        ("{x} \\1 {question} %s", "<{a}> {question} {0} %d", "<{a}> {x} \\1 {question} %s {0} %d"),
    ):  # fmt: skip
        assert build_prompt(question, template) == (Message("user", text),)
    assert build_prompt("q", "plain", "Be brief.") == (Message("system", "Be brief."), Message("user", "q"))


def test_an_instruction_around_the_question_is_replaced() -> None:
    for end in ("", "\n", "  ", "\n\n \t"):
        assert build_prompt(PAPER + end, "boxed") == build_prompt("What is $1+1$?", "boxed")
    assert build_prompt(HASHES, "boxed") == build_prompt("q", "boxed")
    for template, text in (("answer-line", PAPER), ("plain", PAPER), ("Q: {question}", f"Q: {PAPER}")):
        assert build_prompt(PAPER, template) == (Message("user", text),)
