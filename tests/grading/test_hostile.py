"""Hostile answers: the pool survives, every answer gets a verdict, and no wrong answer is correct."""

from __future__ import annotations

import pytest

from bandpo_cli.config.run import GradingConfig
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.types import Problem
from benchmarks.hostile_answers import HOSTILE

FIVE = Problem("five", "", "5", "test", "math")


@pytest.mark.slow
def test_hostile_answers_are_never_correct_and_do_not_break_the_pool() -> None:
    # Each hostile answer is followed by an ordinary one that needs a worker.
    problems, texts = (
        [FIVE, FIVE] * len(HOSTILE),
        [t for text in HOSTILE.values() for t in (text, "Answer: 2+3")],
    )
    with GraderPool(GradingConfig(workers=2, deadline=1)) as pool:
        verdicts = [grade.verdict for grade in pool.grade(problems, texts)]
        after = pool.grade([FIVE] * 3, ["Answer: \\sqrt{25}", "Answer: \\sqrt{36}", "Answer: 5"])
    found = dict(zip(HOSTILE, verdicts[::2], strict=True))
    assert len(found) >= 50
    assert [name for name, verdict in found.items() if verdict == "correct"] == []
    assert set(found.values()) >= {"timeout", "wrong", "malformed"}
    assert set(verdicts[1::2]) == {"correct"}
    assert [grade.verdict for grade in after] == ["correct", "wrong", "correct"]


@pytest.mark.parametrize("grader", ["number", "countdown"])
def test_graders_without_workers_handle_hostile_answers(grader: str) -> None:
    problem = Problem("five", "", "5", "test", grader, {"numbers": "2 3"})
    with GraderPool(GradingConfig()) as pool:
        found = {grade.verdict for grade in pool.grade([problem] * len(HOSTILE), list(HOSTILE.values()))}
    assert found <= {"wrong", "malformed", "wrong-numbers", "wrong-value"}
