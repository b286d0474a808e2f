"""Custom graders with the signatures of verl and TRL: what they receive, and what becomes of what they return."""

import json
from pathlib import Path

import pytest

from bandpo_cli.config.batch_and_sampling import GradingConfig
from bandpo_cli.errors import ConfigError
from bandpo_cli.grading.pool import GraderPool, check_grader, failure_warnings
from bandpo_cli.grading.signatures import BatchGrader, answer_of, load_grader
from bandpo_cli.types import NOT_APPLICABLE, Grade, Message, Problem

REWARDS = """
import json, math, numpy

def _note(arguments):
    with open("calls.jsonl", "a") as file:
        file.write(json.dumps(arguments) + "\\n")

def plain(text, answer, extra): return text == answer
async def plain_async(text, answer, extra): return text == answer
def two(text, answer): return True
def result_of_three(solution_str, ground_truth, more): return True
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    _note([data_source, solution_str, ground_truth, extra_info])
    return {"score": 1.0 if solution_str == ground_truth else -1.0, "acc": solution_str == ground_truth, "pred": "x"}
def result_of(solution_str, ground_truth): return eval(solution_str)
def compute_scores(data_sources, solution_strs, ground_truths, extra_infos):
    _note([data_sources, solution_strs, ground_truths, extra_infos])
    return [-0.5 if text == "wrong" else {"score": 2, "acc": True} for text in solution_strs]
def any_name(**kwargs): _note(sorted(kwargs)); return 1.0

def reward(prompts, completions, level, answer, **kwargs):
    _note([prompts, completions, level, answer, sorted(kwargs)])
    kwargs["log_metric"]("name", 1.0)
    return [float(len(turns[0]["content"])) for turns in completions]
def without_kwargs(completions): return [1.0 for _ in completions]
def on_texts(completions: list[str], prompts, **kwargs): _note([prompts, completions]); return [0.5] * len(completions)
def results_of(completions, **kwargs): return eval(completions[0][0]["content"])
async def reward_async(completions, **kwargs): return [1.0 for _ in completions]
def needs_gold(completions, gold, **kwargs): return [1.0 for _ in completions]
def needs_ids(completions, completion_ids, **kwargs): return [1.0 for _ in completions]
def centred(completions, **kwargs):
    sizes = [len(turns[0]["content"]) for turns in completions]
    return [size - sum(sizes) / len(sizes) for size in sizes]
def failing(completions, **kwargs):
    if any(turns[0]["content"] == "bad" for turns in completions): raise RuntimeError("bad text")
    if any(turns[0]["content"] == "hang" for turns in completions):
        while True: pass
    return [1.0 for _ in completions]
"""
CHAT = (Message("system", "be brief"), Message("user", "1 + 1?"))


