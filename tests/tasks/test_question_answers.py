"""Question-answer task: rows become questions or are counted; training problems and evaluation sets are disjoint."""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bandpo_cli.config.task import DataTask, Fields, Source
from bandpo_cli.errors import ConfigError
from bandpo_cli.registries import TEMPLATES
from bandpo_cli.tasks.question_answers import load_questions, question_key
from bandpo_cli.tasks.rows import source_label
from bandpo_cli.tasks.task import Task, build_prompt, build_task
from bandpo_cli.types import Message, Problem
from tests.tasks.stored_completions import jsonl as write_jsonl


def rows(start: int, stop: int) -> list[dict[str, Any]]:
    return [{"question": f"What is {n}+{n}?", "answer": str(2 * n)} for n in range(start, stop)]


def jsonl(path: Path, content: list[Any]) -> str:
    return str(write_jsonl(path, *content))


def data_task(train: Any, heldout: Any = (), **settings: Any) -> Task:
    settings |= {"name": "data", "train": train, "heldout": heldout}
    return build_task(DataTask.model_validate(settings))


def answers(problems: Any) -> set[int]:
    return {int(problem.answer) for problem in problems}


def test_all_fields_of_a_problem(tmp_path):
    train = {"path": jsonl(tmp_path / "x.jsonl", rows(1, 2)), "grader": "number", "label": "sums"}
    heldout = jsonl(tmp_path / "test.jsonl", rows(2, 3))
    task = data_task(train, heldout, template="Q: {question}", system="Be brief.")
    (problem,) = task.train_problems()
    prompt = (Message("system", "Be brief."), Message("user", "Q: What is 1+1?"))
    assert problem == Problem(problem.id, prompt, "2", source="sums", grader="number")
    assert (problem.label, problem.id[:5]) == ("What is 1+1?", "sums/")
    assert task.heldout_sets()["test"][0].grader == "math"
    custom = data_task(train, heldout, grader="my.module:judge")
    graders = [problem.grader for problem in (*custom.train_problems(), *custom.heldout_sets()["test"])]
    assert graders == ["my.module:judge"] * 2


def test_sources_are_mixed_so_that_a_prefix_is_a_fair_sample(tmp_path):
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


def test_split_by_hash_is_stable_when_rows_are_added(tmp_path):
    def split(count: int, fraction: float) -> tuple[set[int], set[int]]:
        task = data_task(jsonl(tmp_path / "x.jsonl", rows(0, count)), heldout_fraction=fraction)
        return answers(task.train_problems()), answers(task.heldout_sets()["x"])

    train, heldout = split(400, 0.1)
    assert 22 < len(heldout) < 58  # 3 standard deviations around 40
    assert (len(train) + len(heldout), train & heldout) == (400, set())
    more_train, more_heldout = split(800, 0.1)
    assert train <= more_train
    assert heldout <= more_heldout
    assert split(400, 0.05)[1] < heldout


