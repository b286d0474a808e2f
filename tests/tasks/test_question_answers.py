"""Question-answer task: training problems and evaluation sets are disjoint and reproducible."""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bandpo_cli.config.task import TEMPLATES, DataTask
from bandpo_cli.errors import ConfigError
from bandpo_cli.tasks.task import Task, build_task
from bandpo_cli.types import Message, Problem
from tests.tasks.stored_completions import jsonl as write_jsonl


def rows(start: int, stop: int) -> list[dict[str, Any]]:
    return [{"question": f"What is {n}+{n}?", "answer": str(2 * n)} for n in range(start, stop)]


def jsonl(path: Path, content: list[dict[str, Any]]) -> str:
    return str(write_jsonl(path, *content))


def data_task(train: Any, heldout: Any = (), **settings: Any) -> Task:
    return build_task(
        DataTask.model_validate({"name": "data", "train": train, "heldout": heldout, **settings})
    )


def answers(problems: Any) -> set[int]:
    return {int(problem.answer) for problem in problems}


def test_all_fields_of_a_problem(tmp_path: Path) -> None:
    train = {"path": jsonl(tmp_path / "x.jsonl", rows(1, 2)), "grader": "number", "label": "sums"}
    heldout = jsonl(tmp_path / "test.jsonl", rows(2, 3))
    task = data_task(train, heldout, template="Q: {question}", system="Be brief.")
    (problem,) = task.train_problems()
    prompt = (Message("system", "Be brief."), Message("user", "Q: What is 1+1?"))
    assert problem == Problem(problem.id, prompt, "2", source="sums", grader="number")
    assert problem.id.startswith("sums/")
    assert task.heldout_sets()["test"][0].grader == "math"
    custom = data_task(train, heldout, grader="my.module:judge")
    graders = [problem.grader for problem in (*custom.train_problems(), *custom.heldout_sets()["test"])]
    assert graders == ["my.module:judge"] * 2


def test_sources_are_mixed_so_that_a_prefix_is_a_fair_sample(tmp_path: Path) -> None:
    paths = [jsonl(tmp_path / f"{start}.jsonl", rows(start, start + 300)) for start in (0, 1000)]
    heldout = jsonl(tmp_path / "t.jsonl", rows(5000, 5001))
    problems = data_task(paths, heldout).train_problems()
    assert len(problems) == 600
    assert list(data_task(paths).heldout_sets()) == ["heldout"]
    from_first = sum(problem.source == "0" for problem in problems[:100])
    assert 35 < from_first < 65  # 3 standard deviations for a random sample of 100 of the 600
    assert problems[:100] != sorted(problems[:100], key=lambda problem: int(problem.answer))
    shuffled = rows(0, 300)
    random.Random(0).shuffle(shuffled)
    jsonl(tmp_path / "0.jsonl", shuffled)
    again = data_task(paths[::-1], heldout).train_problems()
    assert again == problems, "the order of rows and sources is irrelevant"


def test_split_by_hash_is_stable_when_rows_are_added(tmp_path: Path) -> None:
    def split(count: int, fraction: float) -> tuple[set[int], set[int]]:
        task = data_task(jsonl(tmp_path / "x.jsonl", rows(0, count)), heldout_fraction=fraction)
        return answers(task.train_problems()), answers(task.heldout_sets()["x"])

    train, heldout = split(1000, 0.1)
    assert 70 < len(heldout) < 130  # 3 standard deviations around 100
    assert (len(train) + len(heldout), train & heldout) == (1000, set())
    more_train, more_heldout = split(2000, 0.1)
    assert train <= more_train
    assert heldout <= more_heldout
    assert split(1000, 0.05)[1] < heldout


