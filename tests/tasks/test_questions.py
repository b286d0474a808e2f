"""Questions of one source: rows become questions or are counted, and errors are one line."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bandpo_cli.config.task import Fields, Source
from bandpo_cli.errors import ConfigError
from bandpo_cli.tasks.prompts import TEMPLATES
from bandpo_cli.tasks.questions import load_questions, question_key
from bandpo_cli.tasks.rows import source_label


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def error_of(source: Source, part: Any = "train") -> str:
    with pytest.raises(ConfigError) as caught:
        load_questions(source, part)
    assert "\n" not in str(caught.value)
    return str(caught.value)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "ground_truth", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from(["question", "prompt", "answer", "reward_model", "level", "extra_info", "id"])


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(rows=st.lists(st.dictionaries(NAMES, ANYTHING, max_size=5), max_size=4))
def test_any_rows_are_questions_or_counted_or_one_error(tmp_path: Path, rows: list[Any]) -> None:
    path = jsonl(tmp_path / "fuzz.jsonl", [*rows, {"question": "sure", "answer": "1"}])
    given_fields = Fields(question="question", answer="answer", id="id")
    malformed = rf"row {_first_malformed(rows)}: the chat messages of 'question': "
    with pytest.raises(ConfigError, match=malformed) if _first_malformed(rows) else nullcontext():
        loaded = load_questions(Source(path=path, fields=given_fields), "train")
    if _first_malformed(rows):
        return
    assert len(loaded.questions) + sum(loaded.dropped.values()) == len(rows) + 1
    assert all(question.answer.encode() and question_key(question.prompt) for question in loaded.questions)
    json.dumps([question.extra for question in loaded.questions], allow_nan=False)
    bare = Source(path=jsonl(tmp_path / "fuzz.jsonl", rows))
    try:
        load_questions(bare, "train")
    except ConfigError:
        return


def _first_malformed(rows: list[dict[str, Any]]) -> int:
    """Return the number of the first row whose question is a list; none of these has the role of a chat message."""
    return next((n for n, row in enumerate(rows, start=1) if isinstance(row.get("question"), list)), 0)


def test_unusable_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [
        {"question": "good", "answer": 1},
        {"question": "good", "answer": 1.0},
        {"question": None, "answer": 1},
        {"answer": 1},
        {"question": {"no": "text"}, "answer": 1},
        {"question": "no answer", "answer": None},
        {"question": "a proof", "answer": "First this.\nThen that."},
        {},
    ]
    loaded = load_questions(Source(path=jsonl(tmp_path / "x.jsonl", rows)), "train")
    assert [(question.prompt, question.answer) for question in loaded.questions] == [("good", "1")]
    assert loaded.dropped == {"repeated": 1, "without a question": 4, "without an answer": 2}


def test_custom_grader_may_have_an_answer_of_several_lines(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"question": "q", "answer": "First this.\nThen that."}])
    (question,) = load_questions(Source(path=path, grader="my.module:judge"), "train").questions
    assert (question.answer, question.grader) == ("First this.\nThen that.", "my.module:judge")


def test_no_usable_row(tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": "a\nb", "n": 1}, {"question": "", "answer": "1"}]
    message = error_of(Source(path=jsonl(tmp_path / "x.jsonl", rows)))
    for part in (
        "task.train",
        "1 without an answer",
        "1 without a question",
        "'question'",
        "question, answer, n",
    ):
        assert part in message


def test_missing_fields_are_named_with_the_mapping(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"text": "q", "answer": "1", "gold": 2}])
    message = error_of(Source(path=path))
    assert "no field found for the question; its fields: text, answer, gold" in message
    assert "fields: {question: ...}" in message
    message = error_of(Source(path=jsonl(tmp_path / "y.jsonl", [{"a": 1}])))
    assert "the question and the answer" in message
    path = jsonl(tmp_path / "z.jsonl", [{"question": "q", "answer": "1"}])
    message = error_of(Source(path=path, fields=Fields(answer="gold.value")))
    assert "the answer from 'gold.value'; its fields: question, answer" in message


def test_empty_missing_and_misplaced_sources(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [])
    assert "holds no rows" in error_of(Source(path=path))
    assert "No such file" in error_of(Source(path=str(tmp_path / "none.csv")))
    assert "did you mean 'gsm8k'" in error_of(Source(path="gsm8"))
    assert "split is for data sets on the hub" in error_of(Source(path=path, split="test"))
    assert "for evaluation only; use it in task.heldout" in error_of(Source(name="aime24"))
    assert "has no evaluation split" in error_of(Source(name="dapo-math-17k"), "heldout")


def test_rows_after_the_first_thousand_are_read(tmp_path: Path) -> None:
    rows = [{"question": f"q{n}", "answer": n} for n in range(2500)]
    loaded = load_questions(Source(path=jsonl(tmp_path / "x.jsonl", rows)), "train")
    assert [question.answer for question in loaded.questions] == [str(n) for n in range(2500)]


def test_levels(tmp_path: Path) -> None:
    levels = ["Level 1", "Level 3", "Level ?", 3, None, "5"]
    rows = [{"problem": f"q{n}", "solution": "\\boxed{1}", "level": level} for n, level in enumerate(levels)]
    path = jsonl(tmp_path / "x.jsonl", rows)
    loaded = load_questions(Source(path=path, levels=(3, 5)), "train")
    assert [(q.prompt, q.extra["level"]) for q in loaded.questions] == [("q1", 3), ("q3", 3), ("q5", 5)]
    assert loaded.dropped == {"of other levels": 3}
    assert len(load_questions(Source(path=path), "train").questions) == 6
    bare = jsonl(tmp_path / "y.jsonl", [{"question": "q", "answer": "1"}])
    assert "fields: {level: ...}" in error_of(Source(path=bare, levels=(3,)))


def test_limit_keeps_rows_evenly_spread(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"question": f"q{n}", "answer": n} for n in range(10)])
    for limit, kept in {1: [0], 3: [0, 3, 6], 10: [*range(10)], 99: [*range(10)]}.items():
        loaded = load_questions(Source(path=path, limit=limit), "train")
        assert [int(question.answer) for question in loaded.questions] == kept
        assert len(loaded.questions) + loaded.dropped.get("over the limit", 0) == 10


def test_ids_are_configured_or_a_hash_of_label_question_and_answer(tmp_path: Path) -> None:
    rows = [{"question": "1+1?", "answer": "2", "uid": 7}, {"question": "1+2?", "answer": "3", "uid": 7}]
    path = jsonl(tmp_path / "x.jsonl", rows)
    named = load_questions(Source(path=path, fields=Fields(id="uid")), "train")
    assert [question.id for question in named.questions] == ["x/7"]
    assert named.dropped == {"repeated": 1}
    # Literal: the ids are stored in every run, and determine the order and the split of the problems.
    ids = [question.id for question in load_questions(Source(path=path), "train").questions]
    assert ids == ["x/1f446c5bed8256bd", "x/55f7e9b7445d3d34"]


@pytest.mark.parametrize(
    ("source", "label"),
    [
        (Source(name="math500"), "math500"),
        (Source(name="math500", path="a/b.jsonl"), "math500"),
        (Source(path="a/my set (1).jsonl"), "my-set-1"),
        (Source(path="org/Some.Set-v2"), "Some.Set-v2"),
        (Source(path="a/b.jsonl", label="mine"), "mine"),
        (Source(path="a/" + "x" * 99 + ".csv"), "x" * 60),
    ],
)
def test_labels(source: Source, label: str) -> None:
    assert source_label(source) == label


def test_file_name_that_cannot_be_a_label() -> None:
    with pytest.raises(ConfigError, match="give it a label:"):
        source_label(Source(path="数学.jsonl"))


def test_key_ignores_differences_that_do_not_change_the_question(tmp_path: Path) -> None:
    def key(text: Any) -> str:
        path = jsonl(tmp_path / "k.jsonl", [{"question": text, "answer": "1"}])
        return question_key(load_questions(Source(path=path), "train").questions[0].prompt)

    user = [{"role": "user", "content": "What is x+1?"}]
    same = ["What is $x+1$?", "what is  x + 1 ?\n", "Ｗhat is x+1?", user]
    dapo = TEMPLATES["answer-line"].replace("{question}", "What is $x+1$?")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": dapo}]
    assert len({key(text) for text in (*same, dapo, chat)}) == 1
    assert key("What is x-1?") != key("What is x+1?")
    follow_up = [*chat, {"role": "assistant", "content": "2"}, {"role": "user", "content": "Sure?"}]
    assert key(follow_up) != key(chat)


def test_extra_keeps_the_fields_for_graders(tmp_path: Path) -> None:
    extra = {"data_source": "aops", "extra_info": {"index": 3, "x": None}}
    row = {"question": "q", "answer": "1", "url": "u", **extra}
    (question,) = load_questions(Source(path=jsonl(tmp_path / "x.jsonl", [row])), "train").questions
    assert question.extra == extra
    assert question.source == "x"