def test_split_is_fixed(tmp_path):
    # Literal: a later version must not train on problems that this one evaluates on.
    for template in ("answer-line", "plain"):
        task = data_task(jsonl(tmp_path / "x.jsonl", rows(0, 100)), template=template)
        assert [int(problem.answer) // 2 for problem in task.heldout_sets()["x"]] == [18, 59, 40, 14, 60]
        assert [int(problem.answer) // 2 for problem in task.train_problems()[:3]] == [92, 10, 62]


def test_one_question_with_two_answers_is_on_one_side(tmp_path):
    both = [{**row, "answer": f"{sign}{row['answer']}"} for row in rows(1, 200) for sign in ("", "-")]
    task = data_task(jsonl(tmp_path / "x.jsonl", both), heldout_fraction=0.3)
    heldout, train = answers(task.heldout_sets()["x"]), answers(task.train_problems())
    assert {abs(n) for n in heldout} & {abs(n) for n in train} == set()
    assert len(heldout) + len(train) == 398


def test_few_problems_give_both_sides(tmp_path):
    for count in range(2, 12):
        task = data_task(jsonl(tmp_path / "x.jsonl", rows(0, count)), heldout_fraction=0.01)
        assert (len(task.train_problems()), len(task.heldout_sets()["x"])) == (count - 1, 1)
    task = data_task(jsonl(tmp_path / "x.jsonl", rows(0, 1)))
    with pytest.raises(ConfigError, match="every problem is held out for evaluation"):
        task.train_problems()


def test_problems_of_an_evaluation_set_are_not_trained_on(tmp_path):
    train = jsonl(tmp_path / "train.jsonl", rows(0, 10))
    asked_otherwise = [{"problem": "what is  $3+3$?\n", "answer": "six"}]
    heldout = [jsonl(tmp_path / "a.jsonl", asked_otherwise), jsonl(tmp_path / "b.jsonl", rows(4, 5))]
    task = data_task(train, heldout)
    assert answers(task.train_problems()) == {0, 2, 4, 10, 12, 14, 16, 18}
    assert "train: 2 problems dropped, also in an evaluation set" in task.notes
    with pytest.raises(ConfigError, match="every problem is held out for evaluation"):
        data_task(train, train).train_problems()


def test_equal_ids_in_both_files_are_distinguished(tmp_path):
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


def test_verl_parquet_file(tmp_path):
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
    task = data_task({"name": "dapo-math-17k", "path": str(path)}, test, system="Be brief.")
    problems = task.train_problems()
    assert answers(problems) == {2 * n for n in range(20) if n != 3}, "no repeats, no evaluation problem"
    problem = min(problems, key=lambda problem: int(problem.answer))
    prompt = (Message("system", "Be brief."), Message("user", content[0]["prompt"][0]["content"]))
    extra = {"data_source": "math_dapo", "extra_info": {"index": "0-0"}}
    assert problem == Problem(problem.id, prompt, "0", "dapo-math-17k", "math", extra)
    assert problem.label == "What is 0+0?"
    assert task.notes == [
        "test: 1 evaluation problem",
        "dapo-math-17k: 20 training problems; dropped: 180 repeated",
        "dapo-math-17k: has chat messages; task.template does not apply, task.system where they have no system message",
        "train: 1 problem dropped, also in an evaluation set",
    ]


def test_notes_list_what_was_read_and_dropped(tmp_path):
    content = [*rows(0, 1000), {"question": "no answer", "answer": None}]
    task = data_task({"path": jsonl(tmp_path / "x.jsonl", content), "limit": 900})
    assert task.notes == []
    count = len(task.heldout_sets()["x"])
    assert task.notes == [
        "x: 900 problems; dropped: 1 without an answer, 100 over the limit",
        f"x: {count} of 900 problems held out for evaluation (heldout_fraction = 0.05)",
    ]
    (tmp_path / "x.jsonl").unlink()
    assert len(task.train_problems()) == 900 - count
    assert len(task.notes) == 2, "each source is read once"


INVALID = [
    ({"name": "data"}, ["task.train", "--set task.train=FILE"]),
    ({"name": "aime24"}, ["'aime24' has no training problems", "--set task.train=FILE"]),
    ({"name": "data", "train": ["a/x.jsonl", "b/x.csv"]}, ["task.train", "'x'", "label:"]),
    ({"name": "gsm8k", "heldout": ["math500", "math500"]}, ["task.heldout", "'math500'", "label:"]),
    (
        {"name": "gsm8k", "revisions": {"openai/gsm9k": "x"}},
        ["task.revisions", "did you mean 'openai/gsm8k'"],
    ),
]


def test_an_environment_has_the_user_message_and_the_reward_unless_a_grader_is_named():
    base = {"name": "gsm8k", "environment": "mine:Game"}
    task = DataTask.model_validate({**base, "system": "Be brief."})
    assert (task.template, task.grader, task.system) == ("plain", "environment", "Be brief.")
    assert DataTask.model_validate(task.model_dump()) == task
    assert DataTask.model_validate({**base, "grader": "number"}).grader == "number"
    assert DataTask.model_validate({**base, "rewards": ["mine:f"]}).answer_grader == "mine:f"
    with pytest.raises(ValueError, match="the environment writes the user message; leave it out"):
        DataTask.model_validate({**base, "template": "boxed"})
    with pytest.raises(ValueError, match=r"is the reward of task\.environment; name the class there"):
        DataTask.model_validate({"name": "gsm8k", "grader": "environment"})


def test_invalid_settings_are_reported_before_a_file_is_read():
    for settings, parts in INVALID:
        with pytest.raises(ConfigError) as caught:
            build_task(DataTask.model_validate(settings)).train_problems()
        assert all(part in str(caught.value) for part in parts), caught.value


TEMPLATES_OF_GRADERS = [
    ("gsm8k", "answer-line", "hashes"), ("math-dapo", "boxed", "answer-line"),
    ("math-dapo-boxed", "hashes", "answer-line or boxed"), ("math-dapo", "answer-line", None),
    ("gsm8k", "plain", None), ("gsm8k", "{question} ####", None), ("gsm8k-flexible", "boxed", None),
    ("math", "hashes", None), ("my.module:judge", "boxed", None),
]  # fmt: skip


def test_a_grader_that_cannot_read_the_form_of_the_template_is_noted(tmp_path):
    train, heldout = jsonl(tmp_path / "x.jsonl", rows(1, 2)), jsonl(tmp_path / "y.jsonl", rows(2, 3))
    for grader, template, use in TEMPLATES_OF_GRADERS:
        task = data_task(train, heldout, grader=grader, template=template)
        assert task.train_problems()
        expected = [
            f"{source}: the grader '{grader}' does not read the answers that task.template = '{template}' asks for; "
            f"use task.template = {use}"
            for source in ("y, evaluation", "x, training")
        ]
        assert [note for note in task.notes if "does not read" in note] == (expected if use else [])


def test_custom_graders_and_rewards_get_all_columns_of_a_row(tmp_path):
    content = [{**row, "solution": f"${row['answer']}$", "hint": None} for row in rows(0, 4)]
    path = jsonl(tmp_path / "a.jsonl", content)
    for settings in ({"grader": "trl:mine:reward"}, {"rewards": ["math", "mine:reward"]}):
        problem = data_task(path, **settings).train_problems()[0]
        assert problem.extra == content[int(problem.answer) // 2]
    assert data_task(path).train_problems()[0].extra == {}
    assert data_task(path, rewards=["number", "mine:reward"]).train_problems()[0].grader == "number"


PROMPTS = [{"prompt": f"Write {n} lines.", "style": style} for n in range(6) for style in ("terse", None)]
NO_ANSWERS = [
    {"grader": "mine:reward"},
    {"environment": "mine:Game"},
    {"rewards": [{"grader": "trl:mine:reward"}, {"grader": "number", "weight": 0}]},
    {"rewards": [{"weight": 0}, "random", "format"]},
]


def test_prompts_without_answers_are_trained_on_if_no_reward_compares_with_one(tmp_path):
    """Rows with the same prompt and other columns are different problems, also as chat messages."""
    chats = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in PROMPTS]
    for path in (jsonl(tmp_path / "p.jsonl", PROMPTS), jsonl(tmp_path / "c.jsonl", chats)):
        for settings in NO_ANSWERS:
            task = data_task(path, heldout_fraction=0.2, **settings)
            problems = [*task.train_problems(), *task.heldout_sets()[Path(path).stem]]
            assert len(problems) == len(PROMPTS)
            assert {problem.answer for problem in problems} == {""}
            assert {problem.prompt[0].content for problem in problems} == {row["prompt"] for row in PROMPTS}
            if settings != NO_ANSWERS[-1]:
                assert {problem.extra["style"] for problem in problems} == {"terse", None}
        for part in ("train", "heldout"):
            advice = f"--set task.{part}.0.fields.answer=FIELD, or a reward that needs no answer: --grader"
            assert advice in error_of(Source(path=path), part)
    own = data_task(str(tmp_path / "p.jsonl"), grader="mine:reward", template="Please: {question}")
    assert own.train_problems()[0].prompt[0].content.startswith("Please: Write")
    # A field with answers decides on the rows without one, as for any other grader.
    path = jsonl(tmp_path / "m.jsonl", [{"prompt": "a", "answer": "1"}, {"prompt": "b"}])
    _, notes = load_questions(Source(path=path, grader="mine:reward"), "train")
    assert notes == ["m: 1 problem; dropped: 1 without an answer"]


def error_of(source: Source, part: Any = "train") -> str:
    with pytest.raises(ConfigError) as caught:
        load_questions(source, part)
    return str(caught.value)


def test_unusable_rows_are_dropped_and_counted(tmp_path):
    rows = [
        {"question": "good", "answer": 1}, {"question": "good", "answer": 1.0}, {"question": None, "answer": 1},
        {"answer": 1}, {"question": {"no": "text"}, "answer": 1}, {"question": "no answer", "answer": None},
        {"question": "a proof", "answer": "First this.\nThen that."}, {},
    ]  # fmt: skip
    ((question,), notes) = load_questions(Source(path=jsonl(tmp_path / "x.jsonl", rows)), "train")
    assert (question.prompt, question.answer) == ("good", "1")
    dropped = "1 repeated, 4 without a question, 2 without an answer"
    assert notes == [f"x: 1 problem; dropped: {dropped}"]
    (_, proof), _ = load_questions(Source(path=str(tmp_path / "x.jsonl"), grader="my.module:judge"), "train")
    assert (proof.answer, proof.grader) == ("First this.\nThen that.", "my.module:judge")


def test_missing_fields_are_named_with_the_mapping(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"text": "q", "answer": "1", "gold": 2}])
    message = error_of(Source(path=path))
    assert "no field found for the question; its fields: text, answer, gold" in message
    assert "add --set task.train.0.fields.question=FIELD" in message
    assert "the question and the answer" in error_of(Source(path=jsonl(tmp_path / "y.jsonl", [{"a": 1}])))
    path = jsonl(tmp_path / "z.jsonl", [{"question": "q", "answer": "1"}])
    read_from = "1 without an answer; the question was read from 'question', the answer from 'gold.value'"
    assert read_from in error_of(Source(path=path, fields=Fields(answer="gold.value")))