@pytest.fixture(autouse=True)
def _rewards(tmp_path, monkeypatch):
    (tmp_path / "foreign_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)


def problem(id_: str = "p", function: str = "reward", **extra: object) -> Problem:
    return Problem(id_, CHAT, "2", "sums", function, extra)


def load(function: str, signature: str = "") -> BatchGrader:
    return load_grader(f"{signature}foreign_rewards:{function}")


def calls() -> list[object]:
    return [json.loads(line) for line in Path("calls.jsonl").read_text().splitlines()]


def test_the_signature_is_recognised_by_the_names_of_the_parameters_and_asynchronous_functions_are_run():
    for function in ["plain", "plain_async", "compute_score", "result_of"]:
        assert not load(function).batched
    for function in ["compute_scores", "reward", "without_kwargs", "reward_async"]:
        assert load(function).batched
    for function in ("plain_async", "reward_async"):
        assert load(function).grade([answer_of(problem(), "2")]) == [Grade(1.0, True, "correct")]


def test_verl_gets_the_label_and_the_columns_of_the_row_and_its_batch_form_lists():
    for signature in ("", "verl:"):
        grader = load("compute_score", signature)
        assert grader.grade([answer_of(problem(level=3), "2")]) == [Grade(1.0, True, "correct")]
        assert grader.grade([answer_of(problem(), "3")]) == [Grade(-1.0, False, "wrong")]
    assert calls() == 2 * [["sums", "2", "2", {"level": 3}], ["sums", "3", "2", {}]]
    answers = [answer_of(problem("p", level=1), "right"), answer_of(problem("q"), "wrong")]
    assert load("compute_scores").grade(answers) == [Grade(2.0, True, "correct"), Grade(-0.5, False, "wrong")]
    assert calls()[4:] == [[["sums", "sums"], ["right", "wrong"], ["2", "2"], [{"level": 1}, {}]]]


def test_verl_gets_the_values_of_a_row_in_its_own_layout():
    reward_model = {"style": "rule", "ground_truth": {"target": ["2", "two"]}}
    row = {"data_source": "openai/gsm8k", "reward_model": reward_model, "extra_info": {"index": 7}}
    load("compute_score").grade([answer_of(problem(**row), "2")])
    load("any_name", "verl:").grade([answer_of(problem(), "2")])
    names = ["data_source", "extra_info", "ground_truth", "solution_str"]
    assert calls() == [["openai/gsm8k", "2", {"target": ["2", "two"]}, {"index": 7}], names]


RESULTS = {
    "result_of": {
        "-3.5": Grade(-3.5, False, "wrong"), "True": Grade(1.0, True, "correct"),
        "{'score': 0.9, 'acc': True}": Grade(0.9, True, "correct"), "numpy.float32(0.5)": Grade(0.5, False, "wrong"),
        "{'score': 1.0, 'acc': 0.0}": Grade(1.0, False, "wrong"),
    },
    "results_of": {
        "[None]": NOT_APPLICABLE, "[math.nan]": NOT_APPLICABLE, "[-2]": Grade(-2.0, False, "wrong"),
        "numpy.array([0.25])": Grade(0.25, False, "wrong"),
    },
}  # fmt: skip
"""Results of functions of verl and TRL: any finite score, and None where a reward of TRL does not apply."""
ERRORS = {
    "result_of": {
        **dict.fromkeys(("None", "'1'", "math.nan", "{}", "[1.0]"), "it must return"),
        "{'score': 1, 'acc': 'yes'}": "'acc' as a number",
        "{'reward': 1.0}": "it must return a score or a dict with 'score', not {'reward': 1.0}",
    },
    "results_of": {
        "[]": "returned 0 rewards for 1 completions", "[1, 2]": "returned 2 rewards for 1 completions",
        **dict.fromkeys(("1.0", "'1'", "{'score': 1}"), "must return a list"),
        **dict.fromkeys(("[math.inf]", "['1']"), "a number or None"),
    },
}  # fmt: skip


def test_results_of_verl_and_trl():
    for function in ("result_of", "results_of"):
        grade = load(function).grade
        for result, expected in RESULTS[function].items():
            assert grade([answer_of(problem(), result)]) == [expected], result
        for result, message in ERRORS[function].items():
            with pytest.raises(ValueError, match=message):
                grade([answer_of(problem(), result)])


def test_trl_gets_messages_and_every_column_once_per_completion():
    first = problem("p", level=3, solution="1 + 1 = 2", prompt="raw")
    answers = [answer_of(first, "two"), answer_of(problem("q", level=4), "2")]
    assert load("reward").grade(answers) == [Grade(3.0, True, "correct"), Grade(1.0, True, "correct")]
    prompt = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1 + 1?"}]
    completions = [[{"role": "assistant", "content": text}] for text in ("two", "2")]
    further = ["log_extra", "log_metric", "solution"]
    assert calls() == [[[prompt, prompt], completions, [3, 4], ["2", "2"], further]]


def test_trl_gets_all_messages_of_a_conversation_and_a_function_of_texts_the_last_one():
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]},
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "assistant", "content": "It is 2"},
    ]
    asked = problem(level=3, messages=turns, environment_reward=0.5)
    load("reward").grade([answer_of(asked, "It is 2")])
    load("on_texts").grade([answer_of(asked, "It is 2")])
    messages, texts = calls()
    assert messages[1:] == [[turns], [3], ["2"], ["log_extra", "log_metric"]]
    assert texts == [["be brief\n\n1 + 1?"], ["It is 2"]]


