"""Whatever a model writes, the pool lives, every answer gets its verdict, and none passes for what it is not."""

from __future__ import annotations

import pytest

from bandpo_cli.config.run import GradingConfig
from bandpo_cli.grading import GraderPool
from bandpo_cli.types import Problem
from benchmarks.hostile_answers import HOSTILE

FIVE = Problem("five", "", "5", "test", "math")


@pytest.mark.slow
def test_hostile_answers_are_not_right_and_leave_the_pool_alive() -> None:
    # An ordinary answer that wants a worker stands after each hostile one: it must find one.
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
def test_graders_without_a_worker_survive_them_as_well(grader: str) -> None:
    problem = Problem("five", "", "5", "test", grader, {"numbers": "2 3"})
    with GraderPool(GradingConfig()) as pool:
        found = {grade.verdict for grade in pool.grade([problem] * len(HOSTILE), list(HOSTILE.values()))}
    assert found <= {"wrong", "malformed", "wrong-numbers", "wrong-value"}