def test_rows_that_are_not_in_utf_8_are_counted_as_such(tmp_path):
    """JSON can encode an unpaired surrogate, UTF-8 cannot."""
    odd, good = "1\ud8001", {"question": "q", "answer": "1"}
    for rows, counts in (
        ([{"question": odd, "answer": "1"}], "1 with a question not in UTF-8;"),
        ([{"question": "q", "answer": odd}, {"question": "r", "answer": None}],
         "1 with an answer not in UTF-8, 1 without an answer;"),
    ):  # fmt: skip
        message = error_of(Source(path=jsonl(tmp_path / "x.jsonl", rows)))
        assert f"{counts} the question was read from 'question', the answer from 'answer'" in message
        (_, notes) = load_questions(Source(path=jsonl(tmp_path / "x.jsonl", [*rows, good])), "train")
        assert notes == [f"x: 1 problem; dropped: {counts[:-1]}"]
    rows = [{"question": odd, "problem": "q", "answer": "1"}]  # another field can be read
    (question,), _ = load_questions(Source(path=jsonl(tmp_path / "x.jsonl", rows)), "train")
    assert question.prompt == "q"


def test_empty_missing_and_misplaced_sources(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [])
    assert "holds no rows" in error_of(Source(path=path))
    assert "No such file" in error_of(Source(path=str(tmp_path / "none.csv")))
    assert "did you mean 'gsm8k'" in error_of(Source(path="gsm8"))
    assert "split is for data sets on the hub" in error_of(Source(path=path, split="test"))
    assert "'aime24' has no split for this part" in error_of(Source(name="aime24"))
    assert "'dapo-math-17k' has no split for this part" in error_of(Source(name="dapo-math-17k"), "heldout")


