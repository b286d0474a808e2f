"""Reward functions of the installed verl and TRL as graders, compared with direct calls of the same functions."""

from typing import Any

import pytest

from bandpo_cli.config.batch_and_sampling import GradingConfig
from bandpo_cli.errors import ConfigError
from bandpo_cli.grading.pool import GraderPool, check_grader
from bandpo_cli.grading.signatures import answer_of, load_grader
from bandpo_cli.registries import load_attribute
from bandpo_cli.types import Grade, Message, Problem
from tests.integrations.stand_ins import partial_package

TEXTS = [
    "<think>\n1 + 1\n</think>\nThe answer is \\boxed{2}.",
    "\\boxed{3}",
    "Answer: 2",
    "#### 2",
    "It is \\boxed{\\frac{4}{2}}.\n#### 2",
    "",
]
PROMPT = (Message("user", "1 + 1?"),)


@pytest.fixture
def _verl_rewards():
    """Make `verl.utils.reward_score` importable alone."""
    with partial_package("verl", ["verl", "verl.utils"]):
        yield


def problem(grader: str, **extra: Any) -> Problem:
    return Problem("p", PROMPT, "2", "sums", grader, extra)


@pytest.mark.usefixtures("_verl_rewards")
@pytest.mark.parametrize("source", ["openai/gsm8k", "math_dapo", "lighteval/MATH", "aime24"])
@pytest.mark.parametrize("text", TEXTS)
def test_default_compute_score_of_verl(source, text):
    name = "verl.utils.reward_score:default_compute_score"
    direct = load_attribute(name)(source, text, "2")
    score, correct = (direct["score"], direct["acc"]) if isinstance(direct, dict) else (direct, direct == 1)
    expected = Grade(score, bool(correct), "correct" if correct else "wrong")
    for prefix in ("", "verl:"):
        grader = load_grader(prefix + name)
        assert not grader.batched
        assert grader.grade([answer_of(problem(name, data_source=source), text)]) == [expected]


@pytest.mark.usefixtures("_verl_rewards")
def test_functions_of_verl_with_two_arguments_and_with_lists():
    reward_score = "verl.utils.reward_score"
    answers = [answer_of(problem("x"), text) for text in TEXTS]
    single = load_grader(f"{reward_score}.math_reward:compute_score")
    batched = load_grader(f"{reward_score}.math_batch:compute_score_batched")
    assert batched.batched
    grades = batched.grade(answers)
    assert grades == [single.grade([answer])[0] for answer in answers]
    assert [grade.correct for grade in grades] == [True, False, False, False, False, False]


@pytest.mark.parametrize("function", ["accuracy_reward", "reasoning_accuracy_reward", "think_format_reward"])
def test_rewards_of_trl_in_workers(function):
    """The reference without LaTeX in it cannot be parsed by TRL, whose accuracy is then None."""
    pytest.importorskip("trl")
    name = f"trl:trl.rewards:{function}"
    solutions = ["$2$"] * len(TEXTS) + ["nothing to parse"]
    texts = [*TEXTS, TEXTS[0]]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    direct = load_attribute(f"trl.rewards:{function}")(completions=completions, solution=solutions)
    problems = [problem(name, solution=solution) for solution in solutions]
    with GraderPool(GradingConfig(workers=1, deadline=60)) as pool:
        grades = pool.grade(problems, texts)
        assert not any(use.error for use in pool.uses.values())
    assert [grade.reward if grade.has_reward else None for grade in grades] == direct
    assert {0.0, 1.0} <= set(direct)
    assert (None in direct) == (function != "think_format_reward")


def test_rewards_of_trl_that_need_token_ids_are_refused(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    (tmp_path / "repetition.py").write_text(
        "from trl.rewards import get_repetition_penalty_reward\npenalty = get_repetition_penalty_reward()\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"'trl:repetition:penalty': .*completion_ids"):
        check_grader("trl:repetition:penalty")