def test_split_is_fixed(tmp_path: Path) -> None:
    # Literal: a later version must not train on problems that this one evaluates on.
    for template in ("answer-line", "plain"):
        task = data_task(jsonl(tmp_path / "x.jsonl", rows(0, 100)), template=template)
        assert [int(problem.answer) // 2 for problem in task.heldout_sets()["x"]] == [18, 59, 40, 14, 60]
        assert [int(problem.answer) // 2 for problem in task.train_problems()[:3]] == [92, 10, 62]


def test_one_question_with_two_answers_is_on_one_side(tmp_path: Path) -> None:
    both = [{**row, "answer": f"{sign}{row['answer']}"} for row in rows(1, 200) for sign in ("", "-")]
    task = data_task(jsonl(tmp_path / "x.jsonl", both), heldout_fraction=0.3)
    heldout, train = answers(task.heldout_sets()["x"]), answers(task.train_problems())
    assert {abs(n) for n in heldout} & {abs(n) for n in train} == set()
    assert len(heldout) + len(train) == 398


def test_few_problems_give_both_sides(tmp_path: Path) -> None:
    for count in range(2, 12):
        task = data_task(jsonl(tmp_path / "x.jsonl", rows(0, count)), heldout_fraction=0.01)
        assert (len(task.train_problems()), len(task.heldout_sets()["x"])) == (count - 1, 1)
    task = data_task(jsonl(tmp_path / "x.jsonl", rows(0, 1)))
    with pytest.raises(ConfigError, match="every problem is held out for evaluation"):
        task.train_problems()


def test_problems_of_an_evaluation_set_are_not_trained_on(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "train.jsonl", rows(0, 10))
    asked_otherwise = [{"problem": "what is  $3+3$?\n", "answer": "six"}]
    heldout = [jsonl(tmp_path / "a.jsonl", asked_otherwise), jsonl(tmp_path / "b.jsonl", rows(4, 5))]
    task = data_task(train, heldout)
    assert answers(task.train_problems()) == {0, 2, 4, 10, 12, 14, 16, 18}
    assert "train: 2 problems dropped, also in an evaluation set" in task.notes()
    with pytest.raises(ConfigError, match="every problem is held out for evaluation"):
        data_task(train, train).train_problems()


def test_equal_ids_in_both_files_are_distinguished(tmp_path: Path) -> None:
    sources = []
    for part, start in (("train", 0), ("heldout", 10)):
        (tmp_path / part).mkdir()
        numbered = [{**row, "n": n} for n, row in enumerate(rows(start, start + 10))]
        path = jsonl(tmp_path / part / "x.jsonl", numbered)
        sources.append({"path": path, "fields": {"id": "n"}, "label": "x"})
    task = data_task(*sources)
    ids = [{problem.id for problem in part} for part in (task.train_problems(), task.heldout_sets()["x"])]
    assert list(map(len, ids)) == [10, 10]
    assert not ids[0] & ids[1]


def test_verl_parquet_file(tmp_path: Path) -> None:
    """As the file of DAPO: the instruction is in the message, and each problem is repeated."""
    ask = TEMPLATES["answer-line"]
    content = [
        {
            "data_source": "math_dapo", "extra_info": {"index": f"{copy}-{row['answer']}"},
            "prompt": [{"role": "user", "content": ask.replace("{question}", row["question"])}],
            "reward_model": {"ground_truth": row["answer"], "style": "rule-lighteval/MATH_v2"},
        }
        for copy in range(10) for row in rows(0, 20)
    ]  # fmt: skip
    path = tmp_path / "dapo-math-17k.parquet"
    pq.write_table(pa.Table.from_pylist(content), path)
    test = jsonl(tmp_path / "test.jsonl", rows(3, 4))
    task = data_task({"name": "dapo-math-17k", "path": str(path)}, test, system="unused")
    problems = task.train_problems()
    assert answers(problems) == {2 * n for n in range(20) if n != 3}, "no repeats, no evaluation problem"
    problem = min(problems, key=lambda problem: int(problem.answer))
    assert problem.prompt == (Message("user", content[0]["prompt"][0]["content"]),)
    assert problem.extra == {"data_source": "math_dapo", "extra_info": {"index": "0-0"}}
    assert (problem.source, problem.grader) == ("dapo-math-17k", "math")
    assert task.notes() == [
        "test: 1 evaluation problem",
        "dapo-math-17k: 20 training problems; dropped: 180 repeated",
        "dapo-math-17k: has chat messages; task.template and task.system do not apply",
        "train: 1 problem dropped, also in an evaluation set",
    ]


def test_notes_list_what_was_read_and_dropped(tmp_path: Path) -> None:
    content = [*rows(0, 1000), {"question": "no answer", "answer": None}]
    task = data_task({"path": jsonl(tmp_path / "x.jsonl", content), "limit": 900})
    assert task.notes() == []
    count = len(task.heldout_sets()["x"])
    assert task.notes() == [
        "x: 900 training problems; dropped: 1 without an answer, 100 over the limit",
        f"x: {count} of 900 problems held out for evaluation (heldout_fraction = 0.05)",
    ]
    (tmp_path / "x.jsonl").unlink()
    assert len(task.train_problems()) == 900 - count
    assert len(task.notes()) == 2, "each source is read once"


INVALID: list[tuple[dict[str, Any], list[str]]] = [
    ({"name": "data"}, ["task.train", "--set task.train=FILE"]),
    ({"name": "aime24"}, ["'aime24' has no training problems", "--set task.train=FILE"]),
    ({"name": "data", "train": ["a/x.jsonl", "b/x.csv"]}, ["task.train", "'x'", "label:"]),
    ({"name": "gsm8k", "heldout": ["math500", "math500"]}, ["task.heldout", "'math500'", "label:"]),
    (
        {"name": "gsm8k", "revisions": {"openai/gsm9k": "main"}},
        ["task.revisions", "did you mean 'openai/gsm8k'"],
    ),
]


def test_invalid_settings_are_reported_before_a_file_is_read() -> None:
    for settings, parts in INVALID:
        with pytest.raises(ConfigError) as caught:
            build_task(DataTask.model_validate(settings)).train_problems()
        assert "\n" not in str(caught.value)
        assert all(part in str(caught.value) for part in parts), caught.value


TEMPLATES_OF_GRADERS = [
    ("gsm8k", "answer-line", "hashes"), ("math-dapo", "boxed", "answer-line"),
    ("math-dapo-boxed", "hashes", "answer-line or boxed"), ("math-dapo", "answer-line", None),
    ("gsm8k", "plain", None), ("gsm8k", "{question} ####", None), ("gsm8k-flexible", "boxed", None),
    ("math", "hashes", None), ("my.module:judge", "boxed", None),
]  # fmt: skip


def test_a_grader_that_cannot_read_the_form_of_the_template_is_noted(tmp_path: Path) -> None:
    train, heldout = jsonl(tmp_path / "x.jsonl", rows(1, 2)), jsonl(tmp_path / "y.jsonl", rows(2, 3))
    for grader, template, use in TEMPLATES_OF_GRADERS:
        task = data_task(train, heldout, grader=grader, template=template)
        assert task.train_problems()
        expected = [
            f"{source}: the grader '{grader}' does not read the answers that task.template = '{template}' asks for; "
            f"use task.template = {use}"
            for source in ("y, evaluation", "x, training")
        ]
        assert [note for note in task.notes() if "does not read" in note] == (expected if use else [])


def test_custom_graders_and_rewards_get_all_columns_of_a_row(tmp_path: Path) -> None:
    content = [{**row, "solution": f"${row['answer']}$", "hint": None} for row in rows(0, 4)]
    path = jsonl(tmp_path / "a.jsonl", content)
    for settings in ({"grader": "trl:mine:reward"}, {"rewards": ["math", "mine:reward"]}):
        problem = data_task(path, **settings).train_problems()[0]
        n = int(problem.answer) // 2
        expected = {"question": f"What is {n}+{n}?", "answer": str(2 * n), "solution": f"${2 * n}$"}
        assert problem.extra == expected
    assert data_task(path).train_problems()[0].extra == {}
    assert data_task(path, rewards=["number", "mine:reward"]).train_problems()[0].grader == "number"