def test_levels(tmp_path):
    levels = ["Level 1", "Level 3", "Level ?", 3, None, "5"]
    rows = [{"problem": f"q{n}", "solution": "\\boxed{1}", "level": level} for n, level in enumerate(levels)]
    path = jsonl(tmp_path / "x.jsonl", rows)
    questions, notes = load_questions(Source(path=path, levels=(3, 5)), "train")
    assert [(q.prompt, q.extra["level"]) for q in questions] == [("q1", 3), ("q3", 3), ("q5", 5)]
    assert notes == ["x: 3 problems; dropped: 3 of other levels"]
    assert len(load_questions(Source(path=path), "train")[0]) == 6
    bare = jsonl(tmp_path / "y.jsonl", [{"question": "q", "answer": "1"}])
    assert "task.train.0.fields.level=FIELD" in error_of(Source(path=bare, levels=(3,)))


def test_limit_keeps_rows_evenly_spread(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"question": f"q{n}", "answer": n} for n in range(10)])
    for limit, kept in {1: [0], 3: [0, 3, 6], 10: [*range(10)], 99: [*range(10)]}.items():
        questions, notes = load_questions(Source(path=path, limit=limit), "train")
        assert [int(question.answer) for question in questions] == kept
        assert notes[0].partition("; ")[2] == (f"dropped: {10 - limit} over the limit" if limit < 10 else "")


