"""Fields of a row: which are chosen, and how values of any type are converted."""

import contextlib
import json
from decimal import Decimal
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bandpo_cli.config.task import Fields
from bandpo_cli.errors import ConfigError
from bandpo_cli.tasks.rows import (
    ANSWER_NAMES,
    as_answer,
    as_level,
    find_fields,
    read_question,
    to_json_value,
    value_at,
)

NONE = Fields()
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]

TEXTS = st.text(st.sampled_from("a1 \n\x00#$\\{}é\ud800"), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.binary(max_size=3) | st.decimals(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=10,
)


ANSWERS: list[tuple[Any, str | None]] = [
    (27.0, "27"), (-0.5, "-0.5"), (1e-7, "0.0000001"), (1e22, "10000000000000000000000"), ("27.0", "27"),
    (2**80 + 1, "1208925819614629174706177"), (Decimal("12.50"), "12.50"), (Decimal("3.00"), "3"), ("025", "025"),
    (" $\\frac{1}{2}$ ", "\\frac{1}{2}"), ("$5", "$5"), ("$1$ and $2$", "$1$ and $2$"),
    ("So it is 6 * 3.\n#### 18", "18"), ("First \\boxed{1}, then \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
    (["$2$", "$-1,5$"], "2, -1,5"), (["4"], "4"), (True, "True"), ("\ud800", None), ([[["1"]]], None),
    ({"target": 28, "numbers": [1, 3]}, '{"numbers": [1, 3], "target": 28}'),
    *((nothing, None) for nothing in (None, "", "  ", [], [None], {}, float("nan"), float("inf"), b"18")),
]  # fmt: skip


def test_answers() -> None:
    for value, answer in ANSWERS:
        assert as_answer(value) == answer, value


def test_levels() -> None:
    levels = {"Level 3": 3, 3: 3, "5": 5, "Level ?": None, 2.5: None, None: None}
    assert {value: as_level(value) for value in levels} == levels
    assert (as_level(3.0), as_level(True)) == (3, None)


@settings(max_examples=15)
@given(VALUES)
def test_any_value_is_converted_or_none(value: Any) -> None:
    """Only chat messages raise an error; every result can be encoded as UTF-8 and JSON."""
    if (answer := as_answer(value)) is not None:
        assert answer.encode().strip()
    with contextlib.suppress(ConfigError):
        question = read_question({"q": value}, Fields(question="q"), "row 1")
        assert question is None or question.prompt
    as_level(value)
    json.dumps(to_json_value(value), allow_nan=False)


def test_nesting_depth_cannot_exhaust_the_stack() -> None:
    deep: Any = "1"
    for _ in range(5000):
        deep = {"a": [deep]}
    assert to_json_value(deep) is not None
    assert as_answer(deep) is not None
    assert as_answer([deep]) is None


def test_dotted_paths() -> None:
    row = {"a": {"b": {"c": 1}}, "a.b": 2, "x": None}
    assert value_at(row, "a.b.c") == 1
    assert value_at(row, "a.b") == 2
    assert value_at(row, "a.z") is None
    assert value_at(row, "x.y") is None


USUAL_NAMES: list[tuple[dict[str, Any], tuple[str | None, str | None]]] = [
    ({"question": "q", "answer": "a", "prompt": "p"}, ("question", "answer")),
    ({"problem": "q", "solution": "\\boxed{1}", "answer": "1"}, ("problem", "answer")),
    ({"query": "q", "target": 0}, ("query", "target")),
    ({"input": "q", "solution": "1"}, ("input", "solution")),
    ({"question": None, "problem": "q", "ground_truth": 1}, ("problem", "ground_truth")),
    ({"question": "q", "text": "a"}, ("question", None)),
    ({"text": "q", "answer": "a"}, (None, "answer")),
    ({"messages": CHAT, "problem": "q", "solution": "1"}, ("problem", "solution")),
    ({}, (None, None)),
]


def test_usual_names() -> None:
    for row, names in USUAL_NAMES:
        for rows in ([row], [dict.fromkeys(row), row]):  # a row without values does not decide
            fields = find_fields(rows)
            assert (fields.question, fields.answer) == names, row


def test_configured_fields_and_the_verl_layout_have_priority() -> None:
    row = {
        "prompt": CHAT,
        "reward_model": {"ground_truth": "2"},
        "question": "no",
        "answer": "no",
        "level": 3,
    }
    verl = Fields(question="prompt", answer="reward_model.ground_truth", level="level")
    assert find_fields([row]) == verl
    configured = Fields(question="meta.q", answer="meta.n", level="hard", id="meta.q")
    assert find_fields([row | {"meta": {"q": "x", "n": 7}, "hard": 5}], configured) == configured


def test_fields_of_a_known_dataset_precede_the_usual_names_and_a_solution_is_last() -> None:
    known = Fields(question="prompt", answer="solution", level="level")
    row = {"question": "other", "prompt": "q", "solution": "\\boxed{1}", "level": "Level 2"}
    assert find_fields([row], NONE, known) == known
    assert find_fields([{**row, "answer": "1"}], NONE, known).answer == "answer"
    row = {"question": "1+1?", "answer": "a comment", "final_answer": "2"}
    assert find_fields([row], NONE, Fields(answer="final_answer")).answer == "final_answer"
    assert find_fields([row]).answer == "answer"


def test_worked_solution_is_used_only_without_an_answer_field() -> None:
    """Also for a copy of a known data set whose answer field is the worked solution."""
    for name in ANSWER_NAMES[:-1]:
        section, _, key = name.partition(".")
        row = {"question": "1+1?", "solution": "It is \\boxed{3}."}
        answered = row | {section: {key: "2"} if key else "2"}
        for known in (NONE, Fields(answer="solution")):
            assert find_fields([answered], NONE, known).answer == name
            assert find_fields([row], NONE, known).answer == "solution"