def test_the_column_answer_of_the_row_comes_before_the_reference_and_annotated_functions_get_texts():
    load("reward").grade([answer_of(problem(level=3, answer="so it is #### 2"), "2")])
    load("on_texts").grade([answer_of(problem(), "two")])
    assert calls()[0][3] == ["so it is #### 2"]
    assert calls()[1] == [["be brief\n\n1 + 1?"], ["two"]]


OTHER_SIGNATURES = {
    "foreign_rewards:two": r"called with \(text, answer, extra\) .* two\(text, answer\): too many .*:10, in two",
    "foreign_rewards:result_of_three": "missing a required argument: 'more'",
    "verl:foreign_rewards:plain": "its parameters are answer, extra, text",
    "trl:foreign_rewards:plain": "calls it with prompts, completions",
    "trl:foreign_rewards:needs_ids": "it needs completion_ids, which only TRL's trainer has",
}


def test_a_function_of_another_signature_is_refused_before_the_run_and_a_missing_column_is_named():
    for name, message in OTHER_SIGNATURES.items():
        with pytest.raises(ConfigError, match=message) as error:
            check_grader(name)
        assert str(error.value).startswith(f"grader '{name}': ")
    with pytest.raises(ValueError, match="no column gold in the rows, which have answer, level"):
        load("needs_gold").grade([answer_of(problem(level=3), "2")])


def test_a_call_has_whole_problems_up_to_the_batch_size():
    """Three problems with 2, 2 and 3 completions; deviations from the mean of a call show what it saw."""
    texts = ["1", "333", "1", "55555", "4444", "7777777", "1"]
    problems = [problem(id_, "foreign_rewards:centred") for id_ in "ppqqrrr"]
    with GraderPool(GradingConfig(workers=2, deadline=30, batch=5)) as pool:
        grades = pool.grade(problems, texts)
    sizes = [len(text) for text in texts]
    calls = (sizes[:4], sizes[4:])  # p and q together, r alone
    centred = [size - sum(call) / len(call) for call in calls for size in call]
    assert [grade.reward for grade in grades] == centred


@pytest.mark.slow
def test_an_error_or_a_timeout_affects_the_answers_of_one_call():
    problems = [problem(name, "foreign_rewards:failing") for name in "abcdef"]
    with GraderPool(GradingConfig(workers=1, deadline=0.5, batch=2)) as pool:
        grades = pool.grade(problems, ["x", "y", "x", "bad", "hang", "x"])
        expected = ["correct"] * 2 + ["grader-error"] * 2 + ["timeout"] * 2
        assert [grade.verdict for grade in grades] == expected
        assert failure_warnings([pool.uses]) == [
            "grader 'foreign_rewards:failing' failed on 4 of 6 answers (66.7%), which have no reward and "
            "count as not correct; the first error: RuntimeError: bad text (foreign_rewards.py:35, in failing)"
        ]


@pytest.mark.slow
def test_a_run_whose_answers_all_time_out_ends_with_advice():
    with GraderPool(GradingConfig(workers=1, deadline=0.5)) as pool:
        pool.grade([problem("a", "foreign_rewards:failing")], ["hang"])
        [line] = failure_warnings([pool.uses])
    assert line == (
        "grader 'foreign_rewards:failing' failed on 1 of 1 answers (100.0%), which have no reward and count as not "
        "correct; the first error: no result within grading.deadline; try a longer one, and move imports of large "
        "packages to the top of the file, where it does not apply"
    )