def test_ids_are_configured_or_a_hash_of_label_question_and_answer(tmp_path):
    rows = [{"question": "1+1?", "answer": "2", "uid": 7}, {"question": "1+2?", "answer": "3", "uid": 7}]
    path = jsonl(tmp_path / "x.jsonl", rows)
    named, notes = load_questions(Source(path=path, fields=Fields(id="uid")), "train")
    assert [question.id for question in named] == ["x/7"]
    assert notes == ["x: 1 problem; dropped: 1 repeated"]
    # Literal: the ids are stored in every run, and determine the order and the split of the problems.
    ids = [question.id for question in load_questions(Source(path=path), "train")[0]]
    assert ids == ["x/1f446c5bed8256bd", "x/55f7e9b7445d3d34"]


LABELS = [
    (Source(name="math500"), "math500"), (Source(name="math500", path="a/b.jsonl"), "math500"),
    (Source(path="a/my set (1).jsonl"), "my-set-1"), (Source(path="org/Some.Set-v2"), "Some.Set-v2"),
    (Source(path="a/b.jsonl", label="mine"), "mine"), (Source(path="a/" + "x" * 99 + ".csv"), "x" * 60),
]  # fmt: skip


def test_labels():
    assert [(source, source_label(source)) for source, _ in LABELS] == LABELS
    with pytest.raises(ConfigError, match="give it a label:"):
        source_label(Source(path="数学.jsonl"))


def test_key_ignores_differences_that_do_not_change_the_question(tmp_path):
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


def test_templates_are_those_of_the_paper_and_of_verl_and_a_custom_one_is_filled_literally():
    boxed = "q\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    for question, template, text in (
        ("What is $1+1$?", "answer-line", PAPER), ("q", "boxed", boxed), ("q", "plain", "q"), ("q", "hashes", HASHES),
        ("{x} \\1 {question} %s", "<{a}> {question} {0} %d", "<{a}> {x} \\1 {question} %s {0} %d"),
    ):  # fmt: skip
        assert build_prompt(question, template) == (Message("user", text),)
    assert build_prompt("q", "plain", "Be brief.") == (Message("system", "Be brief."), Message("user", "q"))


def test_an_instruction_around_the_question_is_replaced():
    for end in ("", "\n", "  ", "\n\n \t"):
        assert build_prompt(PAPER + end, "boxed") == build_prompt("What is $1+1$?", "boxed")
    assert build_prompt(HASHES, "boxed") == build_prompt("q", "boxed")
    for template, text in (("answer-line", PAPER), ("plain", PAPER), ("Q: {question}", f"Q: {PAPER}")):
        assert build_prompt(PAPER, template) == (Message("user", text),)
