"""The reward function of an exported folder: the rewards of a run, from many threads, with weights and errors."""

import logging
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from bandpo_cli.config.layers import resolve, to_yaml
from bandpo_cli.exports.verl_files import RewardFunction, load_reward_function, problem_to_json
from bandpo_cli.grading.pool import GraderPool, training_grader
from bandpo_cli.objective.advantages import shaped_rewards
from bandpo_cli.types import Message, Problem

DATA = {"name": "data", "train": "x.jsonl"}
TEXTS = ["Answer: 18", "Answer: $\\frac{36}{2}$", "Answer: 17", "no answer", "Answer: 18.0"]


def problem(grader: str, index: int = 0, answer: str = "18") -> Problem:
    return Problem(f"p{index}", (Message("user", "?"),), answer, "set", grader)


def score(function: RewardFunction, each: Problem, text: str) -> dict[str, float]:
    return function("set", text, each.answer, {"index": 0, "problem": problem_to_json(each)})


@pytest.mark.parametrize("grader", ["math", "math-dapo", "number"])
def test_rewards_are_those_of_a_run(grader):
    config = resolve([{"task": DATA, "reward": {"correct": 1.0, "wrong": -0.5}}])
    function, problems = RewardFunction(config), [problem(grader)] * len(TEXTS)
    with GraderPool(config.grading) as pool:
        grades = training_grader(pool, None)(problems, TEXTS)
    rewards = shaped_rewards(grades, [1] * len(grades), 8, config.reward)
    pairs = zip(rewards, grades, strict=True)
    expected = [{"score": reward, "acc": float(grade.correct)} for reward, grade in pairs]
    assert {item["acc"] for item in expected} == {0.0, 1.0}
    assert [score(function, problem(grader), text) for text in TEXTS] == expected


def test_weighted_rewards_are_added(tmp_path, monkeypatch):
    source = "def reward(text, answer, extra):\n    return min(1.0, len(text) / 20)\n"
    (tmp_path / "my_length.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    rewards = [{"grader": "number"}, {"grader": "my_length:reward", "weight": -0.5, "name": "length"}]
    function = RewardFunction(resolve([{"task": {**DATA, "rewards": rewards}}]))
    right, wrong = (score(function, problem("math"), text) for text in ("Answer: 18", "nineteen!!"))
    assert right == {"score": pytest.approx(1 - 0.5 * 0.5), "acc": 1.0}
    assert wrong == {"score": pytest.approx(-0.5 * 0.5), "acc": 0.0}


@pytest.mark.slow
def test_many_threads_get_the_rewards_of_their_own_answers():
    function = RewardFunction(resolve([{"task": DATA}]))
    problems = [problem("number", index, str(index)) for index in range(400)]
    texts = [f"Answer: {index if index % 3 else index + 1}" for index in range(400)]
    with ThreadPoolExecutor(16) as threads:
        found = [*threads.map(lambda *pair: score(function, *pair)["acc"], problems, texts)]
    assert found == [float(index % 3 != 0) for index in range(400)]


def test_a_failing_grader_is_logged_once_and_its_answers_are_wrong(caplog):
    function = RewardFunction(resolve([{"task": DATA, "reward": {"wrong": -1.0}}]))
    with caplog.at_level(logging.WARNING, "bandpo_cli"):
        found = [score(function, problem("gsm8k", answer="x"), "#### 18") for _ in range(3)]
    assert found == [{"score": -1.0, "acc": 0.0}] * 3
    assert caplog.text.count("grader 'gsm8k' failed") == 1


def test_an_error_of_the_pool_is_raised_in_the_calling_thread(monkeypatch):
    function = RewardFunction(resolve([{"task": DATA}]))
    monkeypatch.setattr(GraderPool, "grade", Mock(side_effect=OSError("no processes left")))
    with pytest.raises(OSError, match="no processes left"):
        score(function, problem("math"), "18")


def test_the_function_reads_the_exported_configuration(tmp_path):
    config = resolve([{"reward": {"correct": 2.0, "wrong": -3.0}}])
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    function = load_reward_function(tmp_path / "config.yaml")
    sum_of_two = Problem("c", "1 2=3:", "3", "countdown", "countdown", {"numbers": "1 2"})
    assert score(function, sum_of_two, "1+2") == {"score": 2.0, "acc": 1.0}
    assert score(function, sum_of_two, "1-2") == {"score": -3.0, "acc": 0.0}
